"""Read progress files from the last offset. Offsets live in memory only: the ledger keeps each sequence number once."""

import logging
from pathlib import Path

from engine.events import Progress

log = logging.getLogger(__name__)


class ProgressFiles:
    """The progress of a run: `progress/*.jsonl` on the disk of every past and present trainer node."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}

    def read(self, node_folder: Path) -> list[Progress]:
        """Return the lines appended since the last call.

        A line without its end is still being written and is left for later.
        """
        return [line for path in sorted((node_folder / "progress").glob("*.jsonl")) for line in self._read_file(path)]

    def forget(self) -> None:
        """Make the next `read` return every line again, because the last lines did not reach the ledger."""
        self._offsets.clear()

    def _read_file(self, path: Path) -> list[Progress]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        lines: list[Progress] = []
        for text in whole.decode(errors="replace").splitlines():
            try:
                lines.append(Progress.from_json(text))
            except ValueError as error:  # a crash cut the line short, so its event was never reported elsewhere
                log.warning("%s: %s", path, error)
        return lines
