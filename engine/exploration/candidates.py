"""Which seeds are tried for the next batch, and which of them are trained (research notes papers 6.1).

While the trainer makes version t + 1 from batch t, idle spot workers still hold version t and try candidate seeds for
the prompts of batch t + 1. Only (prompt, seed, reward) comes back; the seeds whose rewards differ most are then rolled
out afresh with version t + 1, so training stays on-policy. The budget is spread evenly over the prompts.

The promise: equal rewards give an equal manifest. Without any result a batch takes its first seeds, so exploration
is optional by construction.
"""

import math
from collections.abc import Mapping, Sequence

from engine.config import CandidateBudget, ExplorationConfig
from engine.exploration.selection import max_variance_subset
from engine.rollout.request import Group, Kind, RequestId, Stream, seed_of


def candidate_requests(
    config: ExplorationConfig, *, run: str, run_seed: int, lineage: int, batch: int, prompts: Sequence[str], keep: int
) -> tuple[RequestId, ...]:
    """Candidates of one batch, in turns over its prompts, so that a budget cut short is still spread evenly.

    `keep`: pictures per prompt that will be trained; fewer candidates than that are not worth trying.
    """
    budget = config.budget
    total = budget.candidates if isinstance(budget, CandidateBudget) else budget.max_candidates
    each = total // len(prompts)
    if config.mode == "none" or each <= keep:
        return ()
    return tuple(
        RequestId(
            run=run,
            lineage=lineage,
            batch=batch,
            prompt=prompt,
            seed=seed_of(run_seed, Stream.TRAIN, batch, prompt, index),
            kind=Kind.EXPLORE,
        )
        for index in range(each)
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
        if prompt in by_prompt and math.isfinite(reward):
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
