"""Small markets for tests of replays: zones with given capacities, and a plan for them. Pure."""

from collections.abc import Mapping, Sequence

from engine.events import Market
from launcher.decide.work_left import WorkLeft
from launcher.market.hazard import POOLED, HazardCurve
from launcher.market.spells import Spells, ZoneSpells
from launcher.money import HOUR_MS
from launcher.placement.options import Option, SiteOptions
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan, Slot
from launcher.replay.trace import PoolTrace, Trace

SPOT, ON_DEMAND = 15_000_000, 55_000_000
TICK_MS = 600_000


def pool(zone: str, capacity: Sequence[int], micro_usd_per_hour: int | None = None) -> PoolTrace:
    """Return a pool of us-test-1 with a capacity for each ten minutes."""
    return PoolTrace(
        cloud="aws",
        region="us-test-1",
        zone=f"us-test-1{zone}",
        instance_type="p5.48xlarge",
        t_ms=tuple(n * TICK_MS for n in range(len(capacity))),
        capacity=tuple(capacity),
        micro_usd_per_hour=(micro_usd_per_hour,) * len(capacity),
    )


def market(zones: Mapping[str, Sequence[int]]) -> Trace:
    pools = tuple(pool(zone, capacity) for zone, capacity in zones.items())
    return Trace(name="test", pools=pools, end_ms=min(len(p.t_ms) for p in pools) * TICK_MS)


def option(zone: str, market: Market, micro_usd_per_hour: int) -> Option:
    placement = Placement(
        cloud="aws",
        region="us-test-1",
        zone=f"us-test-1{zone}" if market is Market.SPOT else "us-test-1, any zone",
        instance_type="p5.48xlarge",
        gpus=8,
        accelerator="H100",
        market=market,
        micro_usd_per_hour=micro_usd_per_hour,
        price_source="test",
        price_observed_at="",
    )
    return Option(placement=placement, on_demand_micro_usd_per_hour=ON_DEMAND)


def plan(zones: str, nodes: int, spot: int = SPOT, max_total: int | None = None) -> Plan:
    steady = option("", Market.ON_DEMAND, ON_DEMAND)
    spots = [option(zone, Market.SPOT, spot) for zone in zones]
    options = [steady, *(spots[n % len(spots)] for n in range(nodes))]
    return Plan(
        region="us-test-1",
        slots=tuple(
            Slot(
                name="trainer" if n == 0 else f"spot-{n - 1}",
                role="trainer" if n == 0 else "rollout",
                placement=found.placement,
                on_demand_micro_usd_per_hour=ON_DEMAND,
            )
            for n, found in enumerate(options)
        ),
        max_total_micro_usd=max_total,
        max_hourly_micro_usd=None,
        sites=(SiteOptions(cloud="aws", region="us-test-1", trainer=(steady,), rollout=(*spots, steady)),),
    )


def work(nodes: int, hours: float = 10.0) -> WorkLeft:
    """Return work of so many hours with every node: an iteration takes 600 s then, 60 s of them training."""
    rollout = 540.0 * (1 + 8 * nodes)
    iteration_ms = [1000 * (rollout / (1 + 8 * n) + 60) for n in range(nodes + 1)]
    return WorkLeft(iterations=hours * HOUR_MS / iteration_ms[nodes], done=0.0, iteration_ms=iteration_ms)


def zones(names: str, uptime: float = 0.64, hazards: HazardCurve = POOLED.curve) -> list[ZoneSpells]:
    """Return spells of zones of us-test-1, all alike."""
    return [
        ZoneSpells(
            cloud="aws",
            region="us-test-1",
            zone=f"us-test-1{name}",
            instance_type="p5.48xlarge",
            spells=Spells(hazards=hazards, uptime=uptime),
        )
        for name in names
    ]
