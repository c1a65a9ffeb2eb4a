"""Read from a VM itself whether its set-up is finished.

SkyPilot calls a launch done once the set-up was handed to the VM. The last step of the set-up writes the digest of the
bundle. So reading the digest tells when an agent can run on the VM, and the path of the home folder.
"""

import subprocess
from dataclasses import dataclass

from launcher.exit_codes import Failure
from launcher.provision.sky.node_link import Login

CONNECT_SECONDS, ANSWER_SECONDS = 5, 9.0

LOOK = 'cd "$HOME" && pwd; cat spotrl/env/.digest 2>/dev/null; true'


class InstanceUnreachable(Failure):
    """No SSH connection to the VM now. The message is ssh's own error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """The home folder and set-up digest of a VM. `digest` is empty until the set-up is finished."""

    home: str
    digest: str


def ask_set_up(login: Login) -> SetUp:
    """Read the set-up state over one SSH session, bounded in time. Raises InstanceUnreachable."""
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
    command = ["ssh", "-F", "none", "-T", "-i", str(login.key), "-p", str(login.port), *words]
    try:
        done = subprocess.run(
            [*command, f"{login.user}@{login.host}", LOOK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InstanceUnreachable(f"ssh to {login.host} took more than {ANSWER_SECONDS:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise InstanceUnreachable(f"ssh to {login.host}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return SetUp(home=lines[0], digest=lines[1].strip() if len(lines) > 1 else "")
