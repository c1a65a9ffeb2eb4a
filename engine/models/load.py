"""Load a `DiTAdapter` from the model's configuration and select the trained parameters.

The promises: parameters that are not trained are frozen, and all modules are in eval mode (dropout would make the
log-probs of rollout and training differ); low-rank adapters start equal on every node; and `trainable` always gives the
same names in the same order, because publishing, optimising and checkpoints rely on the order.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, assert_never

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.config import SHIPPED, ModelConfig
from engine.families import FAMILIES
from engine.model_folder import ModelFolder, model_folder
from engine.models.adapter import DiTAdapter
from engine.models.half_layers import compute_in_half
from engine.models.lora import load_lora, merge, start_from
from engine.models.text import COMES_LAST
from engine.models.weights import exchanged, set_weights
from engine.storage.tensor_files import Stored

_DTYPE = "spotrl_computing_dtype"
"""Attribute of a network that computes in another dtype than its weights have."""

_CONTINUES = "spotrl_continues"
"""Attribute of a network whose adapters begin with somebody else's factors, so the base is not the start of training.
"""

LORA_SEED = 0
"""Seed of the random start values of low-rank adapters. Every node draws the same values."""


def load_adapter(
    config: ModelConfig,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    reads_later: bool = False,
    encode_first: Callable[[DiTAdapter], None] | None = None,
) -> DiTAdapter:
    """Load the model with its weights, ready for rollouts and for training as set in `config.weights`.

    Transformer, autoencoder and text encoder are all on the device. With `encode_first`, the text encoders come first:
    the function encodes prompts and moves the encoders away (`prepare_prompts`), and transformer and autoencoder
    follow. The device then needs room for the larger of the two, and not for both.
    `dtype`: number format of computing and of frozen weights, for models from a folder; shipped models are fp32.
    Trained weights are fp32. `reads_later`: the transformer of a folder has no values until `unread.read_values`, for
    full weights that ranks divide.
    Raises ValueError if the folder is not the model's, or cannot make the size in `config`, or if `config.lora` does
    not fit.
    """
    adapter = load_family(config, device, dtype, reads_later=reads_later, encodes_first=encode_first is not None)
    if encode_first is not None:
        encode_first(adapter)
        for part in (adapter.transformer, getattr(adapter, "_vae", None)):  # shipped models have no autoencoder
            if part is not None and not any(parameter.is_meta for parameter in part.parameters()):
                part.to(device)
    lora = load_lora(config, adapter.transformer) if config.lora is not None else {}
    if config.lora_use == "merge":
        merge(adapter.transformer, lora)
    freeze_but_trained(adapter, config)
    if config.lora_use == "continue":
        start_from(trainable(adapter), lora, config.lora_alpha / config.lora_rank)
        setattr(adapter.transformer, _CONTINUES, bool(lora))
    if config.weights == "full" and config.name not in SHIPPED and dtype == torch.bfloat16:
        compute_in_bfloat16(adapter.transformer)
    if config.recomputes:
        recompute_blocks(adapter.transformer)
    adapter.doubles_guidance = config.doubles_guidance
    return adapter


def load_family(
    config: ModelConfig,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    reads_later: bool = False,
    encodes_first: bool = False,
) -> DiTAdapter:
    """Load the model with its weights, before the trained parameters are selected. See `load_adapter`.

    `encodes_first`: of a model from a folder, only the text encoders are on the device.
    """
    path = Path(config.path) if config.path is not None else None

    def folder() -> ModelFolder:
        assert path is not None, "ModelConfig refuses a family without a path"
        return replace(model_folder(config, path), reads_later=reads_later, encodes_first=encodes_first)

    match config.name:
        case "digits-ocr":
            from engine.models.digits import BASE, load_digits

            return load_digits(BASE if path is None else path / BASE.name, device)
        case "shapes":
            from engine.models.shapes import BASE as SHAPES_BASE
            from engine.models.shapes import load_shapes

            return load_shapes(SHAPES_BASE if path is None else path / SHAPES_BASE.name, device)
        case "qwen-image":
            from engine.models.qwen_image import load_qwen_image

            return load_qwen_image(folder(), device, dtype)
        case "sd3":
            from engine.models.sd3 import load_sd3

            return load_sd3(folder(), device, dtype)
        case "flux":
            from engine.models.flux import load_flux

            return load_flux(folder(), device, dtype)
        case "wan":
            from engine.models.wan import load_wan

            return load_wan(folder(), device, dtype)
        case "hunyuan-video":
            from engine.models.hunyuan_video import load_hunyuan_video

            return load_hunyuan_video(folder(), device, dtype)
        case _:
            from engine.models.by_family import load_by_family

            return load_by_family(FAMILIES[config.name], folder(), device, dtype)


def freeze_but_trained(adapter: DiTAdapter, config: ModelConfig) -> None:
    """Select the trained parameters: the whole transformer, or low-rank adapters added here."""
    transformer = adapter.transformer.eval()
    match config.weights:
        case "full":
            transformer.requires_grad_(True)
        case "lora":
            transformer.requires_grad_(False)
            lora = LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                init_lora_weights="gaussian",
                target_modules=list(adapter.lora_targets()),
            )
            # The caller's random state stays unchanged. Adapters are drawn on the CPU, whatever the model's device.
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(LORA_SEED)
                transformer.add_adapter(lora)  # type: ignore[operator]
            transformer.eval()
        case _:
            assert_never(config.weights)
    # In half precision, an update of 1e-4 would be lost in rounding. Frozen weights keep their dtype.
    for parameter in trainable(adapter).values():
        parameter.data = parameter.data.float()
    if config.weights == "lora":
        compute_in_half(transformer)


def compute_in_bfloat16(transformer: nn.Module) -> None:
    """Let every pass through fp32 weights compute in bfloat16: rollouts, training and evaluations.

    The weights stay fp32 master weights, with fp32 gradients. Each operation converts the weights it uses, so no second
    copy is kept; sums and norms stay in fp32. On an H100, fp32 matrix products take ten times as long.
    """
    plain = transformer.forward

    @wraps(plain)
    def forward(*args: Any, **named: Any) -> Any:
        # Without a cache, because a converted copy of all weights would live until the end of the pass.
        device = next(transformer.parameters()).device  # here, because a transformer may be read later
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
            return plain(*args, **named)

    transformer.forward = forward
    for module in transformer.modules():
        if isinstance(module, nn.RMSNorm):  # of torch: its fused norm needs inputs of the weights' dtype
            module.register_forward_pre_hook(
                lambda norm, inputs: (inputs[0].to(getattr(norm.weight, "dtype", torch.float32)), *inputs[1:])
            )
    setattr(transformer, _DTYPE, torch.bfloat16)


def computing_dtype(transformer: nn.Module) -> torch.dtype | None:
    """Return the dtype set by `compute_in_bfloat16`, or None: the network computes in the dtype of its weights."""
    dtype: torch.dtype | None = getattr(transformer, _DTYPE, None)
    return dtype


def recompute_blocks(transformer: nn.Module, *, keeps: int = 1) -> None:
    """Turn on gradient checkpointing: a pass with gradients keeps the inputs of blocks, and runs each block twice.

    The last `keeps` blocks are not run again: the backward pass begins with them, when a recomputed block would be
    complete in memory too. Of two branches of guidance that holds for the second. A pass without gradients does not
    change. Raises ValueError if the transformer's class has no checkpointing.
    """
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    blocks = [block for blocks in lists for block in blocks]
    kept = {id(block) for block in blocks[len(blocks) - keeps :]}

    def block(module: nn.Module, *args: object) -> object:
        if id(module) in kept and COMES_LAST.get():
            return module(*args)
        # Nothing in a block draws random numbers, because modules are in eval mode. diffusers' own function saves and
        # restores the process's random state around every block, which threads that train side by side would share.
        return checkpoint(module.__call__, *args, use_reentrant=False, preserve_rng_state=False)

    transformer.enable_gradient_checkpointing(block)  # type: ignore[operator]


def trainable(adapter: DiTAdapter) -> dict[str, nn.Parameter]:
    """Return the optimised, published and checkpointed parameters by name, in the order of the module tree."""
    return {name: parameter for name, parameter in adapter.transformer.named_parameters() if parameter.requires_grad}


def load_start(parameters: Mapping[str, nn.Parameter], data: bytes | Stored) -> None:
    """Load the start weights of a run into the parameters. Raises as `checked_start`."""
    set_weights(parameters, checked_start(parameters, data))


def checked_start(parameters: Mapping[str, nn.Parameter], data: bytes | Stored) -> Stored:
    """Return the start weights of a run. Raises ValueError if the weights belong to another model.

    `data`: safetensors, in the format of checkpoints
    """
    stored = data if isinstance(data, Stored) else Stored.of_bytes(data)
    try:
        stored_shapes = {name: entry.shape for name, entry in stored.entries().items()}
    except ValueError as error:
        raise ValueError(f"the start weights cannot be read ({error}); pull them again") from None
    model_shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name in sorted(stored_shapes.keys() | model_shapes.keys()):
        if stored_shapes.get(name) != model_shapes.get(name):
            raise ValueError(
                f"the start weights are of another model: {name} is {_shape(stored_shapes.get(name))} there and "
                f"{_shape(model_shapes.get(name))} in this model; name a run of the same model, weights and lora_rank"
            )
    return stored


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"{list(shape)}"


class ReferencePolicy:
    """The model before training, for the KL divergence: the base, or the start weights of the run.

    Without start weights, low-rank adapters are only switched off, which costs nothing, because the base is still
    present. Otherwise a copy of the trained parameters is kept, and swapped with the trained weights while `active`.
    """

    def __init__(self, adapter: DiTAdapter, base: Mapping[str, Tensor] | None) -> None:
        """Create the reference. `base`: the reference weights by name; None switches low-rank adapters off instead."""
        self._adapter = adapter
        self._base = base
        self._lora = [module for module in adapter.transformer.modules() if isinstance(module, BaseTunerLayer)]
        if base is None and not self._lora:
            raise ValueError("the model has no low-rank adapters to switch off; give a copy of its base weights")

    @classmethod
    def of(cls, adapter: DiTAdapter, *, is_started: bool = False) -> "ReferencePolicy":
        """Return the current model as reference. Call right after `load_adapter`, before a checkpoint is read.

        `is_started`: True if `load_start` was called. The base without adapters is then not the start of training, and
        neither is it with `lora_use: continue`, whose adapters change the model from the beginning.
        """
        is_base = not is_started and not getattr(adapter.transformer, _CONTINUES, False)
        if is_base and any(isinstance(module, BaseTunerLayer) for module in adapter.transformer.modules()):
            return cls(adapter, None)
        return cls(adapter, {name: weight.detach().clone() for name, weight in trainable(adapter).items()})

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch `adapter.velocity` to the reference inside the context, without gradient.

        Restore the trained weights after.
        """
        swap = self._switched_off() if self._base is None else exchanged(trainable(self._adapter), self._base)
        with torch.no_grad(), swap:
            yield

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        trained = trainable(self._adapter)
        for layer in self._lora:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._lora:
                layer.enable_adapters(True)
            # Switching the adapters off also froze the parameters.
            for parameter in trained.values():
                parameter.requires_grad_(True)
