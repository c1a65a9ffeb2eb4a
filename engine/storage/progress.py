"""Write progress files: one JSON event a line, appended and numbered. The launcher reads from its last offset.

A full disk delays the events and stops no process.
"""

import os
from pathlib import Path

from engine.clock import Clock
from engine.events import Progress, ProgressEvent


class ProgressLog:
    """Writer of the progress file of one source: the trainer or the coordinator.

    Events are numbered per lineage. After a restart, the numbers continue from the last number in the file, so no
    number is issued twice.
    """

    def __init__(self, path: Path, *, run: str, source: str, clock: Clock) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._run, self._source, self._clock = run, source, clock
        self._seq: dict[int, int] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    progress = Progress.from_json(line)
                except ValueError:
                    continue  # a line cut short by a crash was never reported
                self._seq[progress.lineage] = max(self._seq.get(progress.lineage, -1), progress.seq)
        self._late: list[bytes] = []
        """Lines still waiting for room on the disk."""
        self._file = path.open("ab", buffering=0)
        whole = path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file.fileno(), whole)  # cut off a torn line; the line was never reported

    def write(self, lineage: int, event: ProgressEvent) -> None:
        """Append an event. If the disk is full, the event waits in memory and is written before later events."""
        seq = self._seq.get(lineage, -1) + 1
        self._seq[lineage] = seq
        line = Progress(
            run=self._run, source=self._source, lineage=lineage, seq=seq, at_ms=self._clock.now_ms(), event=event
        )
        self._late.append(f"{line.to_json()}\n".encode())
        self.flush()

    def flush(self) -> bool:
        """Try to write the waiting lines. Returns True if no line waits any more. No line is ever left half-written."""
        handle = self._file.fileno()
        while self._late:
            line, done, start = self._late[0], 0, os.fstat(handle).st_size
            try:
                while done < len(line):
                    done += os.write(handle, line[done:])
            except OSError:
                os.ftruncate(handle, start)
                return False
            self._late.pop(0)
        return True
