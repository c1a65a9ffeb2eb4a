"""The file of a selftest that a user can send back: every comparison, and no account, identity, bucket or secret."""

import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from launcher.selftest.conduct import Result
from launcher.selftest.facts import Facts
from launcher.selftest.steps import PURPOSE, Step, Verdict

PACKAGES = ("spotrl", "skypilot", "boto3", "google-cloud-compute")

ACCOUNT_NUMBER = re.compile(r"(?<!\d)\d{12}(?!\d)")
"""An AWS account in an error message."""

E_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLine:
    """One step. `verdict`: passed, failed, not tested, interrupted, or not reached because an earlier step ended."""

    step: str
    purpose: str
    verdict: str
    text: str
    seconds: float
    compared: list[dict[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelftestOutcome:
    """The outcome of a selftest, printed by `spotrl selftest --json` and written to its file."""

    schema_version: int
    cloud: str
    run: str
    passed: bool
    failed_steps: list[str]
    steps: list[StepLine]
    spent_micro_usd: int
    max_total_micro_usd: int
    still_running: list[str]
    """What may still cost money. `spotrl down RUN` stops it."""
    versions: dict[str, str]
    exit_code: int


def outcome_of(run: str, facts: Facts, results: Sequence[Result], exit_code: int) -> SelftestOutcome:
    """Return the outcome, with a line for every step."""
    by_step = {result.step: result for result in results}
    lines = []
    for step in Step:
        result = by_step.get(step)
        lines.append(
            StepLine(
                step=step.value,
                purpose=PURPOSE[step],
                verdict=result.judgement.verdict.value if result else "not reached",
                text=result.judgement.text if result else "",
                seconds=result.seconds if result else 0.0,
                compared=[asdict(comparison) for comparison in result.judgement.compared] if result else [],
            )
        )
    failed = [line.step for line in lines if line.verdict == Verdict.FAILED.value]
    return SelftestOutcome(
        schema_version=1,
        cloud=facts.cloud,
        run=run,
        passed=not failed and exit_code == 0,
        failed_steps=failed,
        steps=lines,
        spent_micro_usd=facts.spent_micro_usd + facts.beside_micro_usd,
        max_total_micro_usd=facts.max_total_micro_usd,
        still_running=[*facts.still_running, *(facts.in_cloud or ())],
        versions={name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        exit_code=exit_code,
    )


def sendable(outcome: SelftestOutcome, private: Sequence[str]) -> dict[str, Any]:
    """Return the outcome as JSON values without the texts in `private` (account, identity, bucket, user, host)."""
    words = sorted({word for word in private if len(word) > 2}, key=len, reverse=True)
    return dict(_cleaned(asdict(outcome), words))


def _cleaned(value: Any, private: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {key: _cleaned(part, private) for key, part in value.items()}
    if isinstance(value, list):
        return [_cleaned(part, private) for part in value]
    if not isinstance(value, str):
        return value
    for word in private:
        value = value.replace(word, "(private)")
    return E_MAIL.sub("(e-mail)", ACCOUNT_NUMBER.sub("(account)", value))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
