"""The trainer's state between two iterations: everything in a checkpoint but tensors and exploration.

A killed trainer continues from the newest checkpoint as if nothing had happened. A field that changes what a run trains
therefore belongs here, and into `checkpoint` and `restore`.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from engine.algorithm.advantages import RunningStd
from engine.algorithm_config import FACTS
from engine.config import SHIPPED, EngineConfig
from engine.drift import Look
from engine.early_config import EarlyConfig
from engine.protocol.request import Manifest
from engine.storage.checkpoint import Checkpoint, RowsThatFit
from engine.strict import Strict


@dataclass(kw_only=True)
class TrainerState:
    """State after `iteration` trained batches.

    `config_digest`: of the engine's config. `lineage`: generation of the run's state; a new one begins when the
    coordinator lost the published weights. `evaluations`: all (iteration, metrics) until now. `std`: running reward std
    (algorithm.std: ema). `skipped_in_a_row`: groups in a row with a reward or loss that is not finite. `base`: look of
    the base model's evaluation images; None before the first evaluation. `fits`: rows of a training pass found after
    memory errors; None: no pass ran out of memory. `early_off_until`: first batch that may have early groups.
    """

    config_digest: str
    iteration: int = 0
    lineage: int = 0
    next_batch: Manifest = field(init=False)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    std: RunningStd = field(default_factory=RunningStd)
    skipped_in_a_row: int = 0
    base: Look | None = None
    fits: RowsThatFit | None = None
    early_off_until: int = 0
    unlearned: int = 0
    """Batches in a row that taught nothing (learning.py)."""
    has_learned: bool = False
    """True: a batch changed the weights."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take the state of a checkpoint. The lineage is settled with the coordinator afterwards."""
        self.iteration = checkpoint.iteration
        self.next_batch = checkpoint.next_batch
        self.evaluations = [(iteration, dict(metrics)) for iteration, metrics in checkpoint.evaluations]
        self.std = RunningStd(checkpoint.std)
        self.skipped_in_a_row = checkpoint.skipped_in_a_row
        self.base = checkpoint.base
        self.fits = checkpoint.fits
        self.early_off_until = checkpoint.early_off_until
        self.unlearned, self.has_learned = checkpoint.unlearned, checkpoint.has_learned

    def checkpoint(self, exploration: dict[str, Any]) -> Checkpoint:
        """Return this state with the explorer's state. The tensors' files are written already."""
        return Checkpoint(
            iteration=self.iteration,
            lineage=self.lineage,
            next_batch=self.next_batch,
            files={},
            evaluations=tuple(self.evaluations),
            std=self.std.value,
            skipped_in_a_row=self.skipped_in_a_row,
            config_digest=self.config_digest,
            exploration=exploration,
            base=self.base,
            fits=self.fits,
            early_off_until=self.early_off_until,
            unlearned=self.unlearned,
            has_learned=self.has_learned,
        )


def config_digest(config: EngineConfig) -> str:
    """Return a digest that is equal for equal jobs.

    Device and ranks are excluded: a job is the same on every device, and with any number of ranks. A field newer than
    some checkpoints is excluded while it has its default, so old checkpoints keep their digest. For the same reason
    `shift: auto` of a shipped model counts as 1: both mean no shift.
    """
    if config.model.name in SHIPPED and config.sampler.shift == "auto":
        config = config.model_copy(update={"sampler": config.sampler.model_copy(update={"shift": 1.0})})
    newer = {
        "model": {
            "start",
            "lora",
            "lora_use",
            "lora_sha256",
            "checkpointing",
            "compile",
            "guidance_passes",
            "height",
            "width",
            "frames",
            "max_text_tokens",
        },
        "evaluation": {"on_the_way", "wait"},
        "exploration": {"wait", "keep"},
        "algorithm": {"grpo_guard", "flow_dppo", "diffusion_nft", "awm", "unit", "stop_without_learning"},
        "reward": {
            "frames",
            "http",
            "vlm",
            "model",
            "parts",
            "pool",
            "combine",
            "colours",
            "student",
            "timeout_seconds",
        },
        "runtime": {"cfg_parallel", "help", "pass_seconds", "row_seconds"},
    }
    unused: dict[str, Any] = {
        section: _with_defaults(getattr(config, section), names) for section, names in newer.items()
    }
    if config.reward.pool is not None and not config.reward.pool_gpus:
        unused["reward"] = {**dict.fromkeys(unused["reward"], True), "pool": {"gpus"}}
    unused["runtime"] = {*_with_defaults(config.runtime, newer["runtime"]), "device", "trainer_ranks", "trainer_nodes"}
    if config.early == EarlyConfig():
        unused["early"] = True
    if config.exploration.trains != "candidates":
        unused["exploration"].add("trains")
    if config.algorithm.image_training is not None:
        # Older checkpoints trained all noise levels, which is no longer the default.
        unused["algorithm"].discard(FACTS[config.algorithm.name].section)
    job = config.model_dump_json(exclude=unused)
    return hashlib.sha256(job.encode()).hexdigest()[:16]


def _with_defaults(section: Strict, names: set[str]) -> set[str]:
    """Return the names of the fields that have their default value."""
    return {name for name in names if getattr(section, name) == type(section).model_fields[name].default}
