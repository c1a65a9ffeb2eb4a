"""Asking a cloud: many questions at once, a limit to patience, and errors that say what to do.

Retries live inside each cloud's own client, bounded by `Patience`; nothing here repeats a question, because two layers
that retry multiply (research notes cost 1.2).
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from launcher.exit_codes import ExitCode, Failure

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 8
"""Questions under way to one cloud. The pricing API throttles above about ten a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """When to give up on one question."""

    attempts: int = 5
    """AWS's client counts; it waits up to 20 s between two."""
    seconds: float = 60.0
    """Google's client looks at the clock."""


class MissingCredentials(Failure):
    """The cloud does not know who asks, or does not let them."""

    exit_code = ExitCode.CREDENTIALS


class SourceFailed(Failure):
    """The cloud did not answer, or not in its own language."""


def ask_all(questions: Sequence[T], ask: Callable[[T], Iterable[R]]) -> tuple[list[R], list[Failure]]:
    """Every answer, and the failures of those questions that had none.

    Raises the first failure when no question was answered; one about credentials before any other.
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
    return Failure(f"{module} is not installed, and prices are asked for with it; `pip install 'spotrl[prices]'`")
