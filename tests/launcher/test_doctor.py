"""`spotrl doctor`: one screen about this machine, and nothing in it that a bug report should not have."""

import json
import socket
from pathlib import Path

import httpx
import pytest

import launcher.checks.doctor as doctor_module
import launcher.provision.provide as provide_module
from launcher.checks.doctor import without_names
from launcher.cli.main import run
from launcher.clouds.base import CallerIdentity, CloudRefused, LoginNeeded
from launcher.exit_codes import ExitCode
from launcher.ledger.store import open_ledger
from launcher.settings import ledger_path
from tests.launcher.printed import printed

SECRETS = {
    "HF_TOKEN": "hf_0123456789abcdefghij",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "WANDB_API_KEY": "0123456789012345678901234567890123456789",
    "HTTPS_PROXY": "http://jane:tea4two@proxy.example:3128",
    "SPOTRL_BUDGET__MAX_TOTAL": "$4321",
}


class Cloud:
    """A cloud that knows the user, or raises."""

    def __init__(self, cloud: str, answer: CallerIdentity | Exception) -> None:
        self.cloud, self._answer = cloud, answer

    def caller(self) -> CallerIdentity:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a home of jane-doe with secrets, two GPUs, and servers of which one answers."""
    home = tmp_path / "jane-doe"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA L4, 23034, 580.1\necho NVIDIA L4, 23034, 580.1\n")
    (home / "bin" / "nvidia-smi").chmod(0o755)
    for name, value in {**SECRETS, "HOME": str(home), "LOGNAME": "jane-doe"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPOTRL_HOME", str(home / "state"))
    monkeypatch.setenv("PATH", f"{home / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-box")

    def head(address: str, timeout: float) -> httpx.Response:
        if "amazonaws" not in address:
            raise httpx.ConnectError("no route from janes-box")
        return httpx.Response(403)

    monkeypatch.setattr(httpx, "head", head)
    known = CallerIdentity(account="123456789012", identity="arn:aws:iam::123456789012:user/jane-doe", owner="jane-doe")
    apis = {"aws": Cloud("aws", known), "gcp": Cloud("gcp", LoginNeeded("jane-doe@example.org is not logged in"))}
    monkeypatch.setattr(provide_module, "cloud_apis", lambda clouds: apis)
    return home


def test_the_report_is_one_screen_without_secrets_names_and_paths(machine, capsys):
    open_ledger(ledger_path())
    assert run(["doctor"]) == ExitCode.OK
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    flat = " ".join(text.split())
    for said in (
        "gpu 2 x NVIDIA L4, 22 GiB, driver 580.1",
        "AWS answers, Google Cloud does not answer",
        "aws the credentials are accepted",
        "? gcp no credentials that the cloud accepts; `spotrl check` names the login",
        "set: AWS_ACCESS_KEY_ID, HF_TOKEN, WANDB_API_KEY, HTTPS_PROXY; not set: AWS_PROFILE",
        "settings set: SPOTRL_BUDGET__MAX_TOTAL, SPOTRL_HOME",
        "ledger 0 runs, version ",
    ):
        assert said in flat
    for hidden in (*SECRETS.values(), "jane", "janes-box", str(machine), "123456789012", "4321"):
        assert hidden not in text


def test_the_json_report_has_the_same_lines_and_a_broken_part_hides_no_other(machine, monkeypatch, capsys):
    refused = {
        "aws": Cloud("aws", CloudRefused(f"{machine} is odd")),
        "gcp": Cloud("gcp", ValueError(f"{machine} of jane-doe on janes-box")),
    }
    monkeypatch.setattr(provide_module, "cloud_apis", lambda clouds: refused)
    ledger_path().parent.mkdir()
    ledger_path().write_bytes(b"no ledger at all, but long enough to look like one" * 40)
    assert run(["doctor", "--json"]) == ExitCode.FAILURE
    lines = {line["what"]: line for line in printed("doctor", capsys.readouterr().out)["checks"]}
    assert lines["aws"]["found"] == "the credentials are refused"
    assert lines["gcp"]["found"] == "this check itself failed (ValueError: ~ of USER on MACHINE)"
    assert lines["ledger"]["verdict"] == "FAIL"
    assert lines["machine"]["verdict"] == "OK"
    assert "jane" not in json.dumps(lines)


def test_doctor_leaves_no_file_and_says_what_is_missing(machine, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(machine))
    monkeypatch.setattr(doctor_module, "PACKAGES", {"engine": ("torch", "no-such-package")})
    assert run(["doctor"]) == ExitCode.OK
    text = " ".join(capsys.readouterr().out.split())
    assert "none (no nvidia-smi); runs on this machine use the CPU" in text
    assert "; without no-such-package" in text
    assert "programs without ssh, rsync" in text
    assert "ledger none yet" in text
    assert not (machine / "state").exists()


def test_a_cloud_without_its_client_is_not_asked(machine, monkeypatch, capsys):
    def cloud_apis(clouds: list[str]) -> dict[str, Cloud]:
        raise ModuleNotFoundError("No module named 'botocore'", name="botocore")

    monkeypatch.setattr(provide_module, "cloud_apis", cloud_apis)
    assert run(["doctor"]) == ExitCode.OK
    assert "aws not asked: its client is not installed (the extra `prices`)" in " ".join(
        capsys.readouterr().out.split()
    )


def test_names_that_are_ordinary_words_stay(monkeypatch):
    monkeypatch.setenv("LOGNAME", "root")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert without_names("root on localhost", {"HOME": "/"}) == "root on localhost"
