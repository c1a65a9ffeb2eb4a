"""The mirror of a node's own files, in the node's local folder.

Input from a node is not trusted beyond the node's own files: only names known to the remote console are written.
"""

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.durable import write_durably
from launcher.provision.sky.ssh_line import BrokenLine

PUT = frozenset({"agent.json", "ready.json", "notice.json", "hint.json", "exit.json"})
APPENDED = re.compile(r"(progress/[\w-][\w.-]*\.jsonl|logs/[\w-][\w.-]*\.log)")
TAIL_BYTES = 64
"""Number of last bytes, same as in the remote console, by which a file is recognised as the file in the mirror."""


@dataclass(frozen=True, slots=True)
class NodeMirror:
    """The copies of a node's files, in one local folder."""

    folder: Path

    def have(self) -> dict[str, tuple[int, str]]:
        """Return the size and last bytes of each growing file in the mirror."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / "known_hosts").touch(mode=0o600)
        have = {}
        for path in [*self.folder.glob("progress/*.jsonl"), *self.folder.glob("logs/*.log")]:
            name = path.relative_to(self.folder).as_posix()
            if APPENDED.fullmatch(name):
                with path.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - TAIL_BYTES))
                    have[name] = (size, base64.b64encode(file.read()).decode())
        return have

    def take(self, message: Mapping[str, Any]) -> bool:
        """Write the node's file to the mirror. Return True if the message reports an error instead."""
        match message:
            case {"put": str(name), "text": str(text)} if name in PUT:
                self._replace(name, text.encode())
            case {"gone": str(name)} if name in PUT:
                (self.folder / name).unlink(missing_ok=True)
            case {"append": str(name), "at": int(at), "data": str(data)} if APPENDED.fullmatch(name):
                self._append(name, at, base64.b64decode(data))
        return "trouble" in message

    def _append(self, name: str, at: int, data: bytes) -> None:
        path = self.folder / name
        if at == 0:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            self._replace(name, data)
            return
        with path.open("r+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) < at:
                raise BrokenLine(f"{name} has fewer bytes in the mirror than {at}, where the node goes on")
            # Writes go by offset, so two processes connected to one node write the same bytes at the same place.
            file.seek(at)
            while data:
                data = data[file.write(data) :]

    def _replace(self, name: str, content: bytes) -> None:
        write_durably(self.folder / name, content)
