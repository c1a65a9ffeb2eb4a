"""Check the gcloud program, with which SkyPilot logs in to Google Cloud: an installation and an active account.

Application-default credentials are enough for spotrl's own calls and not for SkyPilot 0.14.1
(`sky/clouds/gcp.py`, `_check_credentials`). SkyPilot refuses every launch on Google Cloud without the program, an
active account and, for a person's account, the files of a login.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launcher.checks.sky_settings import remote_api_server
from launcher.exit_codes import ExitCode, Failure

LOGIN = "`gcloud auth login`, or with a key file `gcloud auth activate-service-account --key-file FILE`"

ANSWER_SECONDS = 60.0
"""Longest wait for gcloud, a large Python program that takes seconds on a cold disk."""

SERVICE_ACCOUNT = "iam.gserviceaccount.com"

LOGIN_FILES = ("credentials.db", "access_tokens.db")
"""Files in `~/.config/gcloud` that SkyPilot needs for a person's login; a service account needs none."""

APPLICATION = "application_default_credentials.json"


class GcloudMissing(Failure):
    """SkyPilot cannot buy on Google Cloud with this machine's programs and logins."""

    exit_code = ExitCode.CREDENTIALS


def check_gcloud(environ: Mapping[str, str], folder: Path) -> str:
    """Return the active account, or the address of a remote SkyPilot API server. Raises GcloudMissing."""
    elsewhere = remote_api_server(environ, folder)
    if elsewhere is not None:
        return f"SkyPilot's API server is {elsewhere}: the gcloud program and login of that machine count"
    program = shutil.which("gcloud", path=environ.get("PATH"))
    if program is None:
        raise GcloudMissing(
            "the gcloud program is not here, and SkyPilot buys nothing on Google Cloud without it; install it "
            f"(https://cloud.google.com/sdk/docs/install), then {LOGIN}"
        )
    account = _active_account(program, environ)
    if SERVICE_ACCOUNT not in account:
        _check_login_files(account, environ)
    return account


def _active_account(program: str, environ: Mapping[str, str]) -> str:
    asked = [program, "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]
    try:
        answer = subprocess.run(asked, env=dict(environ), capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GcloudMissing(f"`gcloud auth list` gives no answer here ({error}); run it yourself") from None
    account = answer.stdout.strip()
    if answer.returncode != 0:
        words = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        raise GcloudMissing(f"`gcloud auth list` fails here ({words}); run it yourself, then {LOGIN}")
    if not account:
        raise GcloudMissing(
            "the gcloud program here has no active account, which SkyPilot needs beside application-default "
            f"credentials; {LOGIN}"
        )
    return account


def _check_login_files(account: str, environ: Mapping[str, str]) -> None:
    """Check for the files of a person's login, in the folder that SkyPilot reads."""
    folder = Path(environ.get("HOME", "~")).expanduser() / ".config" / "gcloud"
    missing = [name for name in LOGIN_FILES if not (folder / name).is_file()]
    if missing:
        raise GcloudMissing(
            f"gcloud's account here is {account}, and {folder} lacks {' and '.join(missing)}, which SkyPilot reads; "
            "`gcloud auth login` with CLOUDSDK_CONFIG unset"
        )
    key = Path(environ.get("GOOGLE_APPLICATION_CREDENTIALS", "") or folder / APPLICATION).expanduser()
    if not key.is_file():
        raise GcloudMissing(
            f"there are no application-default credentials ({key}), which SkyPilot needs beside the account {account}; "
            "`gcloud auth application-default login`"
        )
