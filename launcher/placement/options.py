"""Options of a slot: the offers that a run may buy, in order of preference, by site."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.events import Market
from launcher.placement.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Option:
    """An offer that a role may buy, and the on-demand price of the same instance type (the worst case)."""

    placement: Placement
    on_demand_micro_usd_per_hour: int

    @cached_property  # a replay asks for it at each decision
    def place(self) -> tuple[str, ...]:
        """Return the key of the pool that has or lacks capacity.

        A pool is an instance type in a zone (or in a whole region), spot or on-demand.
        """
        bought = self.placement
        return bought.cloud, bought.region, bought.zone, bought.instance_type, bought.market

    @cached_property
    def whole_micro_usd_per_hour(self) -> int:
        """Return the hourly price with disk and address, in micro-dollars."""
        return self.placement.micro_usd_per_hour + self.placement.side_micro_usd_per_hour


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """A region of a cloud and every offer that a run could buy in the region, in order of preference."""

    cloud: str
    region: str
    trainer: tuple[Option, ...]
    rollout: tuple[Option, ...]
    """Spot offers of every zone and instance type, and the on-demand offers."""

    @property
    def place(self) -> tuple[str, str]:
        return self.cloud, self.region

    @cached_property
    def spot_trainer(self) -> tuple[Option, ...]:
        return tuple(_on_spot(self.trainer))

    @cached_property
    def least_micro_usd_per_hour(self) -> tuple[int, int]:
        """Return the hourly prices of the cheapest trainer on spot and of the cheapest rollout node. 0: there is none.

        A rollout node is on spot where there is spot.
        """
        trainer, rollout = self.spot_trainer, _on_spot(self.rollout) or self.rollout
        return _least(trainer), _least(rollout)

    @cached_property
    def dearest_micro_usd_per_hour(self) -> int:
        return max((option.whole_micro_usd_per_hour for option in (*self.trainer, *self.rollout)), default=0)


def _on_spot(options: Sequence[Option]) -> list[Option]:
    return [option for option in options if option.placement.market is Market.SPOT]


def _least(options: Sequence[Option]) -> int:
    return min((option.whole_micro_usd_per_hour for option in options), default=0)
