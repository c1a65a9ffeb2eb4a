"""How a process of a node begins: its output goes to its own log, it shows its agent that it is not frozen, and it
ends itself when the agent is gone. A node lives and dies as one. No torch here."""

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

from engine.config import NodeSpec
from engine.events import IterationDone, Progress
from engine.mark import rename
from engine.runtime.disk import log_to


class Beat(Protocol):
    """A shared number: the monotonic time at which a process was last seen running."""

    value: float


SAME_EXITS, MOST_DEATHS = 3, 5
"""A node gives up when a process of it ended three times in the same way, or five times in any way, without progress
in between, however long each life was. The next start would cost as much and end like those."""

EXIT_UNANSWERED = 75
"""The exit code of a process whose coordinator did not answer for too long. No fault of its own: it never counts."""

FINISHED_FILE = "finished"
"""Touched by the workers of a spot node whenever they finished a lease."""

LAST_LINE_CHARACTERS = 300

BEAT_SECONDS = 0.2
"""How often a process shows its agent that it is not frozen."""

LOOK_SECONDS = 0.5
"""Between two looks for an agent whose end no pipe tells."""


def begin(spec: NodeSpec, name: str, beat: Beat) -> None:
    """The first thing that a process of the agent does."""
    open_log(spec, name)
    rename(name)
    threading.Thread(target=_beat, args=(beat,), daemon=True).start()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def open_log(spec: NodeSpec, name: str) -> None:
    """Everything that this process says from here on is in the node's `logs/NAME.log`."""
    log = os.open(Path(spec.folder) / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    log_to(log)
    print(
        f"--- {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {name} of {spec.node}, pid {os.getpid()}", flush=True
    )


@dataclass
class Deaths:
    """The ends of one process since its node last made progress."""

    progress: Callable[[], object]
    """Returns another value when there was progress (`progress_of`)."""
    exits: list[str] = field(default_factory=list)
    _seen: object = None

    def add(self, how: str) -> None:
        """Count an end. Progress since the end before it forgives all earlier ones."""
        now = self.progress()
        if now != self._seen:
            self.exits, self._seen = [], now
        self.exits.append(how)

    def give_up(self) -> str | None:
        """Return why the node gives up, in words; None while another start is worth it."""
        if not self.exits:
            return None
        last, same = self.exits[-1], self.exits.count(self.exits[-1])
        if same >= SAME_EXITS:
            return f"ended with {last} {same} times without progress"
        if len(self.exits) >= MOST_DEATHS:
            return f"ended {len(self.exits)} times without progress, at last with {last}"
        return None


def exit_in_words(code: int | None) -> str:
    """Name how a process ended: its exit code, or the signal that killed it."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def progress_of(spec: NodeSpec) -> object:
    """Return what a node has achieved: another value after every new iteration, or after rollouts were finished.

    An iteration that is done again after a checkpoint is none: the run was there before.
    """
    folder = Path(spec.folder)
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
    """Return the last words in a log of this node, for whoever asks why a process ended."""
    with contextlib.suppress(OSError):
        text = (Path(spec.folder) / "logs" / f"{log}.log").read_bytes()[-4096:].decode(errors="replace")
        for line in reversed(text.splitlines()):
            if line.strip():
                return line.strip()[-LAST_LINE_CHARACTERS:]
    return "nothing"


def note_start(path: Path, spec: NodeSpec, **more: Any) -> list[float]:
    """Write down that a process that Ray restarts, not the agent, began now; returns its starts since progress."""
    note, progress = read_note(path), progress_of(spec)
    starts = [*note.get("starts", []), time.time()] if note.get("progress") == progress else [time.time()]
    write_note(path, starts=starts[-MOST_DEATHS:], progress=progress, **more)
    return starts[-MOST_DEATHS:]


def died_too_often(path: Path) -> bool:
    """Return whether it was started so often without progress that it will not get better: the node gives up."""
    return len(read_note(path).get("starts", [])) >= MOST_DEATHS


def read_note(path: Path) -> dict[str, Any]:
    """Empty when it is not there."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def write_note(path: Path, **content: Any) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)


def _beat(beat: Beat) -> None:
    while True:
        beat.value = time.monotonic()
        time.sleep(BEAT_SECONDS)


def _follow(parent: multiprocessing.process.BaseProcess) -> None:
    """End this process with its agent.

    The pipe that tells of the agent's end may be held open by a frozen process that was forked beside this one. So the
    parent is looked at as well: an orphan has another one.
    """
    before = os.getppid()
    while os.getppid() == before:
        parent.join(timeout=LOOK_SECONDS)
        if not parent.is_alive():
            break
    os._exit(1)
