"""How many more candidates fit into the time that training leaves GPUs idle (research notes papers 6.2).

The budget is *predicted idle GPU-seconds*: live spot GPUs times the seconds until the trainer is expected to finish.
Asked again whenever something changes (a node comes or goes, a candidate is finished), so nothing here is remembered.
Training that takes longer than predicted gives more; what is dealt too much is cut and costs nothing but itself.
"""

from collections.abc import Sequence

QUANTILE = 0.25
"""Of the last training phases: three of four take longer, so that a chunk is rarely cut."""

GUARD_SECONDS = 0.5
"""Kept free at the end, for results on their way and for choosing seeds. Assumed."""

GUARD_SHARE = 0.1
"""Of a training phase: no more than this is kept free, however short it is."""

PHASES = 16
"""Training phases that count: older ones had another trainer, batch or load."""

FIRST_CANDIDATES_PER_GPU = 8
"""Given to each idle GPU at a time while nothing was measured yet; the next ones when these are back."""


def seconds_until_trained(
    phase_seconds: Sequence[float],
    *,
    elapsed_seconds: float,
    quantile: float = QUANTILE,
    guard_seconds: float = GUARD_SECONDS,
) -> float | None:
    """Seconds that the running training phase will still take, for nearly sure; None if none was ever measured.

    phase_seconds    durations of earlier phases, newest last
    elapsed_seconds  how long this one has been running
    returns          the `quantile` of those phases that took longer than this one has so far, less the guard (at most
                     `GUARD_SHARE` of it); 0 when none did, as then nothing is known to be left
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
    """How many more candidates to ask for now; 0 without idle GPUs, known idle time, or room beside the pending ones.

    seconds_left               of `seconds_until_trained`; None: not known
    gpus                       live spot GPUs: those that would be idle
    gpu_seconds_per_candidate  measured, its reward's seconds included; None: not known
    pending                    candidates asked for and not told: they take their share of the time

    With one of the two not known, as in a run's first iteration, every GPU gets `FIRST_CANDIDATES_PER_GPU` at a time.
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
