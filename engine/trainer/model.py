"""The model under training: trained weights, their running average, and the optimizer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors.torch import load, save

from engine.algorithm.transaction import Average, Trainer
from engine.config import AlgorithmConfig
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy, load_start, trainable
from engine.models.weights import get_weights, set_weights
from engine.storage.checkpoint import Start


class TrainedModel:
    """Trained parameters by name, the optimizer that changes them, and the average that evaluations use."""

    def __init__(self, adapter: DiTAdapter, algorithm: AlgorithmConfig, start: Start | None) -> None:
        """Load the start weights, if any, before the average and the reference of the KL divergence copy the weights.

        A run restored from a checkpoint needs the start weights too, because the KL divergence is measured from them.
        """
        self.parameters = trainable(adapter)
        if start is not None:
            load_start(self.parameters, start.weights)
        reference = ReferencePolicy.of(adapter, is_started=start is not None) if algorithm.kl_beta > 0 else None
        self.trainer = Trainer(adapter, self.parameters, algorithm, reference)
        self.average = Average(self.parameters, algorithm.ema_decay)

    @property
    def device(self) -> str:
        return str(next(iter(self.parameters.values())).device)

    def weights(self) -> bytes:
        """Return the trained weights as safetensors bytes."""
        return get_weights(self.parameters)

    def average_weights(self) -> bytes:
        """Return the averaged weights as safetensors bytes."""
        return save(self.average.tensors)

    def files(self, weights: bytes) -> dict[str, bytes]:
        """Return the large files of a checkpoint by name. `weights`: of `weights()`, which are not copied again."""
        optimizer = {name: tensor.contiguous() for name, tensor in self.trainer.optimizer_state().items()}
        return {"weights": weights, "ema": self.average_weights(), "optimizer": save(optimizer)}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Load the files of a checkpoint."""
        set_weights(self.parameters, files["weights"])
        average = load(files["ema"])
        self.average.tensors = {name: average[name].to(value.device) for name, value in self.parameters.items()}
        self.trainer.load_optimizer_state(load(files["optimizer"]))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights into the model inside the context, and restore the trained weights afterwards."""
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
