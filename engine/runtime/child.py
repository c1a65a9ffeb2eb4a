"""How a process of a node begins: its output goes to its own log, it shows its agent that it is not frozen, and it
ends itself when the agent is gone. A node lives and dies as one. No torch here."""

import json
import multiprocessing
import multiprocessing.process
import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from engine.config import NodeSpec
from engine.runtime.disk import log_to


class Beat(Protocol):
    """A shared number: the monotonic time at which a process was last seen running."""

    value: float


CALM_SECONDS = 20.0
"""A process that lived this long is forgiven its earlier deaths."""
MOST_DEATHS = 5
"""So many deaths in short order and the node gives up, leaving its logs as evidence."""

BEAT_SECONDS = 0.2
"""How often a process shows its agent that it is not frozen."""


def begin(spec: NodeSpec, name: str, beat: Beat) -> None:
    """The first thing that a process of the agent does."""
    open_log(spec, name)
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


def note_start(path: Path, **more: Any) -> list[float]:
    """Write down that a process that nobody here restarts (Ray does) began now; returns its latest starts."""
    now = time.time()
    starts = [*read_note(path).get("starts", []), now][-MOST_DEATHS:]
    write_note(path, starts=starts, **more)
    return starts


def died_too_often(path: Path) -> bool:
    """Whether it was started so often in short order that it will not get better: the node gives up."""
    starts = read_note(path).get("starts", [])
    return len(starts) >= MOST_DEATHS and starts[-1] - starts[0] < CALM_SECONDS * (MOST_DEATHS - 1)


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
    parent.join()
    os._exit(1)
