"""Set a VM up over SSH: start the set-up of the bundle on the VM, and read from the VM itself whether it is finished.

    begin_set_up: bundle/ -> set-up.log grows -> set-up.exit, and the digest of the bundle in env/.digest

SkyPilot copies nothing of ours to the VM and runs nothing. A set-up run by SkyPilot is a job of its scheduler on the
VM, and the job begins later than our set-up would be finished: two thirds of the time from the bundle to the agent were
spent so (measured on fake hosts).

The set-up outlives the connection that starts it. A set-up that is started twice runs once (set_up_node.sh takes a
lock), so a controller that crashed in between starts it again. An agent can run once the digest is there.
"""

import shlex
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launcher.exit_codes import Failure
from launcher.provision.sky.node_link import Login

CONNECT_SECONDS, ANSWER_SECONDS = 5, 9.0

SEND_SECONDS = 600.0
"""Longest time to copy a bundle to the VM: its largest, 200 MB, over a slow line of this machine."""

LOG_LINES = 40
"""Lines of the log that explain a failed set-up."""

LOOK = (
    'cd "$HOME" && pwd && echo "$(cat spotrl/env/.digest 2>/dev/null)" && echo "$(cat spotrl/set-up.exit 2>/dev/null)" '
    f"&& tail -n {LOG_LINES} spotrl/set-up.log 2>/dev/null; true"
)


class InstanceUnreachable(Failure):
    """No SSH connection to the VM now. The message is ssh's own error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """The state of a VM's set-up.

    `digest`: of the finished set-up, empty before. `exit_code`: of the last set-up, None while it runs and before.
    """

    home: str
    digest: str
    exit_code: int | None = None
    log: str = ""


def ask_set_up(login: Login) -> SetUp:
    """Read the set-up state over one SSH session, bounded in time. Raises InstanceUnreachable."""
    home, digest, code, *log = [*_run(login, LOOK).splitlines(), "", ""]
    exit_code = int(code) if code.strip().isdigit() else None
    return SetUp(home=home, digest=digest.strip(), exit_code=exit_code, log="\n".join(log).strip())


def begin_set_up(login: Login, bundle: Path, command: str) -> None:
    """Copy the bundle to the VM, start the set-up there and return. Raises InstanceUnreachable.

    `bundle`: the folder here. `command`: sets up from the copy. A half-copied bundle is of no effect.
    """
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(bundle, ".")
        packed.seek(0)
        _run(login, begin_command(command), packed, SEND_SECONDS)


def begin_command(command: str) -> str:
    """Return the shell command that reads the bundle from its input and runs the set-up in a session of its own."""
    runs = f"( {command} ) >set-up.log 2>&1; echo $? >set-up.exit.new; mv set-up.exit.new set-up.exit"
    begin = f"setsid nohup sh -c {shlex.quote(runs)} </dev/null >/dev/null 2>&1 &"
    copy = "rm -rf bundle.new && mkdir bundle.new && tar -xf - -C bundle.new && rm -rf bundle && mv bundle.new bundle"
    first = 'umask 077; mkdir -p "$HOME/spotrl" && cd "$HOME/spotrl"'
    return f"{first} && {copy} && rm -f set-up.exit && {{ {begin} }} && pwd"


def _run(login: Login, command: str, stdin: IO[bytes] | None = None, seconds: float = ANSWER_SECONDS) -> str:
    """Run a command on the VM and return its output, which must not be empty. Raises InstanceUnreachable.

    `stdin`: the command's standard input.
    """
    options = {
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "ControlPath": "none",
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": f'"{login.known_hosts or login.key.parent / "known_hosts"}"',
        "GlobalKnownHostsFile": "/dev/null",
        "ConnectTimeout": str(CONNECT_SECONDS),
        "LogLevel": "ERROR",
        **({"ProxyCommand": login.proxy} if login.proxy else {}),
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    ssh = ["ssh", "-F", "none", "-T", "-i", str(login.key), "-p", str(login.port), *words]
    try:
        done = subprocess.run(
            [*ssh, f"{login.user}@{login.host}", command],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise InstanceUnreachable(f"ssh to {login.host} took more than {seconds:.0f} s") from None
    if done.returncode or not done.stdout:
        raise InstanceUnreachable(f"ssh to {login.host}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
