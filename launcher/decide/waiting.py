"""Decide whether a slot without spot waits, or gets a stand-in on demand. Pure.

Three questions; one yes buys the stand-in:

- Is the run late? On demand from now on would only just be in time. The reserve holds the churn of spot that is still
  to come: a preemption takes a slot out for `CHANGE_MS`, and waiting may not spend the time that preemptions will take.
- Is the money for waiting used up? A run never plans to cost more than `MOST_OVER` above all on demand, so waiting is
  paid from that, and from what spot has saved so far.
- Does waiting cost more than it saves? The rule is that of the plan: `launcher/placement/price_of_waiting.py`.
"""

from dataclasses import dataclass

from engine.events import Market
from launcher.decide.facts import Facts, Wanted
from launcher.decide.launch_history import PRIOR_HAZARD, PRIOR_HAZARD_HOURS
from launcher.decide.work_left import WorkLeft
from launcher.money import HOUR_MS, duration
from launcher.placement.price_of_waiting import (
    CHANGE_MS,
    MOST_OVER,
    RESTART_MS,
    SPARE_CHANGES,
    Prices,
    Waiting,
    prior_share_after,
    trainer_earns,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Spot as this run has seen it so far, with the priors."""

    share: float
    """Share of time that a slot had a spot node."""
    hazard_per_hour: float
    """Preemptions per node-hour."""

    @classmethod
    def of(cls, facts: Facts, slots: int, since_ms: int | None = None) -> "Seen":
        """Return what the run has seen since a time. None: since the first trainer came up."""
        if since_ms is None:
            trainer_ms = (n.happened["up"] for n in facts.nodes if n.role == "trainer" and "up" in n.happened)
            since_ms = min(trainer_ms, default=facts.now_ms)
        hours, preemptions = 0.0, 0
        for node in facts.nodes:
            if node.market is Market.SPOT and "up" in node.happened:
                ended_ms = node.ended_ms
                until_ms = facts.now_ms if ended_ms is None else ended_ms
                hours += max(0, until_ms - node.happened["up"]) / HOUR_MS
                preemptions += node.reclaimed
        share = prior_share_after(hours / max(1, slots), (facts.now_ms - since_ms) / HOUR_MS)
        hazard = (preemptions + PRIOR_HAZARD * PRIOR_HAZARD_HOURS) / (hours + PRIOR_HAZARD_HOURS)
        return cls(share=share, hazard_per_hour=hazard)


def slack_ms(work: WorkLeft, deadline_ms: int, now_ms: int) -> float:
    """Return the time that would be left at the deadline with every node at work from now on."""
    return deadline_ms - now_ms - work.left_ms(work.nodes)


def reserve_ms(work: WorkLeft, hazard_per_hour: float, may_lose_trainer: bool = False) -> float:
    """Return the slack that waiting may not use.

    n nodes are preempted h n times an hour, and each preemption takes one of n slots out for `CHANGE_MS`. That of a
    trainer on spot also loses the work of every node since the last checkpoint, and the restart.
    """
    losses = hazard_per_hour * work.left_ms(work.nodes) / HOUR_MS
    of_trainer = work.lost_ms + RESTART_MS if may_lose_trainer else 0
    return CHANGE_MS * (SPARE_CHANGES + losses) + losses * of_trainer


def _may_lose_trainer(facts: Facts, wanted: Wanted) -> bool:
    """Return whether the plan has its trainer on spot, and no trainer on demand stands in for it."""
    if not _is_trainer_on_spot(wanted):
        return False
    return not any(
        node.role == "trainer" and node.market is Market.ON_DEMAND and node.is_live and not node.is_leaving
        for node in facts.nodes
    )


def seen_so_far(facts: Facts, wanted: Wanted, work: WorkLeft) -> Seen:
    """Return spot as seen so far. A run with its trainer on spot waits for it from its start."""
    if _is_trainer_on_spot(wanted):
        return Seen.of(facts, work.nodes + 1, facts.planned_ms)
    return Seen.of(facts, work.nodes)


def _is_trainer_on_spot(wanted: Wanted) -> bool:
    return any(slot.role == "trainer" and slot.placement.market is Market.SPOT for slot in wanted.slots)


def is_late(facts: Facts, wanted: Wanted, seen: Seen) -> bool:
    """Return whether waiting any longer endangers the deadline."""
    goal_ms = wanted.goal_ms(facts.now_ms)
    if facts.work is None or goal_ms is None:
        return False
    slack = slack_ms(facts.work, goal_ms, facts.now_ms)
    return slack <= reserve_ms(facts.work, seen.hazard_per_hour, _may_lose_trainer(facts, wanted))


def may_risk_spot(facts: Facts, wanted: Wanted) -> bool:
    """Return whether a stand-in may be given back: the slack bears the loss of every spot node once more.

    A plan with its trainer on spot needs room for one change more: the loss of the trainer stops all other nodes.
    """
    goal_ms = wanted.goal_ms(facts.now_ms)
    if facts.work is None or goal_ms is None:
        return True
    spare = SPARE_CHANGES + _is_trainer_on_spot(wanted)
    return slack_ms(facts.work, goal_ms, facts.now_ms) > spare * CHANGE_MS


def pays_on_demand(work: WorkLeft, working: int, prices: Prices) -> bool:
    """Return whether one more node on demand lowers the price of an iteration: without it, waiting loses no money.

    r1 / r0 (P_T + n P) > P_T + (n + 1) P, with r0 and r1 the iterations an hour of n and n + 1 nodes.
    """
    now, then = work.per_hour(working), work.per_hour(working + 1)
    paid = prices.trainer + working * prices.on_demand
    return then * paid > now * (paid + prices.on_demand)


def is_money_used_up(facts: Facts, work: WorkLeft, prices: Prices) -> bool:
    """Return whether the money spent, and the rest on demand, come to more than `MOST_OVER` above all on demand."""
    per_ms = prices.all_on_demand(work.nodes) / HOUR_MS
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
    waiting = Waiting(
        left=work.left,
        full_hours=work.left_ms(work.nodes) / HOUR_MS,
        nodes=work.nodes,
        gained=work.per_hour(working + 1) - work.per_hour(working),
        prices=prices,
    )
    return waiting.earns(out_hours, seen.share) > (prices.on_demand if price is None else price)


def why_stand_in(
    facts: Facts, wanted: Wanted, prices: Prices, working: int, out_since_ms: int, price: float | None = None
) -> str | None:
    """Return the reason to buy a stand-in for a slot without spot now, or None to wait.

    `working`: rollout nodes that work or start. `out_since_ms`: time since which no zone gave a node. `price`: of the
    stand-in, hourly, in micro-dollars; None: on demand.
    """
    work = facts.work
    assert work is not None, "the plan predicts no iteration times"
    seen = seen_so_far(facts, wanted, work)
    out_ms = max(0, facts.now_ms - out_since_ms)
    late = why_late(facts, wanted)
    if late is not None:
        return late
    if is_money_used_up(facts, work, prices) and pays_on_demand(work, working, prices):
        return "the money for waiting is used up: waiting longer would cost more than all on demand"
    if costs_more_to_wait(work, working, out_ms / HOUR_MS, seen, prices, price):
        return f"no spot for {duration(out_ms)}: waiting costs more than it saves"
    return None


def why_trainer_stand_in(
    facts: Facts, wanted: Wanted, prices: Prices, working: int, idle: float, out_since_ms: int, price: float
) -> str | None:
    """Return the reason to buy the trainer on demand although its slot is planned on spot, or None to wait.

    `working`: rollout nodes that work or start, and wait for the trainer. `idle`: their hourly price. `price`: of the
    stand-in. Both in micro-dollars, with disks and addresses.
    """
    work = facts.work
    assert work is not None, "the plan predicts no iteration times"
    if idle and is_money_used_up(facts, work, prices):
        return "the money for waiting is used up: waiting longer would cost more than all on demand"
    if not work.left:
        return None
    out_ms = max(0, facts.now_ms - out_since_ms)
    later = price_of_iteration(facts, wanted, work, prices)
    if trainer_earns(idle / work.left, later, work.per_hour(working), out_ms / HOUR_MS) > price:
        return f"no spot for {duration(out_ms)}: waiting costs more than it saves"
    return None


def needs_on_demand(facts: Facts, wanted: Wanted, work: WorkLeft) -> bool:
    """Return whether the run would be late if spot stayed as it was so far and nothing ran on demand."""
    goal_ms = wanted.goal_ms(facts.now_ms)
    if goal_ms is None:
        return False
    seen = seen_so_far(facts, wanted, work)
    reserve = reserve_ms(work, seen.hazard_per_hour, _may_lose_trainer(facts, wanted))
    return facts.now_ms + work.left_ms(work.nodes) / seen.share > goal_ms - reserve


def price_of_iteration(facts: Facts, wanted: Wanted, work: WorkLeft, prices: Prices) -> float:
    """Return the micro-dollars of an iteration that is made later: by all nodes on spot, if that is in time.

    Else an hour that is lost is made good by rollout nodes on demand, beside a trainer on demand: n P / (r(n) - r(0)).
    """
    if needs_on_demand(facts, wanted, work):
        gained = work.per_hour(work.nodes) - work.per_hour(0)
        return work.nodes * prices.on_demand / gained if gained > 0 else prices.all_on_demand(0) / work.per_hour(0)
    return (prices.trainer + work.nodes * prices.spot) / work.per_hour(work.nodes)


def why_late(facts: Facts, wanted: Wanted) -> str | None:
    """Return why waiting any longer endangers the deadline, or None."""
    goal_ms, work = wanted.goal_ms(facts.now_ms), facts.work
    if work is None or goal_ms is None:
        return None
    seen = seen_so_far(facts, wanted, work)
    if not is_late(facts, wanted, seen):
        return None
    reserve = reserve_ms(work, seen.hazard_per_hour, _may_lose_trainer(facts, wanted))
    return (
        f"behind: with every node at work the run would be {_early(slack_ms(work, goal_ms, facts.now_ms))}, and "
        f"preemptions may take {duration(round(reserve))}"
    )


def _early(slack: float) -> str:
    return f"{duration(round(slack))} early" if slack >= 0 else f"{duration(round(-slack))} late"
