"""Check the job and the age of the prices that its plan uses."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from launcher.checks.check import Check, Verdict, failed
from launcher.checks.preflight import ask_prompt_warnings, check_disk, check_secrets, check_sinks
from launcher.checks.ready import check_job
from launcher.exit_codes import ExitCode, Failure
from launcher.job.checked import CheckedJob
from launcher.market.offers import Age, age_of, age_text
from launcher.placement.plan import Plan


def job_lines(checked: CheckedJob, plan: Plan, environ: Mapping[str, str], runs: Path) -> list[Check]:
    """Return the job's problems, found by the same checks as `launch` runs before a purchase."""
    looks: list[Callable[[], None]] = [
        partial(check_job, checked, plan.slots),
        partial(check_secrets, checked, environ),
        partial(check_sinks, checked),
        partial(check_disk, runs),
    ]
    problems = []
    for look in looks:
        try:
            look()
        except Failure as failure:
            problems.append(failed("job", failure))
    if problems:
        return problems
    names = f", secrets {', '.join(checked.job.secrets)} set" if checked.job.secrets else ""
    fine = Check(what="job", verdict=Verdict.OK, found=f"{checked.job.name}: limits and buckets named{names}")
    try:
        warnings = [warning.rpartition("; ") for warning in ask_prompt_warnings(checked)]
    except Failure as failure:
        return [failed("job", failure)]
    return [
        fine,
        *(Check(what="prompts", verdict=Verdict.WARN, found=text, remedy=to_do) for text, _, to_do in warnings),
    ]


def prices(plan: Plan, now_ms: int) -> list[Check]:
    """Check the oldest price used by the plan."""
    order = [Age.FRESH, Age.OLD, Age.EXPIRED, Age.UNKNOWN]
    worst = max(
        (slot.placement for slot in plan.slots),
        key=lambda place: order.index(age_of(place.price_observed_at, place.market, now_ms)),
    )
    age = age_of(worst.price_observed_at, worst.market, now_ms)
    age_words = age_text(worst.price_observed_at, now_ms)
    text = f"{worst.market.value} price of {worst.instance_type} in {worst.zone}: {age_words}"
    verdict = {Age.FRESH: Verdict.OK, Age.OLD: Verdict.WARN}.get(age, Verdict.FAIL)
    remedy = "" if verdict is Verdict.OK else "`spotrl catalog refresh`, or launch with --allow-old-prices"
    return [Check(what="prices", verdict=verdict, found=text, remedy=remedy, code=ExitCode.STALE_CATALOG)]
