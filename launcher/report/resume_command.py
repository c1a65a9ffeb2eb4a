"""The `spotrl resume` command that continues a stopped run, with more money where a budget stopped the run."""

from sqlalchemy.orm import Session

from engine.events import JUDGES_USED_UP
from launcher.decide.facts import Stage
from launcher.ledger.accounting import judge_budget
from launcher.ledger.models import Removal, Run, RunStatus
from launcher.ledger.node_history import metered_micro_usd as metered
from launcher.money import exact_dollars

MORE = 2
"""The suggested budget, as a multiple of the budget that is used up."""


def resume_command(session: Session, run: Run, status: RunStatus | None, now_ms: int) -> str:
    """Return the command that continues a stopped run. Empty for any other run, and for one whose files were removed.

    `status`: the newest one. `now_ms` is on the run's clock.
    """
    if status is None or status.status != Stage.STOPPED or session.get(Removal, run.id) is not None:
        return ""
    return resume_with_more(run, status.reason, metered(session, run, now_ms)) or plain_resume(run.name)


def plain_resume(run_name: str) -> str:
    """Return the command that continues a run with its own limits."""
    return f"spotrl resume {run_name}"


def resume_with_more(run: Run, reason: str, metered_micro_usd: int) -> str:
    """Return the command that continues a run which a budget of its own stopped, or "" for any other reason.

    `reason`: of the run's end. `metered_micro_usd`: spent on nodes. More money of the judges is added to the total, so
    the nodes keep their part.
    """
    total, judges = run.max_total_micro_usd, judge_budget(run)
    if reason.startswith(JUDGES_USED_UP):
        command = f"spotrl resume {run.name} --max-judges {_written(MORE * judges)}"
        if total is None:
            return command
        return f"{command} --max-total {_written(max(total, metered_micro_usd + judges) + (MORE - 1) * judges)}"
    if reason == "budget" and total is not None:
        return f"spotrl resume {run.name} --max-total {_written(MORE * total)}"
    return ""


def _written(micro_usd: int) -> str:
    """Return an amount as the command takes it. A dollar sign would be the shell's."""
    return exact_dollars(micro_usd).removeprefix("$")
