"""Bytes of activations that a training pass keeps, for one row: one image, or one video, at one denoising step.

    kept     everything that autograd keeps until the backward pass
    working  what the backward pass needs beside it at its largest moment

Gradient checkpointing keeps the input of each block alone and computes the block again when the backward pass reaches
it, but for the last block, which is kept. One block at a time is then complete in memory, so that block is part of
`working`. Guidance without a distilled
input computes two branches, with and without the prompt, and keeps both.

Source of every count: the backward formulas, layer by layer (`tally.py`, `blocks.py`). `python -m
tests.benchmarks.memory` compares them with what autograd keeps of the real diffusers classes, and with peaks on a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from engine.families import FAMILIES
from engine.memory.architecture import Architecture, image_tokens, text_tokens
from engine.memory.blocks import double_block, outside_blocks, single_block, wan_block
from engine.model_folder import ImageSize
from engine.tally import Tally, Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of one row of a training pass."""

    kept: int
    working: int

    @property
    def total(self) -> int:
        return self.kept + self.working


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Numbers of parameters of a transformer, without and with adapters."""

    transformer: int
    adapters: int
    """0 if every weight is trained."""
    adapted: int
    """Numbers of the weights that have adapters."""
    buffers: int
    """Numbers that are stored but not trained."""
    largest_block: int
    """Numbers of the largest block."""


@cache
def parameters_of(architecture: Architecture, training: Training) -> Parameters:
    """Count the parameters of a transformer."""
    tallies = [tally for tally, _ in _blocks(architecture, training, 0, 0)]
    tallies.append(_outside(architecture, training, 0, 0))
    return Parameters(
        transformer=sum(tally.parameters for tally in tallies),
        adapters=sum(tally.adapter_parameters for tally in tallies),
        adapted=sum(tally.adapted_parameters for tally in tallies),
        buffers=architecture.positions * architecture.width,
        largest_block=max(tally.parameters for tally in tallies[:-1]),
    )


@cache
def operations_of(architecture: Architecture, size: ImageSize) -> int:
    """Return the floating point operations of one forward pass of one image, without adapters.

    Layers over one vector a row, norms and activations are left out: less than 1 %.
    """
    image, text = image_tokens(architecture, size), text_tokens(architecture.family, size)
    training = Training(rank=None)
    inside = sum(tally.operations for tally, _ in _blocks(architecture, training, image, text))
    return inside + _outside(architecture, training, image, text).operations


@cache
def activations(
    architecture: Architecture,
    size: ImageSize,
    training: Training,
    *,
    is_checkpointed: bool,
    is_guided: bool,
    doubles_guidance: bool = False,
    kept_blocks: int = 1,
) -> Activations:
    """Return the bytes of one row.

    `is_guided`: the sampler's guidance is not 1. `doubles_guidance`: both branches are one batch, so the backward pass
    works on both at once. `kept_blocks`: last blocks that checkpointing does not compute again.
    """
    image, text = image_tokens(architecture, size), text_tokens(architecture.family, size)
    blocks = list(_blocks(architecture, training, image, text))
    kept = _outside(architecture, training, image, text).kept
    working, last = max(tally.widest for tally, _ in blocks), 0
    if is_checkpointed:
        kept += sum(inputs for _, inputs in blocks)
        # The last blocks' tensors, of the last branch, are gone before another block is complete.
        last = sum(tally.kept - inputs for tally, inputs in blocks[len(blocks) - kept_blocks :])
        working += max(0, max(tally.kept for tally, _ in blocks) - last)
    else:
        kept += sum(tally.kept for tally, _ in blocks)
    branches = branches_of(architecture, is_guided=is_guided)
    at_once = branches if doubles_guidance else 1
    return Activations(kept=branches * kept + at_once * last, working=at_once * working)


def branches_of(architecture: Architecture, *, is_guided: bool) -> int:
    """Return the number of branches of a pass: with and without the prompt, or one."""
    return 2 if is_guided and not architecture.takes_guidance else 1


def _blocks(a: Architecture, training: Training, image: int, text: int) -> Iterator[tuple[Tally, int]]:
    """Return each block's counts, and the bytes of its input, which checkpointing keeps."""

    def counted(build: Callable[[Tally], None]) -> Tally:
        tally = Tally(training)
        build(tally)
        return tally

    if a.family in FAMILIES:
        for blocks in FAMILIES[a.family].blocks(a, image, text):
            input_bytes = blocks.input_tokens * a.width * training.compute_bytes
            yield from [(counted(blocks.count), input_bytes)] * blocks.number
        return
    joint_bytes = (image + text) * a.width * training.compute_bytes
    if a.family == "wan":
        # The text is the same tensor in every block, so it is counted outside the blocks.
        block = counted(lambda t: wan_block(t, a, image, text))
        yield from [(block, image * a.width * training.compute_bytes)] * a.layers
        return
    kinds = [(number < a.dual_layers, a.family == "sd3" and number == a.layers - 1) for number in range(a.layers)]
    counts = {
        (is_dual, text_ends): counted(
            partial(double_block, a=a, image=image, text=text, is_dual=is_dual, text_ends=text_ends)
        )
        for is_dual, text_ends in dict.fromkeys(kinds)
    }
    yield from ((counts[kind], joint_bytes) for kind in kinds)
    single = counted(lambda t: single_block(t, a, image + text))
    yield from [(single, joint_bytes)] * a.single_layers


def _outside(a: Architecture, training: Training, image: int, text: int) -> Tally:
    tally = Tally(training)
    count = FAMILIES[a.family].outside if a.family in FAMILIES else outside_blocks
    count(tally, a, image, text)
    return tally
