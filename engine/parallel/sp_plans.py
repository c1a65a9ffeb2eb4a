"""Sequence-parallel plans of the model families, and the interface to diffusers for attention over a cut sequence.

A diffusion transformer works on two streams of tokens, image and text. Nearly all layers treat tokens separately, and
any rank may therefore hold any token; only attention needs all tokens. A `Plan` names the place where the streams enter
the shared part, the tables along the streams (rotary embeddings), and the attention modules.

This file holds all our knowledge of the inside of diffusers. The promise: the file works with `DIFFUSERS`; a test names
the internals used here. There are three: an attention processor hands its `_parallel_config` to the attention backend;
`_AttentionBackendRegistry._backends` holds the backends; and the modules named in the plans below.

Why not `enable_parallelism` (0.39): the function needs a default process group and an accelerator, so a CPU run must
fake an accelerator. Each switch walks every module. Every length must divide by the degree (SD3's 333 text tokens
never do). A text mask costs a collective in each layer. The backward pass fails under autocast, where queries and
values differ in type. The processors, dispatch and backends of diffusers are used unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from torch import Tensor, cat, nn

DIFFUSERS = "0.39"
"""The diffusers version with the internals used in this file."""

Attend = Callable[..., Tensor]
"""query, key, value [B, S, H, D] by name, and a mask `attn_mask` or None -> [B, S, H, D]."""


class Stream(StrEnum):
    """The stream along a dimension of a tensor."""

    IMAGE = "image"
    TEXT = "text"
    JOINT = "text, then image"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cut of a family's sequence among the ranks. The image is gathered again at `proj_out`."""

    blocks: tuple[str, ...]
    """Lists of transformer blocks, in order."""
    attentions: tuple[str, ...]
    """Modules of a block with attention over the whole sequence. Attention to text held by every rank is left out."""
    enters: tuple[Stream, ...]
    """The first arguments of the first block, [B, S, C] each, if the streams are cut at the first block."""
    outputs: Mapping[str, tuple[tuple[Stream, int], ...]] = field(default_factory=dict)
    """Module -> for each output of the module, the stream and the dimension along the stream."""
    inputs: Mapping[str, tuple[Stream, int]] = field(default_factory=dict)
    """Named argument of the model -> stream and dimension along it, if the streams are cut before the first layer."""
    text_first: bool
    """Order of the streams in joint attention."""

    def attention_modules(self, model: nn.Module) -> list[Any]:
        """Return the attention modules by name.

        A walk over all modules of a large model takes too long for a switch.
        """
        return [
            module
            for blocks in self.blocks
            for block in getattr(model, blocks)
            for name in self.attentions
            if (module := getattr(block, name, None)) is not None
        ]


_BOTH = (Stream.IMAGE, Stream.TEXT)
_ROTARY = ((Stream.IMAGE, 0), (Stream.IMAGE, 0))
"""Cosines and sines, [S, D]."""

PLANS = {
    "QwenImageTransformer2DModel": Plan(
        blocks=("transformer_blocks",),
        attentions=("attn",),
        enters=_BOTH,
        outputs={"pos_embed": ((Stream.IMAGE, 0), (Stream.TEXT, 0))},
        text_first=True,
    ),
    "FluxTransformer2DModel": Plan(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attentions=("attn",),
        enters=(),
        # The rotary table covers both streams and is made before the first block. Both lengths must be known by then.
        outputs={
            "x_embedder": ((Stream.IMAGE, 1),),
            "context_embedder": ((Stream.TEXT, 1),),
            "pos_embed": ((Stream.JOINT, 0), (Stream.JOINT, 0)),
        },
        text_first=True,
    ),
    "WanTransformer3DModel": Plan(
        blocks=("blocks",),
        attentions=("attn1",),
        enters=(Stream.IMAGE,),
        outputs={"rope": ((Stream.IMAGE, 1), (Stream.IMAGE, 1))},
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
    "Flux2Transformer2DModel": Plan(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attentions=("attn",),
        enters=(),
        # The model notes the number of text tokens that it is given, and cuts as many from its last layer's input.
        inputs={
            "hidden_states": (Stream.IMAGE, 1),
            "encoder_hidden_states": (Stream.TEXT, 1),
            "img_ids": (Stream.IMAGE, 0),
            "txt_ids": (Stream.TEXT, 0),
        },
        text_first=True,
    ),
}
"""Plans by class name of the transformer."""


def plan_for(model: nn.Module) -> Plan:
    """Return the plan of a model's family.

    Raises ValueError for a family without a plan, and for variants of a family that treat some image tokens
    differently.
    """
    family = type(model).__name__
    if family not in PLANS:
        raise ValueError(f"{family} has no sequence-parallel plan; use degree 1, or one of {', '.join(PLANS)}")
    config: Any = model.config
    for option, refused in (("zero_cond_t", True), ("image_condition_type", "token_replace")):
        if getattr(config, option, None) == refused:
            raise ValueError(
                f"this {family} has {option}={refused!r}, which treats some tokens of the image in another way; "
                "use degree 1, because its plan would cut them apart"
            )
    return PLANS[family]


# --- the interface to diffusers


class SharedAttention(ABC):
    """The parallel configuration of an attention processor. The backend calls `attend` instead of its own attention."""

    @abstractmethod
    def attend(self, alone: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention. `alone`: the attention backend in use, for a sequence held by a single rank."""


class _Backend:
    """A wrapper around a diffusers attention backend.

    Without a `SharedAttention`, the wrapper calls the backend unchanged.
    """

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
    """Prepare a model for sharing, once, before the first `share`.

    Alone, the model still computes the same bits as before.
    """
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
    """Set `by` as the attention of all shared modules. None: the model's own attention."""
    for module in plan.attention_modules(model):
        module.processor._parallel_config = by


class SD3Attention:
    """SD3's joint attention through diffusers' dispatch, which SD3's own processor bypasses.

    Alone, use SD3's processor.
    """

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
        """Attend: hidden_states [B, image, C], encoder_hidden_states [B, text, C] or None -> equal shapes."""
        if self._parallel_config is None:
            return self._stock(attn, hidden_states, encoder_hidden_states, attention_mask, **more)
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        query, key, value = heads_of(attn, hidden_states, "to_q", "to_k", "to_v", attn.norm_q, attn.norm_k)
        if encoder_hidden_states is not None:
            text = heads_of(
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
        image = attn.to_out[1](attn.to_out[0](attended[:, : hidden_states.shape[1]]))
        if encoder_hidden_states is None:
            return image
        text_attended = attended[:, hidden_states.shape[1] :]
        return image, text_attended if attn.context_pre_only else attn.to_add_out(text_attended)


def heads_of(
    attn: Any, x: Tensor, to_query: str, to_key: str, to_value: str, norm_query: Any, norm_key: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, C] -> query, key, value [B, S, H, D], normalised if the model normalises them."""
    query, key, value = (
        getattr(attn, name)(x).unflatten(-1, (attn.heads, -1)) for name in (to_query, to_key, to_value)
    )
    return (
        query if norm_query is None else norm_query(query),
        key if norm_key is None else norm_key(key),
        value,
    )
