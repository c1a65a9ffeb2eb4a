"""A worker's side of the node's sequence-parallel groups, on a live model.

    join by order -> the first member hands out work -> all members compute each step together -> leave by order

The first member pulls and decides. The other members get the work through the node's store. Between steps, the first
member tells the other members whether to go on: a forward pass needs all members, so no member may decide alone. The
promises:

- no weight is changed and no process restarted when a worker joins, leaves or dies
- a dead or frozen peer raises `TornGroup` in every member; after `tore` the model computes alone again, in-flight work
  is at its last finished step, and the communicator is never used again
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.communicator import Communicators, SPGroup, TornGroup
from engine.parallel.ulysses import SPBackend
from engine.protocol.messages import GroupReport
from engine.protocol.request import ALONE, Regroup

LEAVE = b"leave"


class Elastic:
    """A worker's SP state: current group, communicator and torn communicators. See the module docstring."""

    def __init__(
        self,
        backend: SPBackend,
        communicators: Communicators,
        store: dist.Store,
        *,
        is_current: Callable[[], bool] = lambda: True,
        believed: Mapping[int, float] | None = None,
    ) -> None:
        """Start outside every group.

        `is_current`: returns True if the node's store is still the joined store. `believed`: seconds of an image's step
        by allowed degree, before any measurement; None: no speedup from sharing.
        """
        self._backend, self._communicators, self._store = backend, communicators, store
        self._is_current = is_current
        self._believed = dict(believed or {1: 1.0})
        self._group: SPGroup | None = None
        self._communicator = ALONE
        self._handed = 0
        self.epoch = ALONE
        """The epoch of the current group."""
        self.torn: list[int] = []
        """Communicators that broke since `report`."""

    @property
    def rank(self) -> int:
        return self._backend.rank

    @property
    def degree(self) -> int:
        return self._backend.degree

    @property
    def follows(self) -> bool:
        """Return True if another member hands out the work."""
        return self.rank > 0

    def report(self) -> GroupReport:
        """Return the SP part of a worker's pull for the coordinator (engine/coordinator/regrouping.py)."""
        torn, self.torn = self.torn, []
        return GroupReport(epoch=self.epoch, torn=tuple(torn), believed=dict(self._believed))

    # --- joining and leaving

    def follow(self, order: Regroup) -> None:
        """Join the ordered group. Stay outside every group if the other members do not come.

        Raises ConnectionError if the node's store was restarted: the process can then meet no peer and must restart
        too.
        """
        self.leave()
        if not self._is_current():
            raise ConnectionError("the store of this node was started anew; this worker must be, too")
        if order.keep is not None:
            self._communicators.keep(order.keep)
        if order.epoch == ALONE:
            return
        number = order.communicator
        try:
            for number, rank, degree in order.prepare:
                self._communicators.get(number, rank, degree)
            number = order.communicator
            group = self._communicators.get(number, order.rank, order.degree)
        except TornGroup:
            self._communicators.drop(number)
            self.torn += sorted({number, order.communicator})
            return
        self._backend.use(group)
        self._group, self._communicator, self.epoch, self._handed = group, order.communicator, order.epoch, 0

    def leave(self) -> None:
        """Leave the group and compute alone. The first member makes all other members leave too."""
        if self._group is not None and self.rank == 0:
            self.hand_out(LEAVE)
        self._alone()

    def tore(self) -> None:
        """Break the group for every member, because a peer is lost or a member cannot do the work."""
        if self._group is not None:
            self._communicators.drop(self._communicator)
            self.torn.append(self._communicator)
        self._alone()

    def _alone(self) -> None:
        self._backend.use(None)
        self._group, self._communicator, self.epoch = None, ALONE, ALONE

    # --- working together

    def hand_out(self, message: bytes) -> None:
        """Send work to all followers, in order.

        Call only after all members started the previous work together (`share`, `agree`). If the store is gone, the
        message is lost and the group then tears.
        """
        with suppress(dist.DistError):
            self._store.set(self._key(self._handed), message.decode())
            if self._handed:
                self._store.delete_key(self._key(self._handed - 1))  # started by all members, and therefore read by all
        self._handed += 1

    def handed(self, wait_seconds: float) -> bytes | None:
        """Return the next work from the first member. None: no work yet, or the order to leave."""
        try:
            self._store.wait([self._key(self._handed)], timedelta(seconds=wait_seconds))
            message = bytes(self._store.get(self._key(self._handed)))
        except dist.DistError:
            return None
        self._handed += 1
        if message == LEAVE:
            self._alone()
            return None
        return message

    def share(self, x: Tensor) -> None:
        """Copy the first member's tensor to all members, in place. Raises TornGroup."""
        if self._group is not None:
            self._group.broadcast(x)

    def finish(self) -> None:
        """Wait for the group's part of a pass. Call before a result is used. Raises TornGroup."""
        if self._group is not None:
            self._group.finish()

    def agree(self, go_on: bool, device: torch.device) -> bool:
        """Return the `go_on` of the group's first member: True to compute another step. Raises TornGroup."""
        if self._group is None:
            return go_on
        decision = torch.tensor([go_on], dtype=torch.uint8, device=device)
        self._group.broadcast(decision)
        return bool(decision.item())

    def _key(self, number: int) -> str:
        return f"handed/{self.epoch}/{number}"
