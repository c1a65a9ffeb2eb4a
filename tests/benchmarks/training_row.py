"""training_row: how many kernels does a training row launch, how many bytes does it move, and what do our layers save?

    python -m tests.benchmarks.training_row --json      about five minutes on one idle core, no GPU

A row is one image at one step: the forward pass with guidance, the loss of Flow-GRPO, the backward pass with recomputed
blocks, and its part of the sum of gradients. The real diffusers classes with their published sizes lie on torch's meta
device, which has shapes and no numbers, and a `TorchDispatchMode` sees every operation.

    kernel   an operation that is not a view and not an allocation. Fused attention and RMSNorm are one kernel forward
             and one backward, as on CUDA. An operation over a list of tensors counts the launches of torch's
             multi-tensor kernels.
    bytes    of all inputs read and all outputs written by the kernels, as if no cache existed

`before` runs in the same process: peft's own layers, diffusers' own norms and attention, the sum of gradients parameter
by parameter, and every block recomputed, as the engine did until commit bb7035f. On the CPU nothing is timed.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.algorithm.choice import objective_of
from engine.algorithm.objective import Rows
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm.transaction import added
from engine.algorithm_config import AlgorithmConfig
from engine.config import GUIDANCE, SamplerConfig
from engine.diffusion.sampler import rollout_plan
from engine.memory.architecture import text_of
from engine.memory.published import PublishedModel
from engine.models.half_layers import compute_in_half
from engine.models.load import recompute_blocks, trainable
from engine.tally import Training
from tests.benchmarks.memory import MEASURED, SIZES, built, sized
from tests.benchmarks.page import load_now, publish

RANK = 64
KERNELS_TARGET, BYTES_TARGET = 0.30, 0.20
"""Shares of kernels and bytes that a row should save."""

KERNELS_OF_FEW = {"flux2-klein": 0.20, "sana": 0.28}
"""The same share of families with fewer adapters than others, where the other kernels of a row weigh more.
FLUX.2-klein: one layer makes queries, keys, values and the feed-forward part. SANA: its feed-forward part is
convolutions."""

MOST_TENSORS, MOST_CHUNKS, CHUNK = {1: 110, 2: 64, 3: 48}, 320, 65536
"""Tensors and chunks of numbers in one launch of a multi-tensor kernel over 1, 2 or 3 lists
(torch, ATen/native/cuda/MultiTensorApply.cuh)."""

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view")
WRITES_ONLY = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
"""Operations in place that do not read what they overwrite."""


class Kernels(TorchDispatchMode):
    """Counts kernels and bytes of the operations inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[str] = Counter()
        self.bytes_of: Counter[str] = Counter()

    @property
    def kernels(self) -> int:
        return self.by_operation.total()

    @property
    def bytes(self) -> int:
        return self.bytes_of.total()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        output = operation(*args, **named)
        name = operation._schema.name.removeprefix("aten::")
        if operation.is_view or name in ALLOCATIONS:
            return output
        read = tree_leaves((args, {key: value for key, value in named.items() if key != "out"}))
        if name in WRITES_ONLY:
            read = tree_leaves((args[1:], named))
        written = args[0] if name.endswith("_") and not name.startswith("__") else output
        if name.startswith("_foreach_") and output is None:
            written = args[0]
        self.by_operation[name] += launches(name, args)
        self.bytes_of[name] += moved(read) + moved(tree_leaves(written))
        return output


def launches(name: str, args: tuple[Any, ...]) -> int:
    """Return the kernels of an operation: one, or those of a multi-tensor operation."""
    if not name.startswith("_foreach_"):
        return 1
    lists = [part for part in args if isinstance(part, (list, tuple)) and part and isinstance(part[0], Tensor)]
    depth = len(lists) + (0 if name.endswith("_") else 1)
    chunks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in lists[0])
    return max(math.ceil(len(lists[0]) / MOST_TENSORS[depth]), math.ceil(chunks / MOST_CHUNKS))


def moved(values: Sequence[Any]) -> int:
    """Return the bytes of tensors. An expanded tensor counts the numbers that it has in memory."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let attention and RMSNorm be one operation forward and one backward, as their CUDA kernels are."""
    functions = torch.nn.functional

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Any:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, 0.0, False, attn_mask=attn_mask)[0]

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return functions.layer_norm(x, shape, weight, None, eps or 1e-6)

    with (
        patch.object(functions, "scaled_dot_product_attention", attention),
        patch.object(functions, "rms_norm", rms_norm),
    ):
        yield


# --- a training row


def added_one_by_one(sums: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients as the engine did before."""
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            total.add_(gradient)


def before(transformer: nn.Module) -> Callable[..., object]:
    """Leave the layers as diffusers and peft make them, and recompute every block."""
    recompute_blocks(transformer, keeps=0)
    return added_one_by_one


def after(transformer: nn.Module) -> Callable[..., object]:
    """Take the engine's layers, as `freeze_but_trained` does."""
    compute_in_half(transformer)
    recompute_blocks(transformer)
    return added


def row_of(adapter: Any, rows: int, guidance: float, add: Callable[..., object], device: str = "meta") -> None:
    """Compute one pass of `rows` training rows, with gradients, and add the gradients to a sum."""
    config = AlgorithmConfig(name="flow-grpo")
    plan = rollout_plan(SamplerConfig(steps=10, noise_level=1.2, shift=1.0, guidance=guidance), run_seed=0, batch=0)
    parameters = list(trainable(adapter).values())
    objective = objective_of(config, OldPolicy(trainable(adapter)), None, workers_differ=True)
    shape = (rows, *adapter.latent_shape())
    batch = Rows(
        conditioning=adapter.encode(["a shop sign"] * rows),
        tensors={
            "x": torch.zeros(shape, device=device),
            "next_x": torch.zeros(shape, device=device),
            "step": torch.zeros(rows, dtype=torch.long, device=device),
            "advantage": torch.ones(rows, device=device),
            "old": torch.zeros(rows, device=device),
        },
    )
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    loss = objective.losses(adapter, plan, batch).loss.sum() / rows
    add(sums, torch.autograd.grad(loss, parameters, allow_unused=True))


def counted(model: PublishedModel, prepare: Callable[[nn.Module], Callable[..., object]], rows: int) -> Kernels:
    """Return the kernels and bytes of a pass at the smaller size of the family."""
    transformer = built(model, model.config, Training(rank=RANK))
    add = prepare(transformer)
    adapter = sized(model, transformer, SIZES[model.family][0])
    with as_on_cuda(), Kernels() as kernels:
        row_of(adapter, rows, GUIDANCE[model.family], add)
    return kernels


# --- the page


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One family's row before and after."""

    model: PublishedModel
    rows: int
    before: Kernels
    after: Kernels

    @property
    def kernels(self) -> float:
        """Return the share of kernels that a row no longer launches."""
        return 1 - self.after.kernels / self.before.kernels

    @property
    def bytes(self) -> float:
        """Return the share of bytes that a row no longer moves."""
        return 1 - self.after.bytes / self.before.bytes

    def row(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "size": text_of(SIZES[self.model.family][0]),
            "rows of a pass": self.rows,
            "kernels a row before": round(self.before.kernels / self.rows),
            "after": round(self.after.kernels / self.rows),
            "fewer": f"{self.kernels:.0%}",
            "GB a row before": round(self.before.bytes / self.rows / 1e9),
            "after ": round(self.after.bytes / self.rows / 1e9),
            "fewer ": f"{self.bytes:.0%}",
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Count all families and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.parse_args(arguments)
    load1, begun = load_now(), time.perf_counter()
    savings = [
        Saving(model=model, rows=rows, before=counted(model, before, rows), after=counted(model, after, rows))
        for rows, models in ((1, MEASURED), (4, MEASURED[1:]))
        for model in models
    ]
    single = {saving.model.family: saving for saving in savings if saving.rows == 1}
    publish(
        "training_row",
        question="how many kernels does a training row launch, and how many bytes does it move?",
        command="python -m tests.benchmarks.training_row --json",
        result={
            "kernels_before": {family: saving.before.kernels for family, saving in single.items()},
            "kernels_after": {family: saving.after.kernels for family, saving in single.items()},
            "bytes_before": {family: saving.before.bytes for family, saving in single.items()},
            "bytes_after": {family: saving.after.bytes for family, saving in single.items()},
            "least_kernels_saved": min(saving.kernels for saving in savings),
            "least_bytes_saved": min(saving.bytes for saving in savings),
            "by_operation": {
                family: {"before": most(saving.before.by_operation), "after": most(saving.after.by_operation)}
                for family, saving in single.items()
            },
            "seconds": round(time.perf_counter() - begun),
        },
        runs=1,
        seeds=[],
        load1=load1,
        rows=[saving.row() for saving in savings],
        text=TEXT,
    )


def most(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the 15 largest numbers."""
    return dict(Counter(numbers).most_common(15))


TEXT = """Counted on torch's meta device, on the real diffusers classes at their published sizes: LoRA of rank 64 beside
bf16 weights, published guidance (two passes for Qwen-Image, SD3 and Wan), every block recomputed but, after, the last
one. Eager mode, nothing compiled. Qwen-Image is counted with one row of a pass only. Not counted: decoding, text
encoders and the optimiser's step. **Nothing is timed, and no figure of a GPU is of this code**: the page [gpu](gpu.md)
measured the engine before it; `make gpu-proof` measures both ways on one.

## What was saved

| what | kernels, forward / backward, before | after |
| --- | --- | --- |
| adapter beside a bf16 layer | 7 / 10 | 3 / 7, and a few for all layers of a pass together |
| RMSNorm of queries or keys (Qwen-Image, SD3, HunyuanVideo) | 8 / about 13 | 1 / 1 |
| rotary positions of one tensor (FLUX.1, HunyuanVideo) | 8 / about 10 | 3 / 4 |
| sum of gradients | 2 for each parameter | 1 for each parameter, and a few |

peft's adapter copies every input to fp32, once for each layer that reads it. Those copies, and the fp32 products around
them, were most of the bytes. Adapters are now rounded to bf16 at the beginning of a pass; master weights, gradients,
optimiser and checkpoints stay fp32 (`engine/models/half_adapters.py`).

## How exact it is

`tests/engine/test_half_layers.py` compares gradients of every family with those of the same model in fp32. Their
distance, relative to the norm, is .008 to .05 (.25 for the tiny FLUX.1-dev). The bound is 1.25 times the distance of
peft's and diffusers' own layers in bf16, which is held below .06 (.3): the frozen weights and activations round as
before. fp32 models (digits-ocr, shapes) keep the layers that they had, bit for bit. A pass with gradients has the bits
of one without, and recomputed blocks those of kept ones.

## What it changed for us

The memory forecast follows: adapters keep their input once, in bf16 ([memory](memory.md)). The timing tables
(`engine/timing/figures.py`) keep the figures measured with the old layers until a GPU is at hand: plans are cautious.
"""

if __name__ == "__main__":
    main()
