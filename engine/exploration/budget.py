"""Exploration budget: the number of further candidates for the time that training leaves GPUs idle.

The budget is *predicted idle GPU-seconds*: live spot GPUs times the seconds until the trainer's expected end. The
caller asks again after every change (a node comes or goes, a candidate finishes), and the module therefore stores
nothing. Training longer than predicted allows more candidates. Surplus candidates are cut off and cost only their own
time.
"""

from collections.abc import Sequence

QUANTILE = 0.25
"""Quantile of the last training phases: three of four take longer, and a chunk is therefore rarely cut off."""

GUARD_SECONDS = 0.5
"""Time kept free at the end, for results in transit and for choosing seeds. Assumed."""

GUARD_SHARE = 0.1
"""Upper limit of the free time as a share of a training phase, for short phases."""

PHASES = 16
"""Number of training phases that count: older phases had another trainer, batch or load."""

FIRST_CANDIDATES_PER_GPU = 8
"""Candidates per idle GPU before any measurement. The next candidates follow once these are finished."""


def seconds_until_trained(
    phase_seconds: Sequence[float],
    *,
    elapsed_seconds: float,
    quantile: float = QUANTILE,
    guard_seconds: float = GUARD_SECONDS,
) -> float | None:
    """Return the seconds until the running training phase ends, cautiously. None: no phase was ever measured.

    phase_seconds    durations of earlier phases, newest last
    elapsed_seconds  time since the start of the running phase
    returns          the `quantile` of the earlier phases longer than `elapsed_seconds`, minus the elapsed time and the
                     guard (at most `GUARD_SHARE` of the phase); 0 if no phase was longer: the rest is then unknown
    raises           ValueError: a quantile outside 0 to 1
    """
    if not 0.0 <= quantile <= 1.0:
        raise ValueError(f"the quantile of training phases is {quantile}; use 0 (the shortest) to 1 (the longest)")
    if not phase_seconds:
        return None
    longer = sorted(seconds for seconds in phase_seconds[-PHASES:] if seconds > elapsed_seconds)
    if not longer:
        return 0.0
    expected = longer[int(quantile * (len(longer) - 1))]
    return max(0.0, expected - elapsed_seconds - min(guard_seconds, GUARD_SHARE * expected))


def candidates_that_fit(
    seconds_left: float | None, *, gpus: int, gpu_seconds_per_candidate: float | None, pending: int = 0
) -> int:
    """Return the number of candidates to request now. 0: no idle GPU, no idle time, or enough pending candidates.

    seconds_left               of `seconds_until_trained`; None: not known
    gpus                       live spot GPUs, which would be idle
    gpu_seconds_per_candidate  measured, scoring included; None: not known
    pending                    candidates requested and not finished, which use a part of the time

    If the time or the cost is unknown, as in a run's first iteration, every GPU gets `FIRST_CANDIDATES_PER_GPU` at a
    time.
    """
    if gpus <= 0 or (seconds_left is not None and seconds_left <= 0.0):
        return 0
    if seconds_left is None or gpu_seconds_per_candidate is None:
        return max(0, gpus * FIRST_CANDIDATES_PER_GPU - pending)
    if gpu_seconds_per_candidate <= 0.0:
        raise ValueError(
            f"a candidate takes {gpu_seconds_per_candidate} GPU-seconds; give what was measured, above 0, or None"
        )
    return max(0, int(seconds_left * gpus / gpu_seconds_per_candidate) - pending)
