"""Run one reinforcement-learning job in the trainer process.

    open the batch -> workers roll out and score images -> groups are trained as they arrive -> weights change
    meanwhile, spot workers explore seeds for the next batch with the weights from before the batch
    choose the next batch's seeds -> checkpoint -> publish

The trainer never waits while a group is ready to train. With no group ready, the trainer makes rollouts too, so a run
without any spot node continues. The trainer takes an optimiser step only after the whole batch is rolled out. Until
then, the trainer still holds the weight version of the unfinished rollouts.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from engine.algorithm.advantages import RunningStd
from engine.algorithm.transaction import Average, Health, Trainer
from engine.clock import Clock
from engine.config import DRIFT, CandidateBudget, EngineConfig
from engine.diffusion.sampler import Plan, evaluation_plan, plan_to_dict, preview_plan, rollout_plan
from engine.drift import Look, drift, look_of
from engine.events import (
    CheckpointSaved,
    EngineFinished,
    EngineStarted,
    Evaluated,
    IterationDone,
    Phase,
    Ranked,
    TargetReached,
    Warned,
)
from engine.exploration.batch import ExplorationOrder
from engine.exploration.explorer import Explorer
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy, load_start, trainable
from engine.prompts import PromptSource
from engine.protocol.request import Finished, Kind, Manifest, RequestId, Stream, Wait, WeightsKey, seed_of
from engine.protocol.wire import finished_from_dict, task_to_dict, weights_to_list
from engine.queue.task import Task
from engine.rewards.reward import Reward
from engine.storage.checkpoint import Checkpoint, CheckpointStore, checkpoint_name
from engine.storage.disk import ASK_AGAIN_SECONDS, when_there_is_room
from engine.storage.progress import ProgressLog
from engine.trainer.evaluation import contact_sheet, held, mean_metrics
from engine.trainer.metrics import MetricsLog
from engine.trainer.rollouts import Rollouts, torch_threads
from engine.versions import installed_versions
from engine.worker.transport import Transport
from engine.worker.usage import Usage
from engine.worker.worker import Worker, get_weights, set_weights

BAD_GROUPS_IN_A_ROW = 3
"""Groups in a row with a reward or loss that is not finite, after which the run stops at its last good checkpoint."""

PICTURES_SHOWN = 24
"""Images of each evaluation kept for the report."""


Stored = TypeVar("Stored")


class Stopped(Exception):
    """Stop of the run on request: budget reached, or `spotrl down`."""


class Unhealthy(Exception):
    """Training failure: nothing finite was produced, or a request is poisoned. Continuing would waste money."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Resources of the trainer process: names, stores, logs, clock and the transport to the coordinator."""

    run: str
    node: str
    workers_of_node: int
    store: CheckpointStore
    transport: Transport
    progress: ProgressLog
    metrics: MetricsLog
    clock: Clock


class Loop:
    """Trainer and its state. `run` continues from the newest checkpoint until the run is finished."""

    def __init__(
        self, config: EngineConfig, place: Place, adapter: DiTAdapter, reward: Reward, prompts: PromptSource
    ) -> None:
        self.config = config
        self.place = place
        self.prompts = prompts
        self.lineage = 0
        self.parameters = trainable(adapter)
        self.started_from = self._load_start()
        reference = None
        if config.algorithm.kl_beta > 0:
            reference = ReferencePolicy.of(adapter, is_started=config.model.start is not None)
        self.trainer = Trainer(adapter, self.parameters, config.algorithm, reference)
        self.average = Average(self.parameters, config.algorithm.ema_decay)
        self.worker = Worker(
            name=f"{place.node}/trainer",
            node=place.node,
            workers_of_node=place.workers_of_node,
            transport=place.transport,
            adapter=adapter,
            parameters=self.parameters,
            reward=reward,
            clock=place.clock,
            heartbeat_seconds=config.runtime.heartbeat_seconds,
            kinds=(Kind.TRAIN,),
            may_load=False,
            overlap_scoring=False,
            overlap_commits=False,
            step_seconds=config.runtime.step_seconds,
        )
        self.explorer = Explorer(config, place.run)
        self.usage: Usage = self.worker.usage
        self._boot, self._orders = time.time_ns(), itertools.count(1)
        self.iteration = 0
        self.std = RunningStd()
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.base: Look | None = None
        """Appearance of the base model's evaluation images; None before the first evaluation."""
        self.skipped_in_a_row = 0
        self._spent_before: dict[str, float] = {}
        self._exploring_seconds = self._told_exploring = 0.0
        """GPU-seconds of exploration by spot workers, as counted by the coordinator: the newest total, and the total up
        to the previous batch."""
        self._alone_since: float | None = None
        """Time since which the coordinator has reported no spot node (`time.monotonic`); None while a spot node is
        live."""
        self._told_alone = False
        self._untold_seconds = 0.0
        """Seconds of checkpoint and publish since the last report. The next report includes the seconds."""
        # The digest excludes the device: the job is the same on every device. A field newer than some checkpoints is
        # excluded while unused, so old checkpoints keep their digest.
        newer = {"model": {"start"}, "evaluation": {"on_the_way"}}
        unused = {
            room: {key for key in keys if getattr(getattr(config, room), key) is None} for room, keys in newer.items()
        }
        job = config.model_dump_json(exclude={"runtime": {"device"}, **unused})
        self.config_digest = hashlib.sha256(job.encode()).hexdigest()[:16]

    # --- the run ----------------------------------------------------------------------------------------

    def run(self) -> EngineFinished:
        """Train until the target holds, the iterations are done or the run is told to stop.

        Returns the reason, and never raises for any of the three.
        """
        try:
            self._begin()
            self._evaluate_if_due()
            while self.iteration < self.config.iterations and not self._target_held():
                self._iterate()
                self._evaluate_if_due()
            reached = self._target_held()
            finished = EngineFinished(reason="target" if reached else "iterations", iteration=self.iteration)
        except Stopped as stop:
            finished = EngineFinished(reason="stopped", iteration=self.iteration, text=str(stop))
        except Unhealthy as sick:
            finished = EngineFinished(reason="unhealthy", iteration=self.iteration, text=str(sick))
        self.place.progress.write(self.lineage, finished)
        self._say({"call": "stop", "reason": finished.reason})
        while not self.place.progress.flush():
            time.sleep(ASK_AGAIN_SECONDS)  # the launcher must learn of the end, even after a long full disk
        return finished

    def _begin(self) -> None:
        """Restore the newest checkpoint. If the coordinator lost the published weights, begin a new lineage."""
        newest = self._store(self.place.store.newest)
        if newest is not None:
            if newest.config_digest != self.config_digest:
                text = "the job differs from the one that made the checkpoint; it goes on with the job as it is now"
                self.place.progress.write(newest.lineage, Warned(text=text))
            self._restore(newest)
        self.lineage = self._settle_lineage(newest)
        if newest is None:
            self.next_batch = self._manifest(None, ())
        self.next_batch = replace(self.next_batch, run=self.place.run, lineage=self.lineage)
        started = EngineStarted(
            iteration=self.iteration,
            config_digest=self.config_digest,
            devices=str(next(iter(self.parameters.values())).device),
            versions=installed_versions(),
            started_from=self.started_from,
        )
        self.place.progress.write(self.lineage, started)
        self._publish_live(get_weights(self.parameters))
        self._withdraw_trained()

    def _load_start(self) -> str:
        """Load the start weights named by the job, if any. Returns a description of their source.

        A run restored from a checkpoint loads the start weights too: the KL divergence is measured from the start
        weights.
        """
        if self.config.model.start is None:
            return ""
        start = self._store(self.place.store.start)
        load_start(self.parameters, start.weights)
        return start.text

    def _settle_lineage(self, newest: Checkpoint | None) -> int:
        known = self._say({"call": "peek"})
        same = known["lineage"] > 0 and (newest is None or newest.lineage == known["lineage"])
        if same and (known["version"] is None or known["version"] <= self.iteration):
            return int(known["lineage"])
        lineage = self._store(self.place.store.claim_lineage)
        self._say({"call": "hello", "lineage": lineage})
        return lineage

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.iteration = checkpoint.iteration
        self.evaluations = [(iteration, dict(metrics)) for iteration, metrics in checkpoint.evaluations]
        self.base = checkpoint.base
        self.std = RunningStd(checkpoint.std)
        self.skipped_in_a_row = checkpoint.skipped_in_a_row
        self.next_batch = checkpoint.next_batch
        if checkpoint.exploration:
            self.explorer.restore(checkpoint.exploration)
        set_weights(self.parameters, checkpoint.files["weights"])
        average = load(checkpoint.files["ema"])
        self.average.tensors = {name: average[name].to(value.device) for name, value in self.parameters.items()}
        self.trainer.load_optimizer_state(load(checkpoint.files["optimizer"]))

    # --- one iteration ----------------------------------------------------------------------------------

    def _iterate(self) -> None:
        begun = time.perf_counter() - self._untold_seconds
        manifest, batch = self.next_batch, self.iteration
        plan = rollout_plan(self.config.sampler, self.config.seed, batch)
        self._submit(manifest.requests(), plan, Kind.TRAIN)
        self._submit(self.explorer.control(manifest), plan, Kind.CONTROL)
        order = self._explore(batch + 1)

        rollouts = Rollouts(
            manifest,
            self._more_rollouts,
            self.worker,
            lambda prompt, trajectory: self.trainer.with_own_log_probs(prompt, trajectory, plan),
        )
        if self.config.exploration.mode == "in-path":
            rollouts.wait_for_all()
            manifest = self.explorer.choose_in_path(manifest, rollouts.reward_of())
            rollouts = rollouts.only(manifest)
        health = self._train(manifest, plan, rollouts)
        self.average.follow()
        weights = get_weights(self.parameters)
        with self.usage.measure(Phase.CHECKPOINT):
            written = self._write_checkpoint_files(weights)  # while spot nodes still explore
        candidates = self._explored(order)
        self._judge(manifest, rollouts)

        rewards = torch.tensor(rollouts.rewards(), dtype=torch.float64)
        finite = rewards[torch.isfinite(rewards).all(dim=1)]
        self.std = self.std.after(finite) if len(finite) else self.std
        # Report before the checkpoint is durable. A crash between the two repeats the batch and its report; the report
        # is never lost.
        self._tell(manifest, finite, len(candidates), health, time.perf_counter() - begun, rollouts.made_by)
        saving = time.perf_counter()
        self.iteration += 1
        self.next_batch = self._manifest(order, candidates)
        with self.usage.measure(Phase.CHECKPOINT):
            if written is not None:
                self._checkpoint(*written)
        with self.usage.measure(Phase.SYNC):
            self._publish_live(weights)
            self._withdraw_trained()
        self._untold_seconds = time.perf_counter() - saving

    def _tell(
        self,
        manifest: Manifest,
        rewards: Tensor,
        explored: int,
        health: list[Health],
        seconds: float,
        made_by: Mapping[str, int],
    ) -> None:
        """Report a trained batch. rewards [P, K]: rewards of the finite groups."""
        spent = dict(self.usage.total)
        phase_ms = {phase: round(ms - self._spent_before.get(phase, 0.0)) for phase, ms in spent.items()}
        self._spent_before = spent
        done = IterationDone(
            iteration=manifest.batch,
            reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
            reward_std=float(rewards.std(correction=0)) if len(rewards) else 0.0,
            group_std_mean=float(rewards.std(dim=1, correction=0).mean()) if len(rewards) else 0.0,
            explored=explored,
            manifest_digest=manifest.digest,
            phase_ms=phase_ms,
            wall_seconds=seconds,
            health={**_merge(health), "staleness": 0.0},
            made_by=dict(made_by),
        )
        self.place.progress.write(self.lineage, done)
        self.place.metrics.iteration(done)

    def _train(self, manifest: Manifest, plan: Plan, rollouts: Rollouts) -> list[Health]:
        """Take all optimiser steps of a batch.

        Groups of the first step are trained while workers still roll out other groups.
        """
        std = None
        if self.config.algorithm.std == "batch":
            rollouts.wait_for_all()
            std = rollouts.std()
        elif self.config.algorithm.std == "ema":
            std = self.std.value
        finished = []
        for minibatch in range(len(manifest.minibatches)):
            step = self.trainer.begin(manifest, minibatch, plan, std=std)
            try:
                while step.missing:
                    ready = [number for number in step.missing if rollouts.is_complete(number)]
                    if not ready:
                        rollouts.wait()
                        continue
                    with self.usage.measure(Phase.TRAINING), torch_threads(self.config.runtime.trainer_threads):
                        step.add(ready[0], rollouts.group(ready[0]))
                    rollouts.look()
                rollouts.wait_for_all()
            except BaseException:
                step.abort()
                raise
            with self.usage.measure(Phase.TRAINING):
                finished.append(self._commit(manifest, minibatch, step))
        return finished

    def _commit(self, manifest: Manifest, minibatch: int, step: Any) -> Health:
        health: Health = step.commit()
        for number in manifest.minibatches[minibatch]:
            bad = number in health.skipped
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if bad else 0
            if bad:
                prompt = manifest.groups[number].prompt
                text = f"batch {manifest.batch}: skipped {prompt!r}, its reward or loss is not finite"
                self.place.progress.write(self.lineage, Warned(text=text))
            if self.skipped_in_a_row >= BAD_GROUPS_IN_A_ROW:
                raise Unhealthy(
                    f"{BAD_GROUPS_IN_A_ROW} groups in a row had a reward or loss that is not finite; the last good "
                    f"checkpoint is iteration {self.iteration}: look at the reward, or lower the learning_rate"
                )
        return health

    # --- exploration ------------------------------------------------------------------------------------

    def _explore(self, batch: int) -> ExplorationOrder | None:
        """Order exploration of a batch's candidates with the current weights.

        Returns None for a batch after the last, or when exploration is off.
        """
        if batch >= self.config.iterations:
            return None

        def sampler_of(steps: int) -> str:
            plan = rollout_plan(self.config.sampler, self.config.seed, batch)
            return json.dumps(plan_to_dict(preview_plan(plan, steps)))

        prompts = self.prompts.batch(batch)
        order = self.explorer.order(batch, prompts, lineage=self.lineage, version=self.iteration, sampler_of=sampler_of)
        if order is not None:
            self._say({"call": "explore", "order": order.to_dict()})
        return order

    def _explored(self, order: ExplorationOrder | None) -> list[Finished]:
        """Return the explored candidates.

        Waits for a counted budget while a spot node is live, but not for an idle-time budget.
        """
        if order is None:
            return []
        results: list[Finished] = []
        poisoned = 0
        while True:
            wait = order.counted is not None and not self._is_alone()
            answer = self._collect(Kind.EXPLORE, order.batch, len(results), wait=wait, poisoned=poisoned)
            results += answer["results"]
            poisoned += answer["poisoned"]
            if order.counted is None or not answer["to_come"]:
                return results
            if self._is_alone():
                if not self._told_alone:
                    text = f"batch {order.batch}: no spot node to explore; it goes on with {len(results)} candidates"
                    self.place.progress.write(self.lineage, Warned(text=text))
                self._told_alone = True
                return results

    def _is_alone(self) -> bool:
        """Return True if no spot node was live for longer than the counted budget's patience.

        The coordinator's answers say which nodes are live.
        """
        budget = self.config.exploration.budget
        if self._alone_since is None or not isinstance(budget, CandidateBudget):
            return False
        return time.monotonic() - self._alone_since > budget.patience_seconds

    def _judge(self, manifest: Manifest, rollouts: Rollouts) -> None:
        """Compare fresh rewards with the stale rewards that chose the seeds, and report the ranking quality."""
        control = self._collect(Kind.CONTROL, manifest.batch, 0, wait=False)["results"]
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
        self.place.progress.write(self.lineage, event)

    def _manifest(self, order: ExplorationOrder | None, candidates: Sequence[Finished]) -> Manifest:
        """Return the manifest of the next batch: its groups, and the optimiser step of each group."""
        algorithm, batch = self.config.algorithm, self.iteration
        spent, self._told_exploring = self._exploring_seconds - self._told_exploring, self._exploring_seconds
        groups = self.explorer.choose(
            order, self.prompts.batch(batch), candidates, batch=batch, gpu_seconds=max(0.0, spent)
        )
        share = len(groups) // algorithm.updates_per_batch
        return Manifest(
            run=self.place.run,
            lineage=self.lineage,
            batch=batch,
            version=batch,
            sampler=rollout_plan(self.config.sampler, self.config.seed, batch).signature,
            groups=groups,
            minibatches=tuple(tuple(range(i, i + share)) for i in range(0, len(groups), share)),
        )

    # --- evaluation -------------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        done = any(iteration == self.iteration for iteration, _ in self.evaluations)
        last = self.iteration == self.config.iterations
        if done or (self.iteration % self.config.evaluation.every and not last):
            return
        self._evaluate(is_whole=last or self.iteration == 0)

    def _evaluate(self, *, is_whole: bool) -> None:
        """Evaluate held-out prompts.

        An intermediate evaluation uses a subset, but a target counts as reached only after an evaluation of all
        prompts.
        """
        prompts, target = self.prompts.held_out(), self.config.target
        some = None if is_whole else self.config.evaluation.on_the_way
        results, blobs = self._evaluated(prompts[:some], pictures=PICTURES_SHOWN)
        metrics = self._record(results, blobs)
        if target is not None and target.metric not in metrics:
            reported = sorted(metrics.keys() - {DRIFT})
            raise Unhealthy(f"target.metric is {target.metric!r}, but the reward reports {reported}")
        if len(results) < len(prompts) and self._target_held():
            rest, _ = self._evaluated(prompts[some:], pictures=0)
            metrics = self._record([*results, *rest], blobs)
        if target is not None and self._target_held():
            reached = TargetReached(iteration=self.iteration, metric=target.metric, value=metrics[target.metric])
            self.place.progress.write(self.lineage, reached)

    def _record(self, results: Sequence[Finished], blobs: Mapping[str, bytes]) -> dict[str, float]:
        """Store and report this version's metrics, replacing metrics of fewer prompts. Returns the metrics."""
        metrics = mean_metrics(results)
        sheet = f"evaluation/l{self.lineage:04d}-i{self.iteration:06d}.png"
        shown = [(one.request.prompt, blobs[one.trajectory]) for one in results if one.trajectory is not None]
        with self.usage.measure(Phase.EVALUATION):
            self._store(lambda: self.place.store.put(sheet, contact_sheet(shown)))
            metrics |= self._drift([data for _, data in shown])
        self.evaluations = [one for one in self.evaluations if one[0] != self.iteration] + [(self.iteration, metrics)]
        event = Evaluated(iteration=self.iteration, metrics=metrics, prompts=len(results), pictures=sheet)
        self.place.progress.write(self.lineage, event)
        self.place.metrics.evaluation(event)
        return metrics

    def _evaluated(self, prompts: Sequence[str], *, pictures: int) -> tuple[list[Finished], dict[str, bytes]]:
        """Evaluate held-out prompts with fixed noise, ODE steps and averaged weights.

        All workers take part, and the trainer too.

        Returns the results in the order of the prompts, and the first `pictures` images by name.
        """
        weights = WeightsKey(version=self.iteration, average=True)
        requests = [
            RequestId(
                run=self.place.run,
                lineage=self.lineage,
                batch=self.iteration,
                prompt=prompt,
                # The seed does not depend on the run, so all runs are evaluated with the same noise.
                seed=seed_of(0, Stream.EVAL, 0, prompt, 0),
                kind=Kind.EVALUATE,
            )
            for prompt in prompts
        ]
        live, kinds = self.worker.holds, self.worker.kinds
        data = save(self.average.tensors)
        with self.usage.measure(Phase.EVALUATION):
            published = self._say({"call": "publish", "weights": weights_to_list(weights)}, {"weights": data})
            plan = evaluation_plan(self.config.sampler, self.config.evaluation.steps)
            self._submit(requests, plan, Kind.EVALUATE, weights=weights, pictures=pictures)
            results: dict[RequestId, Finished] = {}
            blobs: dict[str, bytes] = {}
            with self._averaged():
                # Serve evaluations only. A batch begun before a trainer crash needs the live weights, not the averaged
                # weights.
                self.worker.assume(weights, published["digest"])
                self.worker.kinds = (Kind.EVALUATE,)
                while len(results) < len(requests):
                    helped = self.worker.serve_once(wait=False)
                    answer = self._collect(Kind.EVALUATE, self.iteration, len(results), wait=isinstance(helped, Wait))
                    results |= {result.request: result for result in answer["results"]}
                    blobs |= answer["blobs"]
            self.worker.kinds = kinds
            if live is not None:
                self.worker.assume(*live)
            self._say({"call": "withdraw", "batches": [["evaluate", self.iteration]]})
        return [results[request] for request in requests], blobs

    def _drift(self, pictures: Sequence[bytes]) -> dict[str, float]:
        """Return the distance of the images from the base model's images. Empty if the base model's look is unknown.

        pictures: safetensors bytes of uint8 [C, H, W] or [C, F, H, W], of the same prompts in each evaluation
        """
        if not pictures:
            return {}
        look = look_of([load(data)["picture"].numpy() for data in pictures])
        if self.iteration == 0:
            self.base = look
        return {DRIFT: drift(look, self.base)} if self.base is not None else {}

    def _target_held(self) -> bool:
        target = self.config.target
        return target is not None and held([metrics for _, metrics in self.evaluations], target)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Put the averaged weights into the model inside the context, and restore the live weights afterwards."""
        live = {name: value.detach().clone() for name, value in self.parameters.items()}
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(self.average.tensors[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self.parameters.items():
                    value.copy_(live[name])

    # --- durable state and calls to the coordinator -------------------------------------------------------

    def _write_checkpoint_files(self, weights: bytes) -> tuple[dict[str, bytes], dict[str, str]] | None:
        """Write the checkpoint's large files after this batch.

        Returns files and digests, or None if no checkpoint is due.
        """
        iteration = self.iteration + 1
        if iteration % self.config.checkpoint.every and iteration != self.config.iterations:
            return None
        files = {
            "weights": weights,
            "ema": save(self.average.tensors),
            "optimizer": save({n: t.contiguous() for n, t in self.trainer.optimizer_state().items()}),
        }
        name = checkpoint_name(self.lineage, iteration)
        return files, self._store(lambda: self.place.store.write_files(name, files))

    def _checkpoint(self, files: dict[str, bytes], digests: dict[str, str]) -> None:
        checkpoint = Checkpoint(
            iteration=self.iteration,
            lineage=self.lineage,
            next_batch=self.next_batch,
            files=files,
            evaluations=tuple(self.evaluations),
            std=self.std.value,
            skipped_in_a_row=self.skipped_in_a_row,
            config_digest=self.config_digest,
            exploration=self.explorer.to_dict(),
            base=self.base,
        )
        keep = self.config.checkpoint.keep
        digest = self._store(lambda: self.place.store.save(checkpoint, keep=keep, digests=digests))
        event = CheckpointSaved(iteration=self.iteration, path=f"checkpoints/{checkpoint.name}", digest=digest)
        self.place.progress.write(self.lineage, event)

    def _store(self, write: Callable[[], Stored]) -> Stored:
        """Write to the checkpoint store.

        While the store is full, the run waits, because continuing would risk finished work.
        """

        def tell(text: str) -> None:
            warned = Warned(text=f"the checkpoint store {self.place.store.url}: {text}")
            self.place.progress.write(self.lineage, warned)

        return when_there_is_room(write, tell)

    def _publish_live(self, data: bytes) -> None:
        weights = WeightsKey(version=self.iteration)
        published = self._say({"call": "publish", "weights": weights_to_list(weights)}, {"weights": data})
        self.worker.assume(weights, published["digest"])

    def _withdraw_trained(self) -> None:
        """Withdraw the batches that led to this iteration: their results are in its checkpoint.

        Also called at the start, because a trainer may have died between checkpoint and withdrawal.
        """
        batches = [["train", self.iteration - 1], ["control", self.iteration - 1], ["explore", self.iteration]]
        self._say({"call": "withdraw", "batches": batches})

    def _submit(
        self,
        requests: Sequence[RequestId],
        plan: Plan,
        kind: Kind,
        *,
        weights: WeightsKey | None = None,
        pictures: int = 0,
    ) -> None:
        if not requests:
            return
        runtime = self.config.runtime
        # The control slice compares rewards, not bits, so no forward pass is padded to the full shape.
        shapes = {Kind.TRAIN: runtime.shape, Kind.CONTROL: min(runtime.shape, len(requests))}
        task = Task(
            requests=tuple(requests),
            weights=weights or WeightsKey(version=self.iteration),
            sampler=json.dumps(plan_to_dict(plan)),
            steps=plan.steps,
            shape=shapes.get(kind, self.config.evaluation.shape),
            dtype="float32",
            pictures=pictures,
        )
        self._say({"call": "submit", "task": task_to_dict(task)})

    def _collect(self, kind: Kind, batch: int, have: int, *, wait: bool, poisoned: int = 0) -> dict[str, Any]:
        """Return new results of a batch. Raises Stopped or Unhealthy, so no wait outlives the run."""
        ask = {"call": "collect", "kind": str(kind), "batch": batch, "have": have, "poisoned": poisoned}
        answer, blobs = self.place.transport.call(ask | self._usage_report(), wait=wait)
        if answer["stop"]:
            raise Stopped(answer["stop"])
        if answer["poisoned"] and kind in (Kind.TRAIN, Kind.EVALUATE):
            raise Unhealthy(f"a picture could not be made or scored on three workers: {answer['poisoned'][0]}")
        results = [finished_from_dict(result) for result in answer["results"]]
        found = {"results": results, "blobs": blobs, "nodes": answer["nodes"], "to_come": answer["to_come"]}
        self._exploring_seconds = answer["exploring_seconds"]
        has_spot = bool(set(answer["nodes"]) - {self.place.node})
        self._alone_since = None if has_spot else self._alone_since or time.monotonic()
        self._told_alone = self._told_alone and not has_spot
        return found | {"poisoned": len(answer["poisoned"])}

    def _more_rollouts(self, batch: int, have: int, wait: bool) -> dict[str, Any]:
        return self._collect(Kind.TRAIN, batch, have, wait=wait)

    def _say(self, head: dict[str, Any], blobs: dict[str, bytes] | None = None) -> dict[str, Any]:
        order = {"boot": self._boot, "seq": next(self._orders)}  # the coordinator recognises a late order by its number
        answer, _ = self.place.transport.call(head | order | self._usage_report(), blobs)
        return answer

    def _usage_report(self) -> dict[str, Any]:
        return {"node": self.place.node, "of": self.place.workers_of_node, "usage": self.usage.take()}


def _merge(steps: Sequence[Health]) -> dict[str, float]:
    """Return the health of a batch: means over its optimiser steps, the largest ratio, the number of skipped groups."""
    each = [step.summary() for step in steps]
    merged = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
    merged["ratio_max"] = max(one["ratio_max"] for one in each)
    merged["skipped_groups"] = sum(one["skipped_groups"] for one in each)
    merged["dlogp_before_update"] = each[0]["dlogp_abs_mean"]
    return merged
