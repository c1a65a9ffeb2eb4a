"""`spotrl report` and `spotrl pull`, called like a user does."""

import hashlib
import json

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from launcher.cli.pull import pull
from launcher.cli.report import report
from launcher.exit_codes import Failure
from launcher.report.build import build_report
from launcher.report.card import model_card
from launcher.report.weights import Pulled, pull_weights
from launcher.storage.stores import open_store
from tests.launcher.made_ledger import a_long_run, a_run, a_session
from tests.launcher.printed import printed


@pytest.fixture
def sessions(tmp_path):
    with a_session(tmp_path / "ledger.sqlite") as session:
        a_long_run(session, folder=str(tmp_path))
        session.commit()
        return sessionmaker(session.get_bind())


def test_the_terminal_report_starts_with_the_result_and_is_plain_when_piped(sessions):
    result = CliRunner().invoke(report, ["digits-ocr"], obj=sessions)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[1:4] == [
        "exact_match 0.8 was reached at iteration 42 for $5.18 in 3.83 h.",
        "Money is assumed: priced as named offers, nothing was bought; prices of",
        "2025-01-10",
    ]
    assert "First reached by a single evaluation at iteration 30" in result.output
    assert "3 preemptions cost $0.13" in result.output
    assert "nothing was bought" in result.output
    assert "\x1b[" not in result.output


def test_no_line_of_a_piped_report_is_longer_than_80_columns(sessions):
    lines = CliRunner().invoke(report, ["digits-ocr"], obj=sessions).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    lost = [line.split() for line in lines if line.strip().startswith("spot-1-g1")]
    assert ["spot-1-g1", "us-central1-a", "without", "notice", "1.97"] in lost
    assert ["spot-1-g1", "412", "29m", "(29s", "wall)", "$0.02", "$0.03"] in lost


def test_image_sharing_is_shown_in_the_terminal_and_on_the_page(tmp_path):
    page = tmp_path / "report.html"
    with a_session(tmp_path / "ledger.sqlite") as session:
        made = a_run(session)
        made.status("running", 0)
        made.regrouped(made.node("spot-0"), (0, 1), at=0)
        session.commit()
        result = CliRunner().invoke(report, ["demo", "--html", str(page)], obj=sessionmaker(session.get_bind()))
    assert "Shared images: 1 regroup on 1 node; degrees 2." in result.output
    assert "Shared images: 1 regroup on 1 node; degrees 2." in page.read_text()


def test_the_json_is_one_object_and_the_page_is_written_beside_it(sessions, tmp_path):
    page = tmp_path / "report.html"
    result = CliRunner().invoke(
        report, ["digits-ocr", "--target-reward", "0.7", "--json", "--html", str(page)], obj=sessions
    )
    assert result.exit_code == 0, result.output
    assert printed("report", result.output[result.output.index("{") :])["target"]["value"] == 0.7
    assert page.read_text().startswith("<!doctype html>")
    assert list(tmp_path.glob("*.part")) == []


def test_a_target_out_of_reach_is_stated(sessions):
    result = CliRunner().invoke(report, ["digits-ocr", "--target-reward", "0.95"], obj=sessions)
    assert result.exit_code == 0
    assert "exact_match 0.95: not reached. Best so far 0.833 at iteration 42" in result.output


def test_an_unknown_run_is_a_lookup_error_with_similar_names(sessions):
    result = CliRunner().invoke(report, ["digits"], obj=sessions)
    assert isinstance(result.exception, LookupError)
    assert "digits-ocr" in str(result.exception)


@pytest.mark.parametrize("command", [report, pull])
def test_every_help_has_an_example(command):
    assert "Example:" in CliRunner().invoke(command, ["--help"]).output


# --- pull ---------------------------------------------------------------------------------------------


def a_checkpoint(store, name, iteration, *, complete=True):
    folder = store / "checkpoints" / name
    folder.mkdir(parents=True)
    files = {"weights.safetensors": f"weights {name}".encode(), "ema.safetensors": f"ema {name}".encode()}
    for file, data in files.items():
        (folder / file).write_bytes(data)
    digests = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    if complete:
        (folder / "manifest.json").write_text(json.dumps({"iteration": iteration, "files": digests}))


def not_for_diffusers(weights, job):
    raise Failure(f"{weights.name} is not a model")


def test_pull_copies_the_newest_complete_checkpoint(sessions, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.cli.pull.write_for_diffusers", not_for_diffusers)
    store = tmp_path / "store"
    a_checkpoint(store, "l0001-i000012", 12)  # a trainer given up as lost continued to write
    a_checkpoint(store, "l0002-i000009", 9)
    a_checkpoint(store, "l0002-i000010", 10, complete=False)
    result = CliRunner(mix_stderr=False).invoke(
        pull, ["digits-ocr", "--to", str(tmp_path / "out"), "--json"], obj=sessions
    )
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "The weights are there, but not for diffusers: ema.safetensors is not a model\n"
    answer = printed("pull", result.stdout)
    assert answer["diffusers"] is None
    assert (answer["checkpoint"], answer["iteration"]) == ("l0002-i000009", 9)
    assert (tmp_path / "out" / "ema.safetensors").read_bytes() == b"ema l0002-i000009"
    assert answer["files"][0]["sha256"] == hashlib.sha256(b"weights l0002-i000009").hexdigest()
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == ["README.md", "curve.svg", "ema.safetensors", "manifest.json", "weights.safetensors"]
    assert answer["card"] == str(tmp_path / "out" / "README.md")


def test_the_model_card_describes_the_weights_and_their_cost(sessions, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    monkeypatch.setattr("launcher.cli.pull.write_for_diffusers", lambda weights, model: weights.parent / "transformer")
    a_checkpoint(tmp_path / "store", "l0001-i000042", 42)
    result = CliRunner().invoke(pull, ["digits-ocr", "--to", str(folder)], obj=sessions)
    assert result.exit_code == 0, result.output
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: diffusers\n")
    assert "All weights of the transformer of digits-ocr" in card
    assert f'QwenImageTransformer2DModel.from_pretrained("{folder}/transformer")' in card
    assert "exact_match 0.8 was reached at iteration 42 for $5.18 in 3.83 h. Money is assumed: " in card
    assert "prices of 2025-01-10." in card
    rows = [line.split("|")[1:4] for line in card.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 12
    assert [cell.strip() for cell in rows[0]] == ["0", "0.470", "0.470"]
    assert [cell.strip() for cell in rows[-1]] == ["42", "0.833", "0.833"]
    assert (folder / "curve.svg").read_text().startswith("<svg")


def test_pull_replaces_only_files_of_an_earlier_pull_of_the_same_run(sessions, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.cli.pull.write_for_diffusers", not_for_diffusers)
    a_checkpoint(tmp_path / "store", "l0001-i000042", 42)

    def pulled(name):
        return CliRunner().invoke(pull, ["digits-ocr", "--to", str(tmp_path / name)], obj=sessions).exception

    for file, text in {
        "mine/README.md": "# mine",
        "others/manifest.json": '{"run": "b", "checkpoint": "c"}',
        "base/transformer": "",
    }.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    assert "mine holds README.md, which no `spotrl pull` wrote; name another folder with --to" in str(pulled("mine"))
    assert "base holds transformer, which no `spotrl pull` wrote" in str(pulled("base"))
    assert "others holds the weights of b; name another folder" in str(pulled("others"))
    assert "42 holds manifest.json, which no `spotrl pull` wrote" in str(pulled("store/checkpoints/l0001-i000042"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["README.md"]
    assert pulled("out") is None
    (tmp_path / "out" / "weights.safetensors").write_bytes(b"torn")
    assert pulled("out") is None
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == b"weights l0001-i000042"


def test_a_model_card_without_evaluations_has_no_curve(tmp_path):
    with a_session(tmp_path / "ledger.sqlite") as session:
        made = a_run(session, "demo", folder=str(tmp_path))
        sink = {"mlflow": {"tracking_uri": "https://me:hunter22@tracker.example/?token=abc"}}
        made.run.job = {**made.run.job, "model": {"weights": "lora", "lora_rank": 4}, "logging": sink}
        made.status("running", 0)
        report = build_report(session, made.run, 60_000)
        pulled = Pulled(checkpoint="l0001-i000001", iteration=1, files=())
        card = model_card(report, made.run.job, pulled, "weights", has_diffusers_files=True)
    assert "Low-rank adapters (rank 4) of digits-ocr" in card
    assert 'pipeline.load_lora_weights("weights", weight_name="pytorch_lora_weights.safetensors")' in card
    assert "Nothing has been evaluated yet." in card
    assert "curve.svg" not in card
    assert "https://***@tracker.example/?token=***" in card, "a card is published beside the weights"


def test_pull_refuses_weights_that_differ_from_their_manifest(tmp_path):
    a_checkpoint(tmp_path, "l0001-i000001", 1)
    (tmp_path / "checkpoints/l0001-i000001/weights.safetensors").write_bytes(b"torn")
    with pytest.raises(Failure, match="damaged"):
        pull_weights("demo", [open_store(tmp_path.as_uri())], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_pull_reports_a_missing_checkpoint(tmp_path):
    with pytest.raises(Failure, match="no complete checkpoint yet"):
        pull_weights("demo", [open_store(tmp_path.as_uri())], tmp_path / "out")
