"""Communicators: process groups for the workers of a node to share a forward pass, made and broken at any time.

Workers meet at their node's store, which outlives every worker. A communicator is a separate process group, made once
by its members under a number issued once by the coordinator. The remains of a broken communicator can therefore never
meet a new communicator. There is no default group and no rendezvous of the whole node. Workers busy elsewhere are not
waited for, and a death breaks only the communicators that contain the dead worker (measured with gloo).

The promises:

- on gloo, a call raises `TornGroup` at once if a peer died, and within the timeout if a peer froze; nothing else wakes
  a waiting call, so the timeout is short and the node's agent kills frozen workers
- on NCCL, `finish` raises `TornGroup` within the timeout if a peer died or froze; the other calls only queue work on
  the GPU, and a thread aborts a group whose work does not end (collective_watch.py)
- a communicator survives the end of its group: sharing with the same peers again costs nothing
- all traffic uses loopback, except between the nodes of a trainer (engine/node/rank_network.py)

NCCL is used if every member has a GPU of its own, else gloo, which copies through the CPU. NCCL refuses two members on
one GPU. All members decide alike, because each publishes its GPU at the store. Groups of NCCL with two members were
never run: no machine with two GPUs was at hand (tests/gpu/test_nccl.py).
"""

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.collective_watch import CollectiveWatch, HasEnded, WatchThread

LOOPBACK = "127.0.0.1"

Backend = Literal["gloo", "nccl"]

GLOO_ONLY = "gloo"
"""Published at the store by a member that cannot use NCCL."""

NCCL_TRIES = 3
"""Groups of NCCL that fail to form, one after another, before a worker uses gloo only."""

POLL_SECONDS = 0.0005
"""Interval of looks at the device while a pass ends. A step of an image takes 50 ms or more."""

NCCL_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    # torch's own watchdog would end the process when a peer dies, but a worker continues.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class TornGroup(RuntimeError):
    """A peer died, froze or never came. The group's current operation is lost, and the group cannot be used again."""


def serve_store(host: str = LOOPBACK) -> dist.TCPStore:
    """Start a store on one address of this node. Others join at its `port`. It lives as long as the returned object."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # With only a host, the store would listen on every interface.
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(port: int, *, timeout_seconds: float, host: str = LOOPBACK) -> dist.TCPStore:
    """Return a client of a store. Calls that wait at the store give up after the timeout."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))


@dataclass(frozen=True)
class SPGroup:
    """The ranks of a shared forward pass, in the view of one rank. Every rank makes the same calls in the same order.

    Calls raise `TornGroup`.
    """

    group: Any
    """A `ProcessGroup` or a backend object: gloo or NCCL."""
    watch: CollectiveWatch | None = None
    """Watch of a group whose calls only queue work (NCCL). None: every call returns with its result (gloo)."""

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
        self._call(lambda: self.group.alltoall_base(received, x, [], []))
        return received

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the rows of all ranks: [own, ...] -> [degree own, ...]."""
        x = x.contiguous()
        gathered = x.new_empty(self.degree * x.shape[0], *x.shape[1:])
        self._call(lambda: self.group._allgather_base(gathered, x))
        return gathered

    def all_reduce(self, x: Tensor) -> None:
        """Sum over all ranks, in place."""
        self._call(lambda: self.group.allreduce([x]))

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's tensor to all ranks, in place. The data is complete on return."""
        self._call(lambda: self.group.broadcast([x]))
        self.finish()

    def finish(self) -> None:
        """Wait until the calls until now have ended. Call before the results of a pass are used.

        With NCCL, a step left undone by a dead peer is noticed here.
        """
        if self.watch is None:
            return
        while not self.watch.has_ended():
            if self.watch.is_torn:
                break
            self.watch.look()
            time.sleep(POLL_SECONDS)
        if self.watch.is_torn:
            raise TornGroup("a collective did not end in time: a peer died or froze")

    def _call(self, begin: Callable[[], Any]) -> None:
        with _torn():
            if self.watch is None:
                begin().wait()
                return
            if self.watch.is_torn:
                raise TornGroup("the group was aborted")
            self.watch.call(lambda: begin().wait())


@contextmanager
def _torn() -> Iterator[None]:
    try:
        yield
    except TornGroup:
        raise
    except RuntimeError as error:  # gloo raises only RuntimeError; NCCL's DistBackendError is a RuntimeError
        raise TornGroup(str(error).split("\n")[0][:300]) from error


@dataclass(frozen=True, kw_only=True)
class Links:
    """The ways of a worker's device to other devices of the node."""

    device: torch.device
    place: str
    """Name of the worker's GPU, unique on the node; GLOO_ONLY without a GPU of its own, or without NCCL."""
    form: Callable[[Backend, dist.Store, int, int, timedelta], Any]
    """(backend, store, rank, degree, timeout) -> a process group, which the other members make at the same time."""
    mark: Callable[[], HasEnded]
    """Returns a function that tells whether the device has done the work that is queued now."""


def links_of(device: torch.device) -> Links:
    """Return the links of a GPU or of the CPU."""
    place = GLOO_ONLY
    if device.type == "cuda" and dist.is_nccl_available():
        place = str(torch.cuda.get_device_properties(device).uuid)
    return Links(device=device, place=place, form=_form_group, mark=lambda: _event_on(device).query)


def backend_of(places: Sequence[str]) -> Backend:
    """Return NCCL if every member has a GPU of its own, else gloo. `places`: `Links.place` of every member."""
    return "nccl" if GLOO_ONLY not in places and len(set(places)) == len(places) else "gloo"


def _form_group(backend: Backend, store: dist.Store, rank: int, degree: int, timeout: timedelta) -> Any:
    if backend == "nccl":
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, degree, options)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return dist.ProcessGroupGloo(store, rank, degree, timeout)


def _event_on(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


ON_CPU = links_of(torch.device("cpu"))


class Communicators:
    """A worker's communicators, by number."""

    def __init__(
        self,
        store: dist.Store,
        *,
        timeout_seconds: float,
        patience_seconds: float | None = None,
        links: Links = ON_CPU,
    ) -> None:
        """Start without communicators.

        `timeout_seconds`: limit of a call in a group. `patience_seconds`: limit of the wait for the other members when
        a communicator is made; None: equal to `timeout_seconds`. `links`: of the device with the worker's model.
        """
        self._store, self._links = store, links
        self._timeout = timedelta(seconds=timeout_seconds)
        self._patience = timedelta(seconds=patience_seconds or timeout_seconds)
        self._made: dict[int, SPGroup] = {}
        self._thread = WatchThread()
        self._failures = 0
        """Groups of NCCL that failed to form since the last that formed."""

    def get(self, number: int, rank: int, degree: int) -> SPGroup:
        """Return the communicator of this number. All members make the communicator together in their first calls.

        Raises TornGroup if a member does not come in time. The number is then unusable.
        """
        if number not in self._made:
            store = dist.PrefixStore(_prefix(number), self._store)
            with _torn():
                store.set(f"here/{rank}", self._place())
                members = [f"here/{peer}" for peer in range(degree)]
                store.wait(members, self._patience)
                backend = backend_of([bytes(store.get(member)).decode() for member in members])
                self._made[number] = self._make(backend, store, rank, degree)
        return self._made[number]

    def drop(self, number: int) -> None:
        """Abort a communicator for good: a member is dead or has been replaced by another process."""
        group = self._made.pop(number, None)
        if group is not None:
            self._abort(group)
            self._forget(number)

    def keep(self, numbers: Collection[int]) -> None:
        """Drop all communicators but these. With NCCL, every rank must abort every communicator of a dead rank."""
        for number in [existing for existing in self._made if existing not in numbers]:
            self.drop(number)

    def _place(self) -> str:
        return GLOO_ONLY if self._failures >= NCCL_TRIES else self._links.place

    def _make(self, backend: Backend, store: dist.Store, rank: int, degree: int) -> SPGroup:
        if backend == "gloo":
            return SPGroup(self._links.form(backend, store, rank, degree, self._timeout))
        self._failures += 1
        links = self._links.form(backend, store, rank, degree, self._timeout)
        watch = CollectiveWatch(links.abort, self._links.mark, timeout_seconds=self._timeout.total_seconds())
        group = SPGroup(links, watch)
        self._thread.add(watch)
        try:
            # The first collective makes the connections. Then no later call waits for a peer before it returns.
            group.all_reduce(torch.zeros(1, device=self._links.device))
            group.finish()
        except TornGroup:
            self._abort(group)
            raise
        self._failures = 0
        return group

    def _abort(self, group: SPGroup) -> None:
        if group.watch is not None:
            self._thread.remove(group.watch)
        if group.watch is None or not group.watch.is_torn:  # an aborted group is not aborted again
            with suppress(RuntimeError):
                group.group.abort()

    def _forget(self, number: int) -> None:
        """Remove the traces of a communicator's formation from the node's store, which outlives every worker."""
        with suppress(dist.DistError):
            for key in self._store.list_keys() if hasattr(self._store, "list_keys") else ():
                if key.startswith(f"{_prefix(number)}/"):
                    self._store.delete_key(key)


def _prefix(number: int) -> str:
    return f"sp/{number}"
