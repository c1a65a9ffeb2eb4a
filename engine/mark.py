"""Mark the processes of a node, and record agents' exit codes, for other processes to find.

A started program carries the mark in its environment, and all its children inherit the environment. A forked process
cannot change the environment visible to other processes, so a forked process carries the mark in its title, shown by
`ps`.

Importing this module needs the standard library only. Calling some functions needs more.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

MARK = "SPOTRL_NODE_FOLDER"
"""Environment variable with the folder of the node. No two nodes share a folder."""

TITLE = "spotrl-node"

ENDING = "ending"
"""File in the node's folder, created before the node's processes are searched and killed. An agent started later exits
by itself."""

EXITS = "exits.jsonl"
"""File with one line per ended agent of the node: {"pid", "code"}, with a negative code for a signal."""


def bear_mark(folder: Path, name: str) -> bool:
    """Mark this forked process and all its children. Return True if other processes can read the mark."""
    from setproctitle import getproctitle, setproctitle

    os.environ[MARK] = str(folder)
    title = f"{TITLE} {name} {folder}"
    setproctitle(title)
    return getproctitle() == title


def rename(name: str) -> None:
    """Set the process's name in its title. A process without a marked title carries the mark in its environment."""
    from setproctitle import getproctitle, setproctitle

    words = getproctitle().split(" ", 2)
    if words[0] == TITLE:
        setproctitle(f"{TITLE} {name} {words[2]}")


def marked(pid: int) -> str | None:
    """Return the folder of the process's node, or None if the process has no mark.

    Raises OSError or psutil.Error if the process is gone or belongs to another user.
    """
    title, _, words = " ".join(_words(pid)).partition(" ")
    if title == TITLE:
        return words.partition(" ")[2].strip() or None
    return _environ(pid).get(MARK)


def _words(pid: int) -> list[str]:
    """Return the command line. Linux is asked directly: psutil takes six times as long."""
    if sys.platform == "linux":
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    import psutil

    return psutil.Process(pid).cmdline()


def _environ(pid: int) -> dict[str, str]:
    if sys.platform == "linux":
        lines = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
        return dict(line.split("=", 1) for line in lines if line.startswith(f"{MARK}="))
    import psutil

    return psutil.Process(pid).environ()


def read_exits(folder: Path) -> dict[int, int]:
    """Return the exit codes of the node's agents by pid (negative for a signal), the latest last."""
    codes: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for line in (folder / EXITS).read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                ended = json.loads(line)
                codes[int(ended["pid"])] = int(ended["code"])
    return codes
