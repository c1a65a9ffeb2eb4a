"""CPU seconds of a call, as the reference computer of `tests.tiers` would take them.

A slower or busier computer takes more CPU seconds for the same call. So a fixed amount of work is measured before and
after the call, and the seconds of the call are divided by the slowness of that work. A faster computer counts as the
reference, because one small measurement predicts another call badly.
"""

import resource
import time
from collections.abc import Callable

from tests.tiers import REFERENCE_S, ROUNDS, fixed_work

MEASURED_ROUNDS = ROUNDS // 10
"""Work before and after a call: a tenth of the work of `tests.tiers`."""


def takes_less_than(seconds: float, call: Callable[[], object], times: int = 3) -> bool:
    """Return whether one of several calls takes less than `seconds` of CPU time on the reference computer."""
    return any(reference_seconds(call) < seconds for _ in range(times))


def reference_seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call on the reference computer, with the processes that the call waits for."""
    before = _measured_work()
    seconds = _seconds(call)
    work_s = (before + _measured_work()) / 2
    slowness = work_s * ROUNDS / MEASURED_ROUNDS / REFERENCE_S
    return seconds / max(1.0, slowness)


def _measured_work() -> float:
    return _seconds(lambda: fixed_work(MEASURED_ROUNDS))


def _seconds(call: Callable[[], object]) -> float:
    begun = _spent()
    call()
    return _spent() - begun


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
