"""Layers around frozen half-precision weights that need fewer kernels and bytes than diffusers' own.

A training row waits for memory, and on one small image for the launch of its kernels. `compute_in_half` therefore
replaces, in transformers with low-rank adapters beside half-precision weights only:

    adapters         three products instead of seven operations (`half_adapters.py`)
    RMSNorm          diffusers' formula of eight operations by torch's norm, one CUDA kernel
    rotary position  one complex product in fp32 of image and text together, instead of up to eight operations for each
    attention        parts of its output are split, so that the backward pass joins them in one operation

Each computes what diffusers computes, in fp32 where diffusers does, up to rounding. fp32 models, among them those that
ship, keep diffusers' own layers bit for bit. `python -m tests.benchmarks.training_row` counts kernels and bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.models.half_adapters import apply_in_half
from engine.parallel.sp_plans import PLANS, heads_of

HALF = (torch.bfloat16, torch.float16)

REPLACED = (
    "QwenDoubleStreamAttnProcessor2_0",
    "FluxAttnProcessor",
    "HunyuanVideoAttnProcessor2_0",
    "JointAttnProcessor2_0",
)
"""diffusers' processors of attention over image and text."""


def compute_in_half(transformer: nn.Module) -> None:
    """Replace layers of a transformer that has low-rank adapters. Without half-precision weights, change nothing."""
    if not apply_in_half(transformer):
        return
    from diffusers.models.normalization import RMSNorm  # here, because the forking process must not load diffusers

    for parent in list(transformer.modules()):
        for name, norm in parent.named_children():
            if type(norm) is RMSNorm and norm.bias is None and norm.weight is not None and norm.weight.dtype in HALF:
                fused = nn.RMSNorm(norm.dim, eps=norm.eps, device="meta").eval()
                fused.weight = norm.weight
                setattr(parent, name, fused)
    plan = PLANS.get(type(transformer).__name__)
    if plan is not None:
        for attention in plan.attention_modules(transformer):
            if type(attention.processor).__name__ in REPLACED:
                attention.processor = JointAttention(text_first=plan.text_first)
    if type(transformer).__name__ == "WanTransformer3DModel":
        blocks: Any = transformer.blocks
        for block in blocks:
            for attention in (block.attn1, block.attn2):
                if type(attention.processor).__name__ == "WanAttnProcessor" and attention.add_k_proj is None:
                    attention.processor = WanAttention()


class _Rotated(torch.autograd.Function):
    """Rotary position: x [B, S, H, D] in any dtype, table [S, D / 2, 2] -> [B, S, H, D]. Computes in fp32.

    Numbers 2 i and 2 i + 1 of a head are one complex number, which the table turns. The backward pass turns it back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _turned(x, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        return _turned(gradients[0], table * table.new_tensor((1.0, -1.0))), None


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _turned(x, table)
    rotated: Tensor = _Rotated.apply(x, table)  # type: ignore[no-untyped-call]
    return rotated


def _turned(x: Tensor, table: Tensor) -> Tensor:
    pairs = x.float().contiguous().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # torch's compiler makes no kernels of complex numbers
        (first, second), (cosine, sine) = pairs.unbind(-1), table[:, None].unbind(-1)
        turned = torch.stack((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table)[:, None])
    return turned.flatten(-2).to(x.dtype)


def rotary_table(tables: tuple[Tensor, Tensor], tokens: int, *, text_first: bool) -> Tensor:
    """Return cosine and sine of every token of an attention, [tokens, D / 2, 2].

    `tables`: as the transformer gives them to its attention. Qwen-Image: complex, of image and of text. Others: cosines
    and sines [S, D], each number twice; without rows for the text if the text has no position (HunyuanVideo).
    """
    first, second = tables
    if first.is_complex():
        return torch.view_as_real(torch.cat((second, first) if text_first else (first, second)))
    if missing := tokens - len(first):
        first = torch.cat((first, first.new_ones(missing, first.shape[1])))
        second = torch.cat((second, second.new_zeros(missing, second.shape[1])))
    return torch.stack((first[:, 0::2], second[:, 1::2]), dim=-1).float()


class JointAttention:
    """Attention over image and text of Qwen-Image, SD3, FLUX and HunyuanVideo, as their own processors in diffusers."""

    _attention_backend: Any = None
    _parallel_config: Any = None
    """A `SharedAttention` (engine/parallel/sp_plans.py), or None."""

    def __init__(self, *, text_first: bool) -> None:
        self._text_first = text_first

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
    ) -> Any:
        """Attend: hidden_states [B, image, C], encoder_hidden_states [B, text, C] or None -> equal shapes.

        encoder_hidden_states_mask  [B, text] True for text that counts, of Qwen-Image
        attention_mask              [B, 1, 1, image + text], of HunyuanVideo
        """
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        image, text = hidden_states, encoder_hidden_states
        lengths = [image.shape[1]] if text is None else [image.shape[1], text.shape[1]]
        if text is not None and getattr(attn, "add_q_proj", None) is None:
            image, text = torch.cat((image, text), dim=1), None  # HunyuanVideo's single blocks have one stream
        query, key, value = heads_of(attn, image, "to_q", "to_k", "to_v", attn.norm_q, attn.norm_k)
        if text is not None:
            names = ("add_q_proj", "add_k_proj", "add_v_proj")
            joined = (query, key, value), heads_of(attn, text, *names, attn.norm_added_q, attn.norm_added_k)
            pairs = zip(*(reversed(joined) if self._text_first else joined), strict=True)
            query, key, value = (torch.cat(pair, dim=1) for pair in pairs)
        if image_rotary_emb is not None:
            table = rotary_table(image_rotary_emb, query.shape[1], text_first=self._text_first)
            query, key = _rotated(query, table), _rotated(key, table)
        if encoder_hidden_states_mask is not None:
            ones = encoder_hidden_states_mask.new_ones(len(image), lengths[0])
            attention_mask = torch.cat((encoder_hidden_states_mask, ones), dim=1)[:, None, None]
        attended = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2)
        if len(lengths) == 1:
            return _projected(attn, attended)
        parts = attended.split(list(reversed(lengths)) if self._text_first else lengths, dim=1)
        image, text = reversed(parts) if self._text_first else parts
        to_text = getattr(attn, "to_add_out", None)
        return _projected(attn, image), text if to_text is None else to_text(text)


class WanAttention:
    """Self-attention with rotary positions, and attention to the text, of Wan."""

    _attention_backend: Any = None
    _parallel_config: Any = None
    """A `SharedAttention`, or None. Attention to the text is never shared."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend: hidden_states [B, video, C], encoder_hidden_states [B, text, C] or None -> [B, video, C].

        rotary_emb  cosines and sines, [1, video, 1, D] each
        """
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(read))
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(read)))
        if rotary_emb is not None:
            cosines, sines = (part[0, :, 0] for part in rotary_emb)
            table = rotary_table((cosines, sines), query.shape[1], text_first=False)
            query, key = _rotated(query, table), _rotated(key, table)
        attended = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config if encoder_hidden_states is None else None,
        )
        return _projected(attn, attended.flatten(2))


def _projected(attn: Any, attended: Tensor) -> Tensor:
    """Return the output projection, if this attention has one. Its dropout never acts: modules are in eval mode."""
    out = getattr(attn, "to_out", None)
    return attended if out is None else out[0](attended)
