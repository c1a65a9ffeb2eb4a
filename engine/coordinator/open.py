"""Open a coordinator in a folder, with the rules of a job."""

from pathlib import Path

from engine.clock import Clock, run_ms
from engine.config import RewardConfig, RuntimeConfig
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.journal import Journal
from engine.coordinator.weight_book import WeightBook
from engine.queue.pace import Rules
from engine.storage.judge_fund import JudgeFund
from engine.storage.progress import ProgressLog


def open_coordinator(
    folder: Path,
    *,
    clock: Clock,
    run_clock: Clock | None = None,
    runtime: RuntimeConfig,
    progress: ProgressLog | None = None,
    fund: JudgeFund | None = None,
) -> Coordinator:
    """Open the coordinator with its journal and weights in `folder`. `fund`: the budget of paid judges, if any.

    `clock`: of leases. `run_clock`: of the run; None: `clock`.
    """
    rules = Rules(
        lease_ms=run_ms(clock, runtime.lease_seconds),
        first_lease_ms=run_ms(clock, runtime.first_lease_seconds),
        commit_every=_commit_every(runtime),
        preemption_ms=round(runtime.hours_to_preemption * 3_600_000),
    )
    return Coordinator(
        Journal(folder),
        WeightBook(folder / "weights"),
        clock=clock,
        run_clock=run_clock,
        rules=rules,
        progress=progress,
        sp_degree=runtime.sp_degree,
        fund=fund,
    )


def fund_of(reward: RewardConfig, store: str, limit: int | None = None) -> JudgeFund | None:
    """Return the budget of a job's paid judges in the run's store, or None without a paid judge.

    `limit`: the budget in micro-dollars. None: as the job says.
    """
    limit = reward.judge_micro_usd if limit is None else limit
    return JudgeFund(store, limit) if reward.judge_micro_usd else None


def _commit_every(runtime: RuntimeConfig) -> int | None:
    if runtime.resume == "restart":
        return 0  # with `restart`, no worker resumes from a commit
    return None if runtime.commit_every == "auto" else runtime.commit_every
