"""Exit codes of commands, one per kind of result, and the error that carries an exit code to the user.

Every `Failure` names the problem found and the next step. `launcher/cli/main.py` prints the message and exits with the
failure's code.
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes for scripts."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INVALID_JOB = 3
    CREDENTIALS = 4
    REFUSED_BY_BUDGET = 6
    STOPPED_BY_BUDGET = 7
    DEADLINE_MISSED = 8
    STALE_CATALOG = 9
    TEARDOWN_INCOMPLETE = 10
    WARNINGS = 11
    """`launch --strict` and a plan with warnings; nothing was started."""
    PLAN_CHANGED = 12
    """`launch --plan` and a plan that no longer holds; nothing was started."""
    INTERRUPTED = 130


class Failure(Exception):
    """A problem that a person can fix. The message names the problem found and the remedy."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE


class BudgetError(Failure):
    """The budget does not allow the request; the command started nothing."""

    exit_code: ClassVar[ExitCode] = ExitCode.REFUSED_BY_BUDGET


WORDS_CHARACTERS = 300
"""Most characters of an error in one line."""


def words_of(error: BaseException) -> str:
    """Return an error in one line: the text of a Failure, or the kind and the text of a bug."""
    text = " ".join((str(error).splitlines() or [""])[0].split())
    if isinstance(error, Failure) and text:
        return text[:WORDS_CHARACTERS]
    return f"{type(error).__name__}: {text}"[:WORDS_CHARACTERS]
