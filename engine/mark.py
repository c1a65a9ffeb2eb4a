"""Signs by which a process of a node is known from outside: its node, and its agent's exit code.

A program that is started carries the mark in its environment, and all that it starts inherits it. A process that is
forked cannot change the environment that others see. It carries the mark in its title, which `ps` shows.

What imports this needs the standard library only, unless it calls something.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

MARK = "SPOTRL_NODE_FOLDER"
"""Environment variable: the folder of the node, which no other node has."""

TITLE = "spotrl-node"

ENDING = "ending"
"""A file in the node's folder, touched before the node's processes are looked for to be killed. An agent that appears
later ends by itself."""

EXITS = "exits.jsonl"
"""A file with a line for each agent of the node that ended: {"pid", "code"}, the code negative for a signal."""


def bear_mark(folder: Path, name: str) -> bool:
    """Mark this process, which was forked, and all that it starts. Return whether others can see it."""
    from setproctitle import getproctitle, setproctitle

    os.environ[MARK] = str(folder)
    title = f"{TITLE} {name} {folder}"
    setproctitle(title)
    return getproctitle() == title


def rename(name: str) -> None:
    """Say in the title what this process of a node is. A process without such a title has the mark elsewhere."""
    from setproctitle import getproctitle, setproctitle

    words = getproctitle().split(" ", 2)
    if words[0] == TITLE:
        setproctitle(f"{TITLE} {name} {words[2]}")


def marked(process: "psutil.Process") -> str | None:
    """Return the folder of the node that the process belongs to.

    Raises psutil.Error if the process is gone or another user's.
    """
    title, _, rest = " ".join(process.cmdline()).partition(" ")
    if title == TITLE:
        return rest.partition(" ")[2].strip() or None
    return process.environ().get(MARK)


def read_exits(folder: Path) -> dict[int, int]:
    """Return how agents of the node ended: exit code (negative for a signal) by pid, the last one last."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for line in (folder / EXITS).read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                ended = json.loads(line)
                found[int(ended["pid"])] = int(ended["code"])
    return found
