"""The share of a GPU's arithmetic that a run uses (model FLOPs utilisation, MFU). Pure.

    MFU = operations of the network / (GPU-seconds x peak of the GPU)

Operations are those of the network's definition, in the manner of PaLM (arXiv 2204.02311, appendix B): a forward pass
counts once, a backward pass once for the gradients of the inputs and, with all weights trained, once more for those of
the weights. Passes that gradient checkpointing repeats, adapters, decoding, text and scoring do not count.
"""

from collections.abc import Mapping
from pathlib import Path

from engine.config import SHIPPED, EngineConfig
from engine.memory.activations import branches_of
from engine.memory.job import sized_model
from engine.memory.published import SizedModel
from engine.timing.figures import Figure, Source
from engine.timing.job import rows_of_an_image


def _sheet(gpu: str) -> Source:
    return Source(basis="published", text=f"NVIDIA's data sheet of the {gpu}: bf16 tensor cores, without sparsity")


PEAKS: Mapping[str, Figure] = {
    "B200": Figure(value=2250e12, source=_sheet("HGX B200")),
    "H200": Figure(value=989e12, source=_sheet("H200 SXM")),
    "H100": Figure(value=989e12, source=_sheet("H100 SXM")),
    "H800": Figure(value=989e12, source=_sheet("H100 SXM")),
    "H20": Figure(value=148e12, source=_sheet("H20")),
    "A100-80GB": Figure(value=312e12, source=_sheet("A100")),
    "A100": Figure(value=312e12, source=_sheet("A100")),
    "L40S": Figure(value=362e12, source=_sheet("L40S")),
    "RTXPRO6000": Figure(value=500e12, source=_sheet("RTX PRO 6000 Blackwell Server Edition, rounded")),
    "L4": Figure(value=121e12, source=_sheet("L4")),
    "A10G": Figure(value=70e12, source=_sheet("A10G")),
    "A10": Figure(value=125e12, source=_sheet("A10")),
}
"""Operations per second of a GPU, by the name of its accelerator. A longer name comes before its beginning."""


def peak_of(gpu: str) -> float | None:
    """Return the operations per second of a GPU. None: the peak is not known, as for a CPU.

    `gpu`: name of a catalog ("A100-80GB") or of the driver ("NVIDIA A100-SXM4-80GB").
    """
    words = gpu.upper().replace("-", " ").split()
    for name, figure in PEAKS.items():
        if gpu.upper() == name or name in words:
            return figure.value
    return None


def rollout_operations(config: EngineConfig, sized: SizedModel) -> int:
    """Return the operations of the denoising steps of one image."""
    return config.sampler.steps * _pass_operations(config, sized)


def training_operations(config: EngineConfig, sized: SizedModel) -> int:
    """Return the operations of all training rows of one image."""
    passes = 3 if config.model.weights == "full" else 2
    return passes * rows_of_an_image(config) * _pass_operations(config, sized)


def _pass_operations(config: EngineConfig, sized: SizedModel) -> int:
    return branches_of(sized.architecture, is_guided=config.sampler.guidance != 1.0) * sized.operations


def possible_images_a_second(config: EngineConfig, gpu: str) -> float | None:
    """Return the images that a GPU at its peak could sample and train each second. None: that is not known.

    `gpu`: as for `peak_of`.
    """
    peak = peak_of(gpu)
    if peak is None or config.model.name in SHIPPED:
        return None
    sized = sized_model(config.model, Path(config.model.path or ""))
    return peak / (rollout_operations(config, sized) + training_operations(config, sized))
