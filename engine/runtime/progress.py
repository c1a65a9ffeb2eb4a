"""Progress files: one JSON event a line, appended, numbered; the launcher reads on from its last offset."""

from pathlib import Path

from engine.clock import Clock
from engine.events import Progress, ProgressEvent


class ProgressLog:
    """Writes one source's events. Numbers go on where the file left off, so that none is given twice."""

    def __init__(self, path: Path, *, run: str, source: str, clock: Clock) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._run, self._source, self._clock = run, source, clock
        self._seq: dict[int, int] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    seen = Progress.from_json(line)
                except ValueError:
                    continue  # cut short by a crash; nobody was told of it
                self._seq[seen.lineage] = max(self._seq.get(seen.lineage, -1), seen.seq)
        self._file = path.open("a+")
        self._file.seek(0, 2)
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")

    def write(self, lineage: int, event: ProgressEvent) -> None:
        seq = self._seq.get(lineage, -1) + 1
        self._seq[lineage] = seq
        line = Progress(
            run=self._run, source=self._source, lineage=lineage, seq=seq, at_ms=self._clock.now_ms(), event=event
        )
        self._file.write(line.to_json() + "\n")
        self._file.flush()
