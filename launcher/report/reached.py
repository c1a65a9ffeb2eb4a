"""The target and the curve of a run: scores, moments, guards, drift."""

from collections.abc import Iterable, Sequence

from sqlalchemy.orm import Session

from engine.config import DRIFT
from engine.events import Evaluated, IterationDone
from engine.reward_config import RewardConfig
from launcher.ledger.accounting import Charge, RunCosts
from launcher.ledger.models import ProgressRow, Run
from launcher.ledger.store import progress_of
from launcher.money import HOUR_MS
from launcher.report.target import Evaluation, Point, best, crossing, shown_metric
from launcher.report.values import DriftPoint, Factors, Guard, Learning, Moment, Pictures, ScorePoint, Target

GAINS = 8

ENDED = ("finished", "stopped", "failed")

Limits = tuple[tuple[str, float], ...]
"""Guards of a target: each metric with the largest value allowed."""

DEFAULT_HOLD = 3


def by_iteration(session: Session, run: Run, kind: str) -> dict[int, ProgressRow]:
    """Return one event of `kind` per iteration, ordered by iteration. The newest lineage of an iteration counts."""
    rows = {int(row.event["iteration"]): row for row in progress_of(session, run, kind)}
    return dict(sorted(rows.items()))


def target_of(
    session: Session,
    run: Run,
    costs: RunCosts,
    value: float | None,
    metric: str | None = None,
    limits: Limits | None = None,
) -> tuple[Target, list[Evaluation]]:
    evaluated = by_iteration(session, run, Evaluated.KIND)
    names = (name for row in evaluated.values() for name in row.event["metrics"])
    metric = metric or shown_metric(run.target_metric, names)
    value = run.target_value if value is None else value
    hold = int((run.job.get("target") or {}).get("evaluations", DEFAULT_HOLD))
    limits = guard_limits(run) if limits is None else limits
    curve = [
        Evaluation(
            iteration=iteration,
            at_ms=row.at_ms,
            score=row.event["metrics"][metric],
            micro_usd=costs.until(row.at_ms),
            guards_hold=all(guard.holds for guard in _guards(row, limits)),
        )
        for iteration, row in evaluated.items()
        if metric in row.event["metrics"]
    ]
    crossed = crossing(curve, value, hold) if value is not None else None
    confirmed = crossed.confirmed if crossed else None
    return (
        Target(
            metric=metric,
            value=value,
            hold=hold,
            reached=confirmed is not None,
            confirmed=moment_of(run, confirmed) if confirmed else None,
            first=moment_of(run, crossed.first) if crossed and crossed.first else None,
            best=moment_of(run, highest) if (highest := best(curve)) else None,
            factors=_factors(run, confirmed) if confirmed else None,
            guards=_guards(newest, limits) if (newest := next(reversed(evaluated.values()), None)) else (),
        ),
        curve,
    )


def evaluations_of(session: Session, run: Run, metric: str, charges: Iterable[Charge]) -> list[Evaluation]:
    """Return the evaluations of a run, with the micro-dollars of `charges` until each."""
    paid = list(charges)
    return [
        Evaluation(
            iteration=iteration,
            at_ms=row.at_ms,
            score=row.event["metrics"][metric],
            micro_usd=sum(charge.until(row.at_ms) for charge in paid),
        )
        for iteration, row in by_iteration(session, run, Evaluated.KIND).items()
        if metric in row.event["metrics"]
    ]


def guard_limits(run: Run) -> Limits:
    guards = (run.job.get("target") or {}).get("guards") or ()
    return tuple((guard["metric"], float(guard["max"])) for guard in guards)


def _guards(row: ProgressRow, limits: Limits) -> tuple[Guard, ...]:
    values = [row.event["metrics"].get(metric) for metric, _ in limits]
    return tuple(
        Guard(metric=metric, max=most, value=value, holds=value is not None and value <= most)
        for (metric, most), value in zip(limits, values, strict=True)
    )


def drift_points(session: Session, run: Run) -> tuple[DriftPoint, ...]:
    limits = guard_limits(run)
    return tuple(
        DriftPoint(
            iteration=iteration,
            drift=row.event["metrics"][DRIFT],
            guards_hold=all(guard.holds for guard in _guards(row, limits)),
        )
        for iteration, row in by_iteration(session, run, Evaluated.KIND).items()
        if DRIFT in row.event["metrics"]
    )


def score_points(session: Session, run: Run, costs: RunCosts) -> tuple[ScorePoint, ...]:
    """Return the score of each of several rewards in each evaluation."""
    names = [part.metric for part in RewardConfig.model_validate(run.job.get("reward", {})).parts]
    return tuple(
        ScorePoint(
            name=name,
            iteration=iteration,
            micro_usd=costs.until(row.at_ms),
            score=row.event["metrics"][name],
        )
        for name in names
        for iteration, row in by_iteration(session, run, Evaluated.KIND).items()
        if name in row.event["metrics"]
    )


def climb_of(curve: Sequence[Evaluation]) -> tuple[float, int]:
    """Return the gain of the smoothed score from the first to the best evaluation, and its cost in micro-dollars."""
    highest = best(curve)
    if highest is None:
        return 0.0, 0
    return highest.smoothed - curve[0].score, highest.micro_usd - curve[0].micro_usd


def per_hundredth(curve: Sequence[Evaluation]) -> int | None:
    gain, spent = climb_of(curve)
    return round(spent * 0.01 / gain) if gain > 0 else None


def moment_of(run: Run, point: Point) -> Moment:
    return Moment(
        iteration=point.iteration,
        at_ms=point.at_ms,
        hours=(point.at_ms - run.created_ms) / HOUR_MS,
        micro_usd=point.micro_usd,
        score=point.score,
        smoothed=point.smoothed,
    )


def _factors(run: Run, point: Point) -> Factors:
    ms = max(1, point.at_ms - run.created_ms)
    iterations = max(1, point.iteration)
    return Factors(
        iterations=iterations,
        seconds_per_iteration=ms / 1000 / iterations,
        micro_usd_per_hour=round(point.micro_usd * HOUR_MS / ms),
        micro_usd=point.micro_usd,
    )


def learning_of(session: Session, run: Run) -> tuple[Learning, ...]:
    """Return every trained iteration with the figures of its update."""
    return tuple(
        Learning(
            iteration=iteration,
            hours=(row.at_ms - run.created_ms) / HOUR_MS,
            reward_mean=row.event["reward_mean"],
            reward_std=row.event["reward_std"],
            explored=row.event["explored"],
            health=row.event["health"],
        )
        for iteration, row in by_iteration(session, run, IterationDone.KIND).items()
    )


def images_of(session: Session, run: Run, metric: str) -> list[Pictures]:
    return [
        Pictures(iteration=iteration, path=row.event["pictures"], score=row.event["metrics"].get(metric))
        for iteration, row in by_iteration(session, run, Evaluated.KIND).items()
        if row.event.get("pictures")
    ]
