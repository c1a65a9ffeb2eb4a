"""Which of the explored seeds are trained: the subset whose rewards differ most; and which others are checked.

A group's gradient vanishes where its rewards agree, so the kept seeds are those of largest reward variance. The best
subset of a given size is always a prefix plus a suffix of the sorted rewards (research notes rl 1.2), which leaves
keep + 1 candidates to compare. So the gradient is that of a selected sample, and no weight makes it one of all seeds:
extremes count for more than they would in a random group. Pure: equal rewards in equal order give equal choices on
every machine.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from math import floor, isfinite

from engine.rollout.request import Group, Stream, seed_of

_TIE = 1e-12
"""Relative difference of variances below which two candidates are equal; the one with more high rewards is kept."""


def max_variance_subset(rewards: Sequence[float], keep: int) -> tuple[int, ...]:
    """Indices, ascending, of the `keep` rewards whose variance is largest. Equal rewards: the lower index first."""
    if not 1 <= keep <= len(rewards):
        raise ValueError(f"asked to keep {keep} of {len(rewards)} rewards; explore at least as many seeds as are kept")
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError("rewards to choose from must be finite; leave out seeds whose reward is NaN or infinite")
    ascending = sorted(range(len(rewards)), key=lambda index: (rewards[index], index))
    lowest = set(ascending[: _best_prefix([rewards[index] for index in ascending], keep)])
    rest = [index for index in range(len(rewards)) if index not in lowest]
    highest = sorted(rest, key=lambda index: (-rewards[index], index))[: keep - len(lowest)]
    return tuple(sorted([*lowest, *highest]))


def variance(values: Sequence[float]) -> float:
    """Population variance; 0 for fewer than two values."""
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


def kept_variance(rewards: Sequence[float], keep: int) -> float:
    """Variance of the rewards that would be kept: what one more explored seed may increase."""
    return variance([rewards[index] for index in max_variance_subset(rewards, keep)])


def control_slice(
    unselected: Sequence[tuple[str, int]], fraction: float, *, run_seed: int, batch: int
) -> tuple[tuple[str, int], ...]:
    """The unselected (prompt, seed) of a batch that are rolled out afresh as well, and never trained.

    A simple random sample without replacement of the share `fraction`, rounded to nearest, at least one: those whose
    blake2b of (run seed, batch, prompt, seed) is smallest, so the order of `unselected` does not matter. Ascending by
    that number, so that what is finished when spot goes is a random sample too. ValueError for a share outside 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a control slice of {fraction} of the unselected seeds; use a share from 0 to 1, e.g. 0.125")
    if fraction == 0 or not unselected:
        return ()
    count = max(1, floor(fraction * len(unselected) + 0.5))

    def drawn(candidate: tuple[str, int]) -> bytes:
        return blake2b(json.dumps(["control slice", run_seed, batch, *candidate]).encode(), digest_size=16).digest()

    return tuple(sorted(unselected, key=drawn)[:count])


def first_seeds(prompts: Sequence[str], count: int, *, run_seed: int, batch: int) -> tuple[Group, ...]:
    """Every prompt with its first so many candidates: a batch that chooses nothing, or chooses later."""
    return tuple(
        Group(
            prompt=prompt,
            seeds=tuple(seed_of(run_seed, Stream.TRAIN, batch, prompt, index) for index in range(count)),
        )
        for prompt in prompts
    )


def choose_groups(
    prompts: Sequence[str], explored: Mapping[tuple[str, int], float], *, run_seed: int, batch: int, keep: int
) -> tuple[Group, ...]:
    """The groups that a batch will train: per prompt the explored seeds of largest reward variance.

    `explored` maps (prompt, seed) to a reward; one that is not finite does not count. A prompt with fewer than `keep`
    results is filled up with its first seeds, in order.
    """
    by_prompt: dict[str, dict[int, float]] = {prompt: {} for prompt in prompts}
    for (prompt, seed), reward in explored.items():
        if prompt in by_prompt and isfinite(reward):
            by_prompt[prompt][seed] = reward
    return tuple(
        Group(prompt=prompt, seeds=_choose(prompt, found, run_seed, batch, keep)) for prompt, found in by_prompt.items()
    )


def _choose(prompt: str, found: Mapping[int, float], run_seed: int, batch: int, keep: int) -> tuple[int, ...]:
    if len(found) >= keep:
        seeds = sorted(found)
        return tuple(seeds[i] for i in max_variance_subset([found[seed] for seed in seeds], keep))
    first = [seed_of(run_seed, Stream.TRAIN, batch, prompt, index) for index in range(keep + len(found))]
    rest = [seed for seed in first if seed not in found]
    return tuple([*sorted(found), *rest][:keep])


def _best_prefix(ascending: Sequence[float], keep: int) -> int:
    """How many of the `keep` are taken from the low end, by prefix sums over the centred rewards."""
    # Centred first, or the difference of two large sums would drown a small variance.
    centre = sum(ascending) / len(ascending)
    centred = [value - centre for value in ascending]
    sums = [0.0, *accumulate(centred)]
    squares = [0.0, *accumulate(value * value for value in centred)]
    best, best_variance = 0, -1.0
    for low in range(keep + 1):
        high = len(ascending) - (keep - low)
        total = sums[low] + sums[-1] - sums[high]
        square = squares[low] + squares[-1] - squares[high]
        spread = square / keep - (total / keep) ** 2
        if spread > best_variance + _TIE * max(abs(best_variance), squares[-1] / len(ascending)):
            best, best_variance = low, spread
    return best
