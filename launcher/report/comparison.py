"""Several runs side by side: what differs in their jobs, how they climbed, and where the dollars went.

Runs of one job with different seeds are a group. A group's figure is the mean over its seeds with a 95 % interval by
Student's t; with one seed there is no interval. Dollars and hours to the target are given for a group only if every run
of it reached the target: a mean over those that did would favour the group that fails more often.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

from sqlalchemy.orm import Session

from launcher.exit_codes import Failure
from launcher.harmless import harmless
from launcher.ledger.models import Run
from launcher.ledger.store import nodes_of
from launcher.money import dollars
from launcher.report.build import build_report
from launcher.report.costs import price_dates
from launcher.report.target import WINDOW
from launcher.report.values import Moment
from launcher.without_secrets import job_without_secrets

SCHEMA = 1
"""Version of the comparison's JSON. A new field keeps the version; a changed or removed field increments it."""

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom. Above 30, the value for 30 is used: it is larger."""

OWN = ("name", "seed")
"""Fields in which runs of one group differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedMean:
    """The mean over the runs of a group. `low`, `high`: 95 % interval; None with one run."""

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One run of a comparison. `confirmed`: the evaluation that confirmed the target; None if it was not reached."""

    name: str
    group: str
    status: str
    seed: int
    money_basis: str
    iterations: int
    hours: float
    micro_usd: int
    billed_micro_usd: int | None
    """What the clouds billed; None if no imported bill names the run. `micro_usd` is metered, without disks."""
    preemptions: int
    confirmed: Moment | None
    best: Moment | None
    curve: tuple[Moment, ...]
    by_phase: Mapping[str, int]
    by_role: Mapping[str, int]
    by_market: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGroup:
    """Runs that differ in the seed alone, or that are equal in the fields of `--group-by`.

    `micro_usd`, `hours` and `iterations` are to the target; None unless every run reached it.
    """

    name: str
    runs: tuple[str, ...]
    reached: int
    micro_usd: SeedMean | None
    hours: SeedMean | None
    iterations: SeedMean | None
    spent_micro_usd: SeedMean
    best: SeedMean | None
    """The best smoothed score; None if a run has no evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field of the job in which runs differ, with each run's value as JSON text."""

    field: str
    values: Mapping[str, str]

    def shown(self, run: str) -> str:
        """Return a run's value for people: a string without its quotes and control characters."""
        text = self.values[run]
        return harmless(json.loads(text)).replace("\n", "\\n") if text.startswith('"') else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything `spotrl compare` prints."""

    schema: int
    metric: str
    target: float | None
    smoothed_over: int
    """Number of evaluations in the mean of a smoothed score."""
    runs: tuple[ComparedRun, ...]
    groups: tuple[RunGroup, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a dictionary for JSON."""
        return asdict(self)


def compare_runs(
    session: Session, runs: Sequence[Run], group_by: Sequence[str] = (), target_reward: float | None = None
) -> Comparison:
    """Compare runs at one target: `target_reward`, or the target of the first run.

    Raises Failure if the runs have different metrics, or if no job has a field of `group_by`.
    """
    jobs = {run.name: dict(flattened(job_without_secrets(run.job))) for run in runs}
    unknown = [field for field in group_by if not any(field in job for job in jobs.values())]
    if unknown:
        raise Failure(f"no job of these runs has a field {unknown[0]}; name one like algorithm.name or sampler.steps")
    target = target_reward if target_reward is not None else runs[0].target_value
    groups = {run.name: _group(run.name, jobs, group_by) for run in runs}
    compared, metrics, judges, dates = [], {}, {}, {}
    for run in runs:
        report = build_report(session, run, run.clock.now_ms(), target)
        metrics[run.name] = report.target.metric
        dates[run.name] = price_dates(nodes_of(session, run))
        judges[run.name] = sum(line.micro_usd or 0 for line in report.extras if line.kind == "judges")
        compared.append(
            ComparedRun(
                name=run.name,
                group=groups[run.name],
                status=report.run.status,
                seed=run.seed,
                money_basis=report.money_basis,
                iterations=report.run.iterations,
                hours=report.run.hours,
                micro_usd=report.costs.total,
                billed_micro_usd=None if report.bill is None else report.bill.billed_micro_usd,
                preemptions=len(report.preemptions),
                confirmed=report.target.confirmed,
                best=report.target.best,
                curve=report.curve,
                by_phase=report.costs.by_phase,
                by_role=report.costs.by_role,
                by_market=report.costs.by_market,
            )
        )
    if len(set(metrics.values())) > 1:
        named = ", ".join(f"{name}: {metric}" for name, metric in metrics.items())
        raise Failure(f"these runs have different metrics ({named}), and their scores cannot be compared")
    return Comparison(
        schema=SCHEMA,
        metric=metrics[runs[0].name],
        target=target,
        smoothed_over=WINDOW,
        runs=tuple(compared),
        groups=tuple(_grouped(compared)),
        differences=tuple(_differences(jobs)),
        notes=tuple(_notes(runs, compared, judges, dates)),
    )


def flattened(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a job by dotted name, with their values as JSON text."""
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from flattened(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(inner, sort_keys=True)


def seed_mean(values: Sequence[float]) -> SeedMean:
    """Return the mean with a 95 % interval: mean +- t(n - 1) s / sqrt(n). `values`: at least one."""
    middle, n = mean(values), len(values)
    if n == 1:
        return SeedMean(mean=middle, low=None, high=None, n=1)
    half = T_975[min(n - 1, len(T_975)) - 1] * stdev(values) / sqrt(n)
    return SeedMean(mean=middle, low=middle - half, high=middle + half, n=n)


def score_at(run: ComparedRun, axis: str, at: float) -> float | None:
    """Return the smoothed score of a run at a moment of an axis; None before its first and after its last evaluation.

    `axis`: `micro_usd`, `hours` or `iteration`.
    """
    passed = [point for point in run.curve if getattr(point, axis) <= at]
    if not passed or at > getattr(run.curve[-1], axis):
        return None
    return passed[-1].smoothed


def _group(name: str, jobs: Mapping[str, Mapping[str, str]], group_by: Sequence[str]) -> str:
    """Return the name of a run's group: the values of `group_by`, or the first run with the same job but for OWN."""
    if group_by:
        return ", ".join(f"{field}={jobs[name].get(field, 'null')}".replace('"', "") for field in group_by)

    def shared(run: str) -> dict[str, str]:
        return {field: value for field, value in jobs[run].items() if field not in OWN}

    return next(other for other in jobs if shared(other) == shared(name))


def _grouped(runs: Sequence[ComparedRun]) -> Iterator[RunGroup]:
    for name in dict.fromkeys(run.group for run in runs):
        members = [run for run in runs if run.group == name]
        there = [run.confirmed for run in members if run.confirmed is not None]
        best = [run.best.smoothed for run in members if run.best is not None]
        whole = len(there) == len(members)
        yield RunGroup(
            name=name,
            runs=tuple(run.name for run in members),
            reached=len(there),
            micro_usd=seed_mean([moment.micro_usd for moment in there]) if whole else None,
            hours=seed_mean([moment.hours for moment in there]) if whole else None,
            iterations=seed_mean([moment.iteration for moment in there]) if whole else None,
            spent_micro_usd=seed_mean([run.micro_usd for run in members]),
            best=seed_mean(best) if len(best) == len(members) else None,
        )


def _differences(jobs: Mapping[str, Mapping[str, str]]) -> Iterator[Difference]:
    fields = dict.fromkeys(field for job in jobs.values() for field in job)
    for field in fields:
        values = {name: job.get(field, "absent") for name, job in jobs.items()}
        if field != "name" and len(set(values.values())) > 1:
            yield Difference(field=field, values=values)


def _notes(
    runs: Sequence[Run], compared: Sequence[ComparedRun], judges: Mapping[str, int], dates: Mapping[str, str]
) -> Iterator[str]:
    """Yield what a reader must know of the figures.

    judges  cost of paid judges by run, in micro-dollars
    dates   dates of the prices by run, as text; empty for a run without nodes
    """
    for text in dict.fromkeys(filter(None, dates.values())):
        yield f"{text}: {', '.join(name for name, of_run in dates.items() if of_run == text)}"
    if paid := ", ".join(f"{name} {dollars(cost)}" for name, cost in judges.items() if cost):
        yield f"the dollars are those of nodes; paid judges cost beside them: {paid}"
    billed = {run.name: run.billed_micro_usd for run in compared if run.billed_micro_usd is not None}
    if billed:
        named = ", ".join(f"{name} {dollars(cost)}" for name, cost in billed.items())
        yield f"the dollars are metered; billed with disks, traffic, tax and credits: {named}"
    bases = {run.money_basis for run in runs}  # of the dollars compared, which are never billed
    if len(bases) > 1:
        yield f"the dollars have different bases ({', '.join(sorted(bases))}): compare them with care"
    factors = {run.clock_factor for run in runs}
    if len(factors) > 1:
        clocks = ", ".join(f"{run.name} x{run.clock_factor:g}" for run in runs)
        yield f"the clocks of the runs differ ({clocks}): hours and dollars depend on the clock"
    elif factors != {1}:
        yield f"hours are on the runs' clock, {factors.pop():g} s for each second of work"
    if going := [run.name for run in compared if run.status not in ("finished", "stopped", "failed")]:
        yield f"not over yet: {', '.join(going)}"
    seeds = {run.group: 0 for run in compared}
    for run in compared:
        seeds[run.group] += 1
    if alone := [name for name, count in seeds.items() if count == 1]:
        yield f"one seed, so no interval: {', '.join(alone)}"
