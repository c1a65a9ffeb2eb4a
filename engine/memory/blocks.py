"""The blocks of each transformer as layers, in the order of their forward pass (diffusers 0.39).

Read a function beside the block's `forward`. `adapted=True` marks the layers that get a low-rank adapter; they follow
`lora_targets()` of the adapters in engine/models/. Numbers of tokens are of one row.
"""

from engine.memory.architecture import Architecture
from engine.tally import NormKind, Tally

TIME_WIDTH = 256
"""Width of the sine and cosine features of the noise level."""


def _norm_kind(a: Architecture) -> NormKind:
    return "torch" if a.family in ("flux", "wan") else "diffusers"


def _head_norms(t: Tally, a: Architecture, tokens: int) -> None:
    """Norms of queries and keys, one group for each head. All heads share the weights."""
    if a.has_head_norm:
        for _ in ("queries", "keys"):
            t.head_norm(_norm_kind(a), tokens, a.width, a.heads, a.head_width)


def _before_attention(t: Tally, a: Architecture, tokens: int, *, vectors: int = 6) -> None:
    """One stream of a block until attention. `vectors`: shifts, scales and gates computed from the noise level."""
    t.vector(a.width, vectors * a.width)
    t.layer_norm(tokens, a.width)
    t.scaled(tokens, a.width)
    t.linear(tokens, a.width, a.width, a.width, a.width, adapted=True)  # queries, keys, values
    _head_norms(t, a, tokens)


def _after_attention(t: Tally, a: Architecture, tokens: int) -> None:
    """One stream of a block after attention: projection of a copy of its part of the output, and feed-forward."""
    t.linear(tokens, a.width, a.width, adapted=True)
    t.scaled(tokens, a.width)  # gate
    t.layer_norm(tokens, a.width)
    t.scaled(tokens, a.width)
    t.linear(tokens, a.width, a.mlp_width, adapted=a.adapted_width > 0)
    t.gelu(tokens, a.mlp_width)
    t.linear(tokens, a.mlp_width, a.width, adapted=a.adapted_width > 0)
    t.scaled(tokens, a.width)  # gate


def double_block(
    t: Tally, a: Architecture, image: int, text: int, *, is_dual: bool = False, text_ends: bool = False
) -> None:
    """A block with a stream for the image and one for the text, which meet in one attention.

    `is_dual`: SD3.5-medium's second attention over the image, without adapters. `text_ends`: SD3's last block, whose
    text is not needed afterwards.
    """
    _before_attention(t, a, image, vectors=9 if is_dual else 6)
    _before_attention(t, a, text, vectors=2 if text_ends else 6)
    t.attention(image + text, image + text, a.width, a.heads)
    if is_dual:
        t.scaled(0, a.width)  # the same normalised image, scaled a second time
        t.linear(image, a.width, a.width, a.width, a.width)
        _head_norms(t, a, image)
        t.attention(image, image, a.width, a.heads)
        t.linear(image, a.width, a.width, kept_before=True)
        t.scaled(image, a.width)  # gate
    _after_attention(t, a, image)
    if not text_ends:
        _after_attention(t, a, text)


def single_block(t: Tally, a: Architecture, tokens: int) -> None:
    """A block over image and text as one stream: attention and feed-forward side by side, one projection for both."""
    t.vector(a.width, 3 * a.width)
    t.layer_norm(tokens, a.width)
    t.scaled(tokens, a.width)
    t.linear(tokens, a.width, a.mlp_width)
    t.gelu(tokens, a.mlp_width)
    # HunyuanVideo cuts image and text apart and joins them again: another tensor than the feed-forward reads.
    is_same = a.family == "flux" and t.training.is_full  # without its gradient, the feed-forward keeps nothing
    t.linear(tokens, a.width, a.width, a.width, a.width, adapted=True, kept_before=is_same)
    _head_norms(t, a, tokens)
    t.attention(tokens, tokens, a.width, a.heads)
    t.linear(tokens, a.width + a.mlp_width, a.width)
    t.scaled(tokens, a.width)  # gate


def wan_block(t: Tally, a: Architecture, video: int, text: int) -> None:
    """Wan's block: self-attention, attention to the text, feed-forward. Norms, scales and gates compute in fp32."""
    width = a.width
    t.parameters += 6 * width  # table of shifts, scales and gates
    t.layer_norm(video, width, in_fp32=True)
    t.scaled(video, width, in_fp32=True)
    t.linear(video, width, width, width, width, adapted=True)
    for _ in ("queries", "keys"):
        t.head_norm("torch", video, width, 1, width)
    t.attention(video, video, width, a.heads)
    t.linear(video, width, width, adapted=True, kept_before=True)
    t.scaled(video, width)  # gate

    t.layer_norm(video, width, in_fp32=True, affine=True)
    t.linear(video, width, width, adapted=True)
    t.linear(text, width, width, width, adapted=True, kept_before=True)  # every block reads the same text
    t.head_norm("torch", video, width, 1, width)
    t.head_norm("torch", text, width, 1, width)
    t.attention(video, text, width, a.heads)
    t.linear(video, width, width, adapted=True, kept_before=True)

    t.layer_norm(video, width, in_fp32=True)
    t.scaled(video, width, in_fp32=True)
    t.linear(video, width, a.mlp_width, adapted=True)
    t.gelu(video, a.mlp_width)
    t.linear(video, a.mlp_width, width, adapted=True)
    t.scaled(video, width, in_fp32=True)  # gate


def refiner_block(t: Tally, a: Architecture, text: int) -> None:
    """HunyuanVideo's refinement of the text: attention and feed-forward."""
    t.vector(a.width, 2 * a.width)
    t.layer_norm(text, a.width, affine=True)
    t.linear(text, a.width, a.width, a.width, a.width, adapted=True)
    t.attention(text, text, a.width, a.heads)
    t.linear(text, a.width, a.width, adapted=True, kept_before=True)
    t.scaled(text, a.width)
    t.layer_norm(text, a.width, affine=True)
    t.linear(text, a.width, 4 * a.width)
    t.gelu(text, 4 * a.width)
    t.linear(text, 4 * a.width, a.width)
    t.scaled(text, a.width)


def outside_blocks(t: Tally, a: Architecture, image: int, text: int) -> None:
    """Layers before the first and after the last block. Checkpointing does not cover them."""
    width = a.width
    t.vector(TIME_WIDTH, width)
    t.vector(width, width)
    if a.takes_guidance:
        t.vector(TIME_WIDTH, width)
        t.vector(width, width)
    if a.pooled_width:
        t.vector(a.pooled_width, width)
        t.vector(width, width)
    t.linear(image, a.channels, width)
    match a.family:
        case "qwen-image":
            t.parameters += a.text_width  # norm of the text
            if t.training.is_full:
                t.head_norm("diffusers", text, a.text_width, 1, 0)
            t.linear(text, a.text_width, width)
        case "wan":
            t.vector(width, 6 * width)
            t.linear(text, a.text_width, width)
            if t.training.is_full:
                t.gelu(text, width)
            t.linear(text, width, width)
            t.tensor(text, width)  # the encoded text, which every block reads
            t.parameters += 2 * width  # table of the last shift and scale
        case "hunyuan-video":
            t.vector(TIME_WIDTH, width)
            t.vector(width, width)
            t.vector(a.text_width, width)
            t.vector(width, width)
            t.linear(text, a.text_width, width)
            for _ in range(a.refiner_layers):
                refiner_block(t, a, text)
        case "sd3" | "flux":
            t.linear(text, a.text_width, width)
        case _:
            raise ValueError(f"{a.family} has no counts of its layers")
    t.layer_norm(image, width, in_fp32=a.family == "wan")
    t.scaled(image, width, in_fp32=a.family == "wan")
    t.linear(image, width, a.output_channels)
    if a.family != "wan":
        t.vector(width, 2 * width)
