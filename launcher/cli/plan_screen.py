"""A plan on one screen: at most 20 lines of 80 columns. `spotrl launch --explain` prints everything behind it.

headline (dollars, time, hard maximum) -> nodes -> savings -> alternatives; below the screen, the warnings

Each line holds one fact and is never wrapped, so a long text cannot push the nodes off the screen. A text that is cut
ends in " ...", and `--explain` prints it whole. Warnings are whole: their end is the remedy.
"""

import textwrap
from collections.abc import Iterator, Sequence

from engine.events import Market
from launcher.checks.ready import job_problems
from launcher.cli.layout import COLUMNS, columns, fitted
from launcher.cli.plan_text import clock_note, header, judges_text, pool_name, pool_text, pools_of
from launcher.decide.run_budget import bound_of_plan
from launcher.job.checked import CheckedJob
from launcher.job.schema import ASLEEP, Job
from launcher.market.offers import TOO_OLD, age_of, dates_text
from launcher.money import HOUR_MS, dollars, duration, hourly
from launcher.placement.cloud_plan import THE_TRAINER_ALONE, CloudPlan, Factors, PlanReplays, Span
from launcher.placement.plan import Plan, Slot
from launcher.services.fleets import Fleets

POOLS_SHOWN = 3
ALTERNATIVES_SHOWN = 4
"""Most lines of each part. Together with the other lines they make 20."""

ALTERNATIVE_COLUMNS = COLUMNS - 24
"""Width of an alternative's name, beside its dollars and its time."""

MORE = "More: --explain"


def cloud_screen(job: Job, plan: CloudPlan, warnings: int, now_ms: int, fleets: Fleets | None = None) -> Iterator[str]:
    """Return the plan of a job on clouds as lines of at most 80 columns.

    `warnings`: their number. `fleets`: those that the job's own was chosen from; None: the job names it.
    """
    yield _cut(f"{job.name}: {_money(plan.quoted_cost)}, {_time(plan.quoted_time)}")
    goal = f"to {job.target.metric} {job.target.value:g}" if job.target else f"for {job.iterations} iterations"
    yield _cut(f"  {_largest(plan)}; {goal} in {plan.cloud} {plan.region}")
    yield from upper_ends(plan)
    yield from map(_cut, (*judges_text(job), *pool_text(job, plan.slots)))
    if warnings:
        yield f"  !! {warnings} {'warning' if warnings == 1 else 'warnings'} below: what keeps it from being bought"
    yield from pool_table(plan.slots)
    for factors in plan.factors:
        if fleets is None or factors.against != THE_TRAINER_ALONE:
            yield _cut(f"  {saving(plan.quoted_cost.expected, factors)}")
    if fleets is not None:
        yield from map(_cut, _why_beside(fleets))
    yield _cut(f"  {dates_text((slot.placement.price_observed_at for slot in plan.slots), now_ms)}")
    if plan.replays is not None:
        yield _cut(f"  {replays_text(plan.replays)}")
    of_trainer = list(trainer_text(plan))
    yield from map(_cut, of_trainer)
    if fleets is None:
        yield from _alternatives(plan, ALTERNATIVES_SHOWN - len(of_trainer))
    else:
        yield from fleet_table(fleets)
    yield _cut(f"  {len(plan.notes)} things of this were never run or are assumed. {MORE}")


def local_screen(job: Job, plan: Plan) -> Iterator[str]:
    """Return the plan of a run on this machine as lines of at most 80 columns."""
    yield _cut(f"{job.name}: {header(job, plan)}")
    expected, maximum = plan.expected_micro_usd_per_hour, plan.maximum_micro_usd_per_hour
    yield f"  {hourly(expected)} expected, {hourly(maximum)} at most; {_budget(plan)}"
    yield from map(_cut, (*judges_text(job), *pool_text(job, plan.slots)))
    goal = f"{job.target.metric} {job.target.value:g}, or " if job.target else ""
    yield _cut(f"  until {goal}{job.iterations} iterations; how long that takes is not known")
    yield from pool_table(plan.slots)
    alone = sum(slot.placement.micro_usd_per_hour for slot in plan.slots if slot.role != "rollout")
    if maximum > expected:
        less = f"{1 - expected / maximum:.0%} less"
        yield f"  {less} than the same nodes on demand, {hourly(maximum)}; the trainer alone {hourly(alone)}"
    yield _cut(f"  algorithm {job.algorithm.name}, exploration {job.exploration.mode}; prices {plan.money_basis}")
    if note := clock_note(job):
        yield _cut(f"  {note}")
    yield f"  {MORE}"


def plan_warnings(
    checked: CheckedJob, slots: Sequence[Slot], now_ms: int, allows_old_prices: bool = False
) -> Iterator[str]:
    """Yield what keeps `launch` from buying, as far as this machine can tell: whole sentences with their remedies."""
    for problem in job_problems(checked, slots):
        yield f"{problem.found}; {problem.remedy}"
    ages = [age_of(slot.placement.price_observed_at, slot.placement.market, now_ms) for slot in slots]
    too_old = sum(age in TOO_OLD for age in ages)
    if too_old and not allows_old_prices:
        yield (
            f"{too_old} of {len(ages)} prices are TOO OLD TO BUY BY, or undated; `spotrl catalog refresh`, or "
            "--allow-old-prices if you know what it costs"
        )


def warning_lines(checked: CheckedJob, warnings: Sequence[str]) -> Iterator[str]:
    """Yield the lines below a cloud plan: every warning, whole, then what only the clouds can tell."""
    yield from fitted(f"  !! {warning}" for warning in warnings)
    yield f"  Quotas and credentials were not asked for: spotrl check {checked.path.name}"


def upper_ends(plan: CloudPlan) -> Iterator[str]:
    """Yield a line if an interval of the headline ends where a limit stops the run: that end is no forecast."""
    ends = []
    if plan.max_total_micro_usd is not None and plan.quoted_cost.high >= plan.max_total_micro_usd:
        ends.append(f"by the budget ({dollars(plan.max_total_micro_usd)})")
    if plan.longest_ms is not None and plan.quoted_time.high >= plan.longest_ms:
        limit = "deadline" if plan.max_runtime_ms is None else "max_runtime"
        ends.append(f"by the {limit} ({duration(plan.longest_ms)})")
    if ends:
        yield _cut(f"  upper ends: stopped {' and '.join(ends)}")


def pool_table(slots: Sequence[Slot]) -> Iterator[str]:
    """Yield a table of the nodes to keep running; equal nodes share a row."""
    pools = pools_of(slots)
    rows = [("nodes", "market", "GPUs", "instance", "zone", "each")]
    for equal in pools[:POOLS_SHOWN]:
        place = equal[0].placement
        gpus, each = f"{place.accelerator}:{place.gpus}", hourly(place.micro_usd_per_hour)
        rows.append((pool_name(equal), place.market.value, gpus, place.instance_type, place.zone, each))
    yield from columns(rows, words=5)
    if hidden := sum(map(len, pools[POOLS_SHOWN:])):
        yield f"  and {hidden} more nodes"


def replays_text(replays: PlanReplays) -> str:
    """Return a sentence on the replays of a plan: dollars, hours and how often they met the deadline."""
    money = f"${replays.usd:,.2f} (${replays.usd_low:,.2f} to ${replays.usd_high:,.2f})"
    text = f"{replays.starts} replays: {money}, {duration(round(replays.hours * HOUR_MS))}"
    if replays.met is None:
        return text
    return f"{text}; {replays.met} in time ({replays.probability_low:.0%} to {replays.probability_high:.0%})"


def trainer_text(plan: CloudPlan) -> Iterator[str]:
    """Yield what a trainer on spot loses, and what the trainer of the other capacity type would cost."""
    trainer = None if plan.replays is None else plan.replays.trainer
    if trainer is not None:
        yield (
            f"  trainer on spot: lost {trainer.losses:.1f} times, {trainer.lost_iterations:.1f} batches again "
            f"${trainer.lost_usd:,.2f}, waits ${trainer.without_trainer_usd:,.2f}"
        )
    other = plan.other_trainer
    if other is None or plan.replays is None:
        return
    ours = f"${plan.replays.usd:,.2f}"
    if other.market is Market.ON_DEMAND:
        yield f"  with the trainer on demand ${other.usd:,.2f}, {duration(round(other.hours * HOUR_MS))}"
    elif other.why_not == ASLEEP:
        yield f"  trainer on demand, because {ASLEEP};"
        yield f"  with --service ${other.usd:,.2f} instead of {ours}"
    else:
        yield f"  trainer on demand: {other.why_not};"
        yield f"  on spot it would be ${other.usd:,.2f} instead of {ours}"


def saving(micro_usd: int, factors: Factors) -> str:
    """Return a sentence on the dollars that the plan saves against a baseline, like `saves $20.70 (8%) against ...`."""
    saved = factors.their_micro_usd - micro_usd
    if not saved or not factors.their_micro_usd:
        return f"costs as much as {factors.against}"
    share = f"{dollars(abs(saved))} ({abs(saved) / factors.their_micro_usd:.0%})"
    theirs = f"{factors.against}: {dollars(factors.their_micro_usd)}, {duration(factors.their_ms)}"
    return f"saves {share} against {theirs}" if saved > 0 else f"costs {share} more than {theirs}"


def _why_beside(fleets: Fleets) -> Iterator[str]:
    """Yield why rollout nodes beside the trainer are bought, or none: what the other way costs and takes in replays."""
    other = fleets.other_way
    if other is None:
        return
    came_to = f"it is ${other.replays.usd:,.2f}, {duration(round(other.replays.hours * HOUR_MS))}"
    match fleets.chosen.candidate.choice.nodes:
        case 0:
            beside = f"{other.candidate.choice.nodes} x {other.fleet.rollout}"
            yield f"  no node beside the trainer: with {beside} {came_to}"
        case 1:
            yield f"  a node beside the trainer: without it, {came_to}"
        case _:
            yield f"  nodes beside the trainer: without them, {came_to}"


def fleet_table(fleets: Fleets) -> Iterator[str]:
    """Yield the cheapest plan, the cheapest in time and the quickest, each once, with what an hour saved costs."""
    names: dict[int, list[str]] = {fleets.chosen.number: []}
    for name, row in (("cheapest", fleets.cheapest), ("in time", fleets.in_time), ("quickest", fleets.quickest)):
        if row is not None:
            names.setdefault(row.number, []).append(name)
    rows = [(f"plans, by replays; this is {fleets.chosen.number}", "cost", "time")]
    for row in fleets.front:
        if row.number in names:
            label = ", ".join(names[row.number]) or "chosen"
            name = _cut(f"{row.number} {label}: {row.nodes}", ALTERNATIVE_COLUMNS)
            rows.append((name, f"${row.replays.usd:,.2f}", duration(round(row.replays.hours * HOUR_MS))))
    yield from columns(rows, words=1)
    if fleets.usd_per_hour_saved is not None:
        yield f"  an hour saved costs ${fleets.usd_per_hour_saved:,.2f}: --minimize time, or --choose N"
    if fleets.why_trainer_on_demand:
        yield _cut(f"  no plan has its trainer on spot: {fleets.why_trainer_on_demand}")


def _alternatives(plan: CloudPlan, shown: int) -> Iterator[str]:
    """Yield the first `shown` alternatives that have a price, as a table: dollars and time to the target."""
    priced = [other for other in plan.alternatives if other.micro_usd is not None and other.ms is not None]
    if not priced:
        yield "  no alternative keeps the limits"
        return
    rows = [("instead", "cost", "time")]
    for other in priced[:shown]:
        assert other.micro_usd is not None
        assert other.ms is not None
        is_late = plan.deadline_ms is not None and other.ms > plan.deadline_ms
        name = f"{other.what}, past the deadline" if is_late else other.what
        rows.append((_cut(name, ALTERNATIVE_COLUMNS), dollars(other.micro_usd), duration(other.ms)))
    yield from columns(rows, words=1)


def _largest(plan: CloudPlan) -> str:
    bound = bound_of_plan(plan.as_plan(), plan.longest_ms)
    if bound is None:
        return "!! nothing limits what could be spent: budget.max_total (--max-total)"
    return f"at most {dollars(bound)} and {hourly(plan.maximum_micro_usd_per_hour)}"


def _budget(plan: Plan) -> str:
    if plan.max_total_micro_usd is None or plan.lasts_ms is None:
        return "no budget.max_total"
    return f"budget {dollars(plan.max_total_micro_usd)} lasts {duration(plan.lasts_ms)}"


def _money(span: Span) -> str:
    return f"{dollars(span.expected)} ({dollars(span.low)} to {dollars(span.high)})"


def _time(span: Span) -> str:
    return f"{duration(span.expected)} ({duration(span.low)} to {duration(span.high)})"


def _cut(line: str, width: int = COLUMNS) -> str:
    """Return the line, cut between words if it is wider than `width`."""
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return indent + textwrap.shorten(line, width - len(indent), placeholder=" ...")
