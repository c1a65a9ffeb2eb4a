"""Explore seeds for the next batch beside training, choose the seeds to train, and judge the choice.

order(next batch) -> spot workers try candidates with today's weights -> collect -> choose the next manifest
after training: fresh rewards of the trained seeds and of a control slice against the stale rewards -> judge
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from engine.config import CandidateBudget, EngineConfig
from engine.diffusion.sampler import batch_plan, plan_to_dict, preview_plan
from engine.events import ExplorationRests, Ranked
from engine.exploration.explorer import Explorer
from engine.exploration.rest import REST_BATCHES, SHORT
from engine.noise_schedule import ModelSchedule
from engine.prompts import PromptSource
from engine.protocol.exploration_order import ExplorationOrder
from engine.protocol.request import Finished, Kind, Manifest
from engine.trainer.candidates import CandidateImages
from engine.trainer.coordinator_client import CoordinatorClient
from engine.trainer.report import Reporter
from engine.trainer.rollouts import Rollouts
from engine.trainer.state import TrainerState


class SeedExploration:
    """The trainer's side of exploration. `explorer` decides; this class orders, waits and reports."""

    def __init__(
        self,
        config: EngineConfig,
        explorer: Explorer,
        prompts: PromptSource,
        state: TrainerState,
        coordinator: CoordinatorClient,
        reporter: Reporter,
        schedule: ModelSchedule,
    ) -> None:
        self._config = config
        self._schedule = schedule
        self.explorer = explorer
        self._prompts = prompts
        self._state = state
        self._coordinator = coordinator
        self._reporter = reporter
        self._seconds_before = 0.0
        """GPU-seconds of exploration up to the previous batch."""
        self._warned_at: float | None = None
        """The value of `CoordinatorClient.alone_since` for which a warning was written."""
        self._has_told_of_rest = False
        self._latents: dict[str, bytes] = {}
        """Final latents of the collected candidates by name, where candidates are trained."""
        self.images = CandidateImages()
        """Images of the next manifest's early groups, where candidates are trained."""

    def order(self, batch: int, *, pool: int | None) -> ExplorationOrder | None:
        """Order exploration of a batch's candidates with the current weights.

        `pool`: as of `EarlyGroups.pool`. Returns None for a batch after the last, or when exploration is off.
        """
        if batch >= self._config.iterations:
            return None

        def sampler_of(steps: int) -> str:
            return json.dumps(plan_to_dict(preview_plan(batch_plan(self._config, batch, self._schedule), steps)))

        order = self.explorer.order(
            batch,
            self._prompts.batch(batch),
            lineage=self._state.lineage,
            version=self._state.iteration,
            sampler_of=sampler_of,
            pool=pool,
        )
        if order is not None:
            self._coordinator.explore(order)
        return order

    def collect(self, order: ExplorationOrder | None) -> list[Finished]:
        """Return the explored candidates. Those that may be trained are kept with their images (`next_manifest`).

        Waits for a counted budget while a spot node is live, but not for an idle-time budget.
        """
        self._latents = {}
        if order is None:
            return []
        results: list[Finished] = []
        poisoned = 0
        while True:
            wait = order.counted is not None and not self._is_alone()
            collected = self._coordinator.collect(Kind.EXPLORE, order.batch, len(results), wait=wait, poisoned=poisoned)
            results += collected.results
            self._latents |= collected.blobs
            poisoned += len(collected.poisoned)
            if order.counted is None or not collected.to_come:
                return results
            if self._is_alone():
                if self._warned_at != self._coordinator.alone_since:
                    text = f"batch {order.batch}: no spot node to explore; it goes on with {len(results)} candidates"
                    self._reporter.warn(text)
                self._warned_at = self._coordinator.alone_since
                return results

    def choose_in_path(self, manifest: Manifest, rollouts: Rollouts) -> tuple[Manifest, Rollouts]:
        """Keep the groups that are worth training (exploration.mode: in-path).

        Every rollout of the manifest is there.
        """
        chosen = self.explorer.choose_in_path(manifest, rollouts.reward_of())
        return chosen, rollouts.only(chosen)

    def judge(self, manifest: Manifest, rollouts: Rollouts) -> None:
        """Compare fresh rewards with the stale rewards that chose the seeds, and report the ranking quality."""
        control = self._coordinator.collect(Kind.CONTROL, manifest.batch, 0, wait=False).results
        report = self.explorer.judge(manifest, rollouts.reward_of(), control)
        if report is None:
            return
        event = Ranked(
            iteration=manifest.batch,
            profile=self.explorer.profile_of(manifest.batch),
            control=len(control),
            explores_on=self.explorer.monitor.explores(manifest.batch + 2),
            **asdict(report),
        )
        self._reporter.write(event)

    def next_manifest(
        self, run: str, order: ExplorationOrder | None, candidates: Sequence[Finished], *, unit: int
    ) -> Manifest:
        """Return the manifest of the next batch: its groups, and the optimiser step and unit of each group."""
        algorithm, batch = self._config.algorithm, self._state.iteration
        total = self._coordinator.exploring_seconds
        spent, self._seconds_before = total - self._seconds_before, total
        groups = self.explorer.choose(
            order, self._prompts.batch(batch), candidates, batch=batch, gpu_seconds=max(0.0, spent)
        )
        self._tell_of_rest(batch)
        images, self._latents = CandidateImages.of(candidates, self._latents), {}
        share = len(groups) // algorithm.updates_per_batch
        manifest = Manifest(
            run=run,
            lineage=self._state.lineage,
            batch=batch,
            version=batch,
            sampler=batch_plan(self._config, batch, self._schedule).signature,
            groups=groups,
            minibatches=tuple(tuple(range(i, i + share)) for i in range(0, len(groups), share)),
            unit=unit,
        )
        manifest = images.with_early_groups(manifest)
        self.images = images.only(manifest)
        return manifest

    def _tell_of_rest(self, batch: int) -> None:
        """Report the first rest of exploration. No warning: training goes on, and the user need not act."""
        if self._has_told_of_rest or not self.explorer.rest.rests(batch + 1):
            return
        self._has_told_of_rest = True
        trained = self._config.algorithm.images_per_prompt
        self._reporter.write(
            ExplorationRests(iteration=batch, short_batches=SHORT, trained=trained, batches=REST_BATCHES)
        )

    def _is_alone(self) -> bool:
        """Return True if no spot node was live for longer than the counted budget's patience.

        The coordinator's answers say which nodes are live.
        """
        budget, since = self._config.exploration.budget, self._coordinator.alone_since
        if since is None or not isinstance(budget, CandidateBudget):
            return False
        return time.monotonic() - since > budget.patience_seconds
