"""The processes of a node on this machine: found by mark, signalled one by one, by pid.

Every process of a node has the mark of its agent (engine/mark.py), in any session or group. The mark names the node's
own folder, so a recycled pid is never taken for a node's process.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from engine.mark import marked

SAME_START_SECONDS = 2.0
"""Largest difference in seconds between two readings of a process's start. Readings differ because the boot time is
rounded."""


def is_alive(pid: int, create_time: float | None) -> bool:
    """Return whether exactly this process runs or is stopped.

    A zombie, or a later process with the same pid, gives False.
    """
    try:
        process = psutil.Process(pid)
        if create_time is not None and abs(process.create_time() - create_time) > SAME_START_SECONDS:
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_recorded_alive(record: Mapping[str, Any]) -> bool:
    """Return `is_alive` for a record like agent.json: {"pid", "create_time"}."""
    return is_alive(int(record["pid"]), record.get("create_time"))


def is_zombie(pid: int) -> bool:
    """Return whether the process has ended and its parent has not read the exit code."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def processes_of(folder: Path, agent: Mapping[str, Any] | None = None) -> list[int]:
    """Return the pids of the node's processes in `folder`.

    With the agent's record, the processes of the agent's session are included.
    """
    session = int(agent["pid"]) if agent is not None and is_recorded_alive(agent) else None
    return [pid for pid in psutil.pids() if pid != os.getpid() and _belongs(pid, str(folder), session)]


def _belongs(pid: int, folder: str, session: int | None) -> bool:
    try:
        is_ours = (session is not None and os.getsid(pid) == session) or marked(pid) == folder
        return is_ours and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, OSError):
        return False  # gone meanwhile, or another user's: an unreadable process is not ours


def send(pids: list[int], signum: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def kill_all(folder: Path, agent: Mapping[str, Any] | None, seconds: float = 1.0) -> list[int]:
    """SIGKILL until no process of the node is left, also against processes that fork meanwhile. Return leftovers.

    Stopped processes die too. A process in the middle of a disk write may need longer than `seconds`.
    """
    until = time.monotonic() + seconds
    # The agent's session is looked up while the agent lives; after the agent's death the mark alone finds the rest.
    while pids := processes_of(folder, agent):
        send(pids, signal.SIGKILL)
        if time.monotonic() > until:
            return pids
        time.sleep(0.01)
    return []
