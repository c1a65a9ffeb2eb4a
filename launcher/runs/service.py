"""A user service that restarts the controller of one run: a systemd user unit, or a launchd agent on macOS.

`spotrl launch --detach --service` writes the service. The service restarts a dead controller after 30 s, and when the
user logs in after a restart of the machine. The controller of a finished run removes the service. A leftover service is
harmless, because the controller of a finished run ends at once with exit code 0.
No secret is written: the values of the job's `secrets`, the environment's access keys, and a proxy's address with a
password must be in `service.env`.
"""

import os
import plistlib
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy.orm import Session, sessionmaker

from engine.durable import write_durably
from launcher.exit_codes import Failure
from launcher.job.schema import Job
from launcher.ledger.store import find_run
from launcher.runs import runs
from launcher.runs.old_code import code_for
from launcher.runs.own_code import environment_for
from launcher.runs.views import is_controlled
from launcher.settings import config_path, home

AGAIN_SECONDS = 30
"""Seconds between a controller's end and the next controller."""

CALL_SECONDS = 30.0

KEPT = frozenset(
    {
        "PATH",
        "PYTHONPATH",
        "AWS_PROFILE",
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_CLOUD_PROJECT",
        "CLOUDSDK_CONFIG",
        "CLOUDSDK_ACTIVE_CONFIG_NAME",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "SSL_CERT_FILE",
        "XDG_CONFIG_HOME",
        "XDG_STATE_HOME",
    }
)
"""Variables written to the service beside `SPOTRL_*`: paths, no secrets."""

ACCESS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class NoService(Failure):
    """This machine or environment cannot run the controller as a service."""


def environment_file() -> Path:
    """Return the user's own file of NAME=VALUE lines, which the service reads. The file need not exist."""
    return config_path().parent / "service.env"


def service_file(run_name: str, platform: str = sys.platform) -> Path:
    if platform == "darwin":
        return Path.home() / "Library" / "LaunchAgents" / f"spotrl.{run_name}.plist"
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "systemd" / "user" / f"spotrl-{run_name}.service"


def check_service(job: Job, environ: Mapping[str, str], platform: str = sys.platform) -> None:
    """Raise NoService if a service could not be started, or would lack a secret. Call before a purchase."""
    instead = "or leave --service out and start a controller that died with `spotrl resume RUN`"
    command = "launchctl" if platform == "darwin" else "systemctl"
    if shutil.which(command) is None:
        raise NoService(f"{command} was not found, and --service needs it; use a machine with it, {instead}")
    if platform != "darwin":
        asked = _call("systemctl", "--user", "show-environment")
        if asked.returncode != 0:
            raise NoService(
                f"systemd does not run services of this user ({_words(asked)}); log in with a session of your own, or "
                f"`loginctl enable-linger`, then try again, {instead}"
            )
    names_in_file = _names_in(environment_file())
    names = [*job.secrets, *filter(None, [job.notifications.webhook])]
    wandb = job.logging.wandb
    if wandb is not None and (wandb.mode == "online" or (wandb.mode is None and wandb.key in environ)):
        names.append(wandb.key)
    names += [name for name in environ if name in ACCESS_KEYS or (name in KEPT and _has_password(environ[name]))]
    missing = [name for name in names if name not in names_in_file]
    if missing:
        raise NoService(
            f"a service does not have this shell's {', '.join(missing)}, and spotrl writes no secret to a file; put "
            f"NAME=VALUE lines into {environment_file()} (chmod 600), {instead}"
        )


def kept_variables(environ: Mapping[str, str], secrets: Collection[str]) -> dict[str, str]:
    """Return the variables that are written to the service. `secrets`: names of the job's secrets, never written."""
    return {
        name: value
        for name, value in environ.items()
        if (name in KEPT or name.startswith("SPOTRL_")) and name not in secrets and not _has_password(value)
    }


def _has_password(value: str) -> bool:
    """Return whether the value is an address with a user name, and so perhaps with a password."""
    try:
        return urlsplit(value).username is not None
    except ValueError:
        return False


def start_service(sessions: sessionmaker[Session], run_name: str, timeout_s: float = runs.START_SECONDS) -> Path:
    """Install the service of this run, start the service, and return its file once a controller holds the lease.

    Raises NoService when systemd or launchd refuses, ControllerFailed when no controller appears in `timeout_s`.
    """
    with sessions() as session:
        run = find_run(session, run_name)
    folder = Path(run.folder)
    log = folder / "controller.log"
    file = service_file(run_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    environ = kept_variables(os.environ, run.job.get("secrets", ()))
    command = [*runs.CONTROLLER, run_name]
    with code_for(home(), folder) as code:
        environ = environment_for(code, {**environ, "SPOTRL_HOME": str(home())})
        if sys.platform == "darwin":
            write_durably(file, launchd_agent(run_name, command, environ, log))
            calls = [("launchctl", "bootstrap", f"gui/{os.getuid()}", str(file))]
        else:
            write_durably(file, systemd_unit(run_name, command, environ, log).encode())
            calls = [("systemctl", "--user", "daemon-reload"), ("systemctl", "--user", "enable", "--now", file.name)]
    for call in calls:
        done = _call(*call)
        if done.returncode != 0:
            remove_service(run_name)
            raise NoService(
                f"`{' '.join(call)}` failed ({_words(done)}); `spotrl resume {run_name}` goes on without it"
            )
    until = time.monotonic() + timeout_s
    while not is_controlled(sessions, run_name):
        if time.monotonic() > until:
            tail = log.read_text(errors="replace").strip()[-1500:] if log.exists() else ""
            raise runs.ControllerFailed(f"the service {file} started no controller; the end of {log}:\n{tail}")
        time.sleep(0.05)
    return file


def remove_service(run_name: str, platform: str = sys.platform) -> None:
    """Remove the service of a run, if any. The calling controller runs until its own end."""
    file = service_file(run_name, platform)
    if not file.exists():
        return
    if platform != "darwin" and shutil.which("systemctl") is not None:
        _call("systemctl", "--user", "disable", file.name)
    file.unlink(missing_ok=True)


def systemd_unit(run_name: str, command: list[str], environ: Mapping[str, str], log: Path) -> str:
    lines = [
        "[Unit]",
        f"Description=spotrl controller of {run_name}",
        "StartLimitIntervalSec=0",
        "[Service]",
        f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in command)}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in sorted(environ.items())),
        f"EnvironmentFile=-{str(environment_file()).replace('%', '%%')}",
        f"StandardOutput=append:{str(log).replace('%', '%%')}",
        "StandardError=inherit",
        "Restart=on-failure",
        f"RestartSec={AGAIN_SECONDS}",
        # Nodes of the local infra are children of the controller and outlive the controller.
        "KillMode=process",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def launchd_agent(run_name: str, command: list[str], environ: Mapping[str, str], log: Path) -> bytes:
    # launchd reads no file of variables; a shell does.
    script = 'if [ -f "$0" ]; then set -a; . "$0"; set +a; fi; exec "$@"'
    agent = {
        "Label": f"spotrl.{run_name}",
        "ProgramArguments": ["/bin/sh", "-c", script, str(environment_file()), *command],
        "EnvironmentVariables": dict(environ),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "AbandonProcessGroup": True,
        "ThrottleInterval": AGAIN_SECONDS,
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    return plistlib.dumps(agent)


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _names_in(file: Path) -> set[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return set()
    return {line.partition("=")[0].strip() for line in lines if "=" in line and not line.lstrip().startswith("#")}


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
