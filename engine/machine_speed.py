"""Measure the speed of this machine under its current load. The clock factor of a local run depends on the result."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch

REFERENCE_S = 0.75
"""Maximum seconds of `work_seconds` on the reference machine, two cores without other load. The measured range was .49
to .71 (n = 24)."""

REPEATS = 3_000
WARM_UP = 100
SIZE = 192
"""Rows of the matrix: about the size of a matrix product in a layer of the shipped models."""


def slowness() -> float:
    """Return this machine's time divided by the reference machine's, at least 1."""
    return max(1.0, work_seconds() / REFERENCE_S)


def work_seconds() -> float:
    """Measure the seconds two threads take for a fixed amount of work in parallel, one core each."""
    _work(WARM_UP)
    begun = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(_work, (REPEATS, REPEATS)))
    return time.perf_counter() - begun


def _work(repeats: int) -> None:
    matrix = torch.full((SIZE, SIZE), 1 / SIZE)
    for _ in range(repeats):
        matrix = torch.tanh(matrix @ matrix)
