"""Communicators: process groups for the workers of a node to share a forward pass, made and broken at any time.

Workers meet at their node's store, which outlives every worker. A communicator is a separate process group, made once
by its members under a number issued once by the coordinator. The remains of a broken communicator can therefore never
meet a new communicator. There is no default group and no rendezvous of the whole node. Workers busy elsewhere are not
waited for, and a death breaks only the communicators that contain the dead worker (research notes engine 3.4).

The promises:

- a call raises `TornGroup` at once if a peer died, and within the timeout if a peer froze; on gloo nothing else
  wakes a waiting call, so the timeout is short and the node's agent kills frozen workers
- a communicator survives the end of its group: sharing with the same peers again costs nothing
- all traffic uses loopback

Workers use gloo, on GPUs too, where gloo copies through the CPU. NCCL is here for `tests/gpu`: no run uses NCCL yet.
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
    """A peer died, froze or never came. The group's current operation is lost, and the group cannot be used again."""


def serve_store() -> dist.TCPStore:
    """Start a node's store on loopback. Workers join at its `port`. The store lives as long as the returned object."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # With only a host, the store would listen on every interface.
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(port: int, *, timeout_seconds: float) -> dist.TCPStore:
    """Return the worker's client of the node's store. Calls that wait at the store give up after the timeout."""
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))


@dataclass(frozen=True)
class SPGroup:
    """The ranks of a shared forward pass, in the view of one rank. Every rank makes the same calls in the same order.

    Calls raise `TornGroup`.
    """

    group: Any
    """A `ProcessGroup` or a backend object: gloo or NCCL."""
    patience: timedelta | None = None
    """Time limit of `broadcast`. None: gloo, whose calls all wait for the timeout given at creation."""

    @property
    def degree(self) -> int:
        return int(self.group.size())

    @property
    def rank(self) -> int:
        """Return the process's index in the group. The rank decides the process's tokens and heads."""
        return int(self.group.rank())

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send row i of every rank to rank i: [degree, ...] -> [degree, ...]."""
        x = x.contiguous()
        received = torch.empty_like(x)
        with _torn():
            self.group.alltoall_base(received, x, [], []).wait()
        return received

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the rows of all ranks: [own, ...] -> [degree own, ...]."""
        x = x.contiguous()
        gathered = x.new_empty(self.degree * x.shape[0], *x.shape[1:])
        with _torn():
            self.group._allgather_base(gathered, x).wait()
        return gathered

    def all_reduce(self, x: Tensor) -> None:
        """Sum over all ranks, in place."""
        with _torn():
            self.group.allreduce([x]).wait()

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's tensor to all ranks, in place. The data is complete on return.

        With NCCL, all other calls only queue work on the device. A step left undone by a dead peer is noticed here,
        where the group agrees on the next step.
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
    except RuntimeError as error:  # gloo raises only RuntimeError; NCCL's DistBackendError is a RuntimeError
        raise TornGroup(str(error).split("\n")[0][:300]) from error


class Communicators:
    """A worker's communicators, by number."""

    def __init__(
        self,
        store: dist.Store,
        *,
        timeout_seconds: float,
        patience_seconds: float | None = None,
        backend: Backend = "gloo",
    ) -> None:
        """Start without communicators.

        `timeout_seconds`: limit of a call in a group. `patience_seconds`: limit of the wait for the other members when
        a communicator is made; None: equal to `timeout_seconds`.
        """
        self._store, self._backend = store, backend
        self._timeout = timedelta(seconds=timeout_seconds)
        self._patience = timedelta(seconds=patience_seconds or timeout_seconds)
        self._made: dict[int, SPGroup] = {}

    def get(self, number: int, rank: int, degree: int) -> SPGroup:
        """Return the communicator of this number. All members make the communicator together in their first calls.

        Raises TornGroup if a member does not come in time. The number is then unusable.
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
        """Abort a communicator for good: a member is dead or has been replaced by another process."""
        group = self._made.pop(number, None)
        if group is not None:
            with suppress(RuntimeError):
                group.group.abort()

    def keep(self, numbers: Collection[int]) -> None:
        """Drop all communicators but these. With NCCL, every rank must abort every communicator of a dead rank."""
        for number in [known for known in self._made if known not in numbers]:
            self.drop(number)

    def _form(self, store: dist.Store, rank: int, degree: int) -> Any:
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, rank, degree, options)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return dist.ProcessGroupGloo(store, rank, degree, self._timeout)
