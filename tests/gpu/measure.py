"""Measure models of published sizes on a GPU. One check is one process, so an error costs its own figures only.

    python -m tests.gpu.measure                  lists the checks in their order
    python -m tests.gpu.measure NAME             runs one; lines go to the file of figures.py
    python -m tests.gpu.measure NAME --narrow    the same on the CPU, with a narrow model of the same classes

Every figure is kept as soon as it is measured, and a check that is run again goes on with the cases that it has no
figure of (of this commit, on this device). A number of rows that does not fit is kept as "out of memory". Weights and
inputs are random: seconds and bytes do not depend on them.
"""

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
from diffusers import AutoencoderKLQwenImage, SD3Transformer2DModel

from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import DoesNotFit
from engine.algorithm_config import AlgorithmConfig
from engine.clock import ScaledClock
from engine.config import (
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ModelConfig,
    RuntimeConfig,
    SamplerConfig,
    WindowConfig,
)
from engine.diffusion.sampler import Plan, rollout_plan
from engine.diffusion.trajectory import Trajectory
from engine.entrypoints.inproc import build_inproc
from engine.events import Phase
from engine.model_folder import ImageSize
from engine.models.compiled import compile_blocks, missing_compiler
from engine.models.load import compute_in_bfloat16, freeze_but_trained, recompute_blocks, trainable
from engine.models.merge import MergedAdapters
from engine.models.weights import get_weights, read_tensors, set_weights, write_tensors
from engine.out_of_memory import free_memory, is_out_of_memory
from engine.protocol.request import Group, Manifest, Score
from engine.timing.seconds import published_at
from engine.timing.utilisation import peak_of, rollout_operations, training_operations
from engine.trainer.model import TrainedModel
from engine.trainer.outbox import Outbox
from tests.gpu.device import GIB
from tests.gpu.figures import NARROW, describe_device, keep_figure, lines_of
from tests.gpu.published import MODELS, TEXT_TOKENS, Random


class Keep(Protocol):
    """Stores the figures of one case: (path of keys, value)."""

    def __call__(self, case: Sequence[str], value: object) -> None: ...

    def has(self, case: Sequence[str]) -> bool:
        """Return True if the case was measured before."""


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
PLAIN_ROWS = (1, 4, 16)
COMPILED = (16, 4)
FAMILY_ROWS = (1, 4)

RECIPE_ITERATIONS, RECIPE_PROMPTS, RECIPE_IMAGES = 3, 2, 16
ROOM_FOR_TWO_GIB = 130
"""Memory of a GPU that holds the 20 B twice, and a training pass of 16 rows."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The device, and the size of models and batches on it."""

    device: str = "cuda"
    is_narrow: bool = False
    cuda_start_s: float = 0.0
    """Seconds from this process's first use of the device to its first tensor there."""

    @property
    def peak(self) -> float | None:
        """Operations per second of the device. None: not known, or it is a CPU."""
        return peak_of(torch.cuda.get_device_name()) if self.device == "cuda" else None

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


def keep_timed(
    keep: Keep, case: Sequence[str], once: Callable[[], object], scale: Scale, rows: int, operations: int = 0
) -> None:
    """Measure a case and keep its figures, unless it was measured before.

    `operations`: of the network for one row; with them a GPU whose peak is known gives the MFU.
    """
    if keep.has(case):
        return
    figures = timed_if_it_fits(once, scale.device, rows)
    if isinstance(figures, dict) and operations and scale.peak is not None:
        figures["mfu"] = operations / figures["s_a_row"] / scale.peak
    keep(case, figures)


def pass_operations(size: str) -> int:
    """Return the operations of a guided pass of the 20 B for one image."""
    side = int(size.split()[0])
    return 2 * published_at("Qwen-Image", ImageSize(side, side, text_tokens=TEXT_TOKENS)).operations


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
        keep_timed(keep, [f"rows {rows}"], step.once(adapter, rows), scale, images_of(rows), 2 * pass_operations(size))
    del held


def plain_step_20b(scale: Scale, keep: Keep) -> None:
    """Measure steps of the 20 B with peft's and diffusers' own layers, as the engine had before `half_layers.py`.

    Beside "20 B engine step, 512 px", the figures tell what the engine's layers gain on a GPU.
    """
    model = MODELS["20 B"]
    transformer = scale.transformer(model)
    adapter = scale.adapter(model, transformer, "512 px")
    with patch("engine.models.load.compute_in_half", lambda _: None):
        step = EngineStep.of(transformer, adapter, LORA, model.guidance)
    for rows in scale.few(PLAIN_ROWS):
        operations = 2 * pass_operations("512 px")
        keep_timed(keep, [f"rows {rows}"], step.once(adapter, rows), scale, images_of(rows), operations)


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


def keep_passes(
    way: str, adapter: Any, numbers: Sequence[int], guidance: float, size: str, scale: Scale, keep: Keep
) -> None:
    """Measure passes by images, with guidance as two passes and as one doubled batch."""
    for images in numbers:
        for passes, doubles in (("two passes", False), ("one doubled pass", True)):
            adapter.doubles_guidance = doubles
            once = pass_of(adapter, scale.device, images, guidance)
            keep_timed(keep, [way, passes, f"images {images}"], once, scale, images, pass_operations(size))


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
        keep_passes(way, adapter, numbers, model.guidance, size, scale, keep)
        once = pass_of(adapter, scale.device, UNGUIDED, 1.0)
        keep_timed(keep, [way, "no guidance", f"images {UNGUIDED}"], once, scale, UNGUIDED)


def compiled_20b(scale: Scale, keep: Keep) -> None:
    """Measure rollout passes of the 20 B with merged adapters, before and after compilation of the block."""
    model = MODELS["20 B"]
    transformer = scale.transformer(model)
    adapter = scale.adapter(model, transformer, "512 px")
    freeze_but_trained(adapter, LORA)
    MergedAdapters(transformer).merge()
    for way in ("uncompiled", "compiled"):
        if way == "compiled":
            if not scale.is_narrow and (problem := missing_compiler()):  # `compile_blocks` would leave them uncompiled
                keep([way], problem)
                return
            compile_blocks(transformer, "eager" if scale.is_narrow else "inductor")
        keep_passes(way, adapter, scale.few(COMPILED), model.guidance, "512 px", scale, keep)


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
            keep_timed(keep, [size, "pass", f"images {rows}"], once, scale, rows)
        for rows in scale.few(FAMILY_ROWS):
            keep_timed(keep, [size, "step", f"rows {rows}"], step.once(adapter, rows), scale, images_of(rows))


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
                keep_timed(keep, [size, name, "step"], step.once(adapter, 1), scale, images_of(1))


# --- a whole run, and a change of role


def recipe(scale: Scale, keep: Keep) -> None:
    """Run three iterations of the published recipe of verl-omni: rollout, decoding, scoring, training, publishing.

    The 20 B at 512 px, 10 steps of which 2 are trained, guidance 4, LoRA of rank 64; two of its 32 prompts, so that an
    iteration takes a minute. One process makes everything: the trainer's own rollouts, through adapters beside the
    weights. Where the GPU has room for the model twice, a rollout worker with merged adapters makes them. The score is
    the brightness of the image.
    """
    model, of_a_prompt = MODELS["20 B"], 2 if scale.is_narrow else RECIPE_IMAGES
    images = RECIPE_PROMPTS * of_a_prompt
    gib = torch.cuda.get_device_properties(0).total_memory // GIB if scale.device == "cuda" else 0
    workers = int(scale.is_narrow or gib >= ROOM_FOR_TWO_GIB)
    config = EngineConfig(
        iterations=RECIPE_ITERATIONS,
        sampler=SamplerConfig(steps=10, noise_level=1.2, shift=1.0, guidance=1.0, window=WindowConfig(size=2)),
        algorithm=AlgorithmConfig(
            name="flow-grpo",
            prompts_per_batch=RECIPE_PROMPTS,
            images_per_prompt=of_a_prompt,
            rows_per_forward=16,
            learning_rate=1e-5,
        ),
        exploration=ExplorationConfig(mode="none"),
        evaluation=EvaluationConfig(prompts=1, every=RECIPE_ITERATIONS, steps=1, shape=1),
        runtime=RuntimeConfig(
            name="inproc", shape=of_a_prompt, device=scale.device, help="off" if workers else "greedy"
        ),
    )
    config = config.model_copy(
        update={"model": LORA, "sampler": config.sampler.model_copy(update={"guidance": model.guidance})}
    )

    def make_adapter() -> Any:
        torch.manual_seed(0)
        transformer = scale.transformer(model)
        adapter = model.over(
            transformer, "512 px", is_narrow=scale.is_narrow, vae=random_vae(scale.device, is_narrow=scale.is_narrow)
        )
        freeze_but_trained(adapter, LORA)
        recompute_blocks(transformer)
        return adapter

    def reward(finished: torch.Tensor, prompts: Sequence[str]) -> list[Score]:
        return [Score(reward=float(image.float().mean()), metrics={}) for image in finished]

    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        run = build_inproc(
            config,
            Path(folder),
            run="recipe",
            clock=ScaledClock(origin_ms=0),
            reward=reward,
            workers=workers,
            make_adapter=make_adapter,
        )
        finish(scale.device)
        keep(["models_s"], time.perf_counter() - begun)
        iterate, seconds = run.loop.run_iteration, list[float]()

        def timed_iteration() -> None:
            begun = time.perf_counter()
            iterate()
            finish(scale.device)
            seconds.append(time.perf_counter() - begun)
            # At once: an iteration of the 20 B takes a minute, and the run may be cut off in the next one.
            keep(
                ["iterations", str(len(seconds) - 1)], {"s": seconds[-1], "images_per_gpu_second": images / seconds[-1]}
            )

        with patch.object(run.loop, "run_iteration", timed_iteration):
            run.loop.run()
        lines = [
            json.loads(line)
            for file in (Path(folder) / "progress").glob("*.jsonl")
            for line in file.read_text("utf-8").splitlines()
        ]
    spent: Counter[str] = Counter()
    for line in lines:
        if line["kind"] == "node_usage":
            spent.update(line["event"]["phase_ms"])
    sized = published_at("Qwen-Image", ImageSize(512, 512, text_tokens=TEXT_TOKENS))
    work = {Phase.ROLLOUT: rollout_operations(config, sized), Phase.TRAINING: training_operations(config, sized)}
    for phase, ms in spent.items():
        rate = images * len(seconds) / (ms / 1000)
        figures = {"s_an_iteration": ms / 1000 / len(seconds), "images_per_gpu_second": rate}
        if scale.peak is not None and phase in work:
            figures["mfu"] = rate * work[Phase(phase)] / scale.peak
        keep(["phases", phase], figures)
    rate = images / statistics.median(seconds[1:])
    whole: dict[str, object] = {"images_per_gpu_second": rate, "merged": bool(workers)}
    if scale.peak is not None:
        whole["mfu"] = rate * sum(work.values()) / scale.peak
    keep(["whole"], whole)


def random_vae(device: str, *, is_narrow: bool) -> Any:
    """Return Qwen-Image's autoencoder with random weights in bf16."""
    narrow = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1} if is_narrow else {}
    return AutoencoderKLQwenImage(**narrow).to(device, torch.bfloat16)


def promotion(scale: Scale, keep: Keep) -> None:
    """Measure what a worker's GPU does between its last lease and its first as the trainer, in a fresh process.

    CUDA begins; SD3.5-medium's transformer is read from a folder (the file is in the page cache); a trainer is created;
    a checkpoint's tensors are read; the first lease is sampled.
    """
    keep(["cuda_start_s"], scale.cuda_start_s)
    model = MODELS["SD3.5-medium"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scale.transformer(model).save_pretrained(folder / "transformer")
        free_memory()
        begun = time.perf_counter()
        transformer = SD3Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
        transformer.to(scale.device).eval()
        finish(scale.device)
        keep(["base_load_s"], time.perf_counter() - begun)
        keep(["base_bytes"], sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors")))
        adapter = scale.adapter(model, transformer, "512 px")
        step = EngineStep.of(transformer, adapter, LORA, model.guidance)
        step.once(adapter, 2)()
        stored = write_tensors(folder / "optimizer", step.model.trainer.optimizer_state())
        begun = time.perf_counter()
        step.model.trainer.load_optimizer_state(read_tensors(stored.open(), scale.device))
        finish(scale.device)
        keep(["checkpoint_read_s"], time.perf_counter() - begun)
        begun = time.perf_counter()
        once = pass_of(adapter, scale.device, 4, model.guidance)
        for _ in range(10):
            once()
        finish(scale.device)
        keep(["first_lease_s"], time.perf_counter() - begun)


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


FAMILIES = tuple(
    Check(name=f"{name} passes and steps", measure=partial(family, name), gib=model.gib, seconds=model.seconds)
    for name, model in MODELS.items()
    if model.seconds
)
"""A check for each family of `published.py` that names its seconds there."""

CHECKS = (
    Check(name="20 B engine step, 512 px", measure=partial(step_20b, "512 px"), gib=75, seconds=180),
    Check(name="20 B rollout passes, 512 px", measure=partial(passes_20b, "512 px"), gib=75, seconds=240),
    Check(
        name="20 B engine step, 512 px, text encoder on the GPU",
        measure=partial(step_20b, "512 px", with_encoder=True),
        gib=75,
        seconds=180,
    ),
    Check(name="20 B recipe, 512 px", measure=recipe, gib=75, seconds=420),
    Check(name="20 B step with peft's own layers, 512 px", measure=plain_step_20b, gib=75, seconds=150),
    Check(name="20 B rollout passes, 1280 px", measure=partial(passes_20b, "1280 px"), gib=75, seconds=240),
    Check(name="20 B engine step, 1280 px", measure=partial(step_20b, "1280 px"), gib=75, seconds=180),
    *FAMILIES,
    Check(name="SD3.5-medium, all weights, by precision", measure=precisions, gib=75, seconds=180),
    Check(name="20 B compiled passes, 512 px", measure=compiled_20b, gib=75, seconds=300),
    Check(name="20 B adapters sent and loaded", measure=weights_20b, gib=60, seconds=120),
    Check(name="SD3.5-medium, a worker becomes the trainer", measure=promotion, gib=24, seconds=120),
)
"""All measurements, those first that answer most."""


def main(arguments: Sequence[str]) -> int:
    """List the checks, or run one on the GPU, or with `--narrow` on the CPU."""
    by_name = {check.name: check for check in CHECKS}
    names = [argument for argument in arguments if argument != "--narrow"]
    if not names:
        print(*by_name, sep="\n")
        return 0
    name = names[0]
    if name not in by_name:
        print(f"there is no check {name!r}; the checks are:", *by_name, sep="\n")
        return 2
    scale = Scale()
    if "--narrow" in arguments:
        scale = Scale(device="cpu", is_narrow=True)
        torch.set_num_threads(1)  # narrow layers take longest to wait for another thread
    begun = time.perf_counter()  # before `describe_device`, which begins CUDA
    torch.zeros(1, device=scale.device)
    finish(scale.device)
    scale = replace(scale, cuda_start_s=time.perf_counter() - begun)
    device = describe_device() | (NARROW if scale.is_narrow else {})
    by_name[name].measure(scale, KeptFigures(name, device))
    return 0


class KeptFigures:
    """`Keep` that writes the figures of a check to the file of figures.py."""

    def __init__(self, check: str, device: dict[str, Any]) -> None:
        self._check, self._device = check, device
        self._measured = {tuple(line["case"]) for line in lines_of(check, device) if "case" in line}

    def __call__(self, case: Sequence[str], value: object) -> None:
        keep_figure(self._check, case, value, self._device)
        self._measured.add(tuple(case))
        print(f"{self._check}, {', '.join(case)}: {value}", flush=True)

    def has(self, case: Sequence[str]) -> bool:
        return tuple(case) in self._measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
