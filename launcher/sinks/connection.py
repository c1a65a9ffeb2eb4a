"""The controller's end of a sink's process: ask with a time limit, and end a process that does not answer."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.sinks.messages import ANSWER, Answer, Question, Refused

LONGEST_ANSWER = 1 << 20
"""Bytes of an answer after which the process counts as broken."""

LOOK_SECONDS = 0.2
"""Time between two looks at the time limit."""


class Connection:
    """A running process of a sink. One question at a time, so nothing queues up."""

    def __init__(self, command: Sequence[str], log: Path, folder: Path | None = None) -> None:
        """Start the process. `log`: file for what the client prints. Raises OSError.

        `folder`: of the job file, to which a path in the sink's settings is relative. None, or gone: the current one.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=folder if folder is not None and folder.is_dir() else None,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                bufsize=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Question, until: Callable[[], float]) -> Answer:
        """Return the answer. An answer that is late, missing or not understood ends the process.

        `until`: returns the latest time for the answer (time.monotonic), which may move closer while the process works.
        """
        began = time.monotonic()
        try:
            self._write(question.model_dump_json().encode() + b"\n", until)
            return ANSWER.validate_json(self._read(until))
        except TimeoutError:
            self.kill()
            return Refused(text=f"no answer within {time.monotonic() - began:.1f} s")
        except (OSError, ValueError):
            self.kill()
            return Refused(text=f"its process ended with {self._process.returncode}")

    def kill(self) -> None:
        """End the process and its children, also a frozen one."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _write(self, data: bytes, until: Callable[[], float]) -> None:
        while data:
            _wait_for(until, writable=self._to)
            data = data[os.write(self._to, data) :]

    def _read(self, until: Callable[[], float]) -> bytes:
        answer = b""
        while not answer.endswith(b"\n"):
            _wait_for(until, readable=self._from)
            part = os.read(self._from, 65536)
            if not part or len(answer) > LONGEST_ANSWER:
                raise ValueError("the answer is not whole")
            answer += part
        return answer


def _wait_for(until: Callable[[], float], *, readable: int | None = None, writable: int | None = None) -> None:
    """Wait until the pipe is ready. Raises TimeoutError."""
    from_, to = [readable] if readable is not None else [], [writable] if writable is not None else []
    while not any(select.select(from_, to, [], LOOK_SECONDS)):
        if time.monotonic() >= until():
            raise TimeoutError


def command_of(name: str) -> list[str]:
    """Return the command of a sink's process."""
    return [sys.executable, "-P", "-m", "launcher.sinks.process", name]
