"""Ulysses sequence parallelism of a live transformer (DeepSpeed-Ulysses, arXiv 2309.14509).

The ranks of a group compute a forward pass together. Each rank holds all weights and its part of the tokens. Around
attention, the ranks exchange data: each rank then holds all tokens and its part of the heads:

    my tokens, all heads  -> all-to-all ->  all tokens, my heads  -> attention -> all-to-all ->  my tokens, all heads

`use` changes the group in well under a millisecond: the switch sets a few hooks and a single attribute of each
attention module. No weight, process or communicator is touched. The promises:

- alone (degree 1), the model is as before: without a hook, bit for bit
- an equal degree gives equal bits, whatever happened between; across degrees, results differ by rounding (at most
  5e-6 of max|x| a forward pass in fp32, often none: tests/benchmarks/results/sp_parity.md)
- any number of tokens is allowed: missing tokens are padded, and the padding is removed before attention
- every rank must be called with equal inputs and returns the whole output; gradients are partial until `sum_gradients`
- when a peer dies, a forward or backward pass raises (for a frozen peer at the group's timeout); after `use(None)` the
  model computes alone again

A layer costs two all-to-alls (queries, keys and values travel together). At image sizes, the number of all-to-alls sets
the cost: 83 us each (from xDiT's published times of FLUX.1-dev on H100). Ring attention is not offered. Diffusers' ring
attention needs a log-sum-exp not returned by the native backend; ring attention would run on CUDA only, without any
test of ours.
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engine.parallel.communicator import SPGroup
from engine.parallel.sp_plans import Attend, Plan, SharedAttention, Stream, make_shareable, plan_for, share
from engine.parallel.worker_group import allowed_degrees

BUCKET_ELEMENTS = 1 << 24
"""Elements summed in a single all-reduce. Assumed: 64 MB in fp32, large enough to hide the latency."""


class SPBackend(Protocol):
    """The sequence-parallel interface for a worker. `Ulysses` implements the interface."""

    @property
    def degree(self) -> int:
        """Return the number of ranks in the current group. 1: alone."""

    @property
    def rank(self) -> int:
        """Return the rank in the current group."""

    def use(self, group: SPGroup | None) -> None:
        """Share forward passes with this group from now on. None: alone.

        Repeatable, between forward passes only, and without a message to any peer: every rank of the group calls `use`
        itself. A ValueError leaves everything unchanged.
        """


class Ulysses:
    """`SPBackend` for a live transformer. Add low-rank adapters before, or later while the model computes alone."""

    def __init__(self, transformer: nn.Module) -> None:
        """Raises ValueError for a transformer that cannot be shared (`plan_for`)."""
        self._model = _unwrapped(transformer)
        self._plan = plan_for(self._model)
        self._group: SPGroup | None = None
        self._hooks: list[RemovableHandle] = []
        make_shareable(self._model, self._plan)

    @property
    def degree(self) -> int:
        return 1 if self._group is None else self._group.degree

    @property
    def rank(self) -> int:
        return 0 if self._group is None else self._group.rank

    def use(self, group: SPGroup | None) -> None:
        if group is not None and (problem := problem_with_degree(self._model, group.degree)):
            raise ValueError(problem)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._group = group
        if group is None or group.degree == 1:
            share(self._model, self._plan, None)
            return
        work = _SharedPass(group, self._plan)
        share(self._model, self._plan, work)
        # Look up modules by name each time: low-rank adapters added later replace the named module.
        first = self._model.get_submodule(f"{self._plan.blocks[0]}.0")
        self._hooks.append(first.register_forward_pre_hook(work.enter, with_kwargs=True))
        if self._plan.inputs:
            self._hooks.append(self._model.register_forward_pre_hook(work.begin, with_kwargs=True))
        for name, cuts in self._plan.outputs.items():
            module = self._model.get_submodule(name)
            self._hooks.append(module.register_forward_hook(partial(_cut_outputs, work, cuts)))
        self._hooks.append(self._model.get_submodule("proj_out").register_forward_hook(work.leave))


def degrees_of(transformer: nn.Module) -> tuple[int, ...]:
    """Return the allowed degrees of a transformer, ascending."""
    heads = _heads(_unwrapped(transformer))
    return allowed_degrees(heads, most=heads)


def problem_with_degree(transformer: nn.Module, degree: int) -> str | None:
    """Return the reason why a transformer cannot use this degree, with the allowed degrees.

    None: the degree is allowed. Degree 1 always is, also for a class whose heads have another name in its config.
    """
    if degree == 1:
        return None
    model = _unwrapped(transformer)
    allowed = degrees_of(model)
    if degree in allowed:
        return None
    return (
        f"sequence-parallel degree {degree} does not divide the {_heads(model)} attention heads of "
        f"{type(model).__name__}; use one of {', '.join(map(str, allowed))}, because every rank takes whole heads"
    )


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: SPGroup | None) -> None:
    """Sum the gradients of shared passes over the ranks, in place and equal on every rank. None: nothing to do.

    Every rank's backward pass saw its own tokens only, so gradients add up (a sum, not a mean: compared with one
    process in tests/engine/test_ulysses.py). Call once after the last backward pass, on every rank, with parameters in
    the same order.
    """
    if group is None or group.degree == 1:
        return
    waiting: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        bucket = waiting.setdefault(parameter.grad.dtype, [])
        bucket.append(parameter.grad)
        if sum(gradient.numel() for gradient in bucket) >= BUCKET_ELEMENTS:
            _sum_together(waiting.pop(parameter.grad.dtype), group)
    for bucket in waiting.values():
        _sum_together(bucket, group)


def _sum_together(gradients: list[Tensor], group: SPGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    group.all_reduce(flat)
    for gradient, whole in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(whole.view_as(gradient))


def _unwrapped(transformer: nn.Module) -> nn.Module:
    """Return the diffusers model inside a peft wrapper."""
    inside = getattr(transformer, "get_base_model", None)
    return transformer if inside is None else inside()


def _heads(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.num_attention_heads)


# --- a shared forward pass


class _SharedPass(SharedAttention):
    """A rank's part of a group's passes, from a call of `use` to the next call."""

    def __init__(self, group: SPGroup, plan: Plan) -> None:
        self._group = group
        self._plan = plan
        self._lengths: dict[Stream, int] = {}
        """Tokens of each stream in the current pass. All passes of a backward pass must have equal lengths."""

    def begin(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook before the model: keep this rank's tokens of the plan's named arguments."""
        cut = {name: self.part(kwargs[name], *place) for name, place in self._plan.inputs.items()}
        return args, {**kwargs, **cut}

    def enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook before the first block: keep this rank's tokens of the streams that enter the block."""
        arguments, named = list(args), dict(kwargs)
        for place, (name, stream) in enumerate(
            zip(("hidden_states", "encoder_hidden_states"), self._plan.enters, strict=False)
        ):
            if name in named:
                named[name] = self.part(named[name], stream, 1)
            else:
                arguments[place] = self.part(arguments[place], stream, 1)
        return tuple(arguments), named

    def part(self, x: Tensor, stream: Stream, dim: int) -> Tensor:
        """Return this rank's tokens of a tensor along `stream` in dimension `dim`."""
        if stream is Stream.JOINT:
            lengths = [self._lengths[Stream.TEXT], self._lengths[Stream.IMAGE]]
            return torch.cat([self._own(tokens, dim) for tokens in x.split(lengths, dim)], dim)
        self._lengths[stream] = x.shape[dim]
        return self._own(x, dim)

    def _own(self, x: Tensor, dim: int) -> Tensor:
        return own_part(x, dim, self._group.rank, self._group.degree)

    def leave(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Hook after the last layer: gather the image tokens of all ranks, [B, own, C] -> [B, image, C]."""
        whole: Tensor = _AllGather.apply(output.transpose(0, 1), self._group)
        return whole[: self._lengths[Stream.IMAGE]].transpose(0, 1).contiguous()

    def attend(self, alone: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention over all tokens, in the order and with the mask of an unshared pass. Padding is left out.

        query, key, value  [B, own, H, D]  this rank's tokens
        mask               [B, 1, 1, keys] True for keys that count, of all tokens or as `_whole_mask` expects; or None
        returns            [B, own, H, D]
        """
        degree = self._group.degree
        lengths = self._lengths_of(query.shape[1])
        order, places = _indices(lengths, degree, query.device)
        mine = [
            projection.to(_dtype(query)).unflatten(2, (degree, -1)).permute(2, 1, 0, 3, 4)
            for projection in (query, key, value)
        ]
        # [heads' owner, own, 3, B, heads, D] -> [tokens' owner, own, 3, B, heads, D]
        received: Tensor = _AllToAll.apply(torch.stack(mine, dim=2), self._group)
        query, key, value = received.flatten(0, 1).index_select(0, order).permute(1, 2, 0, 3, 4)
        mask = None if mask is None else self._whole_mask(mask, sum(lengths))
        attended = alone(query=query, key=key, value=value, attn_mask=mask)
        placed = attended.transpose(0, 1).index_select(0, places).unflatten(0, (degree, -1))
        # [tokens' owner, own, B, heads, D] -> [heads' owner, own, B, heads, D]
        returned: Tensor = _AllToAll.apply(placed, self._group)
        return returned.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _lengths_of(self, own: int) -> tuple[int, ...]:
        """Return the token counts of the streams in an attention call, in order.

        `own`: number of tokens on this rank.
        """
        degree = self._group.degree
        streams = (Stream.TEXT, Stream.IMAGE) if self._plan.text_first else (Stream.IMAGE, Stream.TEXT)
        lengths = tuple(self._lengths[stream] for stream in streams if stream in self._lengths)
        image = (self._lengths[Stream.IMAGE],)
        for candidate in (lengths, image):
            if sum(share_of(length, degree) for length in candidate) == own:
                return candidate
        raise RuntimeError(
            f"attention got {own} tokens on this rank, but the pass under way has {lengths} in all at degree {degree}; "
            "with gradient checkpointing, use one length of text and one size of image for all passes of a backward"
        )

    def _whole_mask(self, mask: Tensor, tokens: int) -> Tensor:
        """Return the full mask [B, 1, 1, tokens].

        Qwen-Image's processor adds only this rank's image tokens to the mask.
        """
        missing = tokens - mask.shape[-1]
        if missing == 0:
            return mask
        own_tokens = share_of(self._lengths[Stream.IMAGE], self._group.degree)
        if not self._plan.text_first or missing != self._lengths[Stream.IMAGE] - own_tokens:
            raise RuntimeError(
                f"an attention mask over {mask.shape[-1]} keys does not belong to {tokens} tokens; "
                "give the text's mask as the model's forward pass takes it"
            )
        return torch.cat([mask, mask.new_ones(*mask.shape[:-1], missing)], dim=-1)


def _cut_outputs(
    work: _SharedPass, cuts: tuple[tuple[Stream, int], ...], _: nn.Module, args: tuple[Any, ...], output: Any
) -> Any:
    """Hook after a module with outputs along the sequence: keep this rank's part of each output."""
    if isinstance(output, Tensor):
        ((stream, dim),) = cuts
        return work.part(output, stream, dim)
    return tuple(work.part(tensor, stream, dim) for tensor, (stream, dim) in zip(output, cuts, strict=True))


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of attention: autocast's dtype, or x's own.

    Autocast's dtype is less data to send, and gives queries and values the same dtype.
    """
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# --- placement of tokens on ranks


def share_of(length: int, degree: int) -> int:
    """Return the number of slots on each of `degree` ranks for `length` tokens. The last slots may be empty."""
    return -(-length // degree)


def own_part(x: Tensor, dim: int, rank: int, degree: int) -> Tensor:
    """Return the rank's contiguous tokens in dimension `dim`: `share_of` slots, with zeros in empty slots."""
    length = x.shape[dim]
    places = share_of(length, degree)
    begin = min(rank * places, length)
    own = x.narrow(dim, begin, min(places, length - begin))
    empty = list(own.shape)
    empty[dim] = places - own.shape[dim]
    return torch.cat([own, own.new_zeros(empty)], dim) if empty[dim] else own


def order_of(lengths: tuple[int, ...], degree: int) -> Tensor:
    """Return [sum(lengths)]: the slot of each token if the ranks' slots are concatenated.

    A rank's slots are its `share_of` the first stream, then of the second.
    """
    own = sum(share_of(length, degree) for length in lengths)
    order, before = [], 0
    for length in lengths:
        places = share_of(length, degree)
        token = torch.arange(length)
        order.append(token // places * own + before + token % places)
        before += places
    return torch.cat(order)


def places_of(order: Tensor, places: int) -> Tensor:
    """Return [places]: the token in each slot, the inverse of `order`.

    An empty slot holds token 0, which is never read.
    """
    tokens = torch.zeros(places, dtype=torch.long)
    tokens[order] = torch.arange(len(order))
    return tokens


@lru_cache(maxsize=64)
def _indices(lengths: tuple[int, ...], degree: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `order_of` and `places_of` on the device. The result is cached, because every layer needs both."""
    # A tensor made in inference mode could not serve a later differentiated pass.
    with torch.inference_mode(False):
        order = order_of(lengths, degree)
        places = places_of(order, degree * sum(share_of(length, degree) for length in lengths))
        return order.to(device), places.to(device)


# --- collectives with a backward pass


class _AllToAll(torch.autograd.Function):
    """Row i of every rank goes to rank i: [degree, ...] -> [degree, ...]. The transpose is the same operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SPGroup) -> Tensor:
        ctx.group = group
        return group.all_to_all(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None


class _AllGather(torch.autograd.Function):
    """[own, ...] of every rank -> [degree own, ...]. Backward, each rank keeps the gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SPGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.degree)[ctx.group.rank], None
