"""The rollouts of a batch on arrival, sorted into groups: complete groups can be trained at once (GAP).

While no complete group waits for training, the trainer may sample too (TAG). Help stops between denoising steps: the
trainer commits the images' state and gives its lease back, and another worker goes on from that step.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from engine.algorithm.advantages import decoupled
from engine.algorithm.objective import FinishedGroup
from engine.config import RewardConfig
from engine.diffusion.trajectory import Trajectory
from engine.protocol.request import Finished, Manifest, Score, Work
from engine.trainer.candidates import CandidateRollouts
from engine.trainer.coordinator_client import Collected
from engine.trainer.early_rollouts import EarlyRollouts
from engine.worker.worker import Worker

Collect = Callable[[int, int, bool], Collected]
"""(batch, number of results received, wait or not) -> new results of the batch, and their trajectories."""


OldPolicy = Callable[[], AbstractContextManager[None]]
"""Returns a context in which the trainer's model holds the weights that make the batch's rollouts."""


OwnLogProbs = Callable[[str, Trajectory], Trajectory]
"""(prompt, trajectory) -> the trajectory with log-probs computed by the trainer (`Trainer.with_own_log_probs`)."""


class Rollouts:
    """The results received for a manifest."""

    def __init__(
        self,
        manifest: Manifest,
        collect: Collect,
        worker: Worker,
        *,
        own_log_probs: OwnLogProbs,
        old_policy: OldPolicy,
        trained: Callable[[Sequence[Score]], tuple[float, ...]] | None = None,
        early: EarlyRollouts | CandidateRollouts | None = None,
    ) -> None:
        """Start without results. `worker`: the trainer's own worker, which samples while no group can be trained.

        `trained`: the trained rewards of a group's scores; None: the rewards of the scores. `early`: the results of
        the manifest's early groups; None: it has none.
        """
        self._manifest = manifest
        self._collect = collect
        self._worker = worker
        self._own_log_probs = own_log_probs
        self._old_policy = old_policy
        self._trained = trained or reported
        self._early = early
        self._received = 0
        """Number of results received, without those of early groups."""
        self.early: tuple[int, ...] = ()
        """Complete groups that were sampled one version early."""
        self._found: dict[tuple[str, int], tuple[Score, Trajectory]] = {}
        self.made_by: Counter[str] = Counter()
        """Number of finished rollouts by node."""

    def only(self, manifest: Manifest) -> "Rollouts":
        """Return the rollouts of another manifest of the same batch, with the results received until now."""
        chosen = Rollouts(
            manifest,
            self._collect,
            self._worker,
            own_log_probs=self._own_log_probs,
            old_policy=self._old_policy,
            trained=self._trained,
        )
        chosen._found, chosen._received, chosen.made_by = self._found, self._received, self.made_by
        return chosen

    def look(self) -> bool:
        """Take new results without waiting. Return True if there was a result."""
        return self._take(wait=False)

    def wait(self) -> None:
        """Wait for a new result, a moment at most."""
        self._take(wait=True)

    def help(self, stop: Callable[[], bool]) -> bool:
        """Sample a lease with the trainer's own worker. Returns False if there is no work for it: its node may drain.

        `stop`: called between denoising steps; True gives the lease back at that step.
        """
        with torch_threads(1), self._old_policy():
            reply = self._worker.serve_once(wait=False, interrupted=stop)
        self._take(wait=False)
        return isinstance(reply, Work)

    def are_complete(self) -> bool:
        return all(map(self.is_complete, range(len(self._manifest.groups))))

    def count(self, number: int) -> int:
        """Return the number of received images of a group. Early images count before their group is whole."""
        if self._early is not None and number in self._early.open:
            return self._early.count(number)
        group = self._manifest.groups[number]
        return sum((group.prompt, seed) in self._found for seed in group.seeds)

    def is_complete(self, number: int) -> bool:
        group = self._manifest.groups[number]
        return all((group.prompt, seed) in self._found for seed in group.seeds)

    def group(self, number: int) -> FinishedGroup:
        group = self._manifest.groups[number]
        images = [self._found[group.prompt, seed] for seed in group.seeds]
        return FinishedGroup(
            prompt=group.prompt,
            seeds=group.seeds,
            trajectories=tuple(trajectory for _, trajectory in images),
            rewards=self._trained([score for score, _ in images]),
            is_early=number in self.early,
        )

    def fault(self, number: int) -> str:
        """Return the reason why an image of a group has no score. Empty: all have one, or the scorer gave no reason."""
        group = self._manifest.groups[number]
        scores = (self._found[group.prompt, seed][0] for seed in group.seeds)
        return next((score.fault for score in scores if score.fault), "")

    def trained_rewards(self) -> list[tuple[float, ...]]:
        """Return the trained rewards of every group, in the manifest's order."""
        return [self.group(number).rewards for number in range(len(self._manifest.groups))]

    def rewards(self) -> list[tuple[float, ...]]:
        """Return the rewards of every group as scored, in the manifest's order."""
        return [
            tuple(self._found[group.prompt, seed][0].reward for seed in group.seeds) for group in self._manifest.groups
        ]

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric of the scores, over the images that have the metric."""
        values = defaultdict(list)
        for group in self._manifest.groups:
            for seed in group.seeds:
                for name, value in self._found[group.prompt, seed][0].metrics.items():
                    values[name].append(value)
        finite = {name: [value for value in numbers if math.isfinite(value)] for name, numbers in values.items()}
        return {name: sum(numbers) / len(numbers) for name, numbers in finite.items() if numbers}

    def reward_of(self) -> dict[tuple[str, int], float]:
        """Return the received rewards by (prompt, seed)."""
        return {key: score.reward for key, (score, _) in self._found.items()}

    def std(self) -> float:
        """Return the std of all finite trained rewards of the batch."""
        finite = [reward for rewards in self.trained_rewards() for reward in rewards if math.isfinite(reward)]
        return float(torch.tensor(finite, dtype=torch.float64).std(correction=0)) if finite else 0.0

    def _take(self, *, wait: bool) -> bool:
        early = self._take_early(wait=wait and self._waits_for_early_groups())
        new = self._collect(self._manifest.batch, self._received, wait and not early)
        for result in new.results:
            if self._is_wanted(result.request.prompt):
                self._add(result, new.blobs)
            self._received += 1  # last, so that a result that could not be read is asked for again
        return bool(new.results) or early

    def _add(self, result: Finished, blobs: Mapping[str, bytes]) -> None:
        assert result.trajectory is not None, "a rollout to train always carries its trajectory"
        prompt, trajectory = result.request.prompt, Trajectory.from_bytes(blobs[result.trajectory])
        if trajectory.degree is None:
            trajectory = self._own_log_probs(prompt, trajectory)
        self.made_by[result.node] += 1
        self._found[prompt, result.request.seed] = (result.score, trajectory)

    def _is_wanted(self, prompt: str) -> bool:
        """Return False for a training rollout of a group that was taken with its early images.

        A training rollout of an early group means that the group is made anew: an earlier process of the trainer had
        ordered that. Its early images are then not taken any more, so the group has images of one version.
        """
        numbers = [number for number in self._manifest.early if self._manifest.groups[number].prompt == prompt]
        if self._early is not None:
            self._early.open.difference_update(numbers)
        return not any(number in self.early for number in numbers)

    def _take_early(self, *, wait: bool) -> bool:
        """Take new complete early groups. Return True if there was one. Their log-probs stay as the workers sent them.

        The trainer's weights are of a later version than those of the rollout.
        """
        if self._early is None:
            return False
        new = self._early.take(wait=wait)
        for number, images in new.items():
            self.early = tuple(sorted((*self.early, number)))
            for result, trajectory in images:
                self.made_by[result.node] += 1
                self._found[result.request.prompt, result.request.seed] = (result.score, trajectory)
        return bool(new)

    def _waits_for_early_groups(self) -> bool:
        """Return True if nothing but early groups is missing."""
        if self._early is None:
            return False
        numbers = range(len(self._manifest.groups))
        return all(number in self._early.open or self.is_complete(number) for number in numbers)


def reported(scores: Sequence[Score]) -> tuple[float, ...]:
    """Return the rewards of the scores as they are."""
    return tuple(score.reward for score in scores)


def normalised(reward: RewardConfig, correction: int) -> Callable[[Sequence[Score]], tuple[float, ...]]:
    """Return the function from a group's scores to its trained rewards, for `reward.combine: advantages`.

    `correction`: of the std within a group (`group_advantages`).
    """
    names, weights = [part.metric for part in reward.parts], [part.weight for part in reward.parts]

    def trained(scores: Sequence[Score]) -> tuple[float, ...]:
        by_scorer = torch.tensor([[score.metrics.get(name, math.nan) for score in scores] for name in names])
        return tuple(decoupled(by_scorer, torch.tensor(weights), correction=correction).tolist())

    return trained


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with this number of torch threads. 0 keeps the current number."""
    before = torch.get_num_threads()
    if count and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count and count != before:
            torch.set_num_threads(before)
