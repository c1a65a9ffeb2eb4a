"""The meeting place of a trainer's ranks: rank 0 serves a store, and writes its port into the node's folder.

    rank 0 removes an earlier entry -> all ranks load their models -> rank 0 writes the entry -> the group forms

The store lives in rank 0's process, so the ranks of an earlier rank 0 can never meet the ranks of a later one. A store
meets each rank once: a second process of a rank tells that the first was lost, marks the store as void, and waits for
the next entry. Rank 0 ends when its store is void, and the others end with the next entry (rank_watch.py).

A trainer that may lack a node forms its group from the nodes that the entry names: the ranks of another node wait for a
later entry, and rank 0 begins again after a checkpoint when such a node was heard.

On another node of the trainer, a process copies the entry into its own folder (trainer_nodes.py). The store listens on
the first node's address then, and on loopback for a trainer of one node (rank_network.py).
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from engine.node.child import EXIT_TORN
from engine.node.rank_network import host_of_store, use_network
from engine.node.rank_watch import leave_when
from engine.node.trainer_nodes import OtherNodes, meeting_file
from engine.node_spec import NodeSpec
from engine.parallel.communicator import TornGroup, join_store, serve_store
from engine.parallel.rank_group import LIMIT_SECONDS, RankGroup
from engine.protocol.rank_meeting import RankMeeting, read_meeting, write_meeting
from engine.storage.disk import when_there_is_room
from engine.trainer_ranks import ranks_of

LOOK_SECONDS = 0.05
"""Interval of looks for an entry."""

JOIN_SECONDS = 5.0
"""Longest wait of a rank at a store that may be gone."""

VOID = "void"
"""Key of a store to which another process of the same rank came: the earlier one is lost."""


def forget_ranks(spec: NodeSpec) -> None:
    """Remove an earlier rank 0's entry. Rank 0 calls this function first."""
    meeting_file(spec).unlink(missing_ok=True)


@contextlib.contextmanager
def led_group(spec: NodeSpec, device: torch.device) -> Iterator[RankGroup | None]:
    """Form the group as rank 0, with a store that lives as long as the context. None: the job has a single rank.

    A context that ends without an error is the end of the run, which the trainer's other nodes learn.
    """
    ranks = ranks_of(spec.engine)
    if ranks == 1:
        yield None
        return
    other_nodes = OtherNodes(spec)
    nodes = other_nodes.wait()
    use_network(spec)
    store = serve_store(host_of_store(spec))
    meeting = RankMeeting(generation=time.time_ns(), port=store.port, nodes=nodes)
    _tell(spec, meeting)
    # A client of its own, because a client that waits is locked.
    looker = join_store(store.port, host=host_of_store(spec), timeout_seconds=JOIN_SECONDS)
    over = leave_when(lambda: looker.check([VOID]), "it began again")
    deserted = leave_when(other_nodes.are_silent, "its node is silent") if spec.trainer_nodes > 1 else over
    try:
        group = RankGroup.form(store, 0, ranks * len(nodes) // spec.trainer_nodes, device)
        group.may_grow = other_nodes.have_come
        yield group
    finally:
        over.set()
        deserted.set()
    _tell(spec, RankMeeting(generation=meeting.generation, is_over=True))


def _tell(spec: NodeSpec, meeting: RankMeeting) -> None:
    """Write the meeting as soon as the disk has room. An error would count as a death of rank 0."""
    when_there_is_room(lambda: write_meeting(meeting_file(spec), meeting), partial(print, flush=True))


def joined_group(spec: NodeSpec, rank: int, device: torch.device) -> RankGroup:
    """Return the group of the present rank 0, and wait for rank 0."""
    use_network(spec)
    store, nodes = _store(spec, rank)
    of_node = spec.in_trainer.ranks(spec.engine)
    place = nodes.index(spec.trainer_node) * len(of_node) + of_node.index(rank)
    return RankGroup.form(store, place, len(nodes) * len(of_node), device)


def _store(spec: NodeSpec, rank: int) -> tuple[dist.TCPStore, tuple[int, ...]]:
    """Return the store of the next group with this node, and the numbers of the group's nodes."""
    while True:
        meeting = read_meeting(meeting_file(spec))
        if meeting.port is not None and spec.trainer_node in meeting.nodes:
            with contextlib.suppress(RuntimeError):  # an earlier rank 0's store: look again
                store = join_store(meeting.port, host=host_of_store(spec), timeout_seconds=JOIN_SECONDS)
                if store.add(f"came/{rank}", 1) == 1:
                    store.set_timeout(timedelta(seconds=LIMIT_SECONDS))
                    leave_when(partial(_is_replaced, spec, meeting), "rank 0 began again")
                    return store, meeting.nodes
                store.set(VOID, "")
        time.sleep(LOOK_SECONDS)


def _is_replaced(spec: NodeSpec, meeting: RankMeeting) -> bool:
    """Return True if another rank 0 has written its entry. Rank 0 also removes entries, and ends with the run."""
    now = read_meeting(meeting_file(spec))
    return now.port is not None and now.generation != meeting.generation


@contextlib.contextmanager
def leaves_torn_group() -> Iterator[None]:
    """End this process with EXIT_TORN if another rank was lost. The agent then starts this rank again."""
    try:
        yield
    except TornGroup as error:
        print(f"another rank of the trainer was lost: {error}", flush=True)
        sys.exit(EXIT_TORN)
