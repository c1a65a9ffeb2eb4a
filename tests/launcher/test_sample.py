"""`spotrl sample`, called like a user does."""

import hashlib
import json
import sys

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from sqlalchemy.orm import sessionmaker

from engine.models.digits import load_digits
from engine.models.weights import get_weights
from launcher.cli.pull import pull
from launcher.cli.sample import sample
from launcher.exit_codes import Failure
from launcher.ledger.store import find_run
from tests.launcher.made_ledger import a_run, a_session
from tests.launcher.printed import printed


@pytest.fixture
def sessions(tmp_path):
    with a_session(tmp_path / "ledger.sqlite") as session:
        a_run(session, "demo", folder=str(tmp_path))
        session.commit()
        return sessionmaker(session.get_bind())


def a_checkpoint(store, weights, *more):
    folder = store / "checkpoints" / "l0001-i000012"
    folder.mkdir(parents=True)
    names = ("ema.safetensors", *more)
    for name in names:
        (folder / name).write_bytes(weights)
    files = dict.fromkeys(names, hashlib.sha256(weights).hexdigest())
    (folder / "manifest.json").write_text(json.dumps({"iteration": 12, "files": files}))


def sampled(sessions, *words):
    result = CliRunner(mix_stderr=False).invoke(sample, ["demo", *words], obj=sessions, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def stands_in(monkeypatch, program):
    monkeypatch.setattr("launcher.cli.sample.engine_command", lambda module: [sys.executable, "-c", program])


def test_images_of_the_newest_checkpoint_are_written(sessions, tmp_path, forked_engine):
    adapter = load_digits()
    with torch.no_grad():
        adapter.transformer.proj_out.bias -= 9.0
    a_checkpoint(tmp_path / "store", get_weights(dict(adapter.transformer.named_parameters())))
    out = tmp_path / "out"
    result = printed("sample", sampled(sessions, "12", "34", "--count", "2", "--seed", "5", "--to", str(out), "--json"))
    assert (result["checkpoint"], result["iteration"], result["steps"]) == ("l0001-i000012", 12, 8)
    assert [(one["prompt"], one["seed"]) for one in result["pictures"]] == [("12", 5), ("12", 6), ("34", 5), ("34", 6)]
    names = ["001-seed5.png", "001-seed6.png", "002-seed5.png", "002-seed6.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    # The large bias makes every image white, which shows that the trained weights are used.
    assert all(Image.open(one["file"]).getextrema() == ((255, 255),) * 3 for one in result["pictures"])


def test_base_samples_need_no_checkpoint_and_have_their_own_file_names(sessions, tmp_path, monkeypatch):
    stands_in(monkeypatch, "import json, sys; [print(p['file']) for p in json.load(sys.stdin)['images']]")
    result = sampled(sessions, "12", "--base", "--to", str(tmp_path / "out"))
    assert result == f"{tmp_path / 'out' / '001-seed0-base.png'}  12\n"


def test_a_run_is_sampled_and_pulled_from_any_folder(sessions, tmp_path, monkeypatch):
    """The model's folder is relative to the job file, and not to the folder of the command."""
    with sessions() as session, session.begin():
        run = find_run(session, "demo")
        run.job, run.workdir = {**run.job, "model": {"name": "sd3", "path": "./sd3"}}, "/jobs"
    stands_in(monkeypatch, "import json, sys; sys.exit(json.load(sys.stdin)['model']['path'])")
    with pytest.raises(Failure, match=r"^/jobs/sd3$"):
        sampled(sessions, "12", "--base", "--to", str(tmp_path / "out"))

    a_checkpoint(tmp_path / "store", b"weights", "weights.safetensors")
    program = "import json, sys; sys.exit(json.loads(sys.argv[1])['path'])"
    monkeypatch.setattr(
        "launcher.report.diffusers_files.engine_command", lambda _, *words: [sys.executable, "-c", program, *words]
    )
    words = ["demo", "--to", str(tmp_path / "pulled")]
    result = CliRunner(mix_stderr=False).invoke(pull, words, obj=sessions, standalone_mode=False)
    assert "but not for diffusers: /jobs/sd3\n" in result.stderr


def test_base_samples_of_a_run_with_start_weights_use_those_weights(sessions, tmp_path, monkeypatch):
    (tmp_path / "store" / "start").mkdir(parents=True)
    (tmp_path / "store" / "start" / "weights.safetensors").write_bytes(b"start")
    with sessions() as session, session.begin():
        run = find_run(session, "demo")
        run.job = {**run.job, "model": {"name": "digits-ocr", "from": "first"}}
    stands_in(monkeypatch, "import json, sys; sys.exit(open(json.load(sys.stdin)['weights']).read())")
    with pytest.raises(Failure, match=r"^start$"):
        sampled(sessions, "12", "--base", "--to", str(tmp_path / "out"))


def test_the_engine_gets_the_local_path_of_the_base_model(sessions, tmp_path, monkeypatch):
    stands_in(monkeypatch, "import json, sys; sys.exit(json.load(sys.stdin)['model']['path'])")
    with pytest.raises(Failure, match=f"^{tmp_path}$"):
        sampled(sessions, "12", "--base", "--to", str(tmp_path / "out"), "--model", str(tmp_path))


def test_an_error_of_the_engine_is_shown_unchanged(sessions, tmp_path, monkeypatch):
    stands_in(monkeypatch, "raise ValueError('prompt has 9 bytes')")
    with pytest.raises(Failure, match=r"^prompt has 9 bytes$"):
        sampled(sessions, "123456789", "--base", "--to", str(tmp_path / "out"))


def test_sample_without_a_checkpoint_is_refused_and_leaves_nothing(sessions, tmp_path):
    with pytest.raises(Failure, match="no complete checkpoint yet"):
        sampled(sessions, "12", "--to", str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []
