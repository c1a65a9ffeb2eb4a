"""The model under training: trained weights, their running average, and the optimizer."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from engine.algorithm.average import Average
from engine.algorithm.old_policy import decay_of
from engine.algorithm.transaction import Trainer
from engine.algorithm_config import AlgorithmConfig
from engine.diffusion.sampler import Plan
from engine.diffusion.trajectory import Trajectory
from engine.models.adapter import DiTAdapter
from engine.models.load import checked_start, load_start, trainable
from engine.models.merge import sent_dtype
from engine.models.weights import exchanged, fill_tensors, read_tensors, set_weights
from engine.parallel.rank_group import RankGroup
from engine.parallel.sharding import Measure
from engine.storage.checkpoint import Start
from engine.storage.tensor_files import Stored, TensorFile
from engine.trainer.outbox import Outbox
from engine.trainer.rank_messages import Part
from engine.trainer.ranks import OtherRanks
from engine.trainer.reference import reference_of
from engine.trainer.shards import Shards, led_shard

OLD = "old"
"""File of a checkpoint with the old policy's weights, if the old policy is not the trained weights."""

BEFORE = "before"
"""File of a checkpoint with the weights that made the next batch's early groups, if the trainer needs them."""

FILES: dict[Part, str] = {"weights": "weights", "average": "ema", "moments": "optimizer", "old": OLD}
"""Files of a checkpoint, by the tensors in them."""


class TrainedModel:
    """Trained parameters by name, the optimizer that changes them, and the average that evaluations use."""

    def __init__(
        self,
        adapter: DiTAdapter,
        algorithm: AlgorithmConfig,
        start: Start | None,
        outbox: Outbox,
        *,
        workers_compile: bool = False,
        divided_over: RankGroup | None = None,
        all_sample: bool = False,
        measure: Measure = nullcontext,
    ) -> None:
        """Load the start weights, if any, before the average and the reference of the KL divergence copy the weights.

        A run restored from a checkpoint needs the start weights too, because the KL divergence is measured from them.
        `workers_compile`: rollout workers compile blocks. `divided_over`: ranks that each keep a part of the weights;
        `all_sample`: every one has room to sample; `measure`: context around their collectives.
        """
        self._algorithm = algorithm
        self._outbox = outbox
        self.parameters = trainable(adapter)
        self._sent = sent_dtype(adapter.transformer)
        self._shards = None
        if divided_over is None:
            if start is not None:
                load_start(self.parameters, start.weights)
            reference = reference_of(adapter, algorithm, is_started=start is not None)
            self.trainer = Trainer(adapter, self.parameters, algorithm, reference, workers_compile=workers_compile)
            self.average = Average(self.parameters, algorithm.ema_decay)
            return
        weights = None if start is None else checked_start(self.parameters, start.weights)
        shard = led_shard(divided_over, adapter, algorithm, measure, start=weights, compiles=workers_compile)
        self._shards = Shards(shard, measure, all_sample=all_sample)
        self.trainer, self.average, self.parameters = shard.trainer, shard.average, shard.trainer.parameters

    def ranks(self, ranks: OtherRanks) -> OtherRanks:
        """Return the ranks over which the weights are divided, or `ranks` if each rank has all weights."""
        return ranks if self._shards is None else self._shards

    @property
    def device(self) -> str:
        return str(next(iter(self.parameters.values())).device)

    def follow(self, batch: int, *, early_follows: bool = False) -> None:
        """Move the average and the old policy towards the trained weights. Call once per batch, after training it.

        `early_follows`: the next batch may have early groups. If their log-probs are the trainer's to compute, it keeps
        the weights that made them, until the next call or `forget_before`.
        """
        decay = self._old_decay(batch)
        if self._shards is not None:
            self._shards.follow(batch, decay)
            return
        self.average.follow(batch)
        self.trainer.old.advance(decay, keeps_before=early_follows and self.trainer.computes_log_probs)

    def forget_before(self) -> None:
        """Drop the weights of early groups, because the next batch has none."""
        self.trainer.old.forget_before()

    def old_policy(self) -> AbstractContextManager[None]:
        """Put the weights that make the rollouts into the model inside the context, for passes without gradient."""
        return self.trainer.old.active() if self._shards is None else self._shards.old_policy()

    def own_log_probs(self, prompt: str, trajectory: Trajectory, plan: Plan) -> Trajectory:
        """Recompute a trajectory's log-probs. See `Trainer.with_own_log_probs`."""
        if self._shards is None:
            return self.trainer.with_own_log_probs(prompt, trajectory, plan)
        with self._shards.old_policy():
            return self.trainer.with_own_log_probs(prompt, trajectory, plan)

    def rollout_weights(self) -> TensorFile:
        """Write the weights that make the next batch's rollouts to a file, in the format that is sent to workers."""
        return self._write("rollout", "old", self.trainer.old.tensors or self.parameters, self._sent)

    def average_weights(self, name: str) -> TensorFile:
        """Write the averaged weights to a file of this name, in the format that is sent to workers."""
        return self._write(name, "average", self.average.tensors, self._sent)

    def _write(
        self, name: str, part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> TensorFile:
        whole = None if self._shards is None else partial(self._shards.give, part)
        return self._outbox.write(name, tensors, whole, dtype)

    def files(self, rollout_weights: TensorFile) -> dict[str, TensorFile]:
        """Write the large files of a checkpoint, which have the master weights, in fp32.

        `rollout_weights`: of `rollout_weights()`, not written again unless workers get them in another format. The file
        `old` exists only if the old policy differs from the trained weights, and `before` only if the next batch may
        have early groups whose log-probs the trainer computes.
        """
        optimizer = self._write("optimizer", "moments", self.trainer.optimizer_state())
        files = {"ema": self._write("ema", "average", self.average.tensors), "optimizer": optimizer}
        old, before = self.trainer.old.tensors, self.trainer.old.before
        if before is not None:
            files[BEFORE] = self._write(BEFORE, "old", before)
        if old is not None:
            files[OLD] = rollout_weights if self._sent is None else self._write(OLD, "old", old)
        elif self._sent is None:
            return {**files, "weights": rollout_weights}
        return {**files, "weights": self._write("weights", "weights", self.parameters)}

    def restore(self, files: Mapping[str, Stored], iteration: int) -> bool:
        """Load the files of a checkpoint after `iteration` batches.

        Returns False if the job's old policy is an average, and the checkpoint has none. The trained weights then
        take its place.
        """
        if self._shards is not None:
            for part, name in FILES.items():
                if name in files:
                    self._shards.take(part, files[name])
            return OLD in files or self._needs_no_old(iteration)
        set_weights(self.parameters, files["weights"])
        fill_tensors(self.average.tensors, files["ema"])
        self.trainer.optimizer.state.clear()  # before the new moments are read, not beside them
        self.trainer.load_optimizer_state(read_tensors(files["optimizer"], self.device))
        if BEFORE in files:
            self.trainer.old.restore_before(read_tensors(files[BEFORE], self.device))
        if OLD in files:
            self.trainer.old.restore(read_tensors(files[OLD], self.device))
            return True
        return self._needs_no_old(iteration)

    def _needs_no_old(self, iteration: int) -> bool:
        return iteration == 0 or self._old_decay(iteration - 1) == 0

    def _old_decay(self, batch: int) -> float:
        """Return the share of the old policy's weights that is kept after a batch.

        Steps count as planned: a step that was skipped for a gradient that is not finite counts too.
        """
        trained = self._algorithm.image_training
        steps = (batch + 1) * self._algorithm.updates_per_batch
        return 0.0 if trained is None else decay_of(trained.old_policy_decay, steps)

    @contextmanager
    def exchanged(self, file: TensorFile) -> Iterator[None]:
        """Put other weights into the model inside the context. `file`: of all trained parameters, in any format."""
        if self._shards is not None:
            with self._shards.holding(file.open()):
                yield
            return
        tensors = {name: torch.empty_like(parameter.detach()) for name, parameter in self.parameters.items()}
        fill_tensors(tensors, file.open())
        with exchanged(self.parameters, tensors):
            yield
