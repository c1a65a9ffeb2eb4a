"""The memory of one GPU, part by part, and how many rows or images fit beside the parts.

A trainer holds its parts all the time. A training pass adds the activations of its rows; when they are gone, autograd
returns one more set of gradients. So the largest need is

    parts + max(rows x activations of a row, one set of gradients)

and at the start the larger of the text encoders and the weights: the encoders leave the GPU before the transformer
comes (engine/models/load.py, `encode_first`). A rollout worker needs its parts and, one after another, a denoising
pass of some images and their decoding.

Ranks divide the groups of an optimiser step, and each rank's passes have as many rows as those of a single rank. With
LoRA every rank holds all parts, and images that a rank sampled may be decoded while it trains. With full weights FSDP2
divides the transformer, its optimiser, copies and gradients over the ranks, and gathers one block after another for a
pass. A rank that samples gathers all blocks in bf16 between two passes: rank 0, or every rank if there is room.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.memory.activations import activations, branches_of, parameters_of
from engine.memory.architecture import image_tokens
from engine.memory.published import SizedModel
from engine.model_folder import ImageSize
from engine.tally import FP32, HALF, Training

GIB = 2**30

Role = Literal["trainer", "rollout"]

MOMENTS = 2
"""Numbers of AdamW's state for each trained parameter."""

GRADIENT_SETS = 2
"""Sets of gradients beside the activations: the sum of the pass and the sum of the optimiser step
(engine/algorithm/transaction.py)."""

FIXED_POINT_SETS = 1
"""Further sets with `algorithm.order: exact`: the sum of the step has 64 bits (engine/algorithm/gradient_sum.py)."""

COPIES = 2
"""Copies of the trained weights: the running average, and the old policy after the first optimiser step of a batch."""

GATHERED_BLOCKS = 2
"""Blocks of sharded weights that are complete in bf16 at once: the block at work, and the next, fetched meanwhile."""

BUSY_STREAMS = 19
"""Tensors of all tokens that a pass without gradients holds at its largest moment. Measured on an H100 (gpu.json): 12
to 15 with Qwen-Image, SD3.5 and Wan 14 B; 17 with Wan 1.3 B; 18 with FLUX.1, whose feed-forward runs beside
attention."""

ADAPTER_BYTES = 14
"""Bytes a number where an adapter widens a token to the feed-forward's width: three fp32 tensors (B A x, scaled, added
to W x) and W x in bf16."""

DECODED_AT_ONCE = 8 * 512 * 512
"""Pixels that the VAE decodes at once (`PIXELS_AT_ONCE` of engine/models/vae.py)."""

DECODER_BYTES_PER_PIXEL = 2048
"""Assumed: four tensors of 256 channels in bf16 at full size, the widest layers of `AutoencoderKL`'s decoder."""

SPARE_BYTES = 16 * GIB
"""Memory that a rollout worker leaves free when it copies the base weights of merged adapters to its GPU
(engine/models/merge.py). Without so much room the copy lies in the host's memory."""

COMMUNICATOR_BYTES = 590_000_000
"""Memory that NCCL takes for a group of workers. Measured on an H100 with a group of one (gpu.json)."""

CONTEXT_BYTES = 3 * GIB // 4
"""CUDA's context and libraries: 718 MiB were in use with the first tensor on an H100 (gpu.md)."""

FRAGMENTED = 0.04
"""Assumed share of a GPU's memory lost between the blocks of torch's allocator."""

WITH_PARITY = frozenset({"T4", "A10G", "L4", "L40S", "A10", "L40"})
"""GPUs with GDDR memory. Error correction takes a sixteenth of it."""


def usable_bytes(accelerator: str, gpu_memory_gib: int) -> int:
    """Return the bytes of a GPU that tensors may fill. `gpu_memory_gib`: memory by the cloud's table."""
    total = gpu_memory_gib * GIB
    if accelerator.upper() in WITH_PARITY:
        total = total * 15 // 16
    return int(total * (1 - FRAGMENTED)) - CONTEXT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The memory of one GPU in one role. Bytes."""

    role: Role
    parts: Mapping[str, int]
    """Parts that are always there, in the order of a table."""
    unit: Literal["row", "image"]
    bytes_each: int
    """Activations of a row, or working memory of an image."""
    least_beside: int
    """Bytes needed beside the parts, whatever the number of rows: one set of gradients, or the decoder's."""
    start: int
    """Bytes needed while the model is loaded: text encoders alone, then weights."""
    asked: int
    """Rows of a pass, or images of a pass, that the job asks for on one GPU."""
    copy_if_room: int = 0
    """Copy of the base weights of merged adapters, on the GPU only if `SPARE_BYTES` stay free."""

    def parts_on(self, usable: int) -> dict[str, int]:
        """Return the parts on a GPU with so many usable bytes."""
        fixed = sum(self.parts.values())
        if self.copy_if_room and usable - fixed > self.copy_if_room + SPARE_BYTES:
            return {**self.parts, "copy of merged weights": self.copy_if_room}
        return dict(self.parts)

    def needed(self, count: int) -> int:
        """Return the bytes needed for passes of `count` rows or images, without parts that are there only if room is.

        At least the bytes needed while the model is loaded.
        """
        return max(sum(self.parts.values()) + max(count * self.bytes_each, self.least_beside), self.start)

    def fitting(self, usable: int) -> int:
        """Return the largest number of rows or images that fits. 0: not a single one."""
        if self.needed(1) > usable:
            return 0
        return (usable - sum(self.parts_on(usable).values())) // self.bytes_each


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a job uses its model."""

    training: Training
    is_checkpointed: bool
    is_guided: bool
    rows: int
    """Rows of a training pass."""
    images: int
    """Images of a rollout pass."""
    ranks: int = 1
    """GPUs that train the same weights, each a share of the groups."""
    sampled: int = 0
    """With full weights: images that every rank samples at once with gathered weights. 0: rank 0 samples alone."""
    communicators: int = 0
    """Groups of workers of a rollout node that a worker is in, and keeps."""
    doubles_guidance: bool = False
    """True if both branches of guidance are one batch of twice the rows."""
    keeps_reference: bool = False
    """True if the loss compares with a copy of the weights before training. Adapters are switched off instead."""
    sums_exactly: bool = False
    """True with `algorithm.order: exact`."""

    @property
    def gradient_sets(self) -> int:
        return GRADIENT_SETS + (FIXED_POINT_SETS if self.sums_exactly else 0)


def trainer_budget(model: SizedModel, setting: Setting) -> Budget:
    """Return the memory of each GPU that trains."""
    if setting.training.is_full and setting.ranks > 1:
        return _sharded_budget(model, setting)
    training, counts = setting.training, parameters_of(model.architecture, setting.training)
    trained = FP32 * (counts.transformer if training.is_full else counts.adapters)
    weights = counts.transformer * training.compute_bytes + counts.buffers * training.compute_bytes
    # Weights that are fp32 in the forward pass are the optimised weights themselves.
    is_same = training.is_full and training.compute_bytes == FP32
    masters = 0 if is_same else trained
    # Each operation converts fp32 weights to bf16 and keeps the result until its backward pass.
    passed = counts.largest_block if setting.is_checkpointed else counts.transformer
    converted = HALF * passed if is_same else 0
    copies = COPIES + (1 if setting.keeps_reference and training.is_full else 0)
    return Budget(
        role="trainer",
        parts=_present(
            {
                "transformer": weights,
                "weights in bf16": converted,
                "VAE": model.vae_bytes,
                "trained weights in fp32" if training.is_full else "adapters": masters,
                "adapters in bf16": HALF * counts.adapters if training.has_half_layers else 0,
                "optimiser": MOMENTS * trained,
                "average, old policy": copies * trained,
                "gradients": setting.gradient_sets * trained,
                "decoding beside training": decoding_bytes(model.size, setting.images) if setting.ranks > 1 else 0,
            }
        ),
        unit="row",
        bytes_each=_kept_of_a_row(model, setting),
        least_beside=trained,
        start=max(model.text_encoder_bytes, weights + masters + model.vae_bytes),
        asked=setting.rows,
    )


def _kept_of_a_row(model: SizedModel, setting: Setting) -> int:
    """Return the bytes that a training pass keeps for a row."""
    return activations(
        model.architecture,
        model.size,
        setting.training,
        is_checkpointed=setting.is_checkpointed,
        is_guided=setting.is_guided,
        doubles_guidance=setting.doubles_guidance,
    ).total


def _sharded_budget(model: SizedModel, setting: Setting) -> Budget:
    """Return the memory of each rank with full weights: fp32 shards, and gathered blocks in bf16 (FSDP2).

    Each rank reads its own part (engine/models/unread.py). A rank that samples holds all weights in bf16 meanwhile.
    """
    counts = parameters_of(model.architecture, setting.training)
    shard = -(-FP32 * counts.transformer // setting.ranks)
    gathered, decoding = HALF * counts.transformer, 0
    if setting.sampled:
        gathered += setting.sampled * denoising_bytes(model, setting)
        decoding = decoding_bytes(model.size, setting.sampled)
    return Budget(
        role="trainer",
        parts=_present(
            {
                "transformer": shard + FP32 * counts.buffers,
                "weights in bf16": GATHERED_BLOCKS * HALF * counts.largest_block,
                "VAE": model.vae_bytes,
                "optimiser": MOMENTS * shard,
                "average, old policy": (COPIES + (1 if setting.keeps_reference else 0)) * shard,
                "gradients": setting.gradient_sets * shard,
                "decoding beside training": decoding,
            }
        ),
        unit="row",
        bytes_each=_kept_of_a_row(model, setting),
        # Autograd returns the gradients of a block on every rank, before the ranks divide them. While a rank samples,
        # the sum of a pass is not there.
        least_beside=max(shard + FP32 * counts.largest_block, gathered - shard),
        start=max(model.text_encoder_bytes, shard + model.vae_bytes),
        asked=setting.rows,
    )


def rollout_budget(model: SizedModel, setting: Setting) -> Budget:
    """Return the memory of a GPU that rolls out images."""
    training, counts = setting.training, parameters_of(model.architecture, setting.training)
    adapters = FP32 * counts.adapters
    weights = (counts.transformer + counts.buffers) * training.compute_bytes
    return Budget(
        role="rollout",
        parts=_present(
            {
                "transformer": weights,
                "VAE": model.vae_bytes,
                "adapters": adapters,
                "groups (NCCL)": setting.communicators * COMMUNICATOR_BYTES,
            }
        ),
        unit="image",
        bytes_each=denoising_bytes(model, setting),
        least_beside=decoding_bytes(model.size, setting.images),
        start=max(model.text_encoder_bytes, weights + adapters + model.vae_bytes),
        asked=setting.images,
        copy_if_room=counts.adapted * training.compute_bytes,
    )


def _present(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in parts.items() if count}


def denoising_bytes(model: SizedModel, setting: Setting) -> int:
    """Return the bytes that one image of a pass without gradients needs at its largest moment."""
    a = model.architecture
    rows = branches_of(a, is_guided=setting.is_guided) if setting.doubles_guidance else 1
    stream = model.tokens * a.width * setting.training.compute_bytes
    if setting.training.is_full or not a.adapted_width:
        return rows * BUSY_STREAMS * stream
    # Beside the feed-forward's adapter: both streams, and the image normalised and scaled.
    return rows * max(BUSY_STREAMS * stream, ADAPTER_BYTES * image_tokens(a, model.size) * a.adapted_width + 3 * stream)


def decoding_bytes(size: ImageSize, images: int) -> int:
    """Return the bytes of decoding: slices of a batch, and at least one image."""
    pixels = min(size.height * size.width * images, max(DECODED_AT_ONCE, size.height * size.width))
    return pixels * DECODER_BYTES_PER_PIXEL
