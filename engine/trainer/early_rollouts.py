"""The rollouts of a batch's early groups (TCSS): each group is taken whole, or made anew whole with current weights.

The promise: no group has images of two versions. Early images are requests of a kind of their own (`Kind.EARLY`), and
images made anew are training requests.
"""

import time
from collections.abc import Callable, Sequence

from engine.diffusion.trajectory import Trajectory
from engine.protocol.request import Finished, Kind, Manifest
from engine.trainer.coordinator_client import CoordinatorClient

EarlyImage = tuple[Finished, Trajectory]


class EarlyRollouts:
    """The results of a manifest's early groups. A group is taken whole, or made anew whole with current weights."""

    def __init__(
        self,
        manifest: Manifest,
        coordinator: CoordinatorClient,
        remake: Callable[[Sequence[int]], None],
        *,
        patience_seconds: float,
        any_degrees: bool,
    ) -> None:
        """`remake`: submits some groups as training rollouts with current weights.

        `any_degrees`: an image may have steps at different SP degrees, because the trainer does not use the worker's
        log-probs.
        """
        self._manifest = manifest
        self._coordinator = coordinator
        self._remake = remake
        self._patience_seconds = patience_seconds
        self._any_degrees = any_degrees
        self._found: dict[tuple[str, int], EarlyImage] = {}
        self._received = 0
        self.open = set(manifest.early)
        """Groups that are neither complete nor made anew. The owner removes a group that it learns is made anew."""

    def count(self, number: int) -> int:
        """Return the number of received early images of a group."""
        group = self._manifest.groups[number]
        return sum((group.prompt, seed) in self._found for seed in group.seeds)

    def take(self, *, wait: bool) -> dict[int, list[EarlyImage]]:
        """Return the images of the groups that became complete, by group number and in the order of their seeds."""
        if not self.open:
            return {}
        new = self._coordinator.collect(Kind.EARLY, self._manifest.batch, self._received, wait=wait)
        for result in new.results:
            assert result.trajectory is not None, "a rollout to train always carries its trajectory"
            trajectory = Trajectory.from_bytes(new.blobs[result.trajectory])
            self._found[result.request.prompt, result.request.seed] = result, trajectory
            self._received += 1
        poisoned = {(request.prompt, request.seed) for request in new.poisoned}
        complete, lost = {}, []
        for number in sorted(self.open):
            group = self._manifest.groups[number]
            images = [self._found[group.prompt, seed] for seed in group.seeds if (group.prompt, seed) in self._found]
            if not self._any_degrees and any(trajectory.degree is None for _, trajectory in images):
                lost.append(number)  # its log-probs would have to be computed again, with weights that are gone
            elif len(images) == len(group.seeds):
                complete[number] = images
            elif self._is_alone() or not poisoned.isdisjoint((group.prompt, seed) for seed in group.seeds):
                lost.append(number)
        self.open -= {*complete, *lost}
        if lost:
            self._remake(lost)
        return complete

    def _is_alone(self) -> bool:
        """Return True if no spot node was live for a while. The trainer itself no longer has the old weights."""
        since = self._coordinator.alone_since
        return since is not None and time.monotonic() - since > self._patience_seconds
