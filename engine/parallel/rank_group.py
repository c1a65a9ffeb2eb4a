"""The process group of a trainer's ranks: messages in order from rank 0, and tensors between all ranks.

    rank 0  --send-->  other ranks          messages; rank 0 does not wait until they are received
    all     --sum-->   all                  every rank adds a part of the tensors of all ranks, in their order
    rank 0  --copy-->  other ranks          tensors

Messages use gloo. Tensors use NCCL if every rank has a GPU of its own, else gloo (communicator.py). NCCL between two
ranks was never run: no machine with two GPUs was at hand.

A rank that samples looks for messages between two denoising steps: `Inbox` receives them in a thread.

A rank that dies closes its connections, so every call that waits for the rank raises `TornGroup` at once. A rank that
freezes is killed by the node's agent, with the same effect. LIMIT_SECONDS ends what neither notices.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.communicator import ON_CPU, Communicators, SPGroup, TornGroup, links_of

LIMIT_SECONDS = 1800.0
"""Longest wait for a rank that trains its groups of a step, or loads its model."""

IDLE = timedelta(days=365)
"""Longest wait of a rank for its next message. Rollouts and evaluations may take any time."""


class RankGroup:
    """A rank's view of the group. All ranks call `sum` and `copy_from_first` in the same order."""

    def __init__(self, messages: Any, tensors: SPGroup, store: dist.Store, device: torch.device) -> None:
        """Use two groups of the same ranks. `messages`: a gloo group. `store`: all ranks' meeting place.

        `device`: of this rank's tensors.
        """
        self._messages, self._tensors = messages, tensors
        self.store, self.device = store, device
        self.may_grow: Callable[[], bool] = lambda: False
        """Returns True if a larger group could form: a node that this group lacks is there."""
        self._sent: list[tuple[Any, Tensor]] = []
        """Unfinished sends, with the tensors that must live as long."""

    @classmethod
    def form(
        cls, store: dist.Store, rank: int, ranks: int, device: torch.device, *, limit_seconds: float = LIMIT_SECONDS
    ) -> "RankGroup":
        """Return the group, which all ranks make together. Raises TornGroup if a rank does not come in time."""
        limit = timedelta(seconds=limit_seconds)
        with _torn():
            store.set(f"rank/{rank}", "here")
            store.wait([f"rank/{peer}" for peer in range(ranks)], limit)
            messages = ON_CPU.form("gloo", dist.PrefixStore("messages", store), rank, ranks, limit)
        tensors = Communicators(store, timeout_seconds=limit_seconds, links=links_of(device)).get(0, rank, ranks)
        return cls(messages, tensors, store, device)

    @property
    def rank(self) -> int:
        return self._tensors.rank

    @property
    def ranks(self) -> int:
        return self._tensors.degree

    def send(self, rank: int, data: bytes) -> None:
        """Begin to send a message. `finish_sending` waits until all messages are received."""
        with _torn():
            for tensor in (torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
                self._sent.append((self._messages.send([tensor], rank, 0), tensor))

    def finish_sending(self) -> None:
        with _torn():
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    def receive(self, rank: int, *, idle: bool = False) -> bytes:
        """Return the next message of a rank. `idle`: the message may take any time."""
        size = torch.zeros(1, dtype=torch.int64)
        with _torn():
            work = self._messages.recv([size], rank, 0)
            if idle:
                work.wait(IDLE)
            else:
                work.wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            self._messages.recv([data], rank, 0).wait()
        return data.numpy().tobytes()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks: x [N] -> [N], on every rank.

        Addition runs in the order of the ranks, so the sum repeats bit for bit.
        """
        part = -(-len(x) // self.ranks)
        padded = torch.nn.functional.pad(x, (0, part * self.ranks - len(x)))
        received = self._tensors.all_to_all(padded.view(self.ranks, part))
        self._tensors.finish()
        own = received[0].clone()
        for row in received[1:]:
            own += row
        gathered = self._tensors.all_gather(own)
        self._tensors.finish()
        return gathered[: len(x)]

    def copy_from_first(self, x: Tensor) -> None:
        """Overwrite the tensor with the tensor of rank 0."""
        self._tensors.broadcast(x)


class Inbox:
    """Messages of a rank, received by a thread, so a look does not wait. Only the inbox may receive from that rank."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._news = threading.Condition()
        self._arrived: list[bytes] = []
        self._error: TornGroup | None = None
        threading.Thread(target=self._receive, args=(group, rank), name="rank-inbox", daemon=True).start()

    @property
    def is_torn(self) -> bool:
        """Return True if no more messages come."""
        return self._error is not None

    def take(self) -> list[bytes]:
        """Return the messages that arrived since the last call, in order. Never waits."""
        with self._news:
            arrived, self._arrived = self._arrived, []
        return arrived

    def wait(self, seconds: float) -> None:
        """Wait for a message or the end of the group, at most so long."""
        with self._news:
            self._news.wait_for(lambda: self._arrived or self._error, seconds)

    def check(self) -> None:
        """Raise TornGroup if the group has ended."""
        if self._error is not None:
            raise self._error

    def _receive(self, group: RankGroup, rank: int) -> None:
        while True:
            try:
                message, error = group.receive(rank, idle=True), None
            except TornGroup as torn:
                message, error = b"", torn
            with self._news:
                if error is None:
                    self._arrived.append(message)
                self._error = error
                self._news.notify_all()
            if error is not None:
                return


@contextmanager
def _torn() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo and the store raise nothing else
        raise TornGroup(str(error).split("\n")[0][:300]) from error
