"""The processes of a node on this machine: found by its mark, signalled one by one, by pid.

Every process of a node has the mark of its agent (engine/mark.py), whatever session or group it moves to. The
mark names a folder that no other node has, so a recycled pid is never taken for one of ours.
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
"""Two readings of a process's start may differ a little, because the boot time that they rest on is rounded."""


def is_alive(pid: int, create_time: float | None) -> bool:
    """Whether this very process runs (or is stopped): not another one with its pid, and not a zombie."""
    try:
        process = psutil.Process(pid)
        if create_time is not None and abs(process.create_time() - create_time) > SAME_START_SECONDS:
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_recorded_alive(record: Mapping[str, Any]) -> bool:
    """`is_alive` for a record like agent.json: {"pid", "create_time"}."""
    return is_alive(int(record["pid"]), record.get("create_time"))


def is_zombie(pid: int) -> bool:
    """Return whether the process has ended and its parent has not asked how."""
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
    """Pids of everything that runs for the node in `folder`; with its agent's record, all of its session too."""
    session = int(agent["pid"]) if agent is not None and is_recorded_alive(agent) else None
    return [pid for pid in psutil.pids() if pid != os.getpid() and _belongs(pid, str(folder), session)]


def _belongs(pid: int, folder: str, session: int | None) -> bool:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if session is not None and os.getsid(pid) == session:
            return True
        return marked(process) == folder
    except (psutil.Error, OSError):
        return False  # gone meanwhile, or somebody else's: what we may not look at is not ours


def send(pids: list[int], signum: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def kill_all(folder: Path, agent: Mapping[str, Any] | None, seconds: float = 1.0) -> list[int]:
    """SIGKILL until nothing of the node is left, which a process that forks meanwhile cannot outrun. Returns leftovers.

    Stopped processes die too. A process in the middle of a disk write may need longer than `seconds`.
    """
    until = time.monotonic() + seconds
    # The agent's session is looked up while the agent lives; once it is dead the mark alone finds the rest.
    while left := processes_of(folder, agent):
        send(left, signal.SIGKILL)
        if time.monotonic() > until:
            return left
        time.sleep(0.01)
    return []
