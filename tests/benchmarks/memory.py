"""memory: does the memory forecast agree with what autograd keeps, and with peaks measured on a GPU?

    python -m tests.benchmarks.memory --json      about a minute on one core, no GPU

The real diffusers classes with the published sizes lie on torch's meta device, which has shapes and no numbers. A
forward pass of the engine's adapter runs there, and `saved_tensors_hooks` sees every tensor that autograd keeps.
Tensors that share memory count once; parameters and buffers do not count.

Two operations have CUDA kernels that keep less than their formulas on the meta device: fused attention keeps queries,
keys, values, output and one number per query and head; the fused RMSNorm keeps its input and one number per row. Both
are replaced by functions that keep the same tensors as the kernels.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from diffusers import (
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from peft import LoraConfig
from torch import Tensor, nn

from engine.families import FAMILIES
from engine.family import Family
from engine.memory.activations import activations, parameters_of
from engine.memory.architecture import text_of, text_tokens
from engine.memory.published import (
    FLUX_1_DEV,
    HUNYUAN_VIDEO,
    PUBLISHED,
    QWEN_IMAGE,
    SD3_5_MEDIUM,
    WAN_1_3B,
    PublishedModel,
)
from engine.model_folder import ImageSize
from engine.models.by_family import FamilyAdapter
from engine.models.flux import FLUX_LORA_TARGETS, FluxAdapter
from engine.models.half_layers import compute_in_half
from engine.models.hunyuan_video import HUNYUAN_VIDEO_LORA_TARGETS, HunyuanVideoAdapter
from engine.models.load import recompute_blocks
from engine.models.qwen_image import QWEN_LORA_TARGETS, QwenImageAdapter
from engine.models.sd3 import SD3_LORA_TARGETS, SD3Adapter
from engine.models.text import EncodedText
from engine.models.wan import WAN_LORA_TARGETS, WanAdapter
from engine.tally import Training
from tests.benchmarks.memory_parts import parts_off
from tests.benchmarks.memory_peaks import Peak, peaks
from tests.benchmarks.page import load_now, publish

CLASSES: Mapping[str, type[nn.Module]] = {
    "qwen-image": QwenImageTransformer2DModel,
    "sd3": SD3Transformer2DModel,
    "flux": FluxTransformer2DModel,
    "wan": WanTransformer3DModel,
    "hunyuan-video": HunyuanVideoTransformer3DModel,
    **{name: getattr(diffusers, family.pipeline.parts["transformer"]) for name, family in FAMILIES.items()},
}
TARGETS = {
    "qwen-image": QWEN_LORA_TARGETS,
    "sd3": SD3_LORA_TARGETS,
    "flux": FLUX_LORA_TARGETS,
    "wan": WAN_LORA_TARGETS,
    "hunyuan-video": HUNYUAN_VIDEO_LORA_TARGETS,
}
RANK = 64
ROWS = 2
"""Rows of a measured pass. With one row, slices of a tensor need no copies, so a row keeps a little less."""

SIZES: Mapping[str, tuple[ImageSize, ImageSize]] = {
    "qwen-image": (
        ImageSize(height=512, width=512, text_tokens=256),
        ImageSize(height=1280, width=1280, text_tokens=1024),
    ),
    "sd3": (ImageSize(height=512, width=512, text_tokens=256), ImageSize(height=1024, width=1024, text_tokens=256)),
    "flux": (ImageSize(height=512, width=512, text_tokens=512), ImageSize(height=1024, width=768, text_tokens=512)),
    "wan": (
        ImageSize(height=240, width=416, frames=33, text_tokens=226),
        ImageSize(height=480, width=832, frames=81, text_tokens=512),
    ),
    "hunyuan-video": (
        ImageSize(height=320, width=512, frames=17, text_tokens=256),
        ImageSize(height=544, width=960, frames=61, text_tokens=256),
    ),
    **dict.fromkeys(FAMILIES, (ImageSize(height=512, width=512), ImageSize(height=1024, width=768))),
}
OF_ONE_FILE = tuple(
    next(published for published in PUBLISHED if published.family == family and published.name == sizes[0].name)
    for family, sizes in ((name, row.published) for name, row in FAMILIES.items())
)
"""The first published model of each family in engine/families/."""
MEASURED = (QWEN_IMAGE, SD3_5_MEDIUM, FLUX_1_DEV, WAN_1_3B, HUNYUAN_VIDEO, *OF_ONE_FILE)


# --- what autograd keeps


class KeptByAttention(torch.autograd.Function):
    """Attention as CUDA's fused kernels keep it, without numbers. [B, heads, tokens, head width]"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # The kernels write the output as [B, tokens, heads, head width].
        out = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
        log_sum = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out


class KeptByRmsNorm(torch.autograd.Function):
    """RMSNorm as CUDA's fused kernel keeps it, without numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        kept: Tensor = KeptByAttention.apply(query, key, value)
        return kept

    def rms_norm(x: Tensor, _: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        kept: Tensor = KeptByRmsNorm.apply(x, weight)
        return kept

    functions = torch.nn.functional
    with (
        patch.object(functions, "scaled_dot_product_attention", attention),
        patch.object(functions, "rms_norm", rms_norm),
    ):
        yield


def kept_bytes(transformer: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd keeps of a forward pass, without parameters and buffers."""
    own = {id_of(one) for one in (*transformer.parameters(), *transformer.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if id_of(tensor) not in own:
            kept.setdefault(id_of(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward().square().mean()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# --- the models on the meta device


def depths(model: PublishedModel) -> list[tuple[int, dict[str, Any]]]:
    """Return shallow configurations with their weights, whose weighted sum is the published depth.

    Blocks of a kind keep the same bytes. The first configuration has two blocks of each kind (SD3: one), because the
    first block keeps less. Each further configuration has one block more of one kind.
    """
    config = dict(model.config)
    depth = "n_layers" if model.family == "z-image" else "num_layers"
    layers, single = config[depth], config.get("num_single_layers")
    dual = len(config.get("dual_attention_layers", ()))
    if model.family == "sd3":
        base = config | {"num_layers": 3, "dual_attention_layers": (0,)}
        more = [(layers - dual - 2, base | {"num_layers": 4})]
        more += [(dual - 1, base | {"num_layers": 4, "dual_attention_layers": (0, 1)})]
    else:
        base = config | {depth: 2} | ({} if single is None else {"num_single_layers": 2})
        more = [(layers - 2, base | {depth: 3})]
        more += [] if single is None else [(single - 2, base | {"num_single_layers": 3})]
    return [(1 - sum(count for count, _ in more), base), *more]


def built(model: PublishedModel, config: Mapping[str, Any], training: Training) -> nn.Module:
    """Return a transformer with frozen bf16 weights and fp32 adapters, or with all weights trained in bf16.

    Parameters that diffusers keeps in fp32 when it loads a folder are fp32 here too.
    """
    with torch.device("meta"):
        transformer = CLASSES[model.family](**config).eval()
    in_fp32 = getattr(transformer, "_keep_in_fp32_modules", None) or ()
    for name, parameter in transformer.named_parameters():
        if not any(part in name.split(".") for part in in_fp32):
            parameter.data = parameter.data.bfloat16()
    transformer.requires_grad_(training.is_full)
    if training.rank is not None:
        row = FAMILIES.get(model.family)
        targets = list(TARGETS[model.family] if row is None else row.lora_targets(transformer))
        lora = LoraConfig(r=training.rank, lora_alpha=training.rank, target_modules=targets)
        with torch.device("meta"):
            transformer.add_adapter(lora)
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return transformer.eval()


def without_padding(family: Family) -> Family:
    """Return a family whose texts have no padding: a mask on the meta device has no numbers."""

    def forward(transformer: nn.Module, x: Tensor, sigma: Tensor, hidden: Tensor, _: Tensor) -> Tensor:
        return family.forward(transformer, x, sigma, hidden, torch.ones(hidden.shape[:2], dtype=torch.bool))

    return replace(family, forward=forward)


ADAPTERS: Mapping[str, Callable[..., Any]] = {
    "qwen-image": QwenImageAdapter,
    "sd3": SD3Adapter,
    "flux": FluxAdapter,
    "wan": WanAdapter,
    "hunyuan-video": HunyuanVideoAdapter,
    **{name: partial(FamilyAdapter, without_padding(family)) for name, family in FAMILIES.items()},
}


def sized(model: PublishedModel, transformer: nn.Module, size: ImageSize) -> Any:
    """Return the engine's adapter over the transformer, for images of this size and random text of its length."""
    a, tokens = model.architecture, text_tokens(model.family, size)

    def encode(prompts: list[str]) -> EncodedText:
        hidden = torch.empty(len(prompts), tokens, a.text_width, device="meta", dtype=torch.bfloat16)
        pooled = torch.empty(len(prompts), a.pooled_width or 1, device="meta", dtype=torch.bfloat16)
        return EncodedText(hidden, torch.ones(len(prompts), tokens, dtype=torch.bool, device="meta"), pooled)

    latent: tuple[int, ...] = (size.height // model.vae_factor, size.width // model.vae_factor)
    if model.family in ("wan", "hunyuan-video"):
        latent = ((size.frames - 1) // 4 + 1, *latent)
    return ADAPTERS[model.family](transformer, nn.Identity(), encode, latent)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured pass beside its forecast. Bytes are per row."""

    model: str
    size: str
    weights: str
    checkpointing: str
    forecast: int
    measured: int

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1


def cases_of(model: PublishedModel, training: Training) -> Iterator[Case]:
    """Measure both sizes, with and without checkpointing."""
    transformers: list[tuple[int, Any]] = [(count, built(model, config, training)) for count, config in depths(model)]
    for is_checkpointed, size in product((False, True), SIZES[model.family]):
        kept = sum(count * pass_of(model, one, size, is_checkpointed) for count, one in transformers)
        found = activations(model.architecture, size, training, is_checkpointed=is_checkpointed, is_guided=True)
        yield Case(
            model=model.name,
            size=text_of(size),
            weights="full" if training.is_full else f"LoRA {training.rank}",
            checkpointing="on" if is_checkpointed else "off",
            forecast=found.kept,
            measured=kept // ROWS,
        )


def pass_of(model: PublishedModel, transformer: Any, size: ImageSize, is_checkpointed: bool) -> int:
    """Return the bytes that autograd keeps of a pass with guidance, of all its rows."""
    compute_in_half(transformer)
    if is_checkpointed:
        recompute_blocks(transformer)
    transformer.train(is_checkpointed)
    adapter = sized(model, transformer, size)
    x = torch.empty(ROWS, *adapter.latent_shape(), device="meta")
    sigma = torch.full((ROWS,), 0.5, device="meta")
    conditioning = adapter.encode(["a shop sign"] * ROWS)
    with as_on_cuda():
        return kept_bytes(transformer, lambda: adapter.velocity(x, sigma, conditioning, 4.0))


# --- sizes of weights


def counted(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parameters_off() -> dict[str, int]:
    """Return each published transformer's parameters less the counted parameters. All should be 0."""
    off = {}
    for model in PUBLISHED:
        with torch.device("meta"):
            real = counted(CLASSES[model.family](**model.config))
        off[model.name] = real - parameters_of(model.architecture, Training(rank=None)).transformer
    return off


# --- the page


def rows_of(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return a row for each model, size and kind of weights, without and with checkpointing beside each other."""
    pairs: dict[tuple[str, str, str], dict[str, Case]] = {}
    for case in cases:
        pairs.setdefault((case.model, case.size, case.weights), {})[case.checkpointing] = case
    return [
        {
            "model": model,
            "size": size,
            "weights": weights,
            "GB a row": gb(pair["off"].measured),
            "forecast": gb(pair["off"].forecast),
            "with checkpointing": gb(pair["on"].measured),
            "forecast of it": gb(pair["on"].forecast),
            "largest error": f"{max(abs(one.error) for one in pair.values()):.1%}",
        }
        for (model, size, weights), pair in pairs.items()
    ]


def gb(count: float) -> str:
    return f"{count / 1e9:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.parse_args()
    load1, begun = load_now(), time.perf_counter()
    trainings = (Training(rank=RANK), Training(rank=None))
    cases = [case for model, training in product(MEASURED, trainings) for case in cases_of(model, training)]
    worst, off, on_gpu = max(abs(case.error) for case in cases), parameters_off() | parts_off(), peaks()
    publish(
        "memory",
        question="does the memory forecast agree with what autograd keeps, and with peaks measured on a GPU?",
        command="python -m tests.benchmarks.memory --json",
        result={
            "worst_error": worst,
            "cases": [{**asdict(case), "error": case.error} for case in cases],
            "parameters_off": off,
            "worst_error_on_gpu": max(abs(peak.error) for peak in on_gpu),
            "gpu_peaks_gib": [{**asdict(peak), "error": peak.error} for peak in on_gpu],
            "seconds": time.perf_counter() - begun,
        },
        runs=1,
        seeds=[],
        load1=load1,
        rows=rows_of(cases),
        text=text(cases, off, on_gpu),
    )


def text(cases: Sequence[Case], off: Mapping[str, int], on_gpu: Sequence[Peak]) -> str:
    steps = [peak for peak in on_gpu if "step" in peak.what or "rows" in peak.what]
    passes = [peak for peak in on_gpu if peak not in steps]
    shown = [peak for peak in steps if not peak.what.endswith(("rows 2", "rows 8", "512 px, rows 4"))]
    table = "\n".join(f"| {one.what} | {one.forecast:.2f} | {one.measured:.2f} | {one.error:+.1%} |" for one in shown)
    return f"""
Measured on torch's meta device: bytes that autograd keeps of a forward pass with guidance, per row (one image at one
step). Fused attention and RMSNorm keep what their CUDA kernels keep. Forecast: `engine/memory/`, a count of the tensors
that each layer keeps; nothing in it was fitted to these figures. Largest error of {len(cases)} cases:
{worst_of(cases):.1%}. Published depth: blocks of a kind keep the same, so models of two and three blocks are measured,
and their difference is taken as often as the published model has blocks. Adapters have rank {RANK} and compute in fp32
over bf16 weights; `full` trains all weights in bf16. Parameters of {len(off)} transformers, text encoders and VAEs
against their real classes: {sum(map(abs, off.values()))} off.

## Peaks on an H100, GiB

| step with checkpointing (measured 2026-11-26, gpu.json) | forecast | measured | error |
| --- | --- | --- | --- |
{table}

Largest error of {len(steps)} steps {worst_of(steps):.1%}, of {len(passes)} passes without gradients
{worst_of(passes):.1%}. One figure of the passes was read off them: at most 19 tensors of all tokens at once. A step's
working memory is the recomputed block and the gradients of its widest input; the 20 B figures were known when that rule
was written. These checks had no VAE, no text encoder, no average and no old policy.

## What it changed

Plans print this budget, and a launch refuses GPUs on which not one row fits. Not measured: the allocator's loss (4 %
assumed), decoding (2 KB a pixel assumed), HunyuanVideo on a GPU, and a whole trainer with its copies of the weights. A
run that trains all weights converts fp32 weights as it goes; its budget takes all activations as fp32, an upper bound.
"""


def worst_of(found: Sequence[Case] | Sequence[Peak]) -> float:
    return max(abs(one.error) for one in found)


if __name__ == "__main__":
    main()
