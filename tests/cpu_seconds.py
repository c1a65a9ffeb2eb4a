"""CPU seconds of a call, as the reference computer of `tests.tiers` would take them.

A slower or busier computer takes more CPU seconds for the same call. So a fixed amount of work is measured before and
after it, and the seconds of the call are divided by how much slower that was. A faster computer counts as the
reference: one small measurement predicts another call badly.
"""

import resource
import time
from collections.abc import Callable

from tests.tiers import REFERENCE_S, ROUNDS, fixed_work

SHARE = 10
"""A tenth of the work of `tests.tiers` is measured."""


def takes_less_than(seconds: float, call: Callable[[], object], times: int = 3) -> bool:
    """Return whether one of several calls takes less CPU time than this on the reference computer."""
    return any(reference_seconds(call) < seconds for _ in range(times))


def reference_seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call and of the processes that it starts and waits for."""
    before = _measured_work()
    seconds = _seconds(call)
    slower = (before + _measured_work()) / 2 * SHARE / REFERENCE_S
    return seconds / max(1.0, slower)


def _measured_work() -> float:
    return _seconds(lambda: fixed_work(ROUNDS // SHARE))


def _seconds(call: Callable[[], object]) -> float:
    begun = _spent()
    call()
    return _spent() - begun


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
