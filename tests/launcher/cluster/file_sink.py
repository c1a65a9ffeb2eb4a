"""A sink whose process writes to a file, or misbehaves: `python -m tests.launcher.cluster.file_sink FILE MANNER`.

MANNER: good, lost-answer (stores the second batch and dies without an answer, once), full (refuses, until FILE.free
exists), silent (never answers), dead (ends at once), slow (0.2 s a batch), offline (writes files only).
"""

import json
import os
import sys
import time
from pathlib import Path

from launcher.sinks.messages import Open, Opened, Record
from launcher.sinks.process import serve
from launcher.sinks.sink import NotAccepted


class FileSink:
    def __init__(self, path: Path, manner: str) -> None:
        self.path, self.manner, self.batches = path, manner, 0

    def open(self, message: Open) -> Opened:
        if self.manner == "silent":
            time.sleep(600)
        if self.manner == "full" and not self.path.with_suffix(".free").exists():
            raise NotAccepted("no space left")
        self._write({"open": message.run_id, "pid": os.getpid(), "job": message.job})
        held = sum("number" in line for line in lines_of(self.path))
        offline = "the key is not set here; export it" if self.manner == "offline" else ""
        return Opened(held=held, where=str(self.path), offline=offline)

    def add(self, records: tuple[Record, ...], total: int) -> None:
        self.batches += 1
        if self.manner == "slow":
            time.sleep(0.2)
        for record in records:
            self._write(record.model_dump())
        mark = self.path.with_suffix(".died")
        if self.manner == "lost-answer" and not mark.exists():
            mark.touch()
            os._exit(3)

    def close(self, state: str) -> None:
        self._write({"close": state})

    def _write(self, line: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def command(path: Path, manner: str) -> list[str]:
    return [sys.executable, "-m", "tests.launcher.cluster.file_sink", str(path), manner]


if __name__ == "__main__":
    if sys.argv[2] == "dead":
        sys.exit(1)
    serve(lambda: FileSink(Path(sys.argv[1]), sys.argv[2]), sys.stdin.buffer, os.fdopen(1, "wb", buffering=0))
