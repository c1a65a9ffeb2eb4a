"""The meeting place of a trainer's ranks: rank 0 serves a store, and writes its port into the node's folder.

    rank 0 removes an earlier entry -> all ranks load their models -> rank 0 writes the entry -> the group forms

The store lives in rank 0's process, so the ranks of an earlier rank 0 can never meet the ranks of a later one. A store
meets each rank once: a second process of a rank tells that the first was lost, marks the store as void, and waits for
the next entry. Rank 0 ends when its store is void, and the others end with the next entry (rank_watch.py).
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from engine.node.child import EXIT_TORN, read_note, write_note
from engine.node.rank_watch import leave_when
from engine.node_spec import NodeSpec
from engine.parallel.communicator import TornGroup, join_store, serve_store
from engine.parallel.rank_group import LIMIT_SECONDS, RankGroup
from engine.trainer_ranks import ranks_of

LOOK_SECONDS = 0.05
"""Interval of looks for an entry."""

JOIN_SECONDS = 5.0
"""Longest wait of a rank at a store that may be gone."""

VOID = "void"
"""Key of a store to which another process of the same rank came: the earlier one is lost."""


def forget_ranks(spec: NodeSpec) -> None:
    """Remove an earlier rank 0's entry. Rank 0 calls this function first."""
    _file(spec).unlink(missing_ok=True)


@contextlib.contextmanager
def led_group(spec: NodeSpec, device: torch.device) -> Iterator[RankGroup | None]:
    """Form the group as rank 0, with a store that lives as long as the context. None: the job has a single rank."""
    ranks = ranks_of(spec.engine)
    if ranks == 1:
        yield None
        return
    store = serve_store()
    write_note(_file(spec), port=store.port, started_ns=time.time_ns())
    # A client of its own, because a client that waits is locked.
    looker = join_store(store.port, timeout_seconds=JOIN_SECONDS)
    over = leave_when(lambda: looker.check([VOID]), "it began again")
    try:
        yield RankGroup.form(store, 0, ranks, device)
    finally:
        over.set()


def joined_group(spec: NodeSpec, rank: int, device: torch.device) -> RankGroup:
    """Return the group of the present rank 0, and wait for rank 0."""
    return RankGroup.form(_store(spec, rank), rank, ranks_of(spec.engine), device)


def _store(spec: NodeSpec, rank: int) -> dist.TCPStore:
    while True:
        entry = read_note(_file(spec))
        if port := entry.get("port"):
            with contextlib.suppress(RuntimeError):  # an earlier rank 0's store: look again
                store = join_store(port, timeout_seconds=JOIN_SECONDS)
                if store.add(f"came/{rank}", 1) == 1:
                    store.set_timeout(timedelta(seconds=LIMIT_SECONDS))
                    leave_when(partial(_is_replaced, spec, entry), "rank 0 began again")
                    return store
                store.set(VOID, "")
        time.sleep(LOOK_SECONDS)


def _is_replaced(spec: NodeSpec, entry: Mapping[str, object]) -> bool:
    """Return True if another rank 0 has written its entry. Rank 0 also removes entries, and ends with the run."""
    return read_note(_file(spec)) not in ({}, entry)


@contextlib.contextmanager
def leaves_torn_group() -> Iterator[None]:
    """End this process with EXIT_TORN if another rank was lost. The agent then starts this rank again."""
    try:
        yield
    except TornGroup as error:
        print(f"another rank of the trainer was lost: {error}", flush=True)
        sys.exit(EXIT_TORN)


def _file(spec: NodeSpec) -> Path:
    return Path(spec.folder) / "ranks.json"
