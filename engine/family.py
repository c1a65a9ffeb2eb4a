"""One row for each model family that brings all its facts in one file (engine/families/). No torch.

    engine/families/NAME.py -> Family -> names of the job file, checks of a folder, sizes, memory, loading, sampling

A launcher reads the rows before a purchase. The functions that load and compute import torch when they are called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.noise_schedule import Spacing
from engine.tally import HALF, Tally

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class ImageSize:
    """Size of an image or video, and of its text."""

    height: int
    width: int
    frames: int = 1
    text_tokens: int = 512


@dataclass(frozen=True)
class Factors:
    """Pixels per latent value, frames per latent frame, and latent values per image token along one side."""

    vae: int
    frames: int
    patch: int
    most_patches: int | None = None
    """Image tokens along one side for which the transformer has positions. None: any number."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The diffusers pipeline of a family, and what its adapter relies on."""

    name: str
    """Class of the pipeline."""
    parts: Mapping[str, str]
    """Class of each part that has weights."""
    optional: tuple[str, ...] = ()
    """Further parts that the pipeline may have, and that text-to-image does not use."""
    input_channels: int
    output_channels: int | None
    """Defaults of `in_channels` and `out_channels` in the transformer's class. None: as many as in."""
    packed: int = 1
    """Latent channels of a token of the transformer's input: 4 with tokens of 2 x 2 latent values, else 1."""
    packed_output: int = 1
    """The same of `out_channels`."""
    latent_key: str = "latent_channels"
    """Key of the latent channels in the VAE's configuration."""
    latent_channels: int = 16
    """Its default in the VAE's class."""
    input_layer: str
    """Tensor of the transformer's first layer. Its second dimension is `in_channels` x `input_values`."""
    input_values: int = 1
    """Values of a channel in a row of that layer, if the layer is linear and reads whole patches."""


PATCH = 2
"""Latent values of a token along one side, in all published models with patches."""

PIXELS_PER_TOKEN = 8 * PATCH
"""Pixels of an image per token, in each direction: 8 per latent value. Of most published models."""

FRAMES_PER_LATENT = 4
"""Frames of a video per latent frame, after the first frame. Of the published models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Layer sizes of a transformer. Widths count numbers, not bytes."""

    family: str
    layers: int
    """Blocks with one stream for the image and one for the text; for Wan, all blocks."""
    heads: int
    head_width: int
    text_width: int
    """Width of a token of the text encoder."""
    channels: int
    """Numbers of a token of the latent before the first layer: latent channels x patch."""
    output_channels: int
    """Numbers of a token after the last layer."""
    mlp_width: int
    """Inner width of the feed-forward layers."""
    adapted_width: int = 0
    """Numbers of a token behind its widest adapted layer, if the feed-forward layers have adapters; otherwise 0."""
    single_layers: int = 0
    """Blocks with one stream for image and text together (FLUX, HunyuanVideo)."""
    dual_layers: int = 0
    """Blocks with a second attention over the image alone, counted from the first block (SD3.5-medium)."""
    refiner_layers: int = 0
    """Blocks that refine the text before the first block (HunyuanVideo)."""
    pooled_width: int = 0
    """Width of the pooled text vector. 0: the family has none."""
    positions: int = 0
    """Rows of the learned position table (SD3). It is a buffer: stored, but not trained."""
    has_head_norm: bool = True
    """True if queries and keys are normalised. Only SD3 without .5 does not."""
    takes_guidance: bool = False
    """True if the guidance scale is an input (distilled guidance), so guidance needs no second branch."""
    pixels_per_token: int = PIXELS_PER_TOKEN
    """Pixels of an image per token, in each direction: the VAE's factor times the patch."""
    frames_per_latent: int = FRAMES_PER_LATENT
    """Frames of a video per latent frame, after the first frame."""

    @property
    def width(self) -> int:
        """Return the width of a token inside the transformer."""
        return self.heads * self.head_width


@dataclass(frozen=True, kw_only=True)
class PublishedSizes:
    """A published model of a family. The sources of the numbers are in the family's file."""

    name: str
    config: Mapping[str, int | float | bool | str | Sequence[int]]
    """Values of `transformer/config.json` that set sizes."""
    text_encoder_parameters: int
    vae_parameters: int
    spelled: str
    """Regular expression that a folder's name matches, of which only small letters and digits are left."""
    licence: str
    distilled: bool = False
    """True if the model is made for guidance 1, and its folder's name alone says so before the folder is here."""
    file_bytes: int = HALF
    """Bytes of a number in the published files: bf16, or fp32."""
    vae_factor: int = 8
    """Pixels of a latent value along one side."""
    patch: int = PATCH
    """Latent values of a token along one side."""
    timed_like: str | None = None
    """Published model whose operations a second stand for this one's, because nobody has timed it. None: somebody has.
    """


@dataclass(frozen=True, kw_only=True)
class BlockCount:
    """Equal blocks of a transformer, for the memory forecast and the count of operations."""

    number: int
    input_tokens: int
    """Tokens of the tensors that gradient checkpointing keeps of a block, each as wide as the transformer."""
    count: Callable[[Tally], None]
    """Counts one block."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts and functions of one model family."""

    name: str
    """`model.name` of a job."""
    size: ImageSize
    """Size without fields in the job: that of the published recipes, and small videos."""
    spacing: Spacing
    """Spacing of the noise levels in the family's diffusers pipeline."""
    guidance: float
    """Published guidance: of the model card, or the default of the diffusers pipeline."""
    guidance_offset: float = 0.0
    """`sampler.guidance` less the `guidance_scale` of the family's pipeline."""
    guidance_note: str
    """Words on `sampler.guidance` for a model of the family that is distilled, after `sampler.guidance: 1`."""
    is_video: bool = False
    names_blocks: bool = True
    """True if the diffusers class names repeated blocks (`_repeated_blocks`), which `compile` needs."""
    shares_sequence: bool = False
    """True if engine/parallel/sp_plans.py has a plan for the class. Otherwise `runtime.sp_degree` is 1."""
    pipeline: Pipeline
    distilled: Callable[[Mapping[str, Any]], bool]
    """Return whether a folder's `model_index.json` says that its model is distilled for guidance 1."""
    factors: Callable[[Mapping[str, Any], Mapping[str, Any]], Factors]
    """Return the factors from the configurations of VAE and transformer."""
    packed: int = 1
    """Latent values of the VAE along one side of a value that the sampler sees."""
    architecture: Callable[[Mapping[str, Any]], Architecture]
    """Return the layer sizes from the transformer's configuration. Raises KeyError for a missing size."""
    blocks: Callable[[Architecture, int, int], Iterator[BlockCount]]
    """Yield the blocks for so many image tokens and text tokens, in the order of the forward pass."""
    outside: Callable[[Tally, Architecture, int, int], None]
    """Count the layers before the first and after the last block."""
    published: tuple[PublishedSizes, ...]
    template_tokens: int = 0
    """Tokens of the pipeline's template before a prompt, which take room from it."""
    lora_targets: Callable[["nn.Module"], Sequence[str]]
    """Return the names of the adapted layers of a transformer."""
    encode: Callable[[Any, list[str], int], tuple["Tensor", "Tensor | None"]]
    """Encode prompts by the diffusers pipeline, at most so many tokens of each: hidden [B, L, D], mask [B, L] or
    None."""
    forward: Callable[["nn.Module", "Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
    """Return the network's dx/dsigma [B, C, h, w] of x [B, C, h, w] at sigma [B], with hidden and mask."""
    to_decoder: Callable[[Any, "Tensor"], "Tensor"]
    """Turn sampled latents into the input of the VAE's decoder."""
