"""Facts of a model's diffusers folder that need no weights: the size of image and text, and the noise levels.

    ModelConfig + vae/config.json + transformer/config.json -> ImageShape -> latent size, image tokens, noise schedule

The module imports no torch: the launcher checks a folder with the same code before a purchase.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import SHIPPED, ModelConfig, SamplerConfig
from engine.families import FAMILIES as ROWS
from engine.family import Factors as Factors
from engine.family import Family
from engine.family import ImageSize as ImageSize
from engine.model_config import BOTH_BRANCHES
from engine.model_parts import INDEX, check_files, check_parts, read_json
from engine.model_parts import FolderError as FolderError
from engine.noise_schedule import ModelSchedule, ScheduleError, Spacing, model_schedule


@dataclass(frozen=True, kw_only=True)
class SizeAndSpacing:
    """Facts of a model family that a job's size follows from."""

    size: ImageSize
    """Size without fields in the job: that of the published recipes, and small videos."""
    spacing: Spacing
    """Spacing of the noise levels in the family's diffusers pipeline."""


FAMILIES: Mapping[str, SizeAndSpacing | Family] = {
    "qwen-image": SizeAndSpacing(size=ImageSize(512, 512), spacing="even"),
    "flux": SizeAndSpacing(size=ImageSize(512, 512), spacing="even"),
    "sd3": SizeAndSpacing(size=ImageSize(512, 512, text_tokens=256), spacing="to-end"),
    "wan": SizeAndSpacing(size=ImageSize(240, 416, 33), spacing="to-end"),
    "hunyuan-video": SizeAndSpacing(size=ImageSize(320, 512, 33, text_tokens=256), spacing="even"),
    **ROWS,
}

DISTILLED = re.compile(r"turbo|lightning|distill?ed|distill|schnell|fastwan|causvid", re.IGNORECASE)
"""Words in the names of models that were distilled for guidance 1, such as SD3.5-large-turbo. Their configuration is
that of the models that were not."""


@dataclass(frozen=True)
class ModelFolder:
    """One model of one size in its folder."""

    path: Path
    family: SizeAndSpacing | Family
    size: ImageSize
    factors: Factors
    reads_later: bool = False
    """True: the transformer has no values until its parameters are divided over ranks (engine/models/unread.py)."""
    encodes_first: bool = False
    """True: transformer and autoencoder stay in the host's memory until the text encoders have left the GPU."""

    @property
    def latent(self) -> tuple[int, int, int]:
        """Return frames, height and width of the latent."""
        size, factors = self.size, self.factors
        return (size.frames - 1) // factors.frames + 1, size.height // factors.vae, size.width // factors.vae

    @property
    def tokens(self) -> int:
        """Return the number of image tokens in the transformer."""
        frames, height, width = self.latent
        return frames * (height // self.factors.patch) * (width // self.factors.patch)

    @property
    def schedule(self) -> ModelSchedule:
        side = min(self.size.height, self.size.width)
        return model_schedule(self.path, self.family.spacing, self.tokens, side)


def model_folder(config: ModelConfig, path: Path) -> ModelFolder:
    """Return the folder's facts for the job's size. Raises FolderError if the model cannot make that size."""
    if not (path / "model_index.json").is_file():
        raise FolderError(
            "model.path",
            f"model.path is {config.path}, which is not a diffusers folder of {config.name} (no model_index.json)",
            "download the model here first, like `hf download OWNER/MODEL --local-dir FOLDER`, and give its folder",
        )
    check_parts(config.name, path)
    family, factors = FAMILIES[config.name], factors_of(config.name, path)
    folder = ModelFolder(path, family, image_size(config, factors), factors)
    _check(folder)
    return folder


def image_size(config: ModelConfig, factors: Factors | None = None) -> ImageSize:
    """Return the size of a job's images and texts. A size that the job leaves out is one that the model can make.

    `factors`: of the model's folder; None: as published for the family.
    """
    default = FAMILIES[config.name].size
    multiple, frames = (1, 1) if factors is None else (factors.vae * factors.patch, factors.frames)
    return ImageSize(
        config.height or _nearest(default.height, multiple),
        config.width or _nearest(default.width, multiple),
        config.frames or _nearest(default.frames - 1, frames) + 1,
        config.max_text_tokens or default.text_tokens,
    )


def _nearest(value: int, multiple: int) -> int:
    """Return the nearest multiple, the larger of two, and 0 only for 0."""
    return max((2 * value + multiple) // (2 * multiple), min(value, 1)) * multiple


def check_folder(model: ModelConfig, sampler: SamplerConfig, path: Path) -> None:
    """Check that a run can load and train a model's folder: its parts, its files, and the job's size, guidance and
    noise levels. Raises FolderError.

    Every command that reads a job calls this function before it plans, so the folder is verified before a purchase.
    """
    if model.name in SHIPPED:
        return
    folder = model_folder(model, path)
    check_files(model.name, path)
    takes_guidance = model.name != "flux" or read_json(path / "transformer" / "config.json").get(
        "guidance_embeds", False
    )
    if sampler.guidance != 1.0 and not takes_guidance:
        raise FolderError(
            "sampler.guidance",
            f"sampler.guidance is {sampler.guidance:g}, and this FLUX.1 takes no guidance (schnell)",
            "use 1, as published",
        )
    row = ROWS.get(model.name)
    if sampler.guidance != 1.0 and row is not None and row.distilled(read_json(path / INDEX)):
        raise FolderError(
            "sampler.guidance",
            f"sampler.guidance is {sampler.guidance:g}, and the model in {path} is distilled: it takes no guidance",
            f"set sampler.guidance: 1 {row.guidance_note}",
        )
    if sampler.guidance != 1.0 and model.name in BOTH_BRANCHES and (named := _distilled_name(path)):
        raise FolderError(
            "sampler.guidance",
            f"sampler.guidance is {sampler.guidance:g}, and the model's name ({named}) says that the model is "
            "distilled: such models are made for guidance 1, and their configuration does not tell them apart",
            "set sampler.guidance: 1, or rename the folder if its model is not distilled",
        )
    if sampler.shift == "auto":
        try:
            folder.schedule.sigmas(sampler.steps)
        except ScheduleError as error:
            fault, _, remedy = str(error).partition("; ")
            raise FolderError("sampler.shift", f"sampler.shift is auto, and {fault}", remedy) from None


def _distilled_name(path: Path) -> str | None:
    """Return the name of a folder's model if it says that the model is distilled.

    A snapshot of the Hugging Face cache is called by its commit, and the model's name is two folders above.
    """
    real, saved_as = path.resolve(), read_json(path / "transformer" / "config.json").get("_name_or_path")
    cached = [real.parent.parent.name] if real.parent.name == "snapshots" else []
    names = [path.name, real.name, *cached, *([saved_as] if isinstance(saved_as, str) else [])]
    return next((name for name in names if DISTILLED.search(name)), None)


def factors_of(name: str, path: Path) -> Factors:
    """Return the factors of a model's folder. Raises FolderError if a configuration cannot be read."""
    vae, transformer = read_json(path / "vae" / "config.json"), read_json(path / "transformer" / "config.json")
    try:
        factors = _factors(name, vae, transformer)
        if min(factors.vae, factors.frames, factors.patch) < 1:
            raise ValueError("a factor below 1")
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise FolderError(
            "model.path",
            f"model.path is {path}, whose vae/config.json and transformer/config.json give no latent size ({error})",
            "download the model again",
        ) from None
    return factors


def _factors(name: str, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Factors:
    if name in ROWS:
        return ROWS[name].factors(vae, transformer)
    match name:
        case "qwen-image":
            return Factors(2 ** len(vae.get("temperal_downsample", [False, True, True])), 1, 2)
        case "wan":
            patch = transformer.get("patch_size", [1, 2, 2])
            return Factors(int(vae.get("scale_factor_spatial", 8)), int(vae.get("scale_factor_temporal", 4)), patch[1])
        case "hunyuan-video":
            ratios = int(vae.get("spatial_compression_ratio", 8)), int(vae.get("temporal_compression_ratio", 4))
            return Factors(*ratios, int(transformer.get("patch_size", 2)))
        case "sd3":
            places = int(transformer.get("pos_embed_max_size", 96))
            return Factors(_image_factor(vae), 1, int(transformer.get("patch_size", 2)), places)
        case _:
            return Factors(_image_factor(vae), 1, 2)


def _image_factor(vae: Mapping[str, Any]) -> int:
    """Return the pixels per latent value of an `AutoencoderKL`."""
    blocks: Sequence[int] = vae.get("block_out_channels", [64])
    return 1 << (len(blocks) - 1)


def _check(folder: ModelFolder) -> None:
    """Check that the size fills the patches of the transformer. Raises FolderError."""
    factors, size = folder.factors, folder.size
    multiple = factors.vae * factors.patch
    for name in ("height", "width"):
        value = getattr(size, name)
        if value % multiple:
            raise FolderError(
                f"model.{name}",
                f"model.{name} is {value}, and this model's images are multiples of {multiple} "
                f"(VAE {factors.vae} x patch {factors.patch})",
                f"use {' or '.join(str(near) for near in _around(value, multiple))}",
            )
        if factors.most_patches is not None and value > factors.most_patches * multiple:
            raise FolderError(
                f"model.{name}",
                f"model.{name} is {value}, and this model has positions for {factors.most_patches * multiple} pixels",
                f"use {factors.most_patches * multiple} or less",
            )
    if (size.frames - 1) % factors.frames:
        raise FolderError(
            "model.frames",
            f"model.frames is {size.frames}, and this model's VAE makes {factors.frames} n + 1 frames",
            f"use {' or '.join(str(near + 1) for near in _around(size.frames - 1, factors.frames))}",
        )


def _around(value: int, multiple: int) -> list[int]:
    """Return the nearest multiples, at least one of them."""
    below = value // multiple * multiple
    return [near for near in (below, below + multiple) if near > 0]
