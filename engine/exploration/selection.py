"""Selection of explored seeds: the subset to train, with the largest reward variance, and the control seeds.

A group's gradient vanishes if its rewards agree, and the kept seeds are therefore the seeds with the largest reward
variance. The best subset of a given size is always a prefix plus a suffix of the sorted rewards (PODS,
arXiv 2504.13818), which leaves keep + 1 candidates to compare. The gradient is the gradient of a selected sample, and
no weight turns a selected sample into a sample of all seeds: extremes count for more than in a random group. Pure:
equal rewards in equal order give equal choices on every machine.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from math import floor, isfinite
from typing import Literal

from engine.protocol.request import Group, Stream, seed_of

Rule = Literal["variance", "extremes"]
"""Rule of a choice: the largest variance, or as many best as worst."""

_TIE = 1e-12
"""Relative difference below which two variances count as equal; the subset with more high rewards is then kept."""


def max_variance_subset(rewards: Sequence[float], keep: int) -> tuple[int, ...]:
    """Return the ascending indices of the `keep` rewards with the largest variance.

    For equal rewards, the lower index wins.
    """
    ascending = _ascending(rewards, keep)
    return _ends(rewards, ascending, keep, _best_prefix([rewards[index] for index in ascending], keep))


def extremes_subset(rewards: Sequence[float], keep: int) -> tuple[int, ...]:
    """Return the ascending indices of the best and the worst rewards, `keep` in all. An odd one is a best reward.

    For equal rewards, the lower index wins.
    """
    return _ends(rewards, _ascending(rewards, keep), keep, keep // 2)


def _ascending(rewards: Sequence[float], keep: int) -> list[int]:
    if not 1 <= keep <= len(rewards):
        raise ValueError(f"asked to keep {keep} of {len(rewards)} rewards; explore at least as many seeds as are kept")
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError("rewards to choose from must be finite; leave out seeds whose reward is NaN or infinite")
    return sorted(range(len(rewards)), key=lambda index: (rewards[index], index))


def _ends(rewards: Sequence[float], ascending: Sequence[int], keep: int, low: int) -> tuple[int, ...]:
    """Return the indices of the `low` lowest rewards, and of the highest ones up to `keep`."""
    lowest = set(ascending[:low])
    remaining = [index for index in range(len(rewards)) if index not in lowest]
    highest = sorted(remaining, key=lambda index: (-rewards[index], index))[: keep - low]
    return tuple(sorted([*lowest, *highest]))


def variance(values: Sequence[float]) -> float:
    """Return the population variance. 0 for fewer than two values."""
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


def kept_variance(rewards: Sequence[float], keep: int) -> float:
    """Return the variance of the rewards to keep. An additional explored seed may increase the value."""
    return variance([rewards[index] for index in max_variance_subset(rewards, keep)])


def control_slice(
    unselected: Sequence[tuple[str, int]], fraction: float, *, run_seed: int, batch: int
) -> tuple[tuple[str, int], ...]:
    """Return the control slice: unselected (prompt, seed) of a batch to roll out afresh and never train.

    The slice is a simple random sample without replacement of the share `fraction`, rounded to nearest, at least one.
    The slice has the smallest blake2b of (run seed, batch, prompt, seed), and the order of `unselected` therefore does
    not matter. The result is ascending by the hash: the part finished before a loss of spot capacity is then a random
    sample too. Raises ValueError for a share outside 0 to 1.
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
    """Return every prompt with its first `count` candidates: for a batch without choice, or with a later choice."""
    return tuple(
        Group(
            prompt=prompt,
            seeds=tuple(seed_of(run_seed, Stream.TRAIN, batch, prompt, index) for index in range(count)),
        )
        for prompt in prompts
    )


def choose_groups(
    prompts: Sequence[str],
    explored: Mapping[tuple[str, int], float],
    *,
    run_seed: int,
    batch: int,
    keep: int,
    rule: Rule = "variance",
) -> tuple[Group, ...]:
    """Return the groups to train in a batch: per prompt, `keep` of the explored seeds, by the rule.

    `explored` maps (prompt, seed) to a reward; a non-finite reward does not count. A prompt with fewer than `keep`
    results is filled up with its first seeds, in order.
    """
    by_prompt: dict[str, dict[int, float]] = {prompt: {} for prompt in prompts}
    for (prompt, seed), reward in explored.items():
        if prompt in by_prompt and isfinite(reward):
            by_prompt[prompt][seed] = reward
    return tuple(
        Group(prompt=prompt, seeds=_choose(prompt, rewards, run_seed, batch, keep, rule))
        for prompt, rewards in by_prompt.items()
    )


def _choose(
    prompt: str, rewards: Mapping[int, float], run_seed: int, batch: int, keep: int, rule: Rule
) -> tuple[int, ...]:
    if len(rewards) >= keep:
        seeds = sorted(rewards)
        subset = max_variance_subset if rule == "variance" else extremes_subset
        return tuple(seeds[i] for i in subset([rewards[seed] for seed in seeds], keep))
    first = [seed_of(run_seed, Stream.TRAIN, batch, prompt, index) for index in range(keep + len(rewards))]
    new_seeds = [seed for seed in first if seed not in rewards]
    return tuple([*sorted(rewards), *new_seeds][:keep])


def _best_prefix(ascending: Sequence[float], keep: int) -> int:
    """Return the number of rewards to keep from the low end, by prefix sums over the centred rewards."""
    # Centre first: the difference of two large sums would drown a small variance.
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
