"""Expected stand-ins of a plan: against replays of the live decisions on the same spells, and in plain cases."""

from dataclasses import dataclass, replace
from math import exp, log
from statistics import fmean, stdev

import pytest
from scipy.stats import lognorm

from engine.events import Market
from launcher.decide.launch_history import MoveRules
from launcher.market.estimate import Basis, Estimate
from launcher.market.hazard import H100, LaunchOdds
from launcher.market.spells import OUTAGE_SIGMA
from launcher.money import HOUR_MS
from launcher.placement.cloud_plan import CloudPlan
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import Spot, market_view, pool_of_offer
from launcher.placement.stand_ins import hours_beyond, lasts_beyond
from launcher.replay.replay import Replayed
from launcher.replay.simulate import generated_markets, simulate, work_of
from tests.benchmarks import planned_dollars

STARTS = 16


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A job: iterations of ten minutes with every node, 90 % of them rollouts."""

    zones: str = "a"
    uptime: float = 0.64
    nodes: int = 6
    hours: int = 20
    trainer_usd: float = 10.98
    deadline_hours: float | None = None
    spot: Spot = Spot.AUTO
    max_total_usd: float | None = None
    max_hourly_usd: float | None = None


def planned(asked: Asked) -> CloudPlan:
    usual, nodes = planned_dollars.needs(), asked.nodes
    six_an_hour = 6 * asked.hours
    known = Estimate(mean=six_an_hour, low=six_an_hour, high=six_an_hour, basis=Basis.ASSUMED, source="")
    recipe = replace(
        usual.recipe,
        iterations=known,
        rollout_gpu_seconds=540.0 * (1 + nodes),
    )

    def limit(usd: float | None) -> int | None:
        return None if usd is None else round(1e6 * usd)

    needs = replace(
        usual,
        recipe=recipe,
        max_rollout_nodes=nodes,
        min_rollout_nodes=nodes,
        deadline_ms=None if asked.deadline_hours is None else round(asked.deadline_hours * HOUR_MS),
        spot=asked.spot,
        max_total_micro_usd=limit(asked.max_total_usd),
        max_hourly_micro_usd=limit(asked.max_hourly_usd),
        trainer=replace(usual.trainer, instance_type="trainer"),
        rollout=replace(usual.rollout, instance_type="node"),
    )
    node = planned_dollars.steady_offer("gcp", "r", "node")
    trainer = replace(node, instance_type="trainer", micro_usd_per_hour=round(1e6 * asked.trainer_usd))
    spot = [
        replace(node, zone=f"r-{zone}", market=Market.SPOT, micro_usd_per_hour=planned_dollars.SPOT)
        for zone in asked.zones
    ]
    odds = {pool_of_offer(offer): LaunchOdds(prior=asked.uptime) for offer in spot}
    return plan_cloud(needs, market_view([node, trainer, *spot], now_ms=0, prior=H100, believed_odds=odds))


def replayed(plan: CloudPlan) -> list[Replayed]:
    bought, found = plan.as_plan(), []
    simulate(
        bought,
        MoveRules(),
        generated_markets(bought, plan.zones, plan.deadline_ms),
        starts=STARTS,
        deadline_ms=plan.deadline_ms,
        longest_ms=round(2 * work_of(bought).left_ms(0)),
        keep=lambda policy, start, result, trace, start_ms: found.append(result),
    )
    return found


JOBS = {
    "spot most of the time": Asked(zones="abc"),
    "one zone": Asked(),
    "seldom": Asked(uptime=0.15),
    "a dear trainer": Asked(trainer_usd=25.0),
    "a deadline": Asked(uptime=0.4, deadline_hours=40.0),
    "one node": Asked(nodes=1, uptime=0.4, hours=40, deadline_hours=72.0),
}
"""Jobs whose plans and replays are compared."""

WITHIN = 0.1
"""Share by which a plan's dollars may differ from what replays cost, beside two standard errors of their mean. For the
job `seldom`, 16 starts say 1,325 +- 76 dollars, and 64 starts 1,303 +- 37, which is 10 % above its plan. Without
stand-ins, plans were 5 to 25 % too low."""


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_a_plan_costs_what_its_replays_cost(name):
    plan = planned(JOBS[name])
    found = replayed(plan)
    assert all(result.reached for result in found)
    dollars = [result.micro_usd for result in found]
    mean, error = fmean(dollars), stdev(dollars) / len(dollars) ** 0.5
    assert plan.stand_ins.cost.expected == pytest.approx(mean, abs=WITHIN * mean + 2 * error)
    assert plan.stand_ins.cost.low <= mean <= plan.stand_ins.cost.high
    assert abs(plan.stand_ins.cost.expected - mean) <= abs(plan.cost.expected - mean) + 0.02 * mean


def test_spot_only_has_no_stand_ins_and_plenty_of_spot_hardly_any():
    assert planned(Asked(spot=Spot.ONLY)).stand_ins is None
    plan = planned(Asked(zones="abc", uptime=0.99))
    assert plan.stand_ins.hours < 0.5
    assert plan.forecast_cost == plan.stand_ins.cost
    assert planned(Asked(spot=Spot.ONLY)).forecast_cost == planned(Asked(spot=Spot.ONLY)).cost


def test_the_scarcer_spot_is_the_more_hours_are_on_demand():
    hours = [planned(Asked(uptime=uptime)).stand_ins.hours for uptime in (0.9, 0.6, 0.3, 0.1)]
    assert hours == sorted(hours)
    assert hours[-1] > 6 * 10


def test_a_deadline_brings_stand_ins_and_a_near_one_more_of_them():
    """The trainer is cheap, so waiting is too. 40 h of work take 58 h on spot alone."""
    job = Asked(nodes=1, uptime=0.4, hours=40, trainer_usd=1.5)
    calm = planned(job).stand_ins
    far, near = (planned(replace(job, deadline_hours=hours)).stand_ins for hours in (90, 60))
    assert calm.hours <= far.hours < near.hours
    assert near.time.expected <= 60 * HOUR_MS


def test_limits_cap_the_stand_ins():
    free = planned(Asked(uptime=0.15)).stand_ins
    capped = planned(Asked(uptime=0.15, max_total_usd=1_000)).stand_ins
    assert capped.cost.expected <= 1_000_000_000 < free.cost.expected
    hourly = planned(Asked(uptime=0.15, max_hourly_usd=40)).stand_ins
    assert 0 < hourly.hours < free.hours


@pytest.mark.parametrize("hours", [0.01, 0.5, 3.0, 40.0])
def test_the_rest_of_log_normal_outages_is_that_of_scipy(hours):
    mean = 1.2
    outage = lognorm(s=OUTAGE_SIGMA, scale=exp(log(mean) - OUTAGE_SIGMA**2 / 2))
    assert hours_beyond(mean, hours) == pytest.approx(outage.expect(lambda d: d - hours, lb=hours), rel=1e-4)
    assert lasts_beyond(mean, hours) == pytest.approx(outage.sf(hours))
