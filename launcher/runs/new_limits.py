"""New limits for a run that continues: `spotrl resume RUN --max-total 60`."""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy.orm import Session

from launcher.exit_codes import BudgetError
from launcher.job.sections import runtime_problem
from launcher.ledger.accounting import judge_budget
from launcher.ledger.models import Run
from launcher.ledger.node_history import metered_micro_usd
from launcher.money import dollars, duration


class LimitTooLow(BudgetError):
    """The run has already spent its new budget, or would end before its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewLimits:
    """Limits that replace those of the launch. None: unchanged.

    `max_judges_micro_usd`: of all paid judges, with what they have spent, and a part of `max_total_micro_usd`.
    `deadline_ms`: time from now in which the run should be done; `max_runtime_ms`: time from now until it must end.
    Both are on the run's clock. A new deadline alone is also the end.
    """

    max_total_micro_usd: int | None = None
    max_hourly_micro_usd: int | None = None
    max_judges_micro_usd: int | None = None
    deadline_ms: int | None = None
    max_runtime_ms: int | None = None

    def apply(self, session: Session, run: Run, now_ms: int) -> str:
        """Write the limits to the run's row, and return what changed, in words ("" for nothing).

        Only a controller that starts later reads them, and only a coordinator that starts later reads the judges'.
        Raises LimitTooLow if the run has spent `max_total_micro_usd`, for a judges' budget that is not larger, or that
        leaves nodes no money, and for an end before the deadline, as a launch does.
        """
        self._check(session, run, now_ms)
        self._check_end(run, now_ms)
        changes = ", ".join(self._changes(run))
        if self.max_total_micro_usd is not None:
            run.max_total_micro_usd = self.max_total_micro_usd
        if self.max_hourly_micro_usd is not None:
            run.max_hourly_micro_usd = self.max_hourly_micro_usd
        if self.max_judges_micro_usd is not None:
            run.max_judges_micro_usd = self.max_judges_micro_usd
        if self.deadline_ms is not None:
            run.deadline_ms = run.ends_ms = now_ms + self.deadline_ms
        if self.max_runtime_ms is not None:
            run.ends_ms = now_ms + self.max_runtime_ms
        return changes

    def _check(self, session: Session, run: Run, now_ms: int) -> None:
        judges = judge_budget(run)
        if self.max_judges_micro_usd is not None:
            if not judges:
                raise LimitTooLow(f"--max-judges is set, and {run.name} has no paid judge; leave it out")
            if self.max_judges_micro_usd <= judges:
                raise LimitTooLow(
                    f"--max-judges is {dollars(self.max_judges_micro_usd)}, and the judges of {run.name} have "
                    f"{dollars(judges)}; name a larger budget, which includes the money spent"
                )
            judges = self.max_judges_micro_usd
        elif self.max_total_micro_usd is None:
            return
        max_total = run.max_total_micro_usd if self.max_total_micro_usd is None else self.max_total_micro_usd
        spent = metered_micro_usd(session, run, now_ms) + judges
        if max_total is not None and max_total <= spent:
            new = "--max-total" if self.max_total_micro_usd is not None else "budget.max_total"
            raise LimitTooLow(
                f"{new} is {dollars(max_total)}, and {run.name} has already spent "
                f"{dollars(spent)}{' with the budget of its judges' if judges else ''}; name a larger "
                f"{'total' if self.max_total_micro_usd is not None else '--max-total'}, which includes the money spent"
            )

    def _check_end(self, run: Run, now_ms: int) -> None:
        """Compare the new end with the new deadline, or with the time left to the run's own."""
        deadline, goal_ms = "--deadline", self.deadline_ms
        if goal_ms is None and run.deadline_ms is not None:
            deadline, goal_ms = f"the time to the deadline of {run.name},", run.deadline_ms - now_ms
        problem = runtime_problem(("--max-runtime", self.max_runtime_ms), (deadline, goal_ms))
        if problem is not None:
            raise LimitTooLow(f"{problem}; use a longer --max-runtime, or a --deadline that is not later")

    def _changes(self, run: Run) -> Iterator[str]:
        if self.max_total_micro_usd is not None:
            yield f"max_total {_amount(run.max_total_micro_usd)} -> {dollars(self.max_total_micro_usd)}"
        if self.max_hourly_micro_usd is not None:
            old, new = _amount(run.max_hourly_micro_usd), dollars(self.max_hourly_micro_usd)
            yield f"max_hourly {old} -> {new}"
        if self.max_judges_micro_usd is not None:
            yield f"max_judges {dollars(judge_budget(run))} -> {dollars(self.max_judges_micro_usd)}"
        if self.deadline_ms is not None and self.max_runtime_ms is not None:
            yield f"deadline in {duration(self.deadline_ms)}"
        longest_ms = self.deadline_ms if self.max_runtime_ms is None else self.max_runtime_ms
        if longest_ms is not None:
            yield f"ends in {duration(longest_ms)} at the latest"


UNCHANGED = NewLimits()


def _amount(micro_usd: int | None) -> str:
    return "unlimited" if micro_usd is None else dollars(micro_usd)
