"""Start up a process of a node.

The process writes its output to its own log, and shows its agent regularly that the process is not frozen. The process
exits when the agent is gone, so all processes of a node live and die together. No torch here.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.events import IterationDone, Progress
from engine.mark import rename
from engine.node_spec import NodeSpec
from engine.protocol.rank_meeting import read_meeting
from engine.storage.disk import log_to


class SharedHeartbeat(Protocol):
    """A shared number: the monotonic time of a process's last sign of life."""

    value: float


SAME_EXITS, MOST_DEATHS = 3, 5
"""Limits on deaths without progress in between: three equal exits, or five exits of any kind, end the node. The length
of each life does not count. Another start would cost as much and end the same way."""

MOST_TORN = 20
"""Exits with EXIT_TORN in a row, without progress, that end the node. Then the ranks of its trainer cannot meet."""

EXIT_TORN = 76
"""Exit code of a trainer's rank whose group lost another rank. The exit is not the rank's fault."""

EXIT_UNANSWERED = 75
"""Exit code of a process whose coordinator did not answer for too long. The exit is not the process's fault and never
counts."""

EXIT_SUPERSEDED = 78
"""Exit code of a trainer whose role another node has taken. Its node's work is over."""

FINISHED_FILE = "finished"
"""File touched by a spot node's workers after every finished lease."""

MEETING_FILE = "ranks.json"
"""File that tells where the trainer's ranks meet (engine/protocol/rank_meeting.py)."""

LAST_LINE_CHARACTERS = 300

HEARTBEAT_SECONDS = 0.2
"""Interval of a process's signs of life to its agent."""

LOOK_SECONDS = 0.5
"""Interval of checks for an agent's death that no pipe reports."""


def begin(spec: NodeSpec, name: str, heartbeat: SharedHeartbeat) -> None:
    """Set up log, title and sign of life. Every process started by the agent calls this function first."""
    open_log(spec, name)
    rename(name)
    threading.Thread(target=_send_heartbeats, args=(heartbeat,), daemon=True).start()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def open_log(spec: NodeSpec, name: str) -> None:
    """Redirect this process's output to the node's `logs/NAME.log`."""
    log = os.open(Path(spec.folder) / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    log_to(log)
    print(
        f"--- {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {name} of {spec.node}, pid {os.getpid()}", flush=True
    )


@dataclass
class Deaths:
    """Exits of one process since its node last made progress."""

    progress: Callable[[], object]
    """Progress function: its return value changes after progress (`progress_of`)."""
    exits: list[str] = field(default_factory=list)
    torn: int = 0
    """Exits because another rank was lost. They count apart, because the rank that was lost counts its own exit."""
    _last_progress: object = None

    def add(self, how: str) -> None:
        """Count an exit. Progress since the previous exit clears all earlier exits."""
        self._clear_after_progress()
        self.exits.append(how)

    def add_torn(self) -> None:
        """Count an exit because another rank was lost."""
        self._clear_after_progress()
        self.torn += 1

    def _clear_after_progress(self) -> None:
        now = self.progress()
        if now != self._last_progress:
            self.exits, self.torn, self._last_progress = [], 0, now

    def give_up(self) -> str | None:
        """Return the reason why the node gives up, in words, or None if another start is worthwhile."""
        if self.torn >= MOST_TORN:
            return f"lost another rank of the trainer {self.torn} times without progress"
        if not self.exits:
            return None
        last, repeats = self.exits[-1], self.exits.count(self.exits[-1])
        if repeats >= SAME_EXITS:
            return f"ended with {last} {repeats} times without progress"
        if len(self.exits) >= MOST_DEATHS:
            return f"ended {len(self.exits)} times without progress, at last with {last}"
        return None


def exit_in_words(code: int | None) -> str:
    """Return the name of a process's exit: its exit code, or the signal that killed the process."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def progress_of(spec: NodeSpec) -> object:
    """Return a value that changes after every new iteration (trainer), or after finished rollouts (spot node).

    An iteration repeated after a checkpoint is no progress: the run was there before. A further node of the trainer
    learns of iterations with the meeting of the ranks.
    """
    folder = Path(spec.folder)
    if spec.role == "ranks":
        return read_meeting(folder / MEETING_FILE).iteration
    if spec.role == "rollout":
        try:
            return (folder / FINISHED_FILE).stat().st_mtime_ns
        except OSError:
            return None
    best = None
    try:
        lines = (folder / "progress" / "trainer.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        with contextlib.suppress(ValueError):
            event = Progress.from_json(line).event
            if isinstance(event, IterationDone):
                best = event.iteration if best is None else max(best, event.iteration)
    return best


def last_line(spec: NodeSpec, log: str) -> str:
    """Return the last line in a log of this node, to explain a process's exit."""
    with contextlib.suppress(OSError):
        text = (Path(spec.folder) / "logs" / f"{log}.log").read_bytes()[-4096:].decode(errors="replace")
        for line in reversed(text.splitlines()):
            if line.strip():
                return line.strip()[-LAST_LINE_CHARACTERS:]
    return "nothing"


def note_start(path: Path, spec: NodeSpec, **more: Any) -> list[float]:
    """Record the start of a process restarted by Ray, not by the agent.

    Returns the start times since the last progress.
    """
    note, progress = read_note(path), progress_of(spec)
    starts = [*note.get("starts", []), time.time()] if note.get("progress") == progress else [time.time()]
    write_note(path, starts=starts[-MOST_DEATHS:], progress=progress, **more)
    return starts[-MOST_DEATHS:]


def died_too_often(path: Path) -> bool:
    """Return True if the process was started too often without progress, so the node gives up."""
    return len(read_note(path).get("starts", [])) >= MOST_DEATHS


def read_note(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file written by `write_note`; empty if the file is absent or unreadable."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def write_note(path: Path, **content: Any) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)


def _send_heartbeats(heartbeat: SharedHeartbeat) -> None:
    while True:
        heartbeat.value = time.monotonic()
        time.sleep(HEARTBEAT_SECONDS)


def _follow(parent: multiprocessing.process.BaseProcess) -> None:
    """End this process with its agent.

    A frozen process forked beside this one may hold the pipe open that reports the agent's end. The thread therefore
    also checks the parent's pid, which changes for an orphan.
    """
    before = os.getppid()
    while os.getppid() == before:
        parent.join(timeout=LOOK_SECONDS)
        if not parent.is_alive():
            break
    os._exit(1)
