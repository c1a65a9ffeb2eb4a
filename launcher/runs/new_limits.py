"""New limits for a run that continues: `spotrl resume RUN --max-total 60`."""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy.orm import Session

from launcher.exit_codes import BudgetError
from launcher.ledger.accounting import judge_budget
from launcher.ledger.models import Run
from launcher.ledger.node_history import metered_micro_usd
from launcher.money import dollars, duration


class LimitTooLow(BudgetError):
    """The run has already spent its new budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewLimits:
    """Limits that replace those of the launch. None: unchanged.

    `deadline_ms`: time from now in which the run should be done; `max_runtime_ms`: time from now until it must end.
    Both are on the run's clock. A new deadline alone is also the end.
    """

    max_total_micro_usd: int | None = None
    max_hourly_micro_usd: int | None = None
    deadline_ms: int | None = None
    max_runtime_ms: int | None = None

    def apply(self, session: Session, run: Run, now_ms: int) -> str:
        """Write the limits to the run's row, and return what changed, in words ("" for nothing).

        Only a controller that starts later reads them. Raises LimitTooLow if the run has spent `max_total_micro_usd`.
        """
        judges = judge_budget(run)
        spent = metered_micro_usd(session, run, now_ms) + judges
        if self.max_total_micro_usd is not None and self.max_total_micro_usd <= spent:
            raise LimitTooLow(
                f"--max-total is {dollars(self.max_total_micro_usd)}, and {run.name} has already spent "
                f"{dollars(spent)}{' with the budget of its judges' if judges else ''}; name a larger total, which "
                "includes the money spent"
            )
        changes = ", ".join(self._changes(run))
        if self.max_total_micro_usd is not None:
            run.max_total_micro_usd = self.max_total_micro_usd
        if self.max_hourly_micro_usd is not None:
            run.max_hourly_micro_usd = self.max_hourly_micro_usd
        if self.deadline_ms is not None:
            run.deadline_ms = run.ends_ms = now_ms + self.deadline_ms
        if self.max_runtime_ms is not None:
            run.ends_ms = now_ms + self.max_runtime_ms
        return changes

    def _changes(self, run: Run) -> Iterator[str]:
        if self.max_total_micro_usd is not None:
            yield f"max_total {_amount(run.max_total_micro_usd)} -> {dollars(self.max_total_micro_usd)}"
        if self.max_hourly_micro_usd is not None:
            old, new = _amount(run.max_hourly_micro_usd), dollars(self.max_hourly_micro_usd)
            yield f"max_hourly {old} -> {new}"
        if self.deadline_ms is not None and self.max_runtime_ms is not None:
            yield f"deadline in {duration(self.deadline_ms)}"
        longest_ms = self.deadline_ms if self.max_runtime_ms is None else self.max_runtime_ms
        if longest_ms is not None:
            yield f"ends in {duration(longest_ms)} at the latest"


UNCHANGED = NewLimits()


def _amount(micro_usd: int | None) -> str:
    return "unlimited" if micro_usd is None else dollars(micro_usd)
