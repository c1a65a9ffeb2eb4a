"""Run one reinforcement-learning job in the trainer process.

    open the batch -> workers roll out and score images -> groups are trained as they arrive -> weights change
    meanwhile, spot workers explore seeds for the next batch with the weights from before the batch
    choose the next batch's seeds -> checkpoint -> publish

The trainer never waits while a group is ready to train. With no group ready, the schedule decides
(`batch_schedule.py`): the trainer waits, or makes rollouts too. A run without any spot node therefore continues. The
trainer takes an optimiser step once the groups of the step are trained. Until the batch is trained, the trainer keeps
the old weights beside the new ones, for its own rollouts (`old_policy.py`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.algorithm.transaction import DoesNotFit
from engine.config import EngineConfig
from engine.diffusion.sampler import batch_plan
from engine.events import EngineFinished, EngineStarted, Phase
from engine.exploration.explorer import Explorer
from engine.models.adapter import DiTAdapter
from engine.parallel.communicator import TornGroup
from engine.parallel.rank_group import RankGroup
from engine.prompts import PromptSource
from engine.protocol.request import Kind, Manifest, Score, WeightsKey
from engine.rewards.reward import Reward
from engine.storage.checkpoint import Checkpoint
from engine.storage.disk import ASK_AGAIN_SECONDS
from engine.storage.tensor_files import TensorFile
from engine.timing.utilisation import possible_images_a_second
from engine.trainer.batch_forecast import BatchForecast
from engine.trainer.batch_schedule import BatchSchedule
from engine.trainer.cadence import Cadence
from engine.trainer.candidates import FILE as CANDIDATES
from engine.trainer.candidates import CandidateImages, CandidateRollouts
from engine.trainer.checkpoints import Checkpoints
from engine.trainer.context import TrainerContext
from engine.trainer.coordinator_client import Collected, CoordinatorClient
from engine.trainer.early_groups import EarlyGroups
from engine.trainer.early_rollouts import EarlyRollouts
from engine.trainer.ending import Stopped, Unhealthy
from engine.trainer.evaluator import Evaluator
from engine.trainer.exploration import SeedExploration
from engine.trainer.learning import Learning
from engine.trainer.memory import TrainingMemory
from engine.trainer.model import TrainedModel
from engine.trainer.outbox import Outbox
from engine.trainer.rank_sampling import worker_of_trainer
from engine.trainer.ranks import Ranks
from engine.trainer.report import IterationReports, Reporter
from engine.trainer.rollouts import Rollouts, normalised, reported
from engine.trainer.state import TrainerState, config_digest
from engine.trainer.updates import BatchUpdates
from engine.versions import installed_versions
from engine.worker.usage import Usage


class Loop:
    """The parts of the trainer. `run` continues from the newest checkpoint until the run is finished."""

    def __init__(
        self,
        config: EngineConfig,
        context: TrainerContext,
        adapter: DiTAdapter,
        reward: Reward,
        prompts: PromptSource,
        group: RankGroup | None = None,
        *,
        sampling_ranks: int = 1,
    ) -> None:
        """Load the start weights. `group`: this process is rank 0 of several; None: the trainer has one rank.

        `sampling_ranks`: ranks that sample, from rank 0 on.
        """
        self.group = group
        sampling_ranks = min(sampling_ranks, 1 if group is None else group.ranks)
        self.config = config
        self.context = context
        self.state = TrainerState(config_digest=config_digest(config))
        self.reporter = Reporter(context.progress, context.metrics, self.state)
        self.checkpoints = Checkpoints(context, self.state, self.reporter)
        self.cadence = Cadence(config, life_hours=context.life_hours)
        start = None if config.model.start is None else self.checkpoints.start()
        self.started_from = ", ".join(filter(None, ("" if start is None else start.text, config.model.lora_text)))
        self.outbox = Outbox(context.outbox, self.reporter.warn)
        full = config.model.weights == "full"
        self.model = TrainedModel(
            adapter,
            config.algorithm,
            start,
            self.outbox,
            workers_compile=config.model.compile == "on",
            divided_over=group if full else None,
            all_sample=sampling_ranks > 1,
            measure=lambda: self.usage.measure(Phase.COLLECTIVE),
        )
        self.learning = Learning(self.state, self.reporter, limit=config.algorithm.stop_without_learning)
        self.model.trainer.row_seconds = config.runtime.row_seconds
        self.model.trainer.pass_seconds = config.runtime.pass_seconds
        self.memory = TrainingMemory(self.model.trainer, self.state, self.reporter)
        self.schedule = adapter.schedule
        self.worker = worker_of_trainer(
            config,
            rank=0,
            node=context.node,
            workers_of_node=context.workers_of_node,
            transport=context.transport,
            adapter=adapter,
            parameters=self.model.parameters,
            reward=reward,
            clock=context.clock,
            meter=context.meter,
            trace=context.trace,
        )
        self.usage: Usage = self.worker.usage
        device = torch.device(self.model.device)
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.reports = IterationReports(
            self.reporter,
            self.usage,
            ranks=1 if group is None else group.ranks,
            possible_images_a_second=possible_images_a_second(config, gpu),
        )
        self.coordinator = CoordinatorClient(context.transport, context.node, context.workers_of_node, self.usage)
        self.exploration = SeedExploration(
            config, Explorer(config, context.run), prompts, self.state, self.coordinator, self.reporter, self.schedule
        )
        self.early = EarlyGroups(
            config,
            context.run,
            prompts,
            self.schedule,
            state=self.state,
            exploration=self.exploration,
            coordinator=self.coordinator,
            checkpoints=self.checkpoints,
            reporter=self.reporter,
            share=lambda: self.forecast.early_share(),
        )
        copies = None if full else group
        self.ranks = self.model.ranks(Ranks(copies, self.model.trainer, self.usage, is_started=start is not None))
        trainer_ranks = 1 if group is None else group.ranks
        self.forecast = BatchForecast(config, self.model.trainer, self.reporter, context.clock, ranks=trainer_ranks)
        self.batch_schedule = BatchSchedule(
            config,
            self.coordinator,
            self.forecast,
            context.clock,
            own_worker=self.worker.name,
            sampling_ranks=sampling_ranks,
            let_ranks_sample=self.ranks.let_sample,
        )
        self.updates = BatchUpdates(
            config,
            self.ranks,
            self.state,
            self.usage,
            self.reporter,
            schedule=self.batch_schedule,
            forecast=self.forecast,
        )
        self.evaluator = Evaluator(
            config,
            prompts,
            context.run,
            self.model,
            self.worker,
            self.ranks,
            self.schedule,
            state=self.state,
            coordinator=self.coordinator,
            checkpoints=self.checkpoints,
            outbox=self.outbox,
            reporter=self.reporter,
        )

    def run(self) -> EngineFinished:
        """Train until the target holds, the iterations are done or the run is stopped.

        Returns the reason, and never raises for any of the three.
        """
        try:
            finished = self._run_to_the_end()
            self.reporter.write(finished)
            self.coordinator.stop(finished.reason)
            while not self.reporter.flush():
                time.sleep(ASK_AGAIN_SECONDS)  # the launcher must learn of the end, even after a long full disk
            return finished
        finally:
            self.reporter.close()

    def _run_to_the_end(self) -> EngineFinished:
        try:
            self.begin()
            while not self._is_over():
                self.run_iteration()
                if self.learning.failure:
                    raise Unhealthy(self.learning.failure)
            reason = "target" if self.evaluator.target_held() else "iterations"
            if reason == "iterations" and self.learning.failure_at_end:
                raise Unhealthy(self.learning.failure_at_end)
            return EngineFinished(reason=reason, iteration=self.state.iteration)
        except Stopped as stop:
            return EngineFinished(reason="stopped", iteration=self.state.iteration, text=str(stop))
        except (Unhealthy, DoesNotFit) as error:
            return EngineFinished(reason="unhealthy", iteration=self.state.iteration, text=str(error))

    def _is_over(self) -> bool:
        """Return True if no batch is left to train. Waits for an evaluation only if the evaluation may end the run."""
        if self.config.evaluation.wait or self.state.iteration == self.config.iterations:
            self.evaluator.evaluate_if_due()
        return self.state.iteration >= self.config.iterations or self.evaluator.target_held()

    def run_iteration(self) -> None:
        """Roll out and train one batch, and choose the next. An evaluation that is due runs beside the batch.

        Raises Superseded if the trainer of another node has claimed a newer lineage.
        """
        self.checkpoints.check_lineage()
        began_ms, written_ms = self.context.clock.now_ms(), self.usage.total.get(Phase.CHECKPOINT, 0.0)
        self.reports.begin()
        manifest = self.state.next_batch
        rollouts = self._roll_out(manifest)
        self.evaluator.begin_if_due()
        order = self.exploration.order(manifest.batch + 1, pool=self.early.pool(manifest.batch + 1))
        self.early.begin(order)
        plan = batch_plan(self.config, manifest.batch, self.schedule)
        if self.config.exploration.mode == "in-path":
            self.batch_schedule.begin(manifest, plan)
            self.batch_schedule.fill_time_for_all(rollouts)
            manifest, rollouts = self.exploration.choose_in_path(manifest, rollouts)
        health = self.updates.train(manifest, plan, rollouts)  # groups train while other groups are still sampled
        trained_at = time.perf_counter()
        self.evaluator.finish()
        if self.evaluator.target_held():
            return  # the evaluated version stays the newest: its weights are what `spotrl pull` copies
        self.model.follow(manifest.batch, early_follows=self.early.may_follow)
        weights = self.model.rollout_weights()
        files = self._write_files(weights)  # while spot nodes still explore
        candidates = self.exploration.collect(order)
        self.early.finish()
        self.exploration.judge(replace(manifest, early=rollouts.early), rollouts)
        self.early.judge(manifest.batch, health)

        rewards = torch.tensor(rollouts.rewards(), dtype=torch.float64)
        finite = rewards[torch.isfinite(rewards).all(dim=1)]
        trained = torch.tensor(rollouts.trained_rewards(), dtype=torch.float64)
        trained = trained[torch.isfinite(trained).all(dim=1)]
        self.state.std = self.state.std.after(trained) if len(trained) else self.state.std
        self.learning.judge(manifest.batch, health, float(finite.mean()) if len(finite) else 0.0)
        # Report before the checkpoint is durable. A crash between the two repeats the batch and its report; the report
        # is never lost.
        self.reports.report(
            manifest,
            finite,
            len(candidates),
            health,
            rollouts,
            self.forecast.figures(),
            self.state.unlearned,
            self.ranks.take_phases(),
            self.batch_schedule.gpus(),
        )
        self.state.iteration += 1
        unit = self.forecast.unit()
        fresh = self.exploration.next_manifest(self.context.run, order, candidates, unit=unit)
        self.state.next_batch = self.early.merge(fresh)
        if not self.state.next_batch.early:
            self.model.forget_before()
        if files is not None and len(self.exploration.images):
            images = {CANDIDATES: self.exploration.images.stored()}
            files |= self.checkpoints.write_files(self.state.iteration, images)
        self._save(files)
        cost_ms = self.usage.total[Phase.CHECKPOINT] - written_ms
        work_ms = self.context.clock.now_ms() - began_ms - cost_ms
        self.cadence.trained(self.state.iteration, work_ms, None if files is None else cost_ms)
        with self.usage.measure(Phase.SYNC):
            self._publish(weights)
        self.forecast.measured.publish(time.perf_counter() - trained_at)
        self.reports.end()
        if self.group is not None and files is not None and self.group.may_grow():
            raise TornGroup("begins again with the nodes that are there now")

    @property
    def _trained_rewards(self) -> Callable[[Sequence[Score]], tuple[float, ...]]:
        if self.config.reward.combine == "scores":
            return reported
        return normalised(self.config.reward, self.config.algorithm.std_correction)

    def begin(self) -> None:
        """Restore the newest checkpoint. If the coordinator lost the published weights, begin a new lineage."""
        self.state.lineage = self._settle_lineage(self.checkpoints.newest_place())
        newest = self.checkpoints.newest()  # after the lineage is claimed: an older trainer deletes nothing any more
        if newest is not None:
            self._restore(newest)
        if newest is None:
            unit = self.forecast.unit()
            self.state.next_batch = self.exploration.next_manifest(self.context.run, None, (), unit=unit)
        manifest = self.state.next_batch
        # The coordinator of another lineage has no old weights: its early groups are made anew, whole. Images of
        # candidates are in the checkpoint.
        has_images = len(self.exploration.images) > 0
        early = manifest.early if has_images or manifest.lineage == self.state.lineage else ()
        self.state.next_batch = replace(manifest, run=self.context.run, lineage=self.state.lineage, early=early)
        if not early:
            self.model.forget_before()
        started = EngineStarted(
            iteration=self.state.iteration,
            config_digest=self.state.config_digest,
            devices=self.model.device,
            versions=installed_versions(),
            started_from=self.started_from,
        )
        self.reporter.write(started)
        self.evaluator.forget_later(self.cadence.longest)
        self._publish(self.model.rollout_weights())
        self.context.watch_lineage(self.state.lineage)

    def _restore(self, checkpoint: Checkpoint) -> None:
        if checkpoint.config_digest != self.state.config_digest:
            text = "the job differs from the one that made the checkpoint; it goes on with the job as it is now"
            self.reporter.warn(text)
        self.state.restore(checkpoint)
        self.memory.restore()
        if checkpoint.exploration:
            self.exploration.explorer.restore(checkpoint.exploration)
        self.exploration.images = CandidateImages.restored(checkpoint.files.get(CANDIDATES))
        if not self.model.restore(checkpoint.files, checkpoint.iteration):
            self.reporter.warn(
                f"checkpoint {checkpoint.iteration} has no old policy; the trained weights make the next rollouts, and "
                "the average begins anew"
            )

    def _settle_lineage(self, newest: tuple[int, int] | None) -> int:
        """Return the coordinator's lineage if it continues the newest checkpoint, else a new one.

        `newest`: lineage and iteration of that checkpoint. Raises Superseded if the coordinator's lineage is not the
        newest one claimed: its node was given up while it could not be reached.
        """
        status = self.coordinator.peek()
        lineage, iteration = newest or (status.lineage, 0)
        if status.lineage > 0:
            self.state.lineage = status.lineage
            self.checkpoints.check_lineage()
        if status.lineage == lineage > 0 and (status.version is None or status.version <= iteration):
            return status.lineage
        lineage = self.checkpoints.claim_lineage()
        self.coordinator.begin_lineage(lineage)
        return lineage

    def _roll_out(self, manifest: Manifest) -> Rollouts:
        """Submit a batch's requests, and its control slice. Returns the rollouts, which arrive later."""
        plan = batch_plan(self.config, manifest.batch, self.schedule)
        weights, shape = WeightsKey(version=self.state.iteration), self.config.runtime.shape
        self.coordinator.submit(manifest.requests(), plan, weights=weights, shape=shape)
        control = self.exploration.explorer.control(manifest)
        # The control slice compares rewards, not bits, so no forward pass is padded to the full shape.
        self.coordinator.submit(control, plan, weights=weights, shape=min(shape, len(control)))

        def collect(batch: int, have: int, wait: bool) -> Collected:
            self.early.look()
            return self.coordinator.collect(Kind.TRAIN, batch, have, wait=wait)

        def remake(numbers: Sequence[int]) -> None:
            self.coordinator.submit(manifest.requests_of(numbers), plan, weights=weights, shape=shape)
            prompts = ", ".join(repr(manifest.groups[number].prompt) for number in numbers)
            text = f"batch {manifest.batch}: early groups of {prompts} cannot be completed"
            self.reporter.warn(f"{text}; they are made anew with version {weights}")

        early: CandidateRollouts | EarlyRollouts | None
        if len(self.exploration.images):
            early = CandidateRollouts(manifest, self.exploration.images)
        else:
            any_degrees = not self.model.trainer.objective.needs_log_probs
            early = self.early.rollouts(manifest, remake, any_degrees=any_degrees)
        return Rollouts(
            manifest,
            collect,
            self.worker,
            own_log_probs=lambda prompt, trajectory: self.model.own_log_probs(prompt, trajectory, plan),
            old_policy=self.model.old_policy,
            trained=self._trained_rewards,
            early=early,
        )

    def _write_files(self, weights: TensorFile) -> dict[str, str] | None:
        """Write the checkpoint's large files after this batch.

        Returns their digests, or None if no checkpoint is due.
        """
        iteration = self.state.iteration + 1
        with self.usage.measure(Phase.CHECKPOINT):
            if not self.cadence.is_due(iteration):
                return None
            files = self.model.files(weights)
            digests = self.checkpoints.write_files(iteration, files)
            self.outbox.drop(*(file for file in files.values() if file is not weights))
            return digests

    def _save(self, digests: dict[str, str] | None) -> None:
        with self.usage.measure(Phase.CHECKPOINT):
            if digests is not None:
                checkpoint = self.state.checkpoint(self.exploration.explorer.to_dict())
                self.checkpoints.save(checkpoint, digests, keep=self.config.checkpoint.keep)

    def _publish(self, file: TensorFile) -> None:
        """Publish the trained weights, and withdraw the batches that led to them: their results are in the checkpoint.

        The start of a run does the same, because a trainer may have died between checkpoint and withdrawal.
        """
        iteration = self.state.iteration
        weights = WeightsKey(version=iteration)
        digest = self.coordinator.publish(weights, file)
        self.worker.assume(weights, digest)
        self.ranks.published(weights, digest)
        self.outbox.drop(file)
        trained: Sequence[tuple[Kind, int]] = [
            (Kind.TRAIN, iteration - 1),
            (Kind.EARLY, iteration - 1),
            (Kind.CONTROL, iteration - 1),
            (Kind.EXPLORE, iteration),
        ]
        self.coordinator.withdraw(trained)
