"""Define the job file's `model` section. The module does not import torch, like `engine/config.py`."""

from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from engine.families import FAMILIES
from engine.strict import Positive, Strict

SHIPPED = {"digits-ocr": "digits", "shapes": "shapes"}
"""Shipped models, and the prompts each model was trained for. The models have no unconditional branch."""


GUIDANCE = {"qwen-image": 4.0, "sd3": 4.5, "flux": 3.5, "wan": 5.0, "hunyuan-video": 6.0} | {
    name: family.guidance for name, family in FAMILIES.items()
}
"""Published guidance of each family that does not ship: of the model card, or the default of the diffusers pipeline."""

BOTH_BRANCHES = ("qwen-image", "sd3", "wan", *FAMILIES)
"""Families whose guidance computes an unconditional branch. The networks of the others take the scale as an input."""

VIDEO = ("wan", "hunyuan-video", *(name for name, family in FAMILIES.items() if family.is_video))
"""Models that generate videos."""

WITHOUT_REPEATED_BLOCKS = ("sd3", *(name for name, family in FAMILIES.items() if not family.names_blocks))
"""Models whose diffusers class names no repeated blocks (`_repeated_blocks`), which `compile` needs."""


if TYPE_CHECKING:
    ModelName = str
else:  # pydantic refuses other names; a type checker cannot follow a list of files
    ModelName = Literal["digits-ocr", "shapes", "qwen-image", "sd3", "flux", "wan", "hunyuan-video", *FAMILIES]


class ModelConfig(Strict):
    """Diffusion transformer of the job, and the part of its weights to train."""

    # `from` is a Python keyword, so the field has another name. Every file and message says `from`.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    name: ModelName = "digits-ocr"
    """Model family (engine/models/, engine/families/). `digits-ocr` and `shapes` ship with spotrl; every other model
    needs `path`."""
    path: str | None = None
    """Folder of a diffusers model (transformer, vae, ...), relative to the job file; or the model's name on the Hugging
    Face hub (`OWNER/MODEL`), which `launch` downloads. A folder that is not on this machine is planned by its name.
    None: the weights shipped with spotrl."""
    height: Positive | None = None
    """Height of an image in pixels, a multiple of the VAE's factor times the patch: 16, and 32 for Wan2.2-TI2V-5B and
    sana. None: 512 for images, 1024 for sana, 240 for wan, 320 for hunyuan-video, or the nearest height that the
    model's folder allows. Shipped models have one size."""
    width: Positive | None = None
    """Width of an image in pixels, as `height`. None: 512 for images, 1024 for sana, 416 for wan, 512 for
    hunyuan-video."""
    frames: Positive | None = None
    """Frames of a video, 4 n + 1 for the published models. None: 33. Image models have no frames."""
    max_text_tokens: Positive | None = None
    """Text tokens of a prompt; longer prompts are cut, and a launch names them. None: the default of the model's
    diffusers pipeline: 512, 256 for sd3 and hunyuan-video, 300 for sana. A smaller number makes a pass faster. With
    flux, flux2-klein, sd3 and wan, padding is part of the input, so another number also changes the images."""
    weights: Literal["full", "lora"] = "full"
    """Trained weights: `full` trains every weight of the transformer, `lora` trains low-rank adapters."""
    lora_rank: Positive = 16
    """Rank of the low-rank adapters. Used with `weights: lora` only."""
    lora_alpha: Positive = 32
    """Scale of the low-rank adapters: the update is multiplied by `lora_alpha / lora_rank`. Used with `weights: lora`
    only."""
    lora: str | None = None
    """Somebody else's LoRA for this model: a .safetensors file of diffusers, PEFT, kohya or ai-toolkit, or the folder
    of one, relative to the job file. A file with DoRA, LoKr, LoHa, tensors of a text encoder, or any name or shape that
    is not the model's is refused. Needs `weights: lora`."""
    lora_use: Literal["merge", "continue"] = "merge"
    """Use of `lora`. `merge`: its product is added to the base weights, and the run trains new adapters. `continue`:
    the run's adapters begin with its factors; without `lora_rank`, the file's largest rank is taken, and a larger one
    leaves the start as it is. Every comparison is with the base model together with the LoRA."""
    lora_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the file of `lora`, as hubs print it; with PEFT's `adapter_config.json`, of both files one after the
    other. Filled in when the job is read; another file is then refused."""
    checkpointing: Literal["auto", "on", "off"] = "auto"
    """Gradient checkpointing: a training pass keeps the input of every transformer block only, and computes each block
    again in the backward pass. Saves most of the memory for a third more computing. Rollouts and evaluations do not
    change. `auto`: on for every model but those that ship with spotrl."""
    compile: Literal["on", "off"] = "off"
    """Compilation of the repeated transformer block (`torch.compile`), in the passes of rollout workers only; the
    trainer then computes the old log-probs itself. The first pass of a worker waits for the compiler, and a node
    without a C compiler computes uncompiled. Not for sd3, and not with `runtime.sp_degree` above 1."""
    guidance_passes: Literal["auto", "one", "two"] = "auto"
    """Passes of classifier-free guidance: `two` computes the branches with and without the prompt one after the other,
    `one` both in one batch of twice the rows, which takes more memory. Results are equal up to rounding. `auto`: two.
    Without effect where the network takes the scale as an input."""
    start: Annotated[str, Field(min_length=1)] | None = Field(default=None, alias="from")
    """Start weights: a run's name, or a folder written by `spotrl pull` (with a / in the path, relative to the job
    file). Training continues from the start weights, with a new optimizer and a new average. The start weights replace
    the base model in every comparison with the model before training: the first evaluation, the KL divergence,
    `sample --base`."""

    @property
    def recomputes(self) -> bool:
        """Return True if training passes use gradient checkpointing."""
        return self.checkpointing == "on" or (self.checkpointing == "auto" and self.name not in SHIPPED)

    @property
    def doubles_guidance(self) -> bool:
        """Return True if both branches of classifier-free guidance are one batch."""
        return self.guidance_passes == "one"

    @model_validator(mode="after")
    def _weights_exist(self) -> Self:
        if self.path is None and self.name not in SHIPPED:
            raise ValueError(
                f"model.name is {self.name} but model.path is missing; give the folder of its diffusers weights, "
                f"because only {' and '.join(SHIPPED)} ship with spotrl"
            )
        return self

    @model_validator(mode="after")
    def _lora_has_a_place(self) -> Self:
        if self.lora is None:
            return self
        if self.weights == "full":
            raise ValueError(
                "model.lora is given, and model.weights is full; use model.weights: lora, or merge the LoRA with "
                "diffusers (`fuse_lora`, `save_pretrained`) and give that folder as model.path"
            )
        if self.start is not None and self.lora_use == "continue":
            raise ValueError(
                "model.from and model.lora with lora_use: continue both say where the adapters begin; leave one out, "
                "or use lora_use: merge"
            )
        return self

    @property
    def lora_text(self) -> str:
        """Return the LoRA in words; empty without one."""
        if self.lora is None:
            return ""
        use = "merged into the base" if self.lora_use == "merge" else "continued"
        return f"{PurePath(self.lora).name}, {use}, sha256 {(self.lora_sha256 or 'not known')[:12]}"

    @property
    def merged_lora(self) -> str | None:
        """Return the digest of the LoRA that is merged into the base weights, or None."""
        return self.lora_sha256 if self.lora is not None and self.lora_use == "merge" else None

    @model_validator(mode="after")
    def _has_blocks_to_compile(self) -> Self:
        if self.compile == "on" and self.name in WITHOUT_REPEATED_BLOCKS:
            raise ValueError(
                f"model.compile is on, but the transformer class of {self.name} in diffusers names no repeated block "
                "to compile; use model.compile: off"
            )
        return self

    @model_validator(mode="after")
    def _the_model_has_such_a_size(self) -> Self:
        sizes = ("height", "width", "frames", "max_text_tokens")
        extra = [name for name in sizes if getattr(self, name) is not None]
        if self.name in SHIPPED and extra:
            raise ValueError(
                f"model.{extra[0]} is {getattr(self, extra[0])}, but {self.name} has one size of image and text; leave "
                f"out {', '.join(extra)}"
            )
        if self.frames is not None and self.name not in VIDEO:
            raise ValueError(
                f"model.frames is {self.frames}, but {self.name} makes images; leave frames out, or use "
                f"{' or '.join(VIDEO)}"
            )
        return self
