"""One node on a real cloud: its files, which are the truth, and the process's memory beside the files.

An unreadable file counts as absent: a power cut may have left the file empty. `is_begun` tells an unreadable file
from a file that was never written.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from engine.durable import write_durably
from engine.node_spec import NodeSpec
from launcher.clouds.base import Machine
from launcher.decide.node_facts import NodeFact
from launcher.placement.placement import Placement
from launcher.provision.sky.node_link import Login
from launcher.provision.sky.outcome import Outcome


class Link(Protocol):
    """The parts of NodeLink used here."""

    trouble: str

    @property
    def heard_s(self) -> float | None: ...
    def run(self, spec: NodeSpec) -> None: ...
    def rearm(self, left_ms: int) -> None: ...
    def notice(self, deadline_ms: int) -> None: ...
    def door(self, port: int) -> tuple[str, int] | None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class CloudNode:
    """A process's memory of a node. The memory holds only facts that the files also hold, or that may be forgotten."""

    folder: Path
    fresh: bool = False
    """True if requested in this process and not yet sent to SkyPilot: no launch can exist."""
    login: Login | None = None
    """The SSH login during the set-up; `login.json` takes over afterwards."""
    private_address: str = ""
    digest: str = ""
    """Digest of the bundle of the node's set-up, as the node reports."""
    words: str = ""
    """The reason for a failed login."""
    set_up: Outcome | None = None
    """The outcome of the set-up, as SkyPilot reports."""
    link: Link | None = None
    told: NodeSpec | None = None
    told_at: float = 0.0
    deadline_ms: int | None = None
    silent: float = 0.0
    missing: int = 0
    missing_look: int = 0
    stopping_since: float | None = None
    exit_since: float | None = None
    over: NodeFact | None = None
    over_since: float = 0.0
    cleared: bool = False

    @property
    def name(self) -> str:
        return self.folder.name

    # --- files ------------------------------------------------------------------------------------

    def read(self, what: str) -> dict[str, Any] | None:
        """Return the JSON object in the file, or None when the file is missing or damaged."""
        try:
            value = json.loads((self.folder / f"{what}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def has(self, what: str) -> bool:
        """Return whether the file can be read."""
        return self.read(what) is not None

    def is_begun(self, what: str) -> bool:
        """Return whether the file was ever written, even if unreadable now."""
        return (self.folder / f"{what}.json").exists()

    def write(self, what: str, value: Mapping[str, Any]) -> None:
        """Replace the file durably, readable by its owner only. Raises OSError."""
        write_durably(self.folder / f"{what}.json", json.dumps(value).encode())

    def forget(self, what: str) -> None:
        """Remove the file, so that its step is repeated."""
        (self.folder / f"{what}.json").unlink(missing_ok=True)

    def write_key(self, private_key: str) -> Path:
        """Write the private key for the SSH login and return its path."""
        key = self.folder / "ssh.key"
        write_durably(key, private_key.encode())
        # Addresses are reused by VMs with other host keys.
        (self.folder / "known_hosts").unlink(missing_ok=True)
        return key

    # --- contents ---------------------------------------------------------------------------------

    def is_cleared(self) -> bool:
        """Return whether no work is left for this node. A node with an unreadable end is ended again."""
        self.cleared = self.cleared or (self.has("cleared") and self.has("ended"))
        return self.cleared

    @property
    def is_ending(self) -> bool:
        """Return True once the node's end was requested or has begun, even with unreadable files."""
        return self.is_begun("release") or self.is_begun("ending") or self.is_begun("ended")

    @property
    def want(self) -> Placement | None:
        """Return the requested placement; None if the record is lost."""
        record = self.read("want")
        return None if record is None else TypeAdapter(Placement).validate_python(record)

    def write_want(self, want: Placement) -> None:
        self.write("want", dict(TypeAdapter(Placement).dump_python(want, mode="json")))

    @property
    def region(self) -> tuple[str, str] | None:
        """Return the cloud and region of the request or of the found VM."""
        known = self.read("want") or self.read("machine")
        return (known["cloud"], known["region"]) if known is not None else None

    @property
    def machine(self) -> Machine | None:
        record = self.read("machine")
        if record is None or "id" not in record:
            return None
        return TypeAdapter(Machine).validate_python({key: value for key, value in record.items() if key != "login"})

    def write_machine(self, machine: Machine) -> None:
        """Write the VM's record together with the login, for `spotrl ssh`."""
        self.write("machine", {**asdict(machine), "login": self.read("login")})

    @property
    def can_log_in(self) -> bool:
        """Return True if the login and its key can be read."""
        login = self.read("login")
        try:
            return login is not None and Path(login["key"]).stat().st_size > 0
        except OSError:
            return False

    @property
    def notice_ms(self) -> int | None:
        """Return the time of the preemption by the earliest notice."""
        said = [one for what in ("notice", "stopping") if (one := self.read(what)) is not None]
        return min((int(one["deadline_ms"]) for one in said if "deadline_ms" in one), default=None)

    @property
    def ready_ms(self) -> int | None:
        """Return the time at which the node's workers first called in, also for an earlier agent."""
        said = self.read("ready")
        return int(said["at_ms"]) if said is not None and "at_ms" in said else None

    @property
    def is_ready(self) -> bool:
        """Return whether the workers of the current agent have called in."""
        agent, ready = self.read("agent"), self.read("ready")
        return agent is not None and ready is not None and ready.get("pid", agent.get("pid")) == agent.get("pid")
