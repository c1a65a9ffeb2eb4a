"""Options of a slot: the offers that a run may buy, in order of preference, by site."""

from dataclasses import dataclass

from launcher.placement.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An offer that a role may buy, and the on-demand price of the same instance type (the worst case)."""

    placement: Placement
    on_demand_micro_usd_per_hour: int

    @property
    def place(self) -> tuple[str, ...]:
        """Return the key of the pool that has or lacks capacity.

        A pool is an instance type in a zone (or in a whole region), spot or on-demand.
        """
        bought = self.placement
        return bought.cloud, bought.region, bought.zone, bought.instance_type, bought.market


@dataclass(frozen=True, kw_only=True, slots=True)
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
