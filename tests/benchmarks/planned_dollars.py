"""Plans for the regions of a recorded market, and the dollars of their replays by the live decisions (calibration)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.events import Market
from launcher.decide.launch_history import MoveRules
from launcher.job.recipe import Recipe
from launcher.market.estimate import Basis, Estimate
from launcher.market.hazard import HazardPrior, LaunchOdds, PoolHistory
from launcher.market.offers import Offer
from launcher.market.pools import Pool
from launcher.money import HOUR_MS
from launcher.placement.cloud_plan import Span
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import CloudRequirements, MarketView, NodeRequirements, market_view
from launcher.replay.replay import replay
from launcher.replay.simulate import work_of
from launcher.replay.trace import PoolTrace, Trace

NODES = 6
STARTS = 6
"""Starts in each region, at equal distances."""

IDEAL_HOURS = 20
LONGEST_HOURS = 60
SPOT, ON_DEMAND = 2_600_000, 10_980_000
"""Prices of one H100, in micro-dollars an hour: an eighth of a3-highgpu-8g, as in the catalog."""


@dataclass(frozen=True, kw_only=True)
class PlannedStart:
    """One start of a region: the plan's dollars with their interval, and those of the replay. Micro-dollars."""

    region: str
    start_ms: int
    planned: Span
    paid: int
    reached: bool

    @property
    def is_inside(self) -> bool:
        return self.reached and self.planned.low <= self.paid <= self.planned.high


def needs() -> CloudRequirements:
    """Return needs of six one-GPU nodes, whose iterations are known: 90 % of one is rollouts."""
    known = Estimate(mean=6 * IDEAL_HOURS, low=6 * IDEAL_HOURS, high=6 * IDEAL_HOURS, basis=Basis.ASSUMED, source="")
    recipe = Recipe(
        prompts=1,
        images_per_prompt=1,
        sampling_gpus=1,
        rollout_gpu_seconds=540.0 * (1 + NODES),
        candidate_gpu_seconds=1.0,
        train_seconds=60.0,
        iterations=known,
        explores=False,
        rho=0.7,
        gain_exponent=replace(known, mean=0.0, low=0.0, high=0.0),
        copy_bytes=0,
        measured_on="assumed",
        source="assumed",
    )
    one = NodeRequirements(accelerator="H100", gpus=1)
    return CloudRequirements(recipe=recipe, trainer=one, rollout=one, max_rollout_nodes=NODES, min_rollout_nodes=NODES)


def steady_offer(cloud: str, region: str, instance_type: str) -> Offer:
    """Return a node with one H100 on demand."""
    return Offer(
        cloud=cloud,
        region=region,
        zone="",
        instance_type=instance_type,
        accelerator="H100",
        gpus=1,
        market=Market.ON_DEMAND,
        micro_usd_per_hour=ON_DEMAND,
        source="replay",
        observed_at="",
    )


def offers_of(pools: Sequence[PoolTrace]) -> list[Offer]:
    steady = steady_offer(pools[0].cloud, pools[0].region, pools[0].instance_type)
    spot = [replace(steady, zone=pool.zone, market=Market.SPOT, micro_usd_per_hour=SPOT) for pool in pools]
    return [steady, *spot]


def planned_starts(
    trace: Trace,
    prior: HazardPrior,
    histories: Sequence[PoolHistory] = (),
    odds: Mapping[Pool, LaunchOdds] | None = None,
) -> list[PlannedStart]:
    """Return every start of every region. `histories`, `odds`: what is known of the pools; none: the prior."""
    found = []
    for region in sorted({pool.region for pool in trace.pools}):
        pools = [
            replace(pool, micro_usd_per_hour=(None,) * len(pool.t_ms)) for pool in trace.pools if pool.region == region
        ]
        own = replace(trace, pools=tuple(pools))
        view = market_view(offers_of(pools), histories, now_ms=0, prior=prior)
        plan = plan_cloud(needs(), _taught(view, odds or {}))
        bought = plan.as_plan()
        room_ms = trace.end_ms - LONGEST_HOURS * HOUR_MS
        for start_ms in (max(0, room_ms) * number // (STARTS - 1) for number in range(STARTS)):
            result = replay(
                bought, MoveRules(), work_of(bought), own, start_ms, start_ms, longest_ms=LONGEST_HOURS * HOUR_MS
            )
            found.append(
                PlannedStart(
                    region=region,
                    start_ms=start_ms,
                    planned=plan.forecast_cost,
                    paid=result.micro_usd,
                    reached=result.reached,
                )
            )
    return found


def _taught(view: MarketView, odds: Mapping[Pool, LaunchOdds]) -> MarketView:
    return replace(view, odds=dict(view.odds) | dict(odds))
