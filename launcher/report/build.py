"""The report of a run as one value: target, costs, splits of the costs, and the cost of preemptions.

ledger -> costs and curve -> target, gains, preemptions, comparisons -> Report (terminal, JSON and HTML print the value)

The report measures and assumes nothing: every number is a fact in the ledger or computed from facts. The basis of
each number is reported with the number: `money_basis`, price sources with their age, and the baseline of each saving.
"""

from datetime import UTC, datetime

from sqlalchemy.orm import Session

from engine.events import EngineStarted, Evaluated, IterationDone, Phase, Ranked, Regrouped
from launcher.decide.point_cost import point_cost
from launcher.ledger.accounting import run_costs
from launcher.ledger.left_in_buckets import left_in_buckets
from launcher.ledger.models import LOCAL, Run
from launcher.ledger.store import current_status, nodes_of, progress_of, reading_once
from launcher.money import HOUR_MS
from launcher.placement.plan import front_from
from launcher.report.bill import bill_of
from launcher.report.costs import costs_of, extra_lines, money_note, node_line_of, price_effect_of, price_sources_of
from launcher.report.exploration import exploration_of
from launcher.report.preemptions import preemption_lines
from launcher.report.provenance import provenance_of
from launcher.report.ranks import collectives_of, trainer_time_of
from launcher.report.reached import (
    ENDED,
    GAINS,
    by_iteration,
    climb_of,
    drift_points,
    guard_limits,
    images_of,
    learning_of,
    moment_of,
    per_hundredth,
    score_points,
    target_of,
)
from launcher.report.resume_command import resume_command
from launcher.report.savings import NOT_MODELLED, NOT_MODELLED_ON_CLOUDS, saving_against, savings_of
from launcher.report.schedule import schedule_of
from launcher.report.sharing import sharing_of
from launcher.report.stand_ins import move_lines, stand_in_lines
from launcher.report.target import dollars_per_gain, smoothed
from launcher.report.throughput import throughput_of
from launcher.report.trainer_losses import trainer_losses_of
from launcher.report.values import SCHEMA, Report, RunFacts
from launcher.without_secrets import without_secrets


def build_report(
    session: Session, run: Run, now_ms: int, target_reward: float | None = None, against: Run | None = None
) -> Report:
    """Return the report of `run` at `now_ms` (run's clock).

    `target_reward` replaces the target of the job. `against` is another run, the baseline of a saving.
    """
    with reading_once(session):
        return _report(session, run, now_ms, target_reward, against)


def _report(session: Session, run: Run, now_ms: int, target_reward: float | None, against: Run | None) -> Report:
    costs = run_costs(session, run, now_ms)
    bill = bill_of(session, run, costs, now_ms)
    basis = run.money_basis if bill is None or bill.basis != "billed" else bill.basis
    status = current_status(session, run)
    end = status if status is not None and status.status in ENDED else None
    end_ms = now_ms if end is None else end.at_ms
    target, curve = target_of(session, run, costs, target_reward)
    preemptions = preemption_lines(session, run, costs)
    images = images_of(session, run, target.metric)
    started = progress_of(session, run, EngineStarted.KIND)
    devices = str(started[-1].event.get("devices", "")) if started else ""
    iterations = [row.event for row in by_iteration(session, run, IterationDone.KIND).values()]
    saved = [savings_of(costs, preemptions)]
    if against is not None:
        # `against` has its own clock, so count its costs only up to its last evaluation.
        until_ms = max((row.at_ms for row in progress_of(session, against, Evaluated.KIND)), default=against.created_ms)
        theirs, _ = target_of(
            session, against, run_costs(session, against, until_ms), target.value, target.metric, guard_limits(run)
        )
        saved.insert(0, saving_against(target, against.name, theirs))
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
            wall_seconds=run.wall_seconds(end, now_ms),
            clock_factor=run.clock_factor,
            iterations=len(iterations),
            lineages=len({row.lineage for row in started}),
            job_digest=run.job_digest,
            code_version=run.code_version,
            lock_digest=run.lock_digest,
            seeds=(run.seed,),
            devices=devices,
            started_from=str(started[-1].event.get("started_from", "")) if started else "",
        ),
        money_basis=basis,
        money_note=money_note(basis, nodes_of(session, run)),
        target=target,
        costs=costs_of(costs),
        curve=tuple(moment_of(run, point) for point in smoothed(curve)),
        drift=drift_points(session, run),
        scores=score_points(session, run, costs),
        point=point_cost(smoothed(curve)),
        gains=dollars_per_gain(curve, step=max(0.01, climb_of(curve)[0] / GAINS)),
        micro_usd_per_hundredth=per_hundredth(curve),
        extras=extra_lines(session, run, costs, now_ms),
        nodes=tuple(node_line_of(node) for node in costs.nodes),
        preemptions=preemptions,
        stand_ins=stand_in_lines(session, run, costs),
        trainer_losses=trainer_losses_of(session, run, costs, preemptions, end_ms),
        moves=move_lines(session, run),
        exploration=exploration_of(
            iterations,
            [row.event for row in by_iteration(session, run, Ranked.KIND).values()],
            costs.by_phase.get(Phase.EXPLORATION, 0),
        ),
        sharing=sharing_of([row.event for row in progress_of(session, run, Regrouped.KIND)]),
        price_effect=price_effect_of(costs),
        saved=tuple(saved),
        prices=price_sources_of(nodes_of(session, run)),
        pictures_before=images[0] if images else None,
        pictures_after=images[-1] if len(images) > 1 else None,
        start_ms=run.created_ms,
        end_ms=max([end_ms, *(charge.end_ms for node in costs.nodes for charge in node.charges)]),
        notes=NOT_MODELLED if run.infra == LOCAL else NOT_MODELLED_ON_CLOUDS,
        learning=learning_of(session, run),
        pictures=tuple(images),
        job_text=without_secrets(run.job_yaml),
        provenance=provenance_of(session, run, end),
        schedule=schedule_of(iterations),
        collectives=collectives_of(iterations, costs.by_phase.get(Phase.COLLECTIVE, 0), run.clock_factor),
        trainer_time=trainer_time_of(costs.nodes),
        throughput=throughput_of(run, iterations, costs.nodes, nodes_of(session, run), devices),
        resume_with=resume_command(session, run, status, now_ms),
        bill=bill,
        fleets=front_from(run.plan),
        left_in_buckets=left_in_buckets(session, [run.id]).get(run.id, ()) if end is not None else (),
    )


def _utc(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")
