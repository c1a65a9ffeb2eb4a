"""The model under training: trained weights, their running average, and the optimizer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine.algorithm.old_policy import decay_of
from engine.algorithm.transaction import Average, Trainer
from engine.algorithm_config import AlgorithmConfig
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy, load_start, trainable
from engine.models.weights import exchanged, fill_tensors, read_tensors, set_weights
from engine.storage.checkpoint import Start
from engine.storage.tensor_files import Stored, TensorFile
from engine.trainer.outbox import Outbox

OLD = "old"
"""File of a checkpoint with the old policy's weights, if the old policy is not the trained weights."""


def reference_of(adapter: DiTAdapter, algorithm: AlgorithmConfig, *, is_started: bool) -> ReferencePolicy | None:
    """Return the model as reference, if the loss has a term that holds the weights near it (`ReferencePolicy.of`)."""
    if algorithm.kl_beta > 0 or algorithm.diffusion_nft.reference_weight > 0:
        return ReferencePolicy.of(adapter, is_started=is_started)
    return None


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
    ) -> None:
        """Load the start weights, if any, before the average and the reference of the KL divergence copy the weights.

        A run restored from a checkpoint needs the start weights too, because the KL divergence is measured from them.
        `workers_compile`: rollout workers compile blocks.
        """
        self._algorithm = algorithm
        self._outbox = outbox
        self.parameters = trainable(adapter)
        if start is not None:
            load_start(self.parameters, start.weights)
        reference = reference_of(adapter, algorithm, is_started=start is not None)
        self.trainer = Trainer(adapter, self.parameters, algorithm, reference, workers_compile=workers_compile)
        self.average = Average(self.parameters, algorithm.ema_decay)

    @property
    def device(self) -> str:
        return str(next(iter(self.parameters.values())).device)

    def follow(self, batch: int) -> None:
        """Move the average and the old policy towards the trained weights. Call once per batch, after training it."""
        self.average.follow()
        self.trainer.old.advance(decay_of(self._algorithm.diffusion_nft.old_policy_decay, batch))

    def rollout_weights(self) -> TensorFile:
        """Write the weights that make the next batch's rollouts to a file."""
        with self.trainer.old.active():
            return self._outbox.write("rollout", self.parameters)

    def average_weights(self, name: str) -> TensorFile:
        """Write the averaged weights to a file of this name."""
        return self._outbox.write(name, self.average.tensors)

    def files(self, rollout_weights: TensorFile) -> dict[str, TensorFile]:
        """Write the large files of a checkpoint. `rollout_weights`: of `rollout_weights()`, not written again.

        The file `old` exists only if the old policy differs from the trained weights.
        """
        optimizer = self._outbox.write("optimizer", self.trainer.optimizer_state())
        files = {"ema": self.average_weights("ema"), "optimizer": optimizer}
        if self.trainer.old.differs:
            return {**files, "weights": self._outbox.write("weights", self.parameters), OLD: rollout_weights}
        return {**files, "weights": rollout_weights}

    def restore(self, files: Mapping[str, Stored], iteration: int) -> bool:
        """Load the files of a checkpoint after `iteration` batches.

        Returns False if the job's old policy is an average, and the checkpoint has none. The trained weights then
        take its place.
        """
        set_weights(self.parameters, files["weights"])
        fill_tensors(self.average.tensors, files["ema"])
        self.trainer.optimizer.state.clear()  # before the new moments are read, not beside them
        self.trainer.load_optimizer_state(read_tensors(files["optimizer"], self.device))
        if OLD in files:
            self.trainer.old.restore(read_tensors(files[OLD], self.device))
            return True
        return iteration == 0 or decay_of(self._algorithm.diffusion_nft.old_policy_decay, iteration - 1) == 0

    @contextmanager
    def exchanged(self, file: TensorFile) -> Iterator[None]:
        """Put other weights into the model inside the context. `file`: of all trained parameters."""
        with exchanged(self.parameters, read_tensors(file.open(), self.device)):
            yield
