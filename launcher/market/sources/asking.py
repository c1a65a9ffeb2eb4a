"""Query a cloud: many queries at once, a limit to the waiting time, and errors that name the next step.

Retries happen inside each cloud's own client, bounded by `Patience`. This module never repeats a query, because two
layers of retries multiply.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from engine.installation import install_command
from launcher.exit_codes import ExitCode, Failure

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 8
"""Queries in progress to one cloud. The pricing API throttles above about ten a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Limits after which a query is given up."""

    attempts: int = 5
    """Limit for AWS's client, which waits up to 20 s between two attempts."""
    seconds: float = 60.0
    """Limit for Google's client, which counts time instead of attempts."""


class MissingCredentials(Failure):
    """The cloud does not know the caller, or denies access."""

    exit_code = ExitCode.CREDENTIALS


class SourceFailed(Failure):
    """The cloud did not answer, or sent an unreadable answer."""


def ask_all(questions: Sequence[T], ask: Callable[[T], Iterable[R]]) -> tuple[list[R], list[Failure]]:
    """Return every answer, and the failures of the queries without an answer.

    If no query was answered, raises the first failure; a failure about credentials comes first.
    """
    answers: list[R] = []
    failures: list[Failure] = []

    def answer(question: T) -> list[R]:
        return list(ask(question))

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        for future in [pool.submit(answer, question) for question in questions]:
            try:
                answers += future.result()
            except Failure as failure:
                failures.append(failure)
    if failures and len(failures) == len(questions):
        raise min(failures, key=lambda failure: failure.exit_code is not ExitCode.CREDENTIALS)
    return answers, failures


def not_installed(module: str) -> Failure:
    return Failure(f"{module} is not installed, and prices are asked for with it; `{install_command('prices')}`")
