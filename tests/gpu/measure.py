"""Measure models of published sizes on a GPU. One check is one process, so an error costs its own figures only.

    python -m tests.gpu.measure                  lists the checks in their order
    python -m tests.gpu.measure NAME             runs one; lines go to the file of figures.py

Every figure is kept as soon as it is measured. A number of rows that does not fit is kept as "out of memory". The same
functions run on the CPU with narrow models. Weights and inputs are random: seconds and bytes do not depend on them.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import DoesNotFit
from engine.algorithm_config import AlgorithmConfig
from engine.config import ModelConfig, SamplerConfig, WindowConfig
from engine.diffusion.sampler import Plan, rollout_plan
from engine.diffusion.trajectory import Trajectory
from engine.models.compiled import compile_blocks
from engine.models.load import compute_in_bfloat16, freeze_but_trained, recompute_blocks, trainable
from engine.models.merge import MergedAdapters
from engine.models.weights import get_weights, set_weights
from engine.out_of_memory import free_memory, is_out_of_memory
from engine.protocol.request import Group, Manifest
from engine.trainer.model import TrainedModel
from engine.trainer.outbox import Outbox
from tests.gpu.device import GIB
from tests.gpu.figures import describe_device, keep_figure
from tests.gpu.published import MODELS, Random

Keep = Callable[[Sequence[str], object], None]
"""Stores the figures of one case: (path of keys, value)."""

OUT_OF_MEMORY = "out of memory"
RUNS = 3
LIMIT_S = 12.0
"""A case that has taken this long, with its first slow run, is not run again. It always has one measured run."""

RANK = 64
LORA = ModelConfig(name="qwen-image", path="none", weights="lora", lora_rank=RANK, lora_alpha=2 * RANK)
FULL = ModelConfig(name="qwen-image", path="none", weights="full")

ROWS = {"512 px": (1, 2, 4, 8, 16), "1280 px": (1, 2, 4)}
BATCHES = {"512 px": (1, 4, 8, 16, 32), "1280 px": (1, 2, 4, 8)}
UNGUIDED = 4
"""Images that are also measured without guidance."""
COMPILED = (16, 4)
FAMILY_ROWS = (1, 4)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The device, and the size of models and batches on it."""

    device: str = "cuda"
    is_narrow: bool = False

    def few(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the numbers of rows or images to measure."""
        return numbers[:2] if self.is_narrow else numbers

    def transformer(self, model: Random, dtype: torch.dtype = torch.bfloat16) -> Any:
        return model.built(self.device, dtype, is_narrow=self.is_narrow)

    def adapter(self, model: Random, transformer: Any, size: str) -> Any:
        return model.over(transformer, size, is_narrow=self.is_narrow)


# --- timing


def finish(device: str) -> None:
    """Wait for the device's queued work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def timed(once: Callable[[], object], device: str, rows: int) -> dict[str, float]:
    """Return seconds per row of a call, the median after one slow first call, and the peak of memory."""
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= RUNS and sum(seconds) < LIMIT_S):
        finish(device)
        begun = time.perf_counter()
        once()
        finish(device)
        seconds.append(time.perf_counter() - begun)
    return {
        "s_a_row": statistics.median(seconds[1:]) / rows,
        "max_s": max(seconds[1:]),
        "first_s": seconds[0],
        "runs": len(seconds) - 1,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if is_gpu else 0.0,
    }


def timed_if_it_fits(once: Callable[[], object], device: str, rows: int) -> object:
    """Return the figures of `timed`, or "out of memory"."""
    try:
        return timed(once, device, rows)
    except (RuntimeError, MemoryError, DoesNotFit) as error:
        if not isinstance(error, DoesNotFit) and not is_out_of_memory(error):
            raise
        return OUT_OF_MEMORY
    finally:
        free_memory()


# --- the engine's step


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """The trainer of a run, as `engine/trainer/loop.py` makes it: average, old policy and optimiser included."""

    model: TrainedModel
    plan: Plan

    @classmethod
    def of(cls, transformer: Any, adapter: Any, config: ModelConfig, guidance: float) -> "EngineStep":
        """Select the trained weights, and create the trainer. One random step of ten is trained."""
        freeze_but_trained(adapter, config)
        recompute_blocks(transformer)
        sampler = SamplerConfig(steps=10, noise_level=1.2, shift=1.0, guidance=guidance, window=WindowConfig(size=1))
        algorithm = AlgorithmConfig(rows_per_forward=1, learning_rate=1e-5)
        outbox = Outbox(Path(tempfile.mkdtemp()), print)  # the measurement publishes nothing
        model = TrainedModel(adapter, algorithm, None, outbox)
        return cls(model=model, plan=rollout_plan(sampler, run_seed=0, batch=0))

    def once(self, adapter: Any, rows: int) -> Callable[[], None]:
        """Return a call that trains a batch: at least two images, so that rewards can differ, and one optimiser step.

        Passes have at most `rows` rows. The call raises DoesNotFit if the engine had to halve them.
        """
        trainer, images = self.model.trainer, max(2, rows)
        trainer.adapter = adapter
        group = self._group(adapter.latent_shape(), images)
        manifest = Manifest(
            run="gpu",
            lineage=1,
            batch=0,
            version=0,
            sampler=self.plan.signature,
            groups=(Group(prompt=group.prompt, seeds=group.seeds),),
            minibatches=((0,),),
        )

        def step() -> None:
            trainer.rows_per_forward = rows
            transaction = trainer.begin(manifest, 0, self.plan)
            transaction.add(0, group)
            if trainer.rows_per_forward < rows:
                transaction.abort()
                raise DoesNotFit(f"the engine halved {rows} rows to {trainer.rows_per_forward}")
            health = transaction.commit()
            assert not health.skipped, health
            assert health.gradient_norm > 0, health
            self.model.follow(0)

        return step

    def _group(self, shape: tuple[int, ...], images: int) -> FinishedGroup:
        """Return finished rollouts of random latents."""
        generator = torch.Generator().manual_seed(0)
        trajectories = []
        for _ in range(images):
            trajectory = Trajectory.begin(torch.randn(shape, generator=generator))
            for _ in range(self.plan.steps):
                trajectory = trajectory.then(self.plan, torch.randn(shape, generator=generator), torch.tensor(0.0))
            trajectories.append(trajectory)
        return FinishedGroup(
            prompt="a shop sign",
            seeds=tuple(range(images)),
            trajectories=tuple(trajectories),
            rewards=tuple(float(number) for number in range(images)),
        )


def images_of(rows: int) -> int:
    """Return the number of trained rows of `EngineStep.once`."""
    return max(2, rows)


def step_20b(size: str, scale: Scale, keep: Keep, *, with_encoder: bool = False) -> None:
    """Measure training steps of the 20 B with guidance, by rows of a pass.

    `with_encoder`: as many bytes as the text encoder has stay in use, as if it never left the GPU.
    """
    model = MODELS["20 B"]
    transformer = scale.transformer(model)
    adapter = scale.adapter(model, transformer, size)
    step = EngineStep.of(transformer, adapter, LORA, model.guidance)
    numbers = model.published.text_encoder_parameters if with_encoder else 0
    held = torch.empty(min(numbers, 1000) if scale.is_narrow else numbers, dtype=torch.bfloat16, device=scale.device)
    for rows in scale.few(ROWS[size]):
        keep([f"rows {rows}"], timed_if_it_fits(step.once(adapter, rows), scale.device, images_of(rows)))
    del held


# --- rollout passes


def pass_of(adapter: Any, device: str, images: int, guidance: float) -> Callable[[], torch.Tensor]:
    """Return a call that computes the velocity of images without gradient."""
    x = torch.randn(images, *adapter.latent_shape(), device=device)
    sigma = torch.full((images,), 0.5, device=device)
    conditioning = adapter.encode(["a shop sign"] * images)

    @torch.no_grad()
    def once() -> torch.Tensor:
        velocity: torch.Tensor = adapter.velocity(x, sigma, conditioning, guidance)
        return velocity

    return once


def keep_passes(way: str, adapter: Any, numbers: Sequence[int], guidance: float, scale: Scale, keep: Keep) -> None:
    """Measure passes by images, with guidance as two passes and as one doubled batch."""
    for images in numbers:
        for passes, doubles in (("two passes", False), ("one doubled pass", True)):
            adapter.doubles_guidance = doubles
            once = pass_of(adapter, scale.device, images, guidance)
            keep([way, passes, f"images {images}"], timed_if_it_fits(once, scale.device, images))


def passes_20b(size: str, scale: Scale, keep: Keep) -> None:
    """Measure rollout passes of the 20 B, with adapters merged and beside the weights, by images."""
    model = MODELS["20 B"]
    transformer = scale.transformer(model)
    adapter = scale.adapter(model, transformer, size)
    freeze_but_trained(adapter, LORA)
    numbers, merged = scale.few(BATCHES[size]), MergedAdapters(transformer)
    for way in ("adapters beside the weights", "adapters merged"):
        if way == "adapters merged":
            begun = time.perf_counter()
            merged.merge()
            finish(scale.device)
            keep(["merge_s"], time.perf_counter() - begun)
        keep_passes(way, adapter, numbers, model.guidance, scale, keep)
        once = pass_of(adapter, scale.device, UNGUIDED, 1.0)
        keep([way, "no guidance", f"images {UNGUIDED}"], timed_if_it_fits(once, scale.device, UNGUIDED))


def compiled_20b(scale: Scale, keep: Keep) -> None:
    """Measure rollout passes of the 20 B with merged adapters, before and after compilation of the block."""
    model = MODELS["20 B"]
    transformer = scale.transformer(model)
    adapter = scale.adapter(model, transformer, "512 px")
    freeze_but_trained(adapter, LORA)
    MergedAdapters(transformer).merge()
    for way in ("uncompiled", "compiled"):
        if way == "compiled":
            compile_blocks(transformer, "eager" if scale.is_narrow else "inductor")
        keep_passes(way, adapter, scale.few(COMPILED), model.guidance, scale, keep)


def weights_20b(scale: Scale, keep: Keep) -> None:
    """Measure how long the adapters of the 20 B take to become bytes, and to be loaded from bytes."""
    model = MODELS["20 B"]
    transformer = scale.transformer(model)
    adapter = scale.adapter(model, transformer, "512 px")
    freeze_but_trained(adapter, LORA)
    trained, seconds = trainable(adapter), []
    for _ in range(RUNS):
        begun = time.perf_counter()
        sent = get_weights(trained)
        between = time.perf_counter()
        set_weights(trained, sent)
        finish(scale.device)
        seconds.append((between - begun, time.perf_counter() - between))
    get_s, set_s = (statistics.median(some) for some in zip(*seconds, strict=True))
    keep(["adapters"], {"bytes": len(sent), "get_s": get_s, "set_s": set_s, "runs": RUNS})


# --- other families


def family(name: str, scale: Scale, keep: Keep) -> None:
    """Measure passes and training steps of a family with its published guidance, at every size."""
    model = MODELS[name]
    transformer = scale.transformer(model)
    adapters = {size: scale.adapter(model, transformer, size) for size in model.latents}
    step = EngineStep.of(transformer, next(iter(adapters.values())), LORA, model.guidance)
    for size, adapter in adapters.items():
        for rows in scale.few(FAMILY_ROWS):
            once = pass_of(adapter, scale.device, rows, model.guidance)
            keep([size, "pass", f"images {rows}"], timed_if_it_fits(once, scale.device, rows))
        for rows in scale.few(FAMILY_ROWS):
            figures = timed_if_it_fits(step.once(adapter, rows), scale.device, images_of(rows))
            keep([size, "step", f"rows {rows}"], figures)


PRECISIONS = {"fp32": ("highest", False), "TF32": ("high", False), "bf16 with fp32 master weights": ("highest", True)}
"""Torch's precision of fp32 products, and True for the engine's bf16 passes, by name. fp32 is first."""


@contextmanager
def precision(name: str, transformer: Any) -> Iterator[None]:
    """Compute in this precision inside the context."""
    products, in_bfloat16 = PRECISIONS[name]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products)
    if in_bfloat16:
        compute_in_bfloat16(transformer)
    try:
        yield
    finally:
        if in_bfloat16:
            del transformer.forward  # the class's own again
        torch.set_float32_matmul_precision(before)


def precisions(scale: Scale, keep: Keep) -> None:
    """Measure steps that train all weights of SD3.5-medium in each precision, after each one's difference from fp32."""
    model = MODELS["SD3.5-medium"]
    transformer = scale.transformer(model, torch.float32)
    adapters = {size: scale.adapter(model, transformer, size) for size in model.latents}
    for size, adapter in adapters.items():
        once, exact = pass_of(adapter, scale.device, 1, model.guidance), None
        for name in PRECISIONS:
            with precision(name, transformer):
                velocity = once()
            exact = velocity if exact is None else exact
            keep([size, name, "largest_difference"], float((velocity - exact).abs().max()))
            keep([size, name, "largest_value"], float(exact.abs().max()))
    step = EngineStep.of(transformer, next(iter(adapters.values())), FULL, model.guidance)
    for size, adapter in adapters.items():
        for name in PRECISIONS:
            with precision(name, transformer):
                keep([size, name, "step"], timed_if_it_fits(step.once(adapter, 1), scale.device, images_of(1)))


# --- the checks


@dataclass(frozen=True, kw_only=True)
class Check:
    """One measurement, which is one process."""

    name: str
    """Key in gpu.json."""
    measure: Callable[[Scale, Keep], None]
    gib: int
    """Memory that the GPU must have."""
    seconds: float
    """Time limit of the process. Figures until then are kept."""


CHECKS = (
    Check(name="20 B engine step, 512 px", measure=partial(step_20b, "512 px"), gib=75, seconds=180),
    Check(name="20 B rollout passes, 512 px", measure=partial(passes_20b, "512 px"), gib=75, seconds=240),
    Check(
        name="20 B engine step, 512 px, text encoder on the GPU",
        measure=partial(step_20b, "512 px", with_encoder=True),
        gib=75,
        seconds=180,
    ),
    Check(name="20 B rollout passes, 1280 px", measure=partial(passes_20b, "1280 px"), gib=75, seconds=240),
    Check(name="20 B engine step, 1280 px", measure=partial(step_20b, "1280 px"), gib=75, seconds=180),
    Check(name="FLUX.1 passes and steps", measure=partial(family, "FLUX.1"), gib=40, seconds=150),
    Check(name="SD3.5-medium passes and steps", measure=partial(family, "SD3.5-medium"), gib=24, seconds=120),
    Check(name="Wan 1.3 B passes and steps", measure=partial(family, "Wan 1.3 B"), gib=24, seconds=120),
    Check(name="Wan 14 B passes and steps", measure=partial(family, "Wan 14 B"), gib=75, seconds=180),
    Check(name="SD3.5-medium, all weights, by precision", measure=precisions, gib=75, seconds=180),
    Check(name="20 B compiled passes, 512 px", measure=compiled_20b, gib=75, seconds=300),
    Check(name="20 B adapters sent and loaded", measure=weights_20b, gib=60, seconds=120),
)
"""All measurements, those first that answer most."""


def main(arguments: Sequence[str]) -> int:
    """List the checks, or run one on the GPU."""
    by_name = {check.name: check for check in CHECKS}
    if not arguments:
        print(*by_name, sep="\n")
        return 0
    name = arguments[0]
    if name not in by_name:
        print(f"there is no check {name!r}; the checks are:", *by_name, sep="\n")
        return 2
    device = describe_device()
    by_name[name].measure(Scale(), lambda case, value: _keep(name, case, value, device))
    return 0


def _keep(name: str, case: Sequence[str], value: object, device: dict[str, Any]) -> None:
    keep_figure(name, case, value, device)
    print(f"{name}, {', '.join(case)}: {value}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
