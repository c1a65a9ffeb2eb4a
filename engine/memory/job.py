"""The memory that a job needs, and what to change if it does not fit.

    EngineConfig + folder of the model, if it is here -> SizedModel -> budgets of a trainer GPU and of a rollout GPU

Models that ship with spotrl have no budget: they fit everywhere.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from engine.config import SHIPPED, VIDEO, EngineConfig, ModelConfig, SamplerConfig
from engine.families import FAMILIES
from engine.memory.activations import parameters_of
from engine.memory.architecture import FRAMES_PER_LATENT, Architecture, architecture_from, text_of
from engine.memory.budget import Budget, Setting, rollout_budget, trainer_budget
from engine.memory.published import EMBEDDED, PUBLISHED, PublishedModel, SizedModel
from engine.memory.scorers import scorer_bytes
from engine.model_config import BOTH_BRANCHES
from engine.model_folder import DISTILLED, Factors, FolderError, factors_of, image_size
from engine.model_parts import read_json
from engine.tally import FP32, HALF, Training

Config = TypeVar("Config", bound=EngineConfig)

FULL_COMPUTE_BYTES = FP32
"""Bytes of a number of the forward pass if every weight is trained. The weights are fp32, and operations convert what
they use to bf16 (engine/models/load.py): some numbers are kept in fp32, others in bf16. fp32 for all is the upper
bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMemory:
    """The budgets of a job."""

    sized: SizedModel
    is_checkpointed: bool
    trainer: Budget
    rollout: Budget
    model_bytes: int
    """Bytes of the published model's files. The files of a folder that is here may differ."""
    prompt_bytes: int
    """Bytes of an encoded prompt on a node's disk."""
    have_room: bool
    """True if the GPU of every rank has room to sample beside the training of a row. With LoRA always."""

    @property
    def text(self) -> str:
        checkpointing = "on" if self.is_checkpointed else "off"
        size = self.sized.size
        text = f"{self.sized.text}, {text_of(size)}, {size.text_tokens} text tokens, checkpointing {checkpointing}"
        family = FAMILIES.get(self.sized.architecture.family)
        if family is None:
            return text
        licence = f", licence {self.sized.licence}" if self.sized.licence is not None else ""
        return text + licence + ("" if family.shares_sequence else ", sp_degree 1 only")


def job_memory(
    config: EngineConfig,
    sized: SizedModel,
    *,
    ranks: int = 1,
    trainer_nodes: int = 1,
    rollout_gpus: int = 1,
    usable: int | None = None,
) -> JobMemory:
    """Return the memory of a job.

    `ranks`: GPUs that train, on `trainer_nodes` equal nodes. `rollout_gpus`: GPUs of a rollout node with a worker.
    `usable`: bytes of a trainer's GPU that tensors may fill; None: not known, so with full weights only rank 0 samples.
    """
    setting = setting_of(config, ranks, rollout_gpus)
    counts = parameters_of(sized.architecture, setting.training)
    scorers = scorer_bytes(config.reward, ranks // trainer_nodes)
    trainer = _with_scorers(trainer_budget(sized, setting), scorers)
    have_room = not setting.training.is_full or ranks == 1
    if not have_room and usable is not None:
        sampling = _with_scorers(trainer_budget(sized, replace(setting, sampled=config.runtime.shape)), scorers)
        have_room = sampling.fitting(usable) > 0
        trainer = sampling if have_room else trainer
    return JobMemory(
        sized=sized,
        is_checkpointed=setting.is_checkpointed,
        trainer=trainer,
        rollout=_with_scorers(
            rollout_budget(sized, setting), scorer_bytes(config.reward, rollout_gpus, config.reward.pool_gpus)
        ),
        model_bytes=((counts.transformer + counts.buffers) * HALF + sized.text_encoder_bytes + sized.vae_bytes)
        * sized.file_bytes
        // HALF,
        prompt_bytes=sized.size.text_tokens * sized.architecture.text_width * HALF,
        have_room=have_room,
    )


def _with_scorers(budget: Budget, scorers: int) -> Budget:
    """Return the budget with the models of scorers. A waiting trainer scores too."""
    return replace(budget, parts={**budget.parts, "scorers": scorers}) if scorers else budget


def setting_of(config: EngineConfig, ranks: int = 1, rollout_gpus: int = 1) -> Setting:
    """Return how the job uses its model."""
    model, algorithm = config.model, config.algorithm
    is_full = model.weights == "full"
    exploring = [profile.shape for profile in config.exploration.profiles] if config.exploration.mode != "none" else []
    return Setting(
        training=Training(
            rank=None if is_full else model.lora_rank, compute_bytes=FULL_COMPUTE_BYTES if is_full else HALF
        ),
        is_checkpointed=model.recomputes,
        is_guided=config.sampler.guidance != 1.0,
        doubles_guidance=model.doubles_guidance,
        rows=algorithm.rows_per_forward,
        images=max(config.runtime.shape, config.evaluation.shape, *exploring),
        ranks=ranks,
        communicators=_communicators(config, rollout_gpus),
        keeps_reference=algorithm.keeps_reference,
        sums_exactly=algorithm.order == "exact",
    )


def _communicators(config: EngineConfig, workers: int) -> int:
    """Return the groups of a worker: one of a fixed degree, or one for each of the degrees 2, 4, 8, ... with auto."""
    degree = config.runtime.sp_degree
    if degree == 1 or workers == 1:
        return 0
    return 1 if degree != "auto" or config.runtime.cfg_parallel else workers.bit_length() - 1


def sized_model(model: ModelConfig, folder: Path | None = None) -> SizedModel:
    """Return the sizes of a model that does not ship with spotrl: of its folder, or as published for its name.

    `folder`: the model's folder on this machine, if it is here.
    Raises FolderError if the folder's `transformer/config.json` lacks a size, or if the folder is not here and its
    name is that of no published model.
    """
    assert model.name not in SHIPPED, f"{model.name} has no sizes (engine/memory/published.py)"
    published = named_model(model)
    frames = FRAMES_PER_LATENT if model.name in VIDEO else 1
    if folder is None or not (folder / "transformer" / "config.json").is_file():
        if published is None:
            names = ", ".join(other.name for other in PUBLISHED if other.family == model.name)
            raise FolderError(
                "model.path",
                f"model.path is {model.path}, which is not a folder on this machine, and the sizes of no {model.name} "
                f"model of that name are known ({names})",
                "download the folder here, so that the plan reads its sizes, or call it as the model is called",
            )
        return published.at(image_size(model, Factors(published.vae_factor, frames, published.patch)))
    config, factors = read_json(folder / "transformer" / "config.json"), factors_of(model.name, folder)
    architecture = replace(
        architecture_from(model.name, config),
        pixels_per_token=factors.vae * factors.patch,
        frames_per_latent=factors.frames if model.name in VIDEO else FRAMES_PER_LATENT,
    )
    # The timings and the text encoders are those of the published model that is nearest in size.
    parameters, training = parameters_of(architecture, Training(rank=None)).transformer, Training(rank=None)
    nearest = min(
        (other for other in PUBLISHED if other.family == model.name),
        key=lambda other: (
            abs(parameters_of(other.architecture, training).transformer - parameters),
            other is not published,  # of two models of one size, the one that the folder is called like
        ),
    )
    sized = nearest.at(image_size(model, factors))
    if architecture == sized.architecture:
        return sized
    return replace(sized, architecture=architecture, text=f"{model.name} of {folder}", licence=None)


def named_model(model: ModelConfig) -> PublishedModel | None:
    """Return the published model that `model.path` names. None: there is no such model.

    A folder without a number in its name, like `models/base`, is of the family's only size, if there is only one.
    """
    family = [published for published in PUBLISHED if published.family == model.name]
    name = re.sub(r"[^a-z0-9]", "", Path(model.path or "").name.lower()).removesuffix("diffusers")
    named = next((published for published in family if re.fullmatch(published.spelled, name)), None)
    has_number = any(character.isdigit() for character in name)
    return family[0] if named is None and len(family) == 1 and not has_number else named


def check_named(model: ModelConfig, sampler: SamplerConfig) -> None:
    """Check what the name of a folder that is not here says: a distilled model takes no guidance. Raises FolderError.

    `check_folder` checks the rest when the folder is here.
    """
    named, name = named_model(model), Path(model.path or "").name
    is_distilled = named is not None and named.distilled
    if sampler.guidance != 1.0 and (is_distilled or (model.name in BOTH_BRANCHES and DISTILLED.search(name))):
        raise FolderError(
            "sampler.guidance",
            f"sampler.guidance is {sampler.guidance:g}, and the name {name} is that of a distilled model: it takes no "
            "guidance",
            "set sampler.guidance: 1, or name a model that is not distilled",
        )


def trained_bytes(model: ModelConfig, architecture: Architecture) -> int:
    """Return the bytes of the trained weights in fp32: adapters, or all weights."""
    is_full = model.weights == "full"
    counts = parameters_of(architecture, Training(rank=None if is_full else model.lora_rank))
    return FP32 * (counts.transformer if is_full else counts.adapters)


def sent_bytes(model: ModelConfig, trained: int) -> int:
    """Return the bytes that a node gets with each new version of so many trained bytes.

    Adapters of a model in bf16 are sent in bf16 (engine/models/merge.py). Shipped models and full weights are fp32.
    """
    in_half = model.weights == "lora" and model.name not in EMBEDDED
    return trained * (HALF if in_half else FP32) // FP32


def smaller_settings(config: Config, folder: Path | None = None) -> Iterator[tuple[str, Config]]:
    """Yield changes of a job that need less memory for a row, the gentlest first, in words and as the changed job.

    `folder`: the model's folder on this machine, if it is here.
    """

    def changed(**fields: object) -> Config:
        return config.model_copy(update={"model": config.model.model_copy(update=fields)})

    model, size = config.model, sized_model(config.model, folder).size
    if model.doubles_guidance and config.sampler.guidance != 1.0:
        yield "model.guidance_passes: two", changed(guidance_passes="two")
    if not model.recomputes:
        yield "model.checkpointing: on", changed(checkpointing="on")
    if model.weights == "full":
        yield "model.weights: lora", changed(weights="lora")
        if not model.recomputes:
            yield "model.weights: lora and model.checkpointing: on", changed(weights="lora", checkpointing="on")
    usual = sized_model(ModelConfig(name=model.name, path=model.path), folder).size
    smaller = replace(size, height=min(size.height, usual.height), width=min(size.width, usual.width))
    smaller = replace(smaller, frames=min(size.frames, usual.frames))
    if smaller != size:
        frames = f", model.frames: {smaller.frames}" if smaller.frames != size.frames else ""
        fields = {"height": smaller.height, "width": smaller.width}
        if frames:
            fields["frames"] = smaller.frames
        yield f"model.height: {smaller.height}, model.width: {smaller.width}{frames}", changed(**fields)
