"""The gcloud login that SkyPilot needs on Google Cloud, in addition to our own credentials."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.checks.check import Check, Verdict, run_checks
from launcher.checks.cloud_account import gcloud
from launcher.checks.gcloud import GcloudMissing, check_gcloud
from launcher.checks.spotrl_check import of_clouds, one_will_do
from launcher.exit_codes import ExitCode

KEY_ACCOUNT = "launcher@mine.iam.gserviceaccount.com"

Computer = Callable[..., dict[str, str]]


@pytest.fixture
def computer(tmp_path: Path) -> Computer:
    """Create the environment of a computer with or without gcloud, and its login files."""

    def make(account: str | None = None, files: tuple[str, ...] = (), exit_code: int = 0) -> dict[str, str]:
        folder = tmp_path / ".config" / "gcloud"
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            (folder / name).touch()
        (tmp_path / "bin").mkdir(exist_ok=True)
        if account is not None:
            program = tmp_path / "bin" / "gcloud"
            words = "auth list --filter=status:ACTIVE --format=value(account)"
            program.write_text(
                f'#!/bin/sh\n[ "$*" = "{words}" ] || exit 9\necho "{account}"\necho broken >&2\nexit {exit_code}\n'
            )
            program.chmod(0o755)
        return {"HOME": str(tmp_path), "PATH": str(tmp_path / "bin")}

    return make


def test_without_gcloud_its_download_and_the_login_are_named(computer: Computer, tmp_path: Path) -> None:
    with pytest.raises(GcloudMissing, match=r"gcloud program is not here.*; install it .*`gcloud auth login`"):
        check_gcloud(computer(), tmp_path)


def test_gcloud_without_an_active_account_needs_a_login(computer: Computer, tmp_path: Path) -> None:
    with pytest.raises(GcloudMissing, match=r"no active account.*; `gcloud auth login`.*activate-service-account"):
        check_gcloud(computer(""), tmp_path)


def test_the_error_of_a_failing_gcloud_is_shown(computer: Computer, tmp_path: Path) -> None:
    with pytest.raises(GcloudMissing, match=r"`gcloud auth list` fails here \(broken\)"):
        check_gcloud(computer(KEY_ACCOUNT, exit_code=1), tmp_path)


def test_a_service_account_needs_no_login_files(computer: Computer, tmp_path: Path) -> None:
    assert check_gcloud(computer(KEY_ACCOUNT), tmp_path) == KEY_ACCOUNT


def test_a_users_login_needs_two_files_and_application_credentials(computer: Computer, tmp_path: Path) -> None:
    with pytest.raises(GcloudMissing, match=r"lacks credentials.db and access_tokens.db"):
        check_gcloud(computer("ada@example.com"), tmp_path)
    both = ("credentials.db", "access_tokens.db")
    with pytest.raises(GcloudMissing, match=r"`gcloud auth application-default login`"):
        check_gcloud(computer("ada@example.com", both), tmp_path)
    environ = computer("ada@example.com", (*both, "application_default_credentials.json"))
    assert check_gcloud(environ, tmp_path) == "ada@example.com"


@pytest.mark.parametrize("where", ["environment", "file"])
def test_a_remote_api_server_has_its_own_login(computer: Computer, tmp_path: Path, where: str) -> None:
    environ = computer()
    if where == "environment":
        environ["SKYPILOT_API_SERVER_ENDPOINT"] = "https://sky.example.com"
    else:
        (tmp_path / ".sky.yaml").write_text("api_server: {endpoint: https://sky.example.com}\n")
    assert "https://sky.example.com" in check_gcloud(environ, tmp_path)
    environ["SKYPILOT_API_SERVER_ENDPOINT"] = "http://127.0.0.1:46580"
    with pytest.raises(GcloudMissing):
        check_gcloud(environ, tmp_path)


def test_check_has_a_gcloud_line_only_for_google_cloud(computer: Computer, tmp_path: Path) -> None:
    checks = dict(of_clouds({"aws": None, "gcp": None}, {"aws": None, "gcp": None}, int, computer()))  # type: ignore[dict-item]
    (line,) = run_checks([("gcp gcloud", checks["gcp gcloud"])])
    assert (line.what, line.verdict, line.code) == ("gcp gcloud", Verdict.FAIL, ExitCode.CREDENTIALS)
    assert "gcloud auth login" in line.remedy
    assert [name for name in checks if name.endswith("gcloud")] == ["gcp gcloud"]
    assert gcloud(computer(KEY_ACCOUNT), tmp_path) == [Check(what="gcp gcloud", verdict=Verdict.OK, found=KEY_ACCOUNT)]


def test_a_missing_gcloud_is_a_warning_if_no_cloud_was_named_and_another_is_logged_in() -> None:
    def line(what: str, verdict: Verdict) -> Check:
        code = ExitCode.OK if verdict is Verdict.OK else ExitCode.CREDENTIALS
        return Check(what=what, verdict=verdict, found="", code=code)

    no_gcloud = [line("gcp credentials", Verdict.OK), line("gcp gcloud", Verdict.FAIL)]
    assert [one.verdict for one in one_will_do([line("aws credentials", Verdict.OK), *no_gcloud])] == [
        Verdict.OK,
        Verdict.OK,
        Verdict.WARN,
    ]
    assert one_will_do([line("aws credentials", Verdict.FAIL), *no_gcloud])[2].verdict is Verdict.FAIL
