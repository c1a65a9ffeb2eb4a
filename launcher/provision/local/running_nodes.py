"""The folders of the nodes that have processes on this machine, found without the ledger.

A node is found by the mark of its processes (processes.py), and by the record of its agent in its folder.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from engine.mark import marked
from launcher.provision.local.processes import is_recorded_alive


def running_nodes(runs: Path) -> list[Path]:
    """Return the folders RUN/nodes/NODE below `runs` whose nodes have processes, sorted."""
    return sorted({*_marked(runs), *_recorded(runs)})


def agent_of(folder: Path) -> dict[str, Any] | None:
    """Return the agent's record in a node's folder. None: the folder has no agent of this machine."""
    agent = read_json(folder / "agent.json")
    # The record of an agent on a cloud is a copy: its pid belongs to another machine, and the record has no start time.
    return agent if agent is not None and agent.get("create_time") and not (folder / "want.json").exists() else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file, or None when the file is unreadable or damaged."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _marked(runs: Path) -> Iterator[Path]:
    """Yield the node folders named in the marks of live processes."""
    for pid in psutil.pids():
        try:
            folder = Path(marked(pid) or "/")
            if _is_node(folder, runs) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                yield folder
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's


def _recorded(runs: Path) -> Iterator[Path]:
    """Yield the folders of nodes with a live agent by the agent's own record."""
    for file in runs.glob("*/nodes/*/agent.json"):
        agent = agent_of(file.parent)
        if agent is not None and is_recorded_alive(agent):
            yield file.parent


def _is_node(folder: Path, runs: Path) -> bool:
    return folder.parent.name == "nodes" and folder.parents[2:3] == (runs,)
