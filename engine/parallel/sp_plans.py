"""Where each family's sequence may be cut, and the seam to diffusers that attention over a cut sequence needs.

A diffusion transformer works on two streams of tokens, picture and text. Nearly all of it treats tokens one by one, so
any rank may hold any of them; only attention sees them all. A `Plan` says where the streams enter the part that is
shared, which tables (rotary embeddings) run along them, and which modules attend.

All that we know of the inside of diffusers is in this file. The promise: it holds for `DIFFUSERS`; a test names what
it relies on. Three things: an attention processor hands its `_parallel_config` to the attention backend that it
dispatches to; `_AttentionBackendRegistry._backends` holds these backends; and what the plans below name.

Why not `enable_parallelism` (0.39): it needs a default process group and an accelerator, so that a CPU has to pretend;
it walks every module for each switch; every length must divide by the degree (SD3's 333 text tokens never do); a text
mask costs a collective in each layer; and its backward pass fails under autocast, where queries and values
differ in type. Its processors, its dispatch and its backends are used as they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from torch import Tensor, cat, nn

DIFFUSERS = "0.39"
"""The version whose insides this file knows."""

Attend = Callable[..., Tensor]
"""query, key, value [B, S, H, D] by name, and a mask `attn_mask` or None -> [B, S, H, D]."""


class Stream(StrEnum):
    """What a dimension of a tensor runs along."""

    PICTURE = "picture"
    TEXT = "text"
    JOINT = "text, then picture"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the sequence of one family is cut among the ranks; at `proj_out` the picture is put together again."""

    blocks: tuple[str, ...]
    """Lists of transformer blocks, in order."""
    attentions: tuple[str, ...]
    """Modules of a block that attend to the whole sequence; not those that attend to text which every rank holds."""
    enters: tuple[Stream, ...]
    """The first arguments of the first block, [B, S, C] each, when they are cut there."""
    outputs: Mapping[str, tuple[tuple[Stream, int], ...]] = field(default_factory=dict)
    """Module -> of each of its outputs, what it runs along and in which dimension."""
    text_first: bool
    """Order in joint attention."""

    def attention_modules(self, model: nn.Module) -> list[Any]:
        """Found by name, because walking all modules of a large model takes longer than a switch may."""
        return [
            module
            for blocks in self.blocks
            for block in getattr(model, blocks)
            for name in self.attentions
            if (module := getattr(block, name, None)) is not None
        ]


_BOTH = (Stream.PICTURE, Stream.TEXT)
_ROTARY = ((Stream.PICTURE, 0), (Stream.PICTURE, 0))
"""Cosines and sines, [S, D]."""

PLANS = {
    "QwenImageTransformer2DModel": Plan(
        blocks=("transformer_blocks",),
        attentions=("attn",),
        enters=_BOTH,
        outputs={"pos_embed": ((Stream.PICTURE, 0), (Stream.TEXT, 0))},
        text_first=True,
    ),
    "FluxTransformer2DModel": Plan(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attentions=("attn",),
        enters=(),
        # The rotary table is made of both streams at once, before the first block: their lengths must be known by then.
        outputs={
            "x_embedder": ((Stream.PICTURE, 1),),
            "context_embedder": ((Stream.TEXT, 1),),
            "pos_embed": ((Stream.JOINT, 0), (Stream.JOINT, 0)),
        },
        text_first=True,
    ),
    "WanTransformer3DModel": Plan(
        blocks=("blocks",),
        attentions=("attn1",),
        enters=(Stream.PICTURE,),
        outputs={"rope": ((Stream.PICTURE, 1), (Stream.PICTURE, 1))},
        text_first=False,
    ),
    "SD3Transformer2DModel": Plan(
        blocks=("transformer_blocks",), attentions=("attn", "attn2"), enters=_BOTH, text_first=False
    ),
    "HunyuanVideoTransformer3DModel": Plan(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attentions=("attn",),
        enters=_BOTH,
        outputs={"rope": _ROTARY},
        text_first=False,
    ),
}
"""By the class of the transformer."""


def plan_for(model: nn.Module) -> Plan:
    """Raises ValueError for a family without a plan, and for the variants of a family that know a token's place."""
    family = type(model).__name__
    if family not in PLANS:
        raise ValueError(f"{family} has no sequence-parallel plan; use degree 1, or one of {', '.join(PLANS)}")
    config: Any = model.config
    for option, refused in (("zero_cond_t", True), ("image_condition_type", "token_replace")):
        if getattr(config, option, None) == refused:
            raise ValueError(
                f"this {family} has {option}={refused!r}, which treats some tokens of the picture in another way; "
                "use degree 1, because its plan would cut them apart"
            )
    return PLANS[family]


# --- the seam to diffusers


class SharedAttention(ABC):
    """Given to an attention processor as its parallel configuration: it is then asked to attend."""

    @abstractmethod
    def attend(self, alone: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`alone`: the attention backend in use, for a sequence that one rank holds."""


class _Backend:
    """An attention backend of diffusers that a `SharedAttention` may stand before; without one it is what it was."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(
        self,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        _parallel_config: object = None,
        **options: Any,
    ) -> Tensor:
        if isinstance(_parallel_config, SharedAttention):
            return _parallel_config.attend(partial(self._attend, **options), query, key, value, attn_mask)
        return self._attend(
            query=query, key=key, value=value, attn_mask=attn_mask, _parallel_config=_parallel_config, **options
        )


def make_shareable(model: nn.Module, plan: Plan) -> None:
    """Once for a model, before the first `share`. Alone it computes what it did before, bit for bit."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
    from diffusers.models.attention_processor import JointAttnProcessor2_0

    for name, attend in Registry._backends.items():
        if not isinstance(attend, _Backend):
            Registry._backends[name] = _Backend(attend)
    for module in plan.attention_modules(model):
        processor = module.processor
        if isinstance(processor, JointAttnProcessor2_0):
            module.processor = SD3Attention(processor)
        elif not hasattr(processor, "_parallel_config"):
            raise ValueError(
                f"{type(model).__name__} attends with {type(processor).__name__}, which cannot be shared; "
                "put its own processors back (set_attn_processor), or use degree 1"
            )


def share(model: nn.Module, plan: Plan, by: SharedAttention | None) -> None:
    """From now on attention is done by `by`, or alone."""
    for module in plan.attention_modules(model):
        module.processor._parallel_config = by


class SD3Attention:
    """SD3's joint attention by way of diffusers' dispatch, which its own processor goes past; alone, that processor."""

    _attention_backend = None
    _parallel_config: Any = None
    """A `SharedAttention`, or None."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self._stock = stock

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> Any:
        """hidden_states [B, picture, C], encoder_hidden_states [B, text, C] or None -> the same, attended to."""
        if self._parallel_config is None:
            return self._stock(attn, hidden_states, encoder_hidden_states, attention_mask, **more)
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        query, key, value = _heads(attn, hidden_states, "to_q", "to_k", "to_v", attn.norm_q, attn.norm_k)
        if encoder_hidden_states is not None:
            text = _heads(
                attn,
                encoder_hidden_states,
                "add_q_proj",
                "add_k_proj",
                "add_v_proj",
                attn.norm_added_q,
                attn.norm_added_k,
            )
            query, key, value = (cat(pair, dim=1) for pair in zip((query, key, value), text, strict=True))
        attended = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        attended = attended.flatten(2).to(query.dtype)
        picture = attn.to_out[1](attn.to_out[0](attended[:, : hidden_states.shape[1]]))
        if encoder_hidden_states is None:
            return picture
        rest = attended[:, hidden_states.shape[1] :]
        return picture, rest if attn.context_pre_only else attn.to_add_out(rest)


def _heads(
    attn: Any, x: Tensor, to_query: str, to_key: str, to_value: str, norm_query: Any, norm_key: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, C] -> query, key, value [B, S, H, D], normalised where the model does so."""
    query, key, value = (
        getattr(attn, name)(x).unflatten(-1, (attn.heads, -1)) for name in (to_query, to_key, to_value)
    )
    return (
        query if norm_query is None else norm_query(query),
        key if norm_key is None else norm_key(key),
        value,
    )
