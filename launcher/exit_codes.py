"""How a command ends: one number for each kind of answer, and the error that carries it to a person.

Every `Failure` says what was found and what to do next; `launcher/cli/main.py` prints it and exits with its code.
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What a script may rely on."""

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
    INTERRUPTED = 130


class Failure(Exception):
    """Something that a person can put right. The message is complete: what was found, what would do."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE


class BudgetError(Failure):
    """The budget does not allow what was asked for; nothing was started."""

    exit_code: ClassVar[ExitCode] = ExitCode.REFUSED_BY_BUDGET
