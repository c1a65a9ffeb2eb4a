"""Measure the speed of this machine, beside whatever else runs on it. The clock of a local run is set by it."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch

REFERENCE_S = 0.75
"""Seconds that `work_seconds` takes at most on the reference machine, two cores with nothing else running. It took .49
to .71 there (n = 24)."""

REPEATS = 3_000
WARM_UP = 100
SIZE = 192
"""A matrix of so many rows: about what a layer of the shipped models multiplies."""


def slowness() -> float:
    """Return how many times longer this machine takes than the reference machine: 1 or more."""
    return max(1.0, work_seconds() / REFERENCE_S)


def work_seconds() -> float:
    """Measure how long two threads take for a fixed amount of work side by side, one core each."""
    _work(WARM_UP)
    begun = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(_work, (REPEATS, REPEATS)))
    return time.perf_counter() - begun


def _work(repeats: int) -> None:
    matrix = torch.full((SIZE, SIZE), 1 / SIZE)
    for _ in range(repeats):
        matrix = torch.tanh(matrix @ matrix)
