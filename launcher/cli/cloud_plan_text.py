"""A plan for real clouds as text: nodes, zones, prices, cost with intervals, and the alternatives."""

from collections.abc import Iterator, Sequence

from launcher.cli.layout import columns, fitted
from launcher.cli.memory_text import memory_lines
from launcher.cli.plan_text import algorithm_text, judges_text, place_table, pool_name, pool_text, pools_of
from launcher.decide.run_budget import bound_of_plan
from launcher.job.schema import Job
from launcher.market.estimate import Estimate
from launcher.market.offers import TOO_OLD, Age, age_of, age_text
from launcher.money import dollars, duration, hourly
from launcher.placement.cloud_plan import Alternative, CloudPlan, Factors, Span
from launcher.placement.disk import parts_text

ALTERNATIVES_SHOWN = 12
LEFT_OUT_SHOWN = 6
"""Most lines shown, to fit a screen. `--json` prints every alternative."""


def cloud_plan_lines(job: Job, plan: CloudPlan, now_ms: int) -> Iterator[str]:
    """Return the plan as lines of at most 80 columns."""
    return fitted(_lines(job, plan, now_ms))


def _lines(job: Job, plan: CloudPlan, now_ms: int) -> Iterator[str]:
    yield f"{job.name}: {plan.cloud} {plan.region}, policy {plan.policy}"
    yield ""
    yield from _nodes(plan)
    yield f"  trainer: {plan.trainer.text()}"
    yield ""
    yield from _prices(plan, now_ms)
    yield ""
    if plan.memory:
        yield from memory_lines(plan.memory)
        yield ""
    if plan.disk:
        yield f"  disk of each node: {plan.slots[0].placement.disk_gib} GB ({parts_text(plan.disk)})"
        yield ""
    yield from _sums(job, plan)
    yield f"  {algorithm_text(job)}"
    yield from _exploration(job, plan)
    yield from _factors(plan.factors)
    yield ""
    yield from _alternatives(plan)
    yield from _never_run(job, plan)


# --- nodes -------------------------------------------------------------------------------------------


def _nodes(plan: CloudPlan) -> Iterator[str]:
    """Yield the tables of nodes, with one row for all slots of a pool, and the estimates of each pool."""
    named = [(pool_name(slots), slots[0]) for slots in pools_of(plan.slots)]
    yield from place_table(named)
    yield ""
    useful = {(pool.zone, pool.instance_type, pool.market): pool for pool in plan.pools}
    rows = [("nodes", "zone", "each", "on demand", "useful hour")]
    for name, slot in named:
        place = slot.placement
        pool = useful.get((place.zone, place.instance_type, place.market)) if slot.role == "rollout" else None
        useful_hour = hourly(pool.micro_usd_per_useful_hour) if pool else ""
        each, on_demand = hourly(place.micro_usd_per_hour), hourly(slot.on_demand_micro_usd_per_hour)
        rows.append((name, place.zone, each, on_demand, useful_hour))
    yield from columns(rows, words=2)
    for pool in plan.pools:
        if pool.reclaimed_in_first_hour is not None:
            yield (
                f"  {pool.zone}: preempted in the first hour {_share(pool.reclaimed_in_first_hour)}; comes when asked "
                f"for {_share(pool.launch_odds)}; at work {_share(pool.useful_share)} of the time"
            )


def _share(estimate: Estimate) -> str:
    return f"{estimate.mean:.0%} ({estimate.low:.0%} to {estimate.high:.0%}, {estimate.basis.value})"


# --- prices ------------------------------------------------------------------------------------------


def _prices(plan: CloudPlan, now_ms: int) -> Iterator[str]:
    """Yield the source and age of each price. If a price is too old for `launch` to buy by, print a loud warning."""
    places = [slots[0].placement for slots in pools_of(plan.slots)]
    for place in places:
        name = f"{place.instance_type} {place.market.value} in {place.zone}"
        yield f"  price of {name}: {place.price_source}, {age_text(place.price_observed_at, now_ms)}"
    ages = [age_of(place.price_observed_at, place.market, now_ms) for place in places]
    if too_old := sum(age in TOO_OLD for age in ages):
        yield (
            f"  !! {too_old} of {len(ages)} prices are TOO OLD TO BUY BY, or nobody knows their date: refresh them "
            "before you believe a sum of this plan (spotrl catalog refresh)"
        )
    elif old := ages.count(Age.OLD):
        yield f"  {old} of {len(ages)} prices are getting old (spotrl catalog refresh)"


# --- sums --------------------------------------------------------------------------------------------


def _sums(job: Job, plan: CloudPlan) -> Iterator[str]:
    yield (
        f"  an hour: {hourly(plan.listed_micro_usd_per_hour)} with every node running, "
        f"{hourly(plan.expected_micro_usd_per_hour)} expected; at most {hourly(plan.maximum_micro_usd_per_hour)}, were "
        "every node bought on demand"
    )
    goal = f"{job.target.metric} {job.target.value:g}" if job.target else "the end"
    yield (
        f"  to {goal}: {_money(plan.forecast_cost)}, {_time(plan.forecast_time)}; {_count(plan.iterations)} iterations "
        f"of {plan.seconds_per_iteration:.0f} s"
    )
    if plan.stand_ins is not None:
        yield (
            f"  of these {dollars(plan.stand_ins.micro_usd)} for {plan.stand_ins.hours:.1f} node-hours on demand where "
            "spot is missing"
        )
    if plan.schedule is not None:
        yield f"  {plan.schedule.text()}"
    yield f"  basis: {plan.basis}"
    yield from judges_text(job)
    yield from pool_text(job, plan.slots)
    yield f"  {_largest(plan)}"


def _money(span: Span) -> str:
    return f"{dollars(span.expected)} ({dollars(span.low)} to {dollars(span.high)})"


def _time(span: Span) -> str:
    return f"{duration(span.expected)} ({duration(span.low)} to {duration(span.high)})"


def _count(span: Span) -> str:
    return f"{span.expected} ({span.low} to {span.high})"


def _largest(plan: CloudPlan) -> str:
    bound = bound_of_plan(plan.as_plan(), plan.longest_ms)
    if bound is None:
        return "nothing limits what could be spent: a real cloud asks for budget.max_total (--max-total)"
    limit = plan.max_total_micro_usd
    what = f"budget.max_total {dollars(limit)}" if limit is not None and bound >= limit else "all until the run ends"
    return (
        f"at most {dollars(bound)} could be spent, whatever is lost or late: {what}, and what runs while it is "
        "stopped, at on-demand prices with disks and addresses; traffic and stored files are not counted"
    )


# --- exploration and factors -------------------------------------------------------------------------


def _exploration(job: Job, plan: CloudPlan) -> Iterator[str]:
    adds = plan.exploration
    if job.exploration.mode == "none":
        yield "  exploration none: spot nodes are idle while the trainer trains"
    elif not adds.candidates_per_prompt:
        yield f"  exploration {job.exploration.mode} adds nothing: no more fit beside training than are trained"
    else:
        share = adds.iterations_share
        yield (
            f"  exploration {job.exploration.mode}: {adds.candidates_per_prompt} candidates a prompt fit beside "
            f"training; the {adds.kept} that are trained should differ x{adds.variance_gain:.1f} as much "
            f"(rho {adds.rho:g}, assumed), which leaves {share.mean:.0%} of the iterations "
            f"({share.low:.0%} to {share.high:.0%}, {share.basis.value})"
        )
    if plan.spot_pays is not None:
        yield f"  spot: {plan.spot_pays.statement()}"


def _factors(factors: Sequence[Factors]) -> Iterator[str]:
    for one in factors:
        yield (
            f"  against {one.against} ({dollars(one.their_micro_usd)}, {duration(one.their_ms)}): iterations "
            f"x{one.iterations:.2f} * hours of one x{one.hours_per_iteration:.2f} * dollars an hour "
            f"x{one.micro_usd_per_hour:.2f} = dollars x{one.micro_usd:.2f}"
        )


# --- what else, and what is not known ----------------------------------------------------------------


def _alternatives(plan: CloudPlan) -> Iterator[str]:
    yield "  what else there is, and why not:"
    for other in plan.alternatives[:ALTERNATIVES_SHOWN]:
        yield f"    {other.what}{_figures(other)}: {other.why_not}"
    for left in plan.left_out[:LEFT_OUT_SHOWN]:
        yield f"    {left.what}: {left.why}"
    hidden = len(plan.alternatives[ALTERNATIVES_SHOWN:]) + len(plan.left_out[LEFT_OUT_SHOWN:])
    if hidden:
        yield f"    and {hidden} more (--json)"


def _figures(other: Alternative) -> str:
    if other.micro_usd is None or other.ms is None:
        return ""
    return f" ({'at least ' if other.is_at_least else ''}{dollars(other.micro_usd)}, {duration(other.ms)})"


def _never_run(job: Job, plan: CloudPlan) -> Iterator[str]:
    yield "  what of this is not known, and was never run:"
    for note in plan.notes:
        yield f"    {note}"
    if job.model.path is not None:
        yield f"    {job.model.path} was not looked for: a launch sends it to the bucket, where nodes take it from"
