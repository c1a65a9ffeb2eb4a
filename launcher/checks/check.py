"""The lines of `spotrl check`: each line's verdict, and the exit code that follows from all lines."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from launcher.clouds.base import CloudUnreachable, LoginNeeded
from launcher.exit_codes import ExitCode, Failure

AT_ONCE = 16

SHOWN = 6
"""Number of names printed from a long list."""


class Verdict(StrEnum):
    """The result of a check. WARN: the launch may still succeed."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of output. `code`: exit code of the command if the check failed."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""
    code: ExitCode = ExitCode.FAILURE


CheckGroup = Callable[[], Iterable[Check]]


def run_checks(groups: Sequence[tuple[str, CheckGroup]]) -> list[Check]:
    """Run all checks at the same time and return their lines in order. A Failure becomes a line too."""

    def answer(named: tuple[str, CheckGroup]) -> list[Check]:
        subject, ask = named
        try:
            return list(ask())
        except Failure as failure:
            return [failed(subject, failure)]
        except Exception as error:  # a broken check must not hide the results of the rest
            text = f"this check itself failed ({type(error).__name__}: {error})"
            return [Check(what=subject, verdict=Verdict.FAIL, found=text)]

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return [check for checks in pool.map(answer, groups) for check in checks]


def failed(subject: str, failure: Failure) -> Check:
    """Convert an error to a line. Our errors have the form `found; remedy`."""
    text, _, remedy = str(failure).partition("; ")
    if isinstance(failure, CloudUnreachable) and not isinstance(failure, LoginNeeded):
        remedy = "see that it can be reached from here, then check again"
    return Check(what=subject, verdict=Verdict.FAIL, found=text, remedy=remedy, code=failure.exit_code)


def ending(checks: Iterable[Check]) -> ExitCode:
    """Return the exit code.

    Credentials come before the job, and the job before everything else: without credentials no other result is
    reliable.
    """
    codes = {check.code for check in checks if check.verdict is Verdict.FAIL}
    priority = (ExitCode.CREDENTIALS, ExitCode.INVALID_JOB)
    return next((code for code in priority if code in codes), ExitCode.FAILURE if codes else ExitCode.OK)


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
