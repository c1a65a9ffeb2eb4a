"""Communicators: the process groups through which workers of a node share a forward pass, made and broken at will.

Workers meet at their node's store, which outlives every one of them. A communicator is a process group of its own, made
once by its members under a number that the coordinator gives out once: what is left of a broken one can never meet a
new one. There is no default group and no rendezvous of the whole node: who is busy elsewhere is not waited for, and a
death breaks those communicators that contain it and no other (research notes engine 3.4).

The promises:

- a peer that died makes every call raise `TornGroup` at once, and one that froze, within the timeout; on gloo nothing
  else wakes a call that waits, so the timeout is short and the node's agent kills who is frozen
- a communicator stays when its group dissolves: to share with the same peers again costs nothing
- everything is on loopback

Workers use gloo, on GPUs too, where it copies through the CPU. NCCL is here for `tests/gpu`: no run uses it yet.
"""

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

LOOPBACK = "127.0.0.1"

Backend = Literal["gloo", "nccl"]


class TornGroup(RuntimeError):
    """A peer died, froze, or never came: nothing that the group was doing is done, and the group is of no more use."""


def serve_store() -> dist.TCPStore:
    """A node's store, on loopback; its `port` is where to join it. It lives as long as what is returned."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # Given a host alone, it would listen on every interface.
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(port: int, *, timeout_seconds: float) -> dist.TCPStore:
    """The node's store as a worker sees it. What waits at it gives up after the timeout."""
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))


@dataclass(frozen=True)
class SPGroup:
    """Ranks that compute one forward pass together, as one of them sees it. Every call is everyone's: alike, in order.

    Calls raise `TornGroup`.
    """

    group: Any
    """A `ProcessGroup` or a backend of its own: gloo, NCCL."""
    patience: timedelta | None = None
    """How long `broadcast` waits for peers. None: gloo, whose every call waits, as long as the group was made with."""

    @property
    def degree(self) -> int:
        return int(self.group.size())

    @property
    def rank(self) -> int:
        """Place of this process in the group, which decides its tokens and heads."""
        return int(self.group.rank())

    def all_to_all(self, x: Tensor) -> Tensor:
        """Row i of every rank goes to rank i: [degree, ...] -> [degree, ...]."""
        x = x.contiguous()
        received = torch.empty_like(x)
        with _torn():
            self.group.alltoall_base(received, x, [], []).wait()
        return received

    def all_gather(self, x: Tensor) -> Tensor:
        """Everyone's rows: [own, ...] -> [degree own, ...]."""
        x = x.contiguous()
        gathered = x.new_empty(self.degree * x.shape[0], *x.shape[1:])
        with _torn():
            self.group._allgather_base(gathered, x).wait()
        return gathered

    def all_reduce(self, x: Tensor) -> None:
        """Everyone's sum, in place."""
        with _torn():
            self.group.allreduce([x]).wait()

    def broadcast(self, x: Tensor) -> None:
        """What rank 0 has, in place, and there when this returns.

        With NCCL the other calls only queue work for the device, so a step that a dead peer left undone is noticed
        here, where the group agrees on the next one.
        """
        with _torn():
            work = self.group.broadcast([x])
            if self.patience is None:
                work.wait()
            else:
                work.wait(self.patience)


@contextmanager
def _torn() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo knows no other; NCCL's DistBackendError is one
        raise TornGroup(str(error).split("\n")[0][:300]) from error


class Communicators:
    """One worker's communicators, by number."""

    def __init__(
        self,
        store: dist.Store,
        *,
        timeout_seconds: float,
        patience_seconds: float | None = None,
        backend: Backend = "gloo",
    ) -> None:
        """`timeout_seconds`: of a call in a group. `patience_seconds`: how long the others are waited for when a
        communicator is made; None: as long."""
        self._store, self._backend = store, backend
        self._timeout = timedelta(seconds=timeout_seconds)
        self._patience = timedelta(seconds=patience_seconds or timeout_seconds)
        self._made: dict[int, SPGroup] = {}

    def get(self, number: int, rank: int, degree: int) -> SPGroup:
        """The communicator of this number; at first it is made, together with the other members' first calls.

        Raises TornGroup when they do not come in time; the number is of no more use then.
        """
        if number not in self._made:
            store = dist.PrefixStore(f"sp/{number}", self._store)
            with _torn():
                store.set(f"here/{rank}", "")
                store.wait([f"here/{other}" for other in range(degree)], self._patience)
                patience = self._timeout if self._backend == "nccl" else None
                self._made[number] = SPGroup(self._form(store, rank, degree), patience)
        return self._made[number]

    def drop(self, number: int) -> None:
        """Never again: a member is dead, or another process by now."""
        group = self._made.pop(number, None)
        if group is not None:
            with suppress(RuntimeError):
                group.group.abort()

    def keep(self, numbers: Collection[int]) -> None:
        """Drop all but these: with NCCL everything that a dead rank was part of must be aborted, on every rank."""
        for number in [known for known in self._made if known not in numbers]:
            self.drop(number)

    def _form(self, store: dist.Store, rank: int, degree: int) -> Any:
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, rank, degree, options)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return dist.ProcessGroupGloo(store, rank, degree, self._timeout)
