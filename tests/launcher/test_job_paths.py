"""Paths in a job: files and folders are found from any working folder, and models of the hub by their name."""

import json
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import pytest

from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from launcher.job.checked import JobError
from launcher.job.hub import download_model
from launcher.job.load import load_job
from launcher.report.card import _base
from tests.launcher.made_ledger import a_run, a_session
from tests.launcher.printed import printed
from tests.model_folders import write_model

MODEL, COMMIT = "owner/sd3-tiny", "0123456789abcdef0123456789abcdef01234567"

ON_HUB = f"model: {{name: sd3, path: {MODEL}}}\nprompts: words.txt\nreward: ocr\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a job, beside the working folder."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config" / "config.yaml"))
    for name in ("jobs", "elsewhere", "config"):
        (tmp_path / name).mkdir()
    (tmp_path / "jobs" / "words.txt").write_text("a cat\na dog\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "jobs"


def shown(job: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the values of `spotrl config show`, by field."""
    assert run(["config", "show", str(job), "--json"]) == ExitCode.OK
    fields = printed("config-show", capsys.readouterr().out)["fields"]
    return {field: about["value"] for field, about in fields.items()}


def test_each_source_of_a_value_has_its_own_folder(folder, tmp_path, monkeypatch, capsys):
    job = folder / "job.yaml"
    job.write_text("infra: aws\nmodel: {name: sd3, path: ./sd3}\nprompts: words.txt\nreward: ocr\n")
    assert shown(job, capsys)["model.path"] == "./sd3", "as written: the job file's folder goes to the nodes"

    monkeypatch.setenv("SPOTRL_MODEL__PATH", "./sd3")
    assert shown(job, capsys)["model.path"] == str(tmp_path / "elsewhere" / "sd3")
    monkeypatch.setenv("SPOTRL_MODEL__PATH", "../jobs/models/sd3")
    monkeypatch.setenv("SPOTRL_TEST_PROMPTS", "../jobs/words.txt")
    values = shown(job, capsys)
    assert (values["model.path"], values["test_prompts"]) == ("models/sd3", "words.txt")

    monkeypatch.delenv("SPOTRL_MODEL__PATH")
    job.write_text("infra: aws\nprompts: words.txt\nreward: ocr\n")
    (tmp_path / "config" / "config.yaml").write_text("model: {name: sd3, path: ../jobs/of-config}\n")
    assert shown(job, capsys)["model.path"] == "of-config"


def test_a_flag_names_a_file_of_the_working_folder(folder, tmp_path):
    job = folder / "job.yaml"
    job.write_text("reward: ocr\n")
    (tmp_path / "elsewhere" / "mine.txt").write_text("a bird\n")
    assert load_job(job, {"prompts": "digits", "model.from": "first"}).job.model.start == "first", "names of no files"
    with pytest.raises(
        JobError, match=r"elsewhere/mine.txt'; use digits or shapes, or a file in the folder of the job"
    ):
        load_job(job, {"prompts": "mine.txt"})
    assert load_job(job, {"prompts": str(folder / "words.txt")}).job.prompts == "words.txt"
    (folder / "clip").mkdir()
    for path, seen in (("../jobs/clip", "clip"), (str(tmp_path / "elsewhere"), str(tmp_path / "elsewhere"))):
        clip = {"name": "clip", "model": {"path": path}}
        assert load_job(job, {"reward": clip}).job.reward.model.path == seen
        parts = load_job(job, {"reward": [{"name": "ocr"}, clip | {"weight": 0.5}]}).job.reward.parts
        assert parts[1].model.path == seen
    with pytest.raises(JobError, match=r"there is no such folder \(.*elsewhere/clip\)"):
        load_job(job, {"reward.name": "clip", "reward.model.path": "clip"})


def test_the_model_of_a_run_is_in_the_folder_of_its_job(tmp_path):
    with a_session(tmp_path / "ledger.sqlite") as session:
        made = a_run(session, "demo", folder=str(tmp_path))
        made.run.job = {**made.run.job, "model": {"name": "sd3", "path": "./sd3"}}
        made.run.workdir = "/jobs"
        assert made.run.model.path == "/jobs/sd3"
        made.run.job = {**made.run.job, "model": {"name": "sd3", "path": "/models/sd3"}}
        assert made.run.model.path == "/models/sd3"


# --- models of the hub -------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """The files of one model, as the Hugging Face hub serves them."""

    def __init__(self, root: Path, *more: object) -> None:
        self.root = root
        super().__init__(*more)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith(f"/api/models/{MODEL}"):
            names = [str(file.relative_to(self.root)) for file in self.root.rglob("*") if file.is_file()]
            body = json.dumps({"id": MODEL, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
            return self.answer(200, body.encode())
        file = self.root / self.path.rpartition(f"/{MODEL}/resolve/")[2].partition("/")[2]
        if file.is_file() and MODEL in self.path:
            return self.answer(200, file.read_bytes())
        return self.answer(404, b"", "RepoNotFound" if MODEL not in self.path else "EntryNotFound")

    def answer(self, code: int, body: bytes, error: str = "") -> None:
        self.send_response(code)
        for name, value in (("ETag", f'"{hash(body):x}"'), ("X-Repo-Commit", COMMIT), ("X-Error-Code", error)):
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve a model's folder as the hub, and return the folder."""
    root = tmp_path / "hub"
    write_model(root, "sd3")
    (root / "whole.safetensors").write_bytes(b"all weights again, for other programs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, root))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield root
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_is_downloaded_at_launch_and_then_found_in_the_cache(folder, hub, tmp_path, capsys):
    job = folder / "job.yaml"
    job.write_text(f"infra: aws\n{ON_HUB}")
    assert shown(job, capsys)["model.path"] == MODEL, "no command but `launch` downloads"
    snapshot = tmp_path / "cache" / "models--owner--sd3-tiny" / "snapshots" / COMMIT
    checked = load_job(job, fetch=download_model)
    assert checked.job.model.path == str(snapshot) == shown(job, capsys)["model.path"]
    assert {file.name for file in snapshot.iterdir()} >= {"model_index.json", "transformer", "vae"}
    assert not (snapshot / "whole.safetensors").exists(), "only the parts that diffusers loads"
    assert _base(checked.job.model) == f"sd3 ({MODEL}, commit {COMMIT})"

    write_model(folder / "owner" / "sd3-tiny", "sd3")
    assert shown(job, capsys)["model.path"] == MODEL, "a folder of that name comes first"


def test_a_launch_that_cannot_reach_the_hub_prints_the_download_command(folder, hub, monkeypatch, capsys):
    job = folder / "job.yaml"
    job.write_text(ON_HUB.replace(MODEL, "owner/other"))
    assert run(["launch", str(job), "-y"]) == ExitCode.INVALID_JOB
    assert "the hub shows no such model to you" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert run(["launch", str(job), "-y"]) == ExitCode.INVALID_JOB
    said = " ".join(capsys.readouterr().err.split())
    assert "job.yaml, line 1: model.path is 'owner/other'" in said
    assert "`hf download owner/other --local-dir other`, and give its folder" in said
    assert run(["launch", str(job), "--dry-run"]) == ExitCode.INVALID_JOB
    assert "or download it: `hf download owner/other --local-dir other`" in " ".join(capsys.readouterr().err.split())
