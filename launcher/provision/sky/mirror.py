"""The mirror of a node's own files, in the node's local folder.

Input from a node is not trusted beyond the node's own files: only names known to the remote console are written.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from engine.durable import write_durably
from engine.protocol.console import APPENDED, MIRRORED, TAIL_BYTES, AppendFile, Have, PutFile, RemoveFile
from launcher.provision.sky.ssh_line import BrokenLine


@dataclass(frozen=True, slots=True)
class NodeMirror:
    """The copies of a node's files, in one local folder."""

    folder: Path

    def have(self) -> Have:
        """Return the size and last bytes of each growing file in the mirror."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / "known_hosts").touch(mode=0o600)
        have: dict[str, tuple[int, bytes]] = {}
        for path in [*self.folder.glob("progress/*.jsonl"), *self.folder.glob("logs/*.log")]:
            name = path.relative_to(self.folder).as_posix()
            if APPENDED.fullmatch(name):
                with path.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - TAIL_BYTES))
                    have[name] = (size, file.read())
        return Have(files=have)

    def take(self, report: PutFile | RemoveFile | AppendFile) -> None:
        """Write the node's change to the mirror. Ignore a file that is not mirrored."""
        match report:
            case PutFile() if report.name in MIRRORED:
                self._replace(report.name, report.text.encode())
            case RemoveFile() if report.name in MIRRORED:
                (self.folder / report.name).unlink(missing_ok=True)
            case AppendFile() if APPENDED.fullmatch(report.name):
                self._append(report.name, report.at, report.data)
            case _:
                pass

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
