"""One node on a real cloud: its files, which are the truth, and what a process remembers of it beside them."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from engine.config import NodeSpec
from launcher.cluster.clouds.base import Machine
from launcher.cluster.node_link import Login
from launcher.cluster.provisioner import NodeFact
from launcher.cluster.sky import Outcome
from launcher.placement.placement import Placement


class Link(Protocol):
    """What is used of a NodeLink."""

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
    """What one process remembers of a node: nothing that its files do not say, or that may not be forgotten."""

    folder: Path
    fresh: bool = False
    """Asked for in this process, and not handed over before: nobody can have launched it."""
    login: Login | None = None
    """How to get in while the set-up runs; `login.json` afterwards."""
    private_address: str = ""
    digest: str = ""
    """What it was set up from, by its own word."""
    words: str = ""
    """Why nobody gets in."""
    set_up: Outcome | None = None
    """What SkyPilot says of the set-up."""
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
        """A JSON object, or None when the file is not there or not whole yet."""
        try:
            value = json.loads((self.folder / f"{what}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def has(self, what: str) -> bool:
        return (self.folder / f"{what}.json").exists()

    def write(self, what: str, value: Mapping[str, Any]) -> None:
        """All of it or none of it, for the owner's eyes."""
        self._write_private(self.folder / f"{what}.json", json.dumps(value))

    def write_key(self, private_key: str) -> Path:
        """What SSH logs in with."""
        key = self.folder / "ssh.key"
        self._write_private(key, private_key)
        # Addresses are used again, by machines with other keys.
        (self.folder / "known_hosts").unlink(missing_ok=True)
        return key

    def _write_private(self, path: Path, text: str) -> None:
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        os.replace(part, path)

    # --- what they say ----------------------------------------------------------------------------

    def is_cleared(self) -> bool:
        self.cleared = self.cleared or self.has("cleared")
        return self.cleared

    @property
    def want(self) -> Placement:
        return TypeAdapter(Placement).validate_python(self.read("want"))

    def write_want(self, want: Placement) -> None:
        self.write("want", dict(TypeAdapter(Placement).dump_python(want, mode="json")))

    @property
    def region(self) -> tuple[str, str] | None:
        """Cloud and region, of what was asked for or found."""
        known = self.read("want") or self.read("machine")
        return (known["cloud"], known["region"]) if known is not None else None

    @property
    def machine(self) -> Machine | None:
        record = self.read("machine")
        if record is None or "id" not in record:
            return None
        return TypeAdapter(Machine).validate_python({key: value for key, value in record.items() if key != "login"})

    def write_machine(self, machine: Machine) -> None:
        """With the login beside it, for `spotrl ssh`."""
        self.write("machine", {**asdict(machine), "login": self.read("login")})

    @property
    def notice_ms(self) -> int | None:
        """When it is taken back, by the first notice."""
        said = [one for what in ("notice", "stopping") if (one := self.read(what)) is not None]
        return min((int(one["deadline_ms"]) for one in said if "deadline_ms" in one), default=None)

    @property
    def ready_ms(self) -> int | None:
        """When its workers first called in; of an agent before, too."""
        said = self.read("ready")
        return int(said["at_ms"]) if said is not None and "at_ms" in said else None

    @property
    def is_ready(self) -> bool:
        """Whether those of the agent that it has now have."""
        agent, ready = self.read("agent"), self.read("ready")
        return agent is not None and ready is not None and ready.get("pid", agent.get("pid")) == agent.get("pid")
