"""Early groups (TCSS): a part of the next batch is sampled with the weights of one version before.

    begin (a batch opens) -> look (often, while it trains): draft, make it durable, submit -> finish -> merge into the
    next manifest -> EarlyRollouts (the next batch opens) -> judge its health

An early group is sampled with the version of its draft, whenever it is sampled, and its log-probs at the rollout are
those of that version: the worker's, or the trainer's if workers round their weights (`OldPolicy.before`).

The promises: staleness is 0 or 1; a group's images have one version; a restarted trainer goes on with the same draft.
"""

from collections.abc import Callable, Sequence

from engine.algorithm.health import Health
from engine.config import EngineConfig
from engine.diffusion.sampler import batch_plan
from engine.noise_schedule import ModelSchedule
from engine.prompts import PromptSource
from engine.protocol.draft import Draft, early_groups, has_pool, with_draft
from engine.protocol.exploration_order import ExplorationOrder
from engine.protocol.request import Finished, Kind, Manifest, RequestId, WeightsKey
from engine.trainer.checkpoints import Checkpoints
from engine.trainer.coordinator_client import CoordinatorClient
from engine.trainer.early_rollouts import EarlyRollouts
from engine.trainer.exploration import SeedExploration
from engine.trainer.report import Reporter, outside_share
from engine.trainer.state import TrainerState

MOST_OUTSIDE = 0.5
"""Share of an early group's training rows outside the clip range above which early groups pause. Measured on
digits-ocr: .02 to .04 with fresh rollouts, .16 to .24 with all rollouts one version old (two seeds)."""

PAUSE_BATCHES = 10
"""Batches without early groups after a share above `MOST_OUTSIDE`. Assumed."""


class EarlyGroups:
    """The trainer's side of early groups. See the module docstring."""

    def __init__(
        self,
        config: EngineConfig,
        run: str,
        prompts: PromptSource,
        schedule: ModelSchedule,
        *,
        state: TrainerState,
        exploration: SeedExploration,
        coordinator: CoordinatorClient,
        checkpoints: Checkpoints,
        reporter: Reporter,
        share: Callable[[], float],
    ) -> None:
        """`share`: returns the share of groups to sample early, as it is best now. 0: none."""
        self._config, self._run, self._prompts, self._schedule = config, run, prompts, schedule
        self._state = state
        self._exploration = exploration
        self._coordinator = coordinator
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._share = share
        self._order: ExplorationOrder | None = None
        self._candidates: list[Finished] = []
        self._looks = False
        self._draft: Draft | None = None

    @property
    def may_follow(self) -> bool:
        """Return True if the next batch has a draft, or may still get one."""
        return self._draft is not None or self._looks

    def pool(self, batch: int) -> int | None:
        """Return the candidates that each prompt needs before early groups of a batch are chosen. None: none are."""
        if batch >= self._config.iterations or batch < self._state.early_off_until:
            return None
        if not early_groups(self._share(), self._config.algorithm.prompts_per_batch):
            return None
        return self._config.early.min_pool or 2 * self._config.algorithm.images_per_prompt

    def begin(self, order: ExplorationOrder | None) -> None:
        """Begin with the batch after the open batch. `order`: its exploration.

        A draft that an earlier process of this lineage made durable is taken over.
        """
        batch = self._state.iteration + 1
        self._draft, self._looks, self._order, self._candidates = None, False, order, []
        if not any(self._config.early.shares) or batch >= self._config.iterations:
            return
        stored = self._checkpoints.draft(batch)
        if stored is not None and stored.version == self._state.iteration:
            self._submit(stored)
            return
        self._looks = batch >= self._state.early_off_until

    def look(self) -> None:
        """Draft the early groups once there are enough candidates and a spot node is live. Call often."""
        if not self._looks or self._coordinator.alone_since is not None:
            return
        number = early_groups(self._share(), self._config.algorithm.prompts_per_batch)
        if not number or not self._has_candidates():
            return
        batch = self._state.iteration + 1
        prompts = self._prompts.batch(batch)
        groups = self._exploration.explorer.preview(self._order, prompts, self._candidates, batch=batch)
        draft = Draft(
            run=self._run,
            lineage=self._state.lineage,
            batch=batch,
            version=self._state.iteration,
            sampler=batch_plan(self._config, batch, self._schedule).signature,
            groups=groups[:number],
        )
        self._checkpoints.put_draft(draft)  # before the first rollout: a restarted trainer must not choose again
        self._submit(draft)

    def finish(self) -> None:
        """End the search for a draft: the open batch is trained, and its exploration is collected.

        A counted budget that is waited for has one more look, so that a repeated run has the same early groups.
        """
        if self._order is None or self._order.counted is not None:
            self.look()
        self._looks = False

    def merge(self, manifest: Manifest) -> Manifest:
        """Return the next manifest with the drafted groups."""
        return manifest if self._draft is None else with_draft(manifest, self._draft)

    def rollouts(
        self, manifest: Manifest, remake: Callable[[Sequence[int]], None], *, any_degrees: bool
    ) -> EarlyRollouts | None:
        """Submit a manifest's early groups, and return their rollouts. None: the manifest has no early group.

        Arguments as of `EarlyRollouts`.
        """
        if not manifest.early:
            return None
        self._order_rollouts(manifest.requests(Kind.EARLY), manifest.batch, manifest.version - 1)
        patience = self._config.early.patience_seconds
        return EarlyRollouts(manifest, self._coordinator, remake, patience_seconds=patience, any_degrees=any_degrees)

    def judge(self, batch: int, health: Sequence[Health]) -> None:
        """Turn early groups off for a while if too many of their training rows were outside the clip range."""
        share = outside_share(health)
        if share is None or share <= MOST_OUTSIDE:
            return
        self._state.early_off_until = batch + 2 + PAUSE_BATCHES
        self._reporter.warn(
            f"batch {batch}: {share:.0%} of the training rows of early groups were outside the clip range, above "
            f"{MOST_OUTSIDE:.0%}; no early groups are drafted before batch {self._state.early_off_until}. Lower "
            "learning_rate or early.share if this repeats"
        )

    def _submit(self, draft: Draft) -> None:
        self._draft, self._looks = draft, False
        self._order_rollouts(draft.requests(), draft.batch, draft.version)

    def _order_rollouts(self, requests: Sequence[RequestId], batch: int, version: int) -> None:
        plan = batch_plan(self._config, batch, self._schedule)
        shape = self._config.runtime.shape
        self._coordinator.submit(requests, plan, weights=WeightsKey(version=version), shape=shape)

    def _has_candidates(self) -> bool:
        """Return True if there are enough candidates to choose from: all of a counted budget that is waited for."""
        order = self._order
        if order is None:
            return True
        collected = self._coordinator.collect(Kind.EXPLORE, order.batch, len(self._candidates), wait=False)
        self._candidates += collected.results
        if order.counted is not None:
            return not collected.to_come
        least = self._config.early.min_pool or 2 * order.keep
        return has_pool(self._candidates, order.prompts, min(least, order.most))
