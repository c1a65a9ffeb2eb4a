"""Pools of spot nodes, and how alike their fates are. Pure."""

from dataclasses import dataclass

from launcher.market.estimate import Basis, Estimate

RECORDED = "recorded in nine AWS V100 zones, 2022-23"


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Pool:
    """Nodes with a shared fate: one instance type in one zone. `zone` is empty for on-demand nodes."""

    cloud: str
    region: str
    zone: str
    instance_type: str


SAME_ZONE = Estimate(
    mean=0.59,
    low=0.42,
    high=1.0,
    basis=Basis.ASSUMED,
    source="no lower than the most alike zones of one region; the ends are assumed",
)
SAME_REGION = Estimate(
    mean=0.42,
    low=0.25,
    high=0.59,
    basis=Basis.PRIOR,
    source=f"{RECORDED}: range over pairs of zones, and its middle",
)
OTHER_REGION = Estimate(
    mean=0.14,
    low=0.0,
    high=0.25,
    basis=Basis.PRIOR,
    source=f"{RECORDED}: mean; the ends are no correlation, and the least inside one region",
)


def correlation(first: Pool, second: Pool) -> Estimate:
    """Return the correlation between two nodes being available, by zone and region."""
    if (first.cloud, first.region) != (second.cloud, second.region):
        return OTHER_REGION
    return SAME_ZONE if first.zone == second.zone else SAME_REGION
