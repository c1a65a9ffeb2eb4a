"""Whether a machine is set up, asked of the machine itself.

SkyPilot calls a launch done once the set-up was handed to the machine; the set-up's last act is to write the digest of
what it made. So this short look tells when an agent can run there, and where its home is.
"""

import subprocess
from dataclasses import dataclass

from launcher.cluster.node_link import Login
from launcher.exit_codes import Failure

CONNECT_SECONDS, ANSWER_SECONDS = 5, 9.0

LOOK = 'cd "$HOME" && pwd; cat spotrl/env/.digest 2>/dev/null; true'


class MachineUnreachable(Failure):
    """No SSH to the machine now. The message has ssh's own words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """`digest` is empty until the set-up is through."""

    home: str
    digest: str


def ask_set_up(login: Login) -> SetUp:
    """One SSH session, bounded in time. Raises MachineUnreachable."""
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
        raise MachineUnreachable(f"ssh to {login.host} took more than {ANSWER_SECONDS:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise MachineUnreachable(f"ssh to {login.host}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return SetUp(home=lines[0], digest=lines[1].strip() if len(lines) > 1 else "")
