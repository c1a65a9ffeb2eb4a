"""Decide whether a slot without spot waits, or gets a stand-in on demand. Pure.

Three questions; one yes buys the stand-in:

- Is the run late? On demand from now on would only just be in time. The reserve holds the churn of spot that is still
  to come: a preemption takes a slot out for `CHANGE_MS`, and waiting may not spend the time that preemptions will take.
- Is the money for waiting used up? A run never plans to cost more than `MOST_OVER` above all on demand, so waiting is
  paid from that, and from what spot has saved so far.
- Does waiting cost more than it saves? An iteration made later costs V: the trainer waits out the rest of the outage
  and later outages, then spot does the work. A node on demand pays if its iterations, at V, are worth more than its
  price. Outages are heavy-tailed: the longer one has lasted, the longer it will last (`expected_rest_hours`).
"""

from dataclasses import dataclass

from engine.events import Market
from launcher.decide.facts import Facts, Wanted
from launcher.decide.launch_history import PRIOR_HAZARD, PRIOR_HAZARD_HOURS
from launcher.decide.work_left import WorkLeft
from launcher.market.hazard import COLD_START_MS
from launcher.money import HOUR_MS, duration
from launcher.placement.options import Option

CHANGE_MS = COLD_START_MS + 240_000
"""Time that a slot is out after a loss: the answer to a launch, and the cold start. Milliseconds."""

SPARE_CHANGES = 2
"""Changes of every node at once that the reserve holds, beside the expected churn: one to go on demand, and one for
spot nodes that are all lost after that."""

MOST_OVER = 0.01
"""Share of the price of all on demand that waiting may cost before it has saved anything."""

REST_HOURS, REST_GROWTH = 0.5, 1.0
"""Expected rest of an outage of x hours: `REST_HOURS` + `REST_GROWTH` x."""

PRIOR_SHARE, PRIOR_SHARE_HOURS = 0.7, 6.0
"""Share of time with spot before a run has seen any, and the hours that it weighs."""


def expected_rest_hours(out_hours: float) -> float:
    """Return the expected rest of an outage that has lasted so long."""
    return REST_HOURS + REST_GROWTH * out_hours


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Hourly prices in micro-dollars, with disks and addresses."""

    trainer: float
    spot: float
    on_demand: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Spot as this run has seen it so far, with the priors."""

    share: float
    """Share of time that a slot had a spot node."""
    hazard_per_hour: float
    """Preemptions per node-hour."""

    @classmethod
    def of(cls, facts: Facts, slots: int) -> "Seen":
        trainer_ms = [n.happened["up"] for n in facts.nodes if n.role == "trainer" and "up" in n.happened]
        since_ms = min(trainer_ms, default=facts.now_ms)
        hours, preemptions = 0.0, 0
        for node in facts.nodes:
            if node.role == "rollout" and node.market is Market.SPOT and "up" in node.happened:
                ended_ms = node.ended_ms
                hours += ((facts.now_ms if ended_ms is None else ended_ms) - node.happened["up"]) / HOUR_MS
                preemptions += node.reclaimed
        wanted = max(1, slots) * (facts.now_ms - since_ms) / HOUR_MS
        prior = PRIOR_SHARE_HOURS * max(1, slots)
        share = (hours + PRIOR_SHARE * prior) / (wanted + prior)
        hazard = (preemptions + PRIOR_HAZARD * PRIOR_HAZARD_HOURS) / (hours + PRIOR_HAZARD_HOURS)
        return cls(share=min(1.0, max(share, 0.01)), hazard_per_hour=hazard)


def slack_ms(work: WorkLeft, deadline_ms: int, now_ms: int) -> float:
    """Return the time that would be left at the deadline with every node at work from now on."""
    return deadline_ms - now_ms - work.left_ms(work.nodes)


def reserve_ms(work: WorkLeft, hazard_per_hour: float) -> float:
    """Return the slack that waiting may not use.

    n nodes are preempted h n times an hour, and each preemption takes one of n slots out for `CHANGE_MS`.
    """
    return CHANGE_MS * (SPARE_CHANGES + hazard_per_hour * work.left_ms(work.nodes) / HOUR_MS)


def is_late(facts: Facts, wanted: Wanted, seen: Seen) -> bool:
    """Return whether waiting any longer endangers the deadline."""
    goal_ms = wanted.goal_ms(facts.now_ms)
    if facts.work is None or goal_ms is None:
        return False
    slack = slack_ms(facts.work, goal_ms, facts.now_ms)
    return slack <= reserve_ms(facts.work, seen.hazard_per_hour)


def may_risk_spot(facts: Facts, wanted: Wanted) -> bool:
    """Return whether a stand-in may be given back: the slack bears the loss of every spot node once more."""
    goal_ms = wanted.goal_ms(facts.now_ms)
    if facts.work is None or goal_ms is None:
        return True
    return slack_ms(facts.work, goal_ms, facts.now_ms) > SPARE_CHANGES * CHANGE_MS


def pays_on_demand(work: WorkLeft, working: int, prices: Prices) -> bool:
    """Return whether one more node on demand lowers the price of an iteration: without it, waiting loses no money.

    r1 / r0 (P_T + n P) > P_T + (n + 1) P, with r0 and r1 the iterations an hour of n and n + 1 nodes.
    """
    now, then = work.per_hour(working), work.per_hour(working + 1)
    paid = prices.trainer + working * prices.on_demand
    return then * paid > now * (paid + prices.on_demand)


def is_money_used_up(facts: Facts, work: WorkLeft, prices: Prices) -> bool:
    """Return whether the money spent, and the rest on demand, come to more than `MOST_OVER` above all on demand."""
    per_ms = (prices.trainer + work.nodes * prices.on_demand) / HOUR_MS
    whole = work.iterations * work.iteration_ms[-1] * per_ms
    return facts.metered + work.left_ms(work.nodes) * per_ms > (1 + MOST_OVER) * whole


def costs_more_to_wait(
    work: WorkLeft, working: int, out_hours: float, seen: Seen, prices: Prices, price: float | None = None
) -> bool:
    """Return whether a stand-in beside `working` nodes earns its price until the outage is expected to end.

    `price`: of the stand-in, hourly, in micro-dollars. None: on demand.
    """
    if not work.left:
        return False
    rest = expected_rest_hours(out_hours)
    useful = max(0.0, rest - CHANGE_MS / HOUR_MS) / rest
    full_hours = work.left_ms(work.nodes) / HOUR_MS
    later = prices.trainer * (rest + full_hours / seen.share) + work.nodes * prices.spot * full_hours
    gained = work.per_hour(working + 1) - work.per_hour(working)
    return later / work.left * gained * useful > (prices.on_demand if price is None else price)


def why_stand_in(
    facts: Facts, wanted: Wanted, prices: Prices, working: int, out_since_ms: int, price: float | None = None
) -> str | None:
    """Return the reason to buy a stand-in for a slot without spot now, or None to wait.

    `working`: rollout nodes that work or start. `out_since_ms`: time since which no zone gave a node. `price`: of the
    stand-in, hourly, in micro-dollars; None: on demand.
    """
    work = facts.work
    assert work is not None, "the plan predicts no iteration times"
    seen = Seen.of(facts, work.nodes)
    out_ms = max(0, facts.now_ms - out_since_ms)
    goal_ms = wanted.goal_ms(facts.now_ms)
    if is_late(facts, wanted, seen) and goal_ms is not None:
        slack, reserve = slack_ms(work, goal_ms, facts.now_ms), reserve_ms(work, seen.hazard_per_hour)
        return (
            f"behind: with every node at work the run would be {_early(slack)}, and preemptions may take "
            f"{duration(round(reserve))}"
        )
    if is_money_used_up(facts, work, prices) and pays_on_demand(work, working, prices):
        return "the money for waiting is used up: waiting longer would cost more than all on demand"
    if costs_more_to_wait(work, working, out_ms / HOUR_MS, seen, prices, price):
        return f"no spot for {duration(out_ms)}: waiting costs more than it saves"
    return None


def _early(slack: float) -> str:
    return f"{duration(round(slack))} early" if slack >= 0 else f"{duration(round(-slack))} late"


def price_of(option: Option) -> int:
    """Return an option's hourly price with disk and address, in micro-dollars."""
    return option.placement.micro_usd_per_hour + option.placement.side_micro_usd_per_hour
