"""The report of a run as one value: target, costs, splits of the costs, and the cost of preemptions.

ledger -> costs and curve -> target, gains, preemptions, comparisons -> Report (terminal, JSON and HTML print the value)

The report measures and assumes nothing: every number is a fact in the ledger or computed from facts. The basis of
each number is reported with the number: `money_basis`, price sources with their age, and the baseline of each saving.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.clock import ScaledClock
from engine.config import DRIFT
from engine.events import EngineStarted, Evaluated, IterationDone, NodeMissed, Phase, Ranked, Regrouped
from launcher.ledger.accounting import Charge, NodeCost, RunCosts, run_costs, side_costs_of_run
from launcher.ledger.billing import LOCAL, NOT_PRICED, interval_micro_usd
from launcher.ledger.models import Node, Preemption, ProgressRow, Run, SideCost
from launcher.ledger.store import current_status, nodes_of, progress_of
from launcher.money import HOUR_MS
from launcher.report.exploration import Exploration, exploration_of
from launcher.report.sharing import Sharing, sharing_of
from launcher.report.target import Evaluation, Gain, Point, best, crossing, dollars_per_gain, smoothed

SCHEMA = 1
"""Version of the report's JSON. A new field keeps the version; a changed or removed field increments the version."""

GAINS = 8

ENDED = ("finished", "stopped", "failed")

DEFAULT_METRIC = "exact_match"

Limits = tuple[tuple[str, float], ...]
"""Guards of a target: each metric with the largest value allowed."""

DEFAULT_HOLD = 3

BASIS = {
    "assumed": "assumed: priced as named offers, nothing was bought",
    "metered": "metered: observed price x running time; not yet compared with a bill",
    "billed": "billed: taken from the cloud's own bill",
}

ONE_SEED = "One seed (n=1): no interval can be given for dollars or hours."

NOT_MODELLED = (
    "Discounts, credits and taxes are not in these figures, nor are disks, traffic and addresses.",
    ONE_SEED,
)

NOT_MODELLED_ON_CLOUDS = (
    "Credits and taxes are not in these figures, nor discounts that the job does not name; what is beside the machines "
    "is listed apart, and what has no price is not counted as nothing.",
    ONE_SEED,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Identity of the run, and the inputs needed to reproduce the run. Hours are on the run's clock."""

    name: str
    status: str
    reason: str
    infra: str
    created_at: str
    until: str
    """End of the run, or the time of the report if the run has not ended; ISO, UTC."""
    hours: float
    wall_seconds: float
    clock_factor: float
    iterations: int
    lineages: int
    job_digest: str
    code_version: str
    lock_digest: str
    seeds: tuple[int, ...]
    devices: str
    started_from: str = ""
    """Source of the start weights (run and checkpoint); empty if the run started from the base model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An evaluation, with the hours and micro-dollars since the run was created."""

    iteration: int
    at_ms: int
    hours: float
    micro_usd: int
    score: float
    smoothed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftPoint:
    """Distance of an evaluation's images to the base model's images (engine/drift.py), and whether every guard held."""

    iteration: int
    drift: float
    guards_hold: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """A limit on a metric, required by the target. `value` is from the newest evaluation; None if not reported."""

    metric: str
    max: float
    value: float | None
    holds: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Factors of a cost and of a saving: iterations x seconds per iteration x dollars per hour (run's clock)."""

    iterations: int
    seconds_per_iteration: float
    micro_usd_per_hour: int
    micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The target score, and whether the run reached the target.

    A target is reached when the smoothed score is at or above `value` for `hold` evaluations in a row.
    `confirmed` is the last evaluation of the row; dollars and hours are counted up to `confirmed`. `first` is the
    first single evaluation at or above `value`. `value` is None if the run had no target.
    """

    metric: str
    value: float | None
    hold: int
    reached: bool
    confirmed: Moment | None
    first: Moment | None
    best: Moment | None
    """Evaluation with the highest smoothed score."""
    factors: Factors | None
    """Factors of the cost up to `confirmed`."""
    guards: tuple[Guard, ...] = ()
    """Guards in the newest evaluation. An evaluation counts towards the target only if all guards hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Total cost in micro-dollars, and five splits of the same total."""

    total: int
    by_role: Mapping[str, int]
    by_market: Mapping[str, int]
    by_place: Mapping[str, int]
    """Split by cloud and region."""
    by_node: Mapping[str, int]
    by_phase: Mapping[str, int]
    sums_equal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraLine:
    """A separate line of the bill. `micro_usd` is None if the cloud charges an amount that is not known."""

    kind: str
    """failed_launches, setup, idle (inside the total); disk, address, egress (not in the total)."""
    amount: str
    micro_usd: int | None
    in_total: bool
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLine:
    """One node: its offer, the intervals in which the node was billed, and the cost."""

    node: str
    slot: str
    generation: int
    role: str
    market: str
    zone: str
    instance_type: str
    micro_usd_per_hour: int
    charges: tuple[Charge, ...]
    seen_ms: int | None
    running: bool
    hours: float
    micro_usd: int
    phase_micro_usd: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionLine:
    """A preempted node, and the cost of the preemption.

    `micro_usd` = `cold_start_micro_usd` + `lost_work_micro_usd`:

    - cold start: cost of the successors in the same slot, from the start of billing until a worker of the successor
      called in. Successors count up to the first successor with a call or with a preemption. A preempted
      successor's own preemption carries the next cold start, to count no cold start twice.
    - lost work: `lost_steps` x the run's own mean node-time per denoising step (node-time of rollouts and
      exploration / denoising steps of trained iterations and of their exploration) x the lost node's price.
      Lost work is at most the cost of the node. Lost work is 0 before the first trained iteration, because the
      time of a step is not known yet.

    `replaced_after_*`: time from the preemption to the first call of a later node of the slot; None if no later node
    has called.
    """

    node: str
    slot: str
    zone: str
    at_ms: int
    hours: float
    signal: str | None
    notice: bool
    lost_steps: int
    replaced_by: str | None
    replaced_after_s: float | None
    """Seconds on the run's clock."""
    replaced_after_wall_s: float | None
    cold_start_micro_usd: int
    lost_work_micro_usd: int
    micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceEffect:
    """The run's node-time at the on-demand price of the same offers. The figure does not predict a run without spot."""

    paid_micro_usd: int
    on_demand_micro_usd: int
    difference_micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A saving against a named baseline: another run, or a counterfactual labelled as a counterfactual.

    `saved_micro_usd` is None if the two cannot be compared; `why` gives the reason.
    """

    kind: str
    """`run` or `counterfactual`."""
    against: str
    micro_usd: int | None
    saved_micro_usd: int | None
    why: str
    ours: Factors | None = None
    theirs: Factors | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceSource:
    """A source of prices. `age_days` is the price's age at the newest request for a node at the price."""

    source: str
    observed_at: str
    age_days: float | None
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """A contact sheet of held-out prompts; `path` is relative to the checkpoint store."""

    iteration: int
    path: str
    score: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Every value `spotrl report` prints about a run."""

    schema: int
    run: RunFacts
    money_basis: str
    money_note: str
    target: Target
    costs: Costs
    curve: tuple[Moment, ...]
    drift: tuple[DriftPoint, ...]
    """Drift of each evaluation with a drift metric."""
    gains: tuple[Gain, ...]
    """Cost of each part of the climb, in at most `GAINS` parts."""
    micro_usd_per_hundredth: int | None
    """Micro-dollars per +0.01, from the first evaluation to the best smoothed score; None if the score did not rise."""
    extras: tuple[ExtraLine, ...]
    """Separate bill lines of a run on real clouds; empty on the local infra."""
    nodes: tuple[NodeLine, ...]
    preemptions: tuple[PreemptionLine, ...]
    exploration: Exploration | None
    sharing: Sharing | None
    price_effect: PriceEffect
    saved: tuple[Saving, ...]
    prices: tuple[PriceSource, ...]
    pictures_before: Pictures | None
    pictures_after: Pictures | None
    start_ms: int
    end_ms: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return asdict(self)


def clock_of(run: Run) -> ScaledClock:
    """Return the clock of the run's times in the ledger."""
    return ScaledClock(origin_ms=run.clock_origin_ms, factor=run.clock_factor)


def build_report(
    session: Session, run: Run, now_ms: int, target_reward: float | None = None, against: Run | None = None
) -> Report:
    """Return the report of `run` at `now_ms` (run's clock).

    `target_reward` replaces the target of the job. `against` is another run, the baseline of a saving.
    """
    costs = run_costs(session, run, now_ms)
    end_ms = _ended_ms(session, run) or now_ms
    target, curve = _target(session, run, costs, target_reward)
    preemptions = _preemptions(session, run, costs)
    pictures = _pictures(session, run, target.metric)
    started = progress_of(session, run, EngineStarted.KIND)
    status = current_status(session, run)
    saved = [_counterfactual(costs, preemptions)]
    if against is not None:
        # `against` has its own clock, so count its costs only up to its last evaluation.
        told = max((row.at_ms for row in progress_of(session, against, Evaluated.KIND)), default=against.created_ms)
        theirs, _ = _target(
            session, against, run_costs(session, against, told), target.value, target.metric, _limits(run)
        )
        saved.insert(0, _saved_against(target, against.name, theirs))
    return Report(
        schema=SCHEMA,
        run=RunFacts(
            name=run.name,
            status=status.status if status else "unknown",
            reason=status.reason if status else "",
            infra=run.infra,
            created_at=_utc(run.created_ms),
            until=_utc(end_ms),
            hours=(end_ms - run.created_ms) / HOUR_MS,
            wall_seconds=(end_ms - run.created_ms) / 1000 / run.clock_factor,
            clock_factor=run.clock_factor,
            iterations=len(_by_iteration(session, run, IterationDone.KIND)),
            lineages=len({row.lineage for row in started}),
            job_digest=run.job_digest,
            code_version=run.code_version,
            lock_digest=run.lock_digest,
            seeds=(run.seed,),
            devices=str(started[-1].event.get("devices", "")) if started else "",
            started_from=str(started[-1].event.get("started_from", "")) if started else "",
        ),
        money_basis=run.money_basis,
        money_note=BASIS.get(run.money_basis, run.money_basis),
        target=target,
        costs=_costs(costs),
        curve=tuple(_moment(run, point) for point in smoothed(curve)),
        drift=_drift(session, run),
        gains=dollars_per_gain(curve, step=max(0.01, _climb(curve)[0] / GAINS)),
        micro_usd_per_hundredth=_per_hundredth(curve),
        extras=_extras(session, run, costs, now_ms),
        nodes=tuple(_node_line(node) for node in costs.nodes),
        preemptions=preemptions,
        exploration=exploration_of(
            [row.event for row in _by_iteration(session, run, IterationDone.KIND).values()],
            [row.event for row in _by_iteration(session, run, Ranked.KIND).values()],
            costs.by_phase.get(Phase.EXPLORATION, 0),
        ),
        sharing=sharing_of([row.event for row in progress_of(session, run, Regrouped.KIND)]),
        price_effect=_price_effect(costs),
        saved=tuple(saved),
        prices=_price_sources(nodes_of(session, run)),
        pictures_before=pictures[0] if pictures else None,
        pictures_after=pictures[-1] if len(pictures) > 1 else None,
        start_ms=run.created_ms,
        end_ms=max([end_ms, *(charge.end_ms for node in costs.nodes for charge in node.charges)]),
        notes=NOT_MODELLED if run.infra == LOCAL else NOT_MODELLED_ON_CLOUDS,
    )


# --- target -------------------------------------------------------------------------------------------


def _by_iteration(session: Session, run: Run, kind: str) -> dict[int, ProgressRow]:
    """Return one event of `kind` per iteration, ordered by iteration. The newest lineage of an iteration counts."""
    rows = {int(row.event["iteration"]): row for row in progress_of(session, run, kind)}
    return dict(sorted(rows.items()))


def _target(
    session: Session,
    run: Run,
    costs: RunCosts,
    value: float | None,
    metric: str | None = None,
    limits: Limits | None = None,
) -> tuple[Target, list[Evaluation]]:
    evaluated = _by_iteration(session, run, Evaluated.KIND)
    metric = metric or run.target_metric or _a_metric(evaluated.values())
    value = run.target_value if value is None else value
    hold = int((run.job.get("target") or {}).get("evaluations", DEFAULT_HOLD))
    limits = _limits(run) if limits is None else limits
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
            confirmed=_moment(run, confirmed) if confirmed else None,
            first=_moment(run, crossed.first) if crossed and crossed.first else None,
            best=_moment(run, highest) if (highest := best(curve)) else None,
            factors=_factors(run, confirmed) if confirmed else None,
            guards=_guards(newest, limits) if (newest := next(reversed(evaluated.values()), None)) else (),
        ),
        curve,
    )


def _limits(run: Run) -> Limits:
    guards = (run.job.get("target") or {}).get("guards") or ()
    return tuple((guard["metric"], float(guard["max"])) for guard in guards)


def _guards(row: ProgressRow, limits: Limits) -> tuple[Guard, ...]:
    values = [row.event["metrics"].get(metric) for metric, _ in limits]
    return tuple(
        Guard(metric=metric, max=most, value=value, holds=value is not None and value <= most)
        for (metric, most), value in zip(limits, values, strict=True)
    )


def _drift(session: Session, run: Run) -> tuple[DriftPoint, ...]:
    limits = _limits(run)
    return tuple(
        DriftPoint(
            iteration=iteration,
            drift=row.event["metrics"][DRIFT],
            guards_hold=all(guard.holds for guard in _guards(row, limits)),
        )
        for iteration, row in _by_iteration(session, run, Evaluated.KIND).items()
        if DRIFT in row.event["metrics"]
    )


def _climb(curve: Sequence[Evaluation]) -> tuple[float, int]:
    """Return the gain of the smoothed score from the first to the best evaluation, and its cost in micro-dollars."""
    highest = best(curve)
    if highest is None:
        return 0.0, 0
    return highest.smoothed - curve[0].score, highest.micro_usd - curve[0].micro_usd


def _per_hundredth(curve: Sequence[Evaluation]) -> int | None:
    gain, spent = _climb(curve)
    return round(spent * 0.01 / gain) if gain > 0 else None


def _a_metric(evaluated: Iterable[ProgressRow]) -> str:
    names = sorted({name for row in evaluated for name in row.event["metrics"]} - {DRIFT})
    return DEFAULT_METRIC if DEFAULT_METRIC in names or not names else names[0]


def _moment(run: Run, point: Point) -> Moment:
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


def _pictures(session: Session, run: Run, metric: str) -> list[Pictures]:
    return [
        Pictures(iteration=iteration, path=row.event["pictures"], score=row.event["metrics"].get(metric))
        for iteration, row in _by_iteration(session, run, Evaluated.KIND).items()
        if row.event.get("pictures")
    ]


# --- costs --------------------------------------------------------------------------------------------


def _costs(costs: RunCosts) -> Costs:
    splits = (costs.by_role, costs.by_market, costs.by_place, costs.by_node, costs.by_phase)
    return Costs(
        total=costs.total,
        by_role=costs.by_role,
        by_market=costs.by_market,
        by_place=costs.by_place,
        by_node=costs.by_node,
        by_phase={phase.value: costs.by_phase[phase.value] for phase in Phase if phase.value in costs.by_phase}
        | costs.by_phase,
        sums_equal=all(sum(split.values()) == costs.total for split in splits),
    )


def _extras(session: Session, run: Run, costs: RunCosts, now_ms: int) -> tuple[ExtraLine, ...]:
    """Return the bill lines of a real cloud besides working nodes. The local infra has no lines."""
    if run.infra == LOCAL:
        return ()
    idlers = [node for node in costs.nodes if node.charges and node.seen_ms is None]
    refused = sum(not node.charges for node in costs.nodes)
    setup = costs.by_phase.get(Phase.COLD_START, 0)
    inside = (
        ("failed_launches", _failed(len(idlers), refused), sum(node.micro_usd for node in idlers)),
        ("setup", "from billing to the first call of a worker", setup),
        ("idle", "of nodes at work", costs.by_phase.get(Phase.IDLE, 0)),
    )
    lines = [
        ExtraLine(kind=kind, amount=amount, micro_usd=paid, in_total=True, source=BASIS.get(run.money_basis, ""))
        for kind, amount, paid in inside
    ]
    by_kind: dict[str, list[SideCost]] = {}
    for cost in side_costs_of_run(session, run, now_ms):
        by_kind.setdefault(cost.kind, []).append(cost)
    for kind, rows in by_kind.items():
        known = [row.micro_usd for row in rows if row.micro_usd is not None]
        lines.append(
            ExtraLine(
                kind=kind,
                amount=rows[0].amount if len(rows) == 1 else f"{len(rows)} x {rows[0].amount}",
                micro_usd=sum(known) if len(known) == len(rows) else None,
                in_total=False,
                source=rows[0].source,
            )
        )
    unpriced = [(kind, what) for kind, what in NOT_PRICED if kind not in by_kind]
    why = "not priced: no cloud says the amount before its bill"
    lines += [ExtraLine(kind=kind, amount=what, micro_usd=None, in_total=False, source=why) for kind, what in unpriced]
    return tuple(lines)


def _failed(came: int, refused: int) -> str:
    return f"{came} came up and never worked, {refused} never came up and were not billed"


def _node_line(node: NodeCost) -> NodeLine:
    return NodeLine(
        node=node.node,
        slot=node.slot,
        generation=node.generation,
        role=node.role,
        market=node.market,
        zone=node.zone,
        instance_type=node.instance_type,
        micro_usd_per_hour=node.micro_usd_per_hour,
        charges=node.charges,
        seen_ms=node.seen_ms,
        running=not all(charge.closed for charge in node.charges),
        hours=node.ms / HOUR_MS,
        micro_usd=node.micro_usd,
        phase_micro_usd=node.phase_micro_usd,
    )


def _price_effect(costs: RunCosts) -> PriceEffect:
    on_demand = sum(node.on_demand_micro_usd for node in costs.nodes)
    return PriceEffect(
        paid_micro_usd=costs.total, on_demand_micro_usd=on_demand, difference_micro_usd=on_demand - costs.total
    )


def _price_sources(nodes: Sequence[Node]) -> tuple[PriceSource, ...]:
    by_source: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        by_source.setdefault((node.price_source, node.price_observed_at), []).append(node)
    return tuple(
        PriceSource(
            source=source,
            observed_at=observed_at,
            age_days=_age_days(observed_at, max(node.requested_ms for node in bought)),
            nodes=len(bought),
        )
        for (source, observed_at), bought in sorted(by_source.items())
    )


def _age_days(observed_at: str, at_ms: int) -> float | None:
    """Return the days from an ISO date or time to `at_ms`; None if `observed_at` is not a date."""
    try:
        seen = datetime.fromisoformat(observed_at)
    except ValueError:
        return None
    seen = seen if seen.tzinfo else seen.replace(tzinfo=UTC)
    return round((at_ms / 1000 - seen.timestamp()) / 86_400, 2)


# --- cost of preemptions ------------------------------------------------------------------------------


def _preemptions(session: Session, run: Run, costs: RunCosts) -> tuple[PreemptionLine, ...]:
    rows = session.execute(
        select(Preemption, Node)
        .join(Node, Node.id == Preemption.node_id)
        .where(Node.run_id == run.id)
        .order_by(Preemption.at_ms, Preemption.id)
    ).all()
    lost_steps: dict[str, int] = {}
    for missed in progress_of(session, run, NodeMissed.KIND):
        node = missed.event["node"]
        lost_steps[node] = lost_steps.get(node, 0) + int(missed.event["lost_steps"])
    taken = {node.name for _, node in rows}
    step_ms, steps = _time_of_steps(session, run, costs)
    lines = []
    for preemption, node in rows:
        own = next(cost for cost in costs.nodes if cost.node == node.name)
        later = sorted(
            (cost for cost in costs.nodes if cost.slot == own.slot and cost.generation > own.generation),
            key=lambda cost: cost.generation,
        )
        replaced = next((cost for cost in later if cost.seen_ms is not None), None)
        seen_ms = replaced.seen_ms if replaced is not None else None
        after_ms = None if seen_ms is None else max(0, seen_ms - preemption.at_ms)
        cold_start = sum(cost.phase_micro_usd.get(Phase.COLD_START.value, 0) for cost in _paid_by(later, taken))
        lost = lost_steps.get(node.name, 0)
        work = min(own.micro_usd, _value(lost, step_ms, steps, node.micro_usd_per_hour))
        lines.append(
            PreemptionLine(
                node=node.name,
                slot=node.slot,
                zone=node.zone,
                at_ms=preemption.at_ms,
                hours=(preemption.at_ms - run.created_ms) / HOUR_MS,
                signal=preemption.signal,
                notice=preemption.noticed_ms is not None,
                lost_steps=lost,
                replaced_by=replaced.node if replaced else None,
                replaced_after_s=None if after_ms is None else after_ms / 1000,
                replaced_after_wall_s=None if after_ms is None else round(after_ms / 1000 / run.clock_factor, 3),
                cold_start_micro_usd=cold_start,
                lost_work_micro_usd=work,
                micro_usd=cold_start + work,
            )
        )
    return tuple(lines)


def _paid_by(later: Sequence[NodeCost], taken: set[str]) -> list[NodeCost]:
    """Return the successors with cold starts caused by the preemption: up to the first one seen or preempted."""
    paid = []
    for cost in later:
        paid.append(cost)
        if cost.seen_ms is not None or cost.node in taken:
            break
    return paid


def _time_of_steps(session: Session, run: Run, costs: RunCosts) -> tuple[int, int]:
    """Return the node-milliseconds of rollouts and exploration in the whole run, and the number of denoising steps.

    Both figures include every lineage: repeated work took its time twice.
    """
    ms = sum(costs.phase_ms.get(phase.value, 0) for phase in (Phase.ROLLOUT, Phase.EXPLORATION))
    algorithm, sampler = run.job.get("algorithm", {}), run.job.get("sampler", {})
    trained = int(algorithm.get("prompts_per_batch", 0)) * int(algorithm.get("images_per_prompt", 0))
    done = session.scalars(
        select(ProgressRow).where(ProgressRow.run_id == run.id, ProgressRow.kind == IterationDone.KIND)
    )
    pictures = sum(trained + int(row.event["explored"]) for row in done)
    return ms, pictures * int(sampler.get("steps", 0))


def _value(lost_steps: int, ms: int, steps: int, micro_usd_per_hour: int) -> int:
    if steps == 0:
        return 0
    return interval_micro_usd(0, round(lost_steps * ms / steps), micro_usd_per_hour)


# --- savings ------------------------------------------------------------------------------------------


def _counterfactual(costs: RunCosts, preemptions: Sequence[PreemptionLine]) -> Saving:
    """Return the saving against all nodes on demand: the same node-time, minus the cold starts after preemptions."""
    taken = {line.node for line in preemptions}
    caused: dict[str, NodeCost] = {}
    for line in preemptions:
        generation = next(cost.generation for cost in costs.nodes if cost.node == line.node)
        later = [cost for cost in costs.nodes if cost.slot == line.slot and cost.generation > generation]
        caused |= {cost.node: cost for cost in _paid_by(sorted(later, key=lambda cost: cost.generation), taken)}
    spared = sum(
        interval_micro_usd(0, cost.phase_ms.get(Phase.COLD_START.value, 0), cost.on_demand_micro_usd_per_hour)
        for cost in caused.values()
    )
    there = sum(cost.on_demand_micro_usd for cost in costs.nodes) - spared
    return Saving(
        kind="counterfactual",
        against="all nodes on demand, no preemption cold starts",
        micro_usd=there,
        saved_micro_usd=there - costs.total,
        why="not a run: the node-time of this one at on-demand prices; work redone after reclaims is still in it",
    )


def _saved_against(ours: Target, name: str, theirs: Target) -> Saving:
    """Compare the dollars to the same target in two runs, with the factors of each cost."""
    if ours.value is None:
        return _incomparable(name, "there is no target to compare at; name one with --target-reward")
    late = [who for who, target in (("this run", ours), (name, theirs)) if target.confirmed is None]
    if ours.confirmed is None or theirs.confirmed is None:
        return _incomparable(name, f"{ours.metric} {ours.value:g} was not reached by {' and '.join(late)}")
    return Saving(
        kind="run",
        against=name,
        micro_usd=theirs.confirmed.micro_usd,
        saved_micro_usd=theirs.confirmed.micro_usd - ours.confirmed.micro_usd,
        why=f"dollars until {ours.metric} {ours.value:g} was confirmed in both runs; n=1 each, no interval",
        ours=ours.factors,
        theirs=theirs.factors,
    )


def _incomparable(name: str, why: str) -> Saving:
    return Saving(kind="run", against=name, micro_usd=None, saved_micro_usd=None, why=why)


# --- time ---------------------------------------------------------------------------------------------


def _ended_ms(session: Session, run: Run) -> int | None:
    status = current_status(session, run)
    return status.at_ms if status is not None and status.status in ENDED else None


def _utc(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")
