"""The budget guard on a run's facts: rates, reserves, and the most that a run can spend."""

from collections.abc import Mapping, Sequence
from math import ceil

from engine.events import Market
from launcher.decide import budget_guard
from launcher.decide.actions import Buy
from launcher.decide.facts import Facts, NodeRecord, Wanted
from launcher.market.side_prices import side_micro_usd_per_hour
from launcher.money import dollars, duration, hourly
from launcher.placement.options import Option, SiteOptions
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan

NODES_A_SLOT = 3
"""Most nodes in a slot at once: a stand-in, the spot node meant to replace the stand-in, and a leaving node."""


def refused_now(facts: Facts, wanted: Wanted, buy: Buy) -> budget_guard.Refusal | None:
    """Check the budget guard again inside the write transaction. Two controllers may decide at the same moment."""
    placement = buy.option.placement
    rate = placement.micro_usd_per_hour + beside(placement, facts)
    live = [node for node in facts.nodes if node.is_live]
    return budget_refusal(facts, wanted, live, rate, buy.reserved_micro_usd)


def judges_refusal(facts: Facts, wanted: Wanted) -> str | None:
    """Return why a run on this machine may not start: its judges' budget does not fit beside the other runs. Or None.

    Once the run has bought a node, the other runs set that budget aside.
    """
    most, others = wanted.others_at_most, facts.others
    has_begun = any(node.requested_ms >= facts.planned_ms for node in facts.nodes)
    if most is None or has_begun or others.metered + others.reserved <= most:
        return None
    return "budget: all_runs.max_total does not bear the judges of this run beside the other runs"


def reserved_micro_usd(nodes: Sequence[NodeRecord], allowance_ms: int, now_ms: int) -> int:
    """Return the money in micro-dollars that a run's live nodes reserve against the limits."""
    return reserve_of([node for node in nodes if node.is_live], allowance_ms, now_ms)


def hourly_micro_usd(nodes: Sequence[NodeRecord]) -> int:
    """Return the hourly cost in micro-dollars of a run's live nodes, with disks and addresses."""
    return hourly_of([node for node in nodes if node.is_live])


def budget_refusal(
    facts: Facts, wanted: Wanted, after: Sequence[NodeRecord], rate: int, reserve: int
) -> budget_guard.Refusal | None:
    """Return the budget limit that buying a node at this rate would break, or None.

    The run's own limits are checked first, then the limits across all runs. `after`: the nodes after the actions
    decided so far, without those that are kept.
    """
    paid = [*after, *facts.kept]
    held = reserve_of(paid, wanted.allowance_ms, facts.now_ms) + stuck_micro_usd(facts, wanted)
    hourly_now = hourly_of(paid)
    new = reserve + budget_guard.worst_case(rate, wanted.allowance_ms)
    own = budget_guard.may_buy(
        metered=facts.metered,
        reserved=held,
        worst_case_new=new,
        max_total=wanted.limits.max_total,
        hourly_now=hourly_now,
        hourly_new=rate,
        max_hourly=wanted.limits.max_hourly,
    )
    return own or budget_guard.may_buy(
        metered=facts.metered + facts.others.metered,
        reserved=held + facts.others.reserved,
        worst_case_new=new,
        max_total=wanted.all_runs.max_total,
        hourly_now=hourly_now + facts.others.hourly,
        hourly_new=rate,
        max_hourly=wanted.all_runs.max_hourly,
        section="all_runs",
    )


def beside(placement: Placement, facts: Facts) -> int:
    """Return the hourly price of a node's disk and address on a real cloud."""
    return placement.side_micro_usd_per_hour if facts.sites else 0


def hourly_of(nodes: Sequence[NodeRecord]) -> int:
    return sum(node.running_micro_usd_per_hour for node in nodes)


def reserve_of(live: Sequence[NodeRecord], allowance_ms: int, now_ms: int) -> int:
    """Return the money held for stopping the live nodes and for pending launches.

    A pending launch holds the cost since the request, or its reserved minimum billing if larger.
    """
    return budget_guard.reserved(
        hourly_of(live),
        allowance_ms,
        [
            max(node.reserved_micro_usd, budget_guard.worst_case(hourly_of([node]), now_ms - node.requested_ms))
            for node in live
            if "up" not in node.happened
        ],
    )


def planned_hourly(facts: Facts, wanted: Wanted) -> int:
    """Return the highest hourly cost for the spend deadline: the whole plan, or the live nodes if more expensive."""
    live = [node for node in facts.nodes if node.is_live]
    return max(_hourly_of_plan(facts, wanted), hourly_of(live)) + hourly_of(facts.kept)


def _hourly_of_plan(facts: Facts, wanted: Wanted) -> int:
    return sum(slot.placement.micro_usd_per_hour + beside(slot.placement, facts) for slot in wanted.slots)


def stuck_micro_usd(facts: Facts, wanted: Wanted) -> int:
    """Return the money held for nodes of this run that the cloud does not end (`held_for_stuck`)."""
    limits = (wanted.limits.max_total, wanted.all_runs.max_total)
    return held_for_stuck(
        [*facts.nodes, *facts.kept],
        facts.metered_when_ordered,
        max_total=min((limit for limit in limits if limit is not None), default=None),
        planned_hourly=_hourly_of_plan(facts, wanted),
        allowance_ms=wanted.allowance_ms,
        now_ms=facts.now_ms,
    )


def held_for_stuck(
    nodes: Sequence[NodeRecord],
    metered_when_ordered: Mapping[str, int],
    *,
    max_total: int | None,
    planned_hourly: int,
    allowance_ms: int,
    now_ms: int,
) -> int:
    """Return the money held for nodes that were ordered to end, and that the cloud has not ended within the allowance.

    Nobody can say when the cloud obeys. Such a node ends itself at its spend deadline, which is at the latest the one
    of the time of the order: the whole plan uses up the money that was left then. The allowance itself is part of
    `reserve_of`.
    """
    total = 0
    for node in nodes:
        if not node.is_ordered_to_end or now_ms - node.happened["releasing"] <= allowance_ms:
            continue
        ends_ms = budget_guard.money_deadline_ms(
            now_ms=node.happened["releasing"],
            metered=metered_when_ordered.get(node.name, 0),
            max_total=max_total,
            planned_hourly=planned_hourly,
        )
        if ends_ms is not None:
            left_ms = ends_ms - now_ms - allowance_ms
            total += budget_guard.worst_case(node.running_micro_usd_per_hour, left_ms)
    return total


def bound_micro_usd(wanted: Wanted, sites: Sequence[SiteOptions] = ()) -> int | None:
    """Return the most that a run can cost: its limit, plus the highest running cost during a stop. None: no limit."""
    if wanted.limits.max_total is None:
        return None
    return wanted.limits.max_total + budget_guard.overdraft(_most_hourly(wanted, sites), wanted.allowance_ms)


def bound_of_plan(plan: Plan, longest_ms: int | None = None) -> int | None:
    """Return the most that a plan on real clouds can cost, in micro-dollars. `launch` prints the bound. None: no limit.

    `longest_ms`: time after which the run ends. The judges' budget, disks, addresses, on-demand stand-ins and the time
    of stopping are counted. Traffic and storage are not counted, because no cloud states their price before the bill.
    """
    wanted = Wanted(
        run="",
        slots=plan.slots,
        limits=budget_guard.Limits(max_total=plan.max_total_micro_usd, max_hourly=plan.max_hourly_micro_usd),
        deadline_ms=None,
        allowance_ms=budget_guard.RELEASE_ALLOWANCE_MS,
        settle_ms=0,
    )
    bounds = [bound_micro_usd(wanted, plan.sites)]
    if longest_ms is not None:
        nodes = budget_guard.worst_case(_most_hourly(wanted, plan.sites), longest_ms + wanted.allowance_ms)
        bounds.append(nodes + plan.judge_micro_usd)
    return min((bound for bound in bounds if bound is not None), default=None)


def _most_hourly(wanted: Wanted, sites: Sequence[SiteOptions]) -> int:
    """Return the most that can run at once, at on-demand prices.

    A spot price may rise to the on-demand price before a release.
    The bound follows from `max_hourly` at purchase. Without `max_hourly`, the bound is `NODES_A_SLOT` nodes in each
    slot at the most expensive site.
    """
    if not sites:
        return sum(slot.placement.micro_usd_per_hour for slot in wanted.slots)

    def dearest(role: str) -> int:
        options = [option for site in sites for option in (site.rollout if role == "rollout" else site.trainer)]
        return max(map(_at_most, options), default=0)

    slots = [slot.role for slot in wanted.slots]
    once = sum(dearest(role) for role in slots)
    if wanted.limits.max_hourly is None:
        return NODES_A_SLOT * once
    least = min(
        (
            option.placement.micro_usd_per_hour / _at_most(option)
            for site in sites
            for option in (*site.trainer, *site.rollout)
        ),
        default=1.0,
    )
    return min(NODES_A_SLOT * once, ceil(wanted.limits.max_hourly / least))


def _at_most(option: Option) -> int:
    """Return a node's on-demand price per hour, with disk and address."""
    place = option.placement
    return option.on_demand_micro_usd_per_hour + side_micro_usd_per_hour(place.cloud, Market.ON_DEMAND, place.disk_gib)


def describe_limits(wanted: Wanted, sites: Sequence[SiteOptions] = ()) -> str:
    """Return the limits that the budget guard enforces on a run, as text with amounts, for the log and the plan."""
    total = "no total limit" if wanted.limits.max_total is None else f"at most {dollars(wanted.limits.max_total)}"
    per_hour = "no hourly limit" if wanted.limits.max_hourly is None else f"at most {hourly(wanted.limits.max_hourly)}"
    allowance = dollars(budget_guard.overdraft(_most_hourly(wanted, sites), wanted.allowance_ms))
    if not sites:
        return (
            f"{total}, {per_hour}; stopping is given {wanted.allowance_ms} ms of the run's clock, {allowance} at most"
        )
    bound = bound_micro_usd(wanted, sites)
    never = "" if bound is None else f"; never more than {dollars(bound)}"
    return f"{total}, {per_hour}; stopping is given {duration(wanted.allowance_ms)}, {allowance} at most{never}"
