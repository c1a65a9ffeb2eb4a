"""Take the optimiser steps of a batch.

Groups are trained while workers still roll out other groups. A step is committed once its own groups are trained, and
rollouts of later steps may still be under way: the trainer keeps the weights that make the rollouts (`old_policy.py`).
A step that fails is aborted, and the weights stay as they were. Ranks may share the groups of a step (`ranks.py`,
`shards.py`).
"""

import time

from engine.algorithm.health import Health
from engine.config import EngineConfig
from engine.diffusion.sampler import Plan
from engine.events import Phase
from engine.protocol.request import Manifest
from engine.timing.work import work_seconds
from engine.trainer.batch_forecast import BatchForecast
from engine.trainer.batch_schedule import BatchSchedule
from engine.trainer.ending import Unhealthy
from engine.trainer.ranks import OtherRanks, Step
from engine.trainer.report import Reporter
from engine.trainer.rollouts import Rollouts, torch_threads
from engine.trainer.state import TrainerState
from engine.trainer_ranks import ranks_of
from engine.worker.usage import Usage

BAD_GROUPS_IN_A_ROW = 3
"""Groups in a row with a reward or loss that is not finite, after which the run stops at its last good checkpoint."""


class BatchUpdates:
    """Trains batches. Raises Unhealthy after BAD_GROUPS_IN_A_ROW groups without a finite reward and loss."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: OtherRanks,
        state: TrainerState,
        usage: Usage,
        reporter: Reporter,
        *,
        schedule: BatchSchedule,
        forecast: BatchForecast,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._state = state
        self._usage = usage
        self._reporter = reporter
        self._schedule = schedule
        self._forecast = forecast
        ranks_at_work = ranks_of(config)
        self._image_seconds = work_seconds(config).trained(config, images=1) / ranks_at_work

    def train(self, manifest: Manifest, plan: Plan, rollouts: Rollouts) -> list[Health]:
        """Take all optimiser steps of a batch. Returns the health of each step."""
        self._schedule.begin(manifest, plan)
        std = self._std(rollouts)
        finished = []
        for minibatch in range(len(manifest.minibatches)):
            step = self._ranks.begin(manifest, minibatch, plan, std=std)
            seconds, collective_ms = 0.0, self._collective_ms
            try:
                while step.missing:
                    ready = [number for number in step.missing if rollouts.is_complete(number)]
                    if not ready or self._schedule.goes_ahead:
                        if not rollouts.look() or self._schedule.goes_ahead:
                            self._schedule.fill_time(rollouts)
                        continue
                    self._usage.meter.keep_pace()
                    begun = time.perf_counter()
                    with self._usage.measure(Phase.TRAINING), torch_threads(self._config.runtime.trainer_threads):
                        step.add(ready[0], rollouts.group(ready[0]))
                    seconds += time.perf_counter() - begun
                    self._usage.meter.done(self._image_seconds * len(manifest.groups[ready[0]].seeds))
                    self._schedule.group_added()
                    rollouts.look()
            except BaseException:
                step.abort()
                raise
            begun = time.perf_counter()
            with self._usage.measure(Phase.TRAINING):
                finished.append(self._commit(manifest, minibatch, step, rollouts))
            seconds += time.perf_counter() - begun
            collective_ms = self._collective_ms - collective_ms
            self._forecast.trained(seconds, rows=finished[-1].rows, collective_ms=collective_ms)
        return finished

    @property
    def _collective_ms(self) -> float:
        """Return the milliseconds of collectives since the start."""
        return self._usage.total.get(Phase.COLLECTIVE.value, 0.0)

    def _std(self, rollouts: Rollouts) -> float | None:
        """Return the reward std that normalises advantages, or None for the std of each group (algorithm.std)."""
        if self._config.algorithm.std == "batch":
            self._schedule.fill_time_for_all(rollouts)
            return rollouts.std()
        return self._state.std.value if self._config.algorithm.std == "ema" else None

    def _commit(self, manifest: Manifest, minibatch: int, step: Step, rollouts: Rollouts) -> Health:
        health = step.commit()
        for number in manifest.minibatches[minibatch]:
            bad = number in health.skipped
            fault = rollouts.fault(number) if bad else ""
            why = f": {fault}" if fault else ""
            self._state.skipped_in_a_row = self._state.skipped_in_a_row + 1 if bad else 0
            if bad:
                prompt = manifest.groups[number].prompt
                self._reporter.warn(
                    f"batch {manifest.batch}: skipped {prompt!r}, its reward or loss is not finite{why}",
                )
            if self._state.skipped_in_a_row >= BAD_GROUPS_IN_A_ROW:
                raise Unhealthy(
                    f"{BAD_GROUPS_IN_A_ROW} groups in a row had a reward or loss that is not finite; the last good "
                    f"checkpoint is iteration {self._state.iteration}: look at the reward, or lower the learning_rate"
                    + why
                )
        return health
