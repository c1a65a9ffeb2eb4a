"""One worker's part in the sequence-parallel groups of its node, on a live model.

    ordered into a group -> the first member hands out what to do -> all compute each step together -> ordered elsewhere

The first member pulls and decides. The others are handed its work through the node's store, and hear between steps
whether to go on: a forward pass needs everyone, so nobody may decide for himself. The promises:

- no weight is touched and no process restarted, whatever joins, leaves or dies
- a peer that died or froze raises `TornGroup` in everyone; after `tore` the model computes alone again, what was in
  flight stands at its last finished step, and that communicator is never used again
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.communicator import Communicators, SPGroup, TornGroup
from engine.parallel.membership import ALONE
from engine.parallel.ulysses import SPBackend
from engine.rollout.request import Regroup

LEAVE = b"leave"


class Elastic:
    """See the module's story."""

    def __init__(
        self,
        backend: SPBackend,
        communicators: Communicators,
        store: dist.Store,
        *,
        is_current: Callable[[], bool] = lambda: True,
        believed: Mapping[int, float] | None = None,
    ) -> None:
        """`is_current`: whether the node's store is still the one that was joined. `believed`: seconds of a picture's
        step by allowed degree, before any was measured; None: no faster together."""
        self._backend, self._communicators, self._store = backend, communicators, store
        self._is_current = is_current
        self._believed = dict(believed or {1: 1.0})
        self._group: SPGroup | None = None
        self._communicator = ALONE
        self._handed = 0
        self.epoch = ALONE
        """Of the group that it is in."""
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
        """Whether it does what another hands out."""
        return self.rank > 0

    def report(self) -> dict[str, Any]:
        """What the coordinator wants to know whenever this worker asks for work (engine/parallel/regrouping.py)."""
        torn, self.torn = self.torn, []
        return {"epoch": self.epoch, "torn": torn, "believed": self._believed}

    # --- coming and going

    def follow(self, order: Regroup) -> None:
        """Be in this group from now on; in none if its other members do not come.

        Raises ConnectionError when the node's store was started anew: this process cannot meet anybody any more.
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
        """Compute alone; who is first takes the others along."""
        if self._group is not None and self.rank == 0:
            self.hand_out(LEAVE)
        self._alone()

    def tore(self) -> None:
        """This group is broken, or its work cannot be done by all: break it for everyone."""
        if self._group is not None:
            self._communicators.drop(self._communicator)
            self.torn.append(self._communicator)
        self._alone()

    def _alone(self) -> None:
        self._backend.use(None)
        self._group, self._communicator, self.epoch = None, ALONE, ALONE

    # --- working together

    def hand_out(self, message: bytes) -> None:
        """To everyone who follows, in order, and only after the last one was begun together (`share`, `agree`).

        A store that is gone takes nothing: the group then tears.
        """
        with suppress(dist.DistError):
            self._store.set(self._key(self._handed), message.decode())
            if self._handed:
                self._store.delete_key(self._key(self._handed - 1))  # begun together, so it was read
        self._handed += 1

    def handed(self, wait_seconds: float) -> bytes | None:
        """What the first member hands out next; None: nothing yet, or it is time to leave."""
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
        """Everyone has what the first member has, in place. Raises TornGroup."""
        if self._group is not None:
            self._group.broadcast(x)

    def agree(self, go_on: bool, device: torch.device) -> bool:
        """What the first member decides. Raises TornGroup."""
        if self._group is None:
            return go_on
        decision = torch.tensor([go_on], dtype=torch.uint8, device=device)
        self._group.broadcast(decision)
        return bool(decision.item())

    def _key(self, number: int) -> str:
        return f"handed/{self.epoch}/{number}"
