"""The rollouts of one batch as they come in, sorted into groups, so that complete groups can be trained at once (GAP).

While nothing has come that could be trained, the trainer rolls out too: a waiting trainer is a worker like any other.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.rollout.request import Manifest, Wait
from engine.rollout.trajectory import Trajectory
from engine.runtime.worker import Worker
from engine.training.transaction import FinishedGroup

Collect = Callable[[int, int, bool], dict[str, Any]]
"""(batch, how many results are here already, whether to wait) -> {"results": ..., "blobs": ...}."""


OwnLogProbs = Callable[[str, Trajectory], Trajectory]
"""(prompt, trajectory) -> the same with log-probs that the trainer computed (`Trainer.with_own_log_probs`)."""


class Rollouts:
    """What a manifest asks for, as far as it is here."""

    def __init__(self, manifest: Manifest, collect: Collect, worker: Worker, own_log_probs: OwnLogProbs) -> None:
        """`worker`: the trainer's own, which helps while there is nothing to train."""
        self._manifest = manifest
        self._collect = collect
        self._worker = worker
        self._own_log_probs = own_log_probs
        self._found: dict[tuple[str, int], tuple[float, Trajectory]] = {}
        self.made_by: Counter[str] = Counter()
        """How many rollouts each node finished."""

    def only(self, manifest: Manifest) -> "Rollouts":
        """Of the same batch, what another manifest asks for."""
        chosen = Rollouts(manifest, self._collect, self._worker, self._own_log_probs)
        chosen._found, chosen.made_by = self._found, self.made_by
        return chosen

    def look(self) -> bool:
        """Take what has come, without waiting; whether there was anything."""
        return self._take(wait=False)

    def wait(self) -> None:
        """Something to do until more comes: roll out ourselves, or wait."""
        if self.look():
            return
        with torch_threads(1):
            reply = self._worker.serve_once(wait=False)
        self._take(wait=isinstance(reply, Wait))

    def wait_for_all(self) -> None:
        while not all(self.is_complete(number) for number in range(len(self._manifest.groups))):
            self.wait()

    def is_complete(self, number: int) -> bool:
        group = self._manifest.groups[number]
        return all((group.prompt, seed) in self._found for seed in group.seeds)

    def group(self, number: int) -> FinishedGroup:
        group = self._manifest.groups[number]
        found = [self._found[group.prompt, seed] for seed in group.seeds]
        return FinishedGroup(
            prompt=group.prompt,
            trajectories=tuple(trajectory for _, trajectory in found),
            rewards=tuple(reward for reward, _ in found),
        )

    def rewards(self) -> list[tuple[float, ...]]:
        """Of every group, in the manifest's order."""
        return [self.group(number).rewards for number in range(len(self._manifest.groups))]

    def reward_of(self) -> dict[tuple[str, int], float]:
        """By (prompt, seed), of what is here."""
        return {key: reward for key, (reward, _) in self._found.items()}

    def std(self) -> float:
        """Of all finite rewards of the batch."""
        finite = [reward for rewards in self.rewards() for reward in rewards if math.isfinite(reward)]
        return float(torch.tensor(finite, dtype=torch.float64).std(correction=0)) if finite else 0.0

    def _take(self, *, wait: bool) -> bool:
        answer = self._collect(self._manifest.batch, len(self._found), wait)
        for result in answer["results"]:
            self.made_by[result.node] += 1
            prompt, trajectory = result.request.prompt, Trajectory.from_bytes(answer["blobs"][result.trajectory])
            if trajectory.degree is None:
                # No optimiser step is taken before all of a batch is here, so the weights still are those that made it.
                trajectory = self._own_log_probs(prompt, trajectory)
            self._found[prompt, result.request.seed] = (result.score.reward, trajectory)
        return bool(answer["results"])


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with so many torch threads; 0 leaves them alone."""
    before = torch.get_num_threads()
    if count and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count and count != before:
            torch.set_num_threads(before)
