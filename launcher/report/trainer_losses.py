"""What the losses of a run's trainer cost: the work since the last checkpoint, and the time until the next trainer."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.events import CheckpointSaved, EngineStarted
from launcher.ledger.accounting import RunCosts
from launcher.ledger.models import ProgressRow, Run
from launcher.report.values import PreemptionLine, TrainerLosses


def trainer_losses_of(
    session: Session, run: Run, costs: RunCosts, preemptions: Sequence[PreemptionLine], end_ms: int
) -> TrainerLosses | None:
    """Return the sums over all preemptions of the trainer. None: the trainer was never preempted.

    Seconds are of the run's clock, dollars those of all nodes in that time. Work is lost from the last checkpoint, or
    from the start of the trainer if that is later, until the loss.
    """
    lost = [line for line in preemptions if line.role == "trainer"]
    if not lost:
        return None
    kinds = (CheckpointSaved.KIND, EngineStarted.KIND)
    kept_ms = session.scalars(
        select(ProgressRow.at_ms).where(ProgressRow.run_id == run.id, ProgressRow.kind.in_(kinds))
    ).all()
    work_ms = work_micro_usd = wait_ms = wait_micro_usd = 0
    for line in lost:
        since_ms = max((at_ms for at_ms in kept_ms if at_ms <= line.at_ms), default=line.at_ms)
        until_ms = end_ms if line.replaced_after_s is None else line.at_ms + round(1000 * line.replaced_after_s)
        work_ms += line.at_ms - since_ms
        work_micro_usd += costs.until(line.at_ms) - costs.until(since_ms)
        wait_ms += max(0, until_ms - line.at_ms)
        wait_micro_usd += costs.until(max(until_ms, line.at_ms)) - costs.until(line.at_ms)
    return TrainerLosses(
        losses=len(lost),
        promotions=sum(line.recovered_by == "a promotion" for line in lost),
        made_again_seconds=work_ms / 1000,
        made_again_micro_usd=work_micro_usd,
        without_trainer_seconds=wait_ms / 1000,
        without_trainer_micro_usd=wait_micro_usd,
    )
