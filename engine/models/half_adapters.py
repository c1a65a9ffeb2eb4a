"""Low-rank adapters beside frozen half-precision weights: applied in half precision, trained in fp32.

    out = W x + b + scale B (A x)        W, b, x and out in bf16; A and B are fp32 parameters

peft computes the adapter in fp32: it copies every input to fp32, and casts, scales, adds and casts back every output.
Here a pass rounds A and B once, all layers together, and each layer is three matrix products, of which the last adds
to the first. The backward pass has five products and gives fp32 gradients. Rounding is that of bf16, as everywhere else
in the pass: `tests/engine/test_half_layers.py` holds the bound against fp32. Workers that merge adapters get them
rounded to bf16 too (`merge.py`).

The promises: a pass with gradients gives the bits of a pass without; a layer's gradient has the bits of any other pass
of its shape; values of A and B that change between a pass and its backward pass raise an error.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn


class HalfAdaptedLinear(Linear):  # type: ignore[misc]  # peft has no types
    """peft's layer with one adapter. Merged or switched off, it is peft's own."""

    half_a: Tensor
    half_b: Tensor
    """A [rank, inputs] and B [outputs, rank], rounded at the beginning of the pass (`RoundedAdapters`)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or args or kwargs:
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        (name,) = self.active_adapters
        base, a, b = self.get_base_layer(), self.lora_A[name].weight, self.lora_B[name].weight
        if torch.is_grad_enabled():
            trained: Tensor = _Adapted.apply(  # type: ignore[no-untyped-call]
                x, base.weight, base.bias, a, b, self, self.scaling[name]
            )
            return trained
        rows = x.reshape(-1, x.shape[-1])
        out, _ = _product(rows, base.weight, base.bias, self.half_a, self.half_b, self.scaling[name])
        return out.view(*x.shape[:-1], -1)


class RoundedAdapters:
    """Rounds all adapters to the dtype of their layers' weights. A hook before each pass of the transformer."""

    def __init__(self, layers: list[HalfAdaptedLinear]) -> None:
        self._layers = layers
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, *_: object) -> None:
        """Round the adapters' current values, in a few kernels."""
        first = self._layers[0]
        if first.disable_adapters or first.merged:
            return
        (name,) = first.active_adapters
        masters = [matrix.weight for layer in self._layers for matrix in (layer.lora_A[name], layer.lora_B[name])]
        if not self._copies or self._copies[0].device != masters[0].device:
            dtype = first.get_base_layer().weight.dtype
            self._copies = [torch.empty_like(master, dtype=dtype) for master in masters]
            for layer, a, b in zip(self._layers, self._copies[::2], self._copies[1::2], strict=True):
                layer.half_a, layer.half_b = a, b
        torch._foreach_copy_(self._copies, masters)


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the layer's output [N, outputs] and A x [N, rank] of its input rows [N, inputs]."""
    narrow = rows @ a.t()
    out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    return out.addmm_(narrow, b.t(), alpha=scale), narrow


class _Adapted(torch.autograd.Function):
    """A layer with its adapter. x [..., inputs] -> [..., outputs]"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, layer: Any, scale: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, narrow = _product(rows, weight, bias, layer.half_a, layer.half_b, scale)
        ctx.save_for_backward(rows, narrow, weight, a, b)
        ctx.layer, ctx.scale, ctx.shape = layer, scale, x.shape
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A and B are saved for their check alone: torch raises if a value changed in place since the pass.
        rows, narrow, weight, a, b = ctx.saved_tensors
        half_a, half_b = ctx.layer.half_a, ctx.layer.half_b
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        through = gradient @ half_b
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight).addmm_(through, half_a, alpha=ctx.scale).view(ctx.shape)
        of_a = torch.mul(through.t() @ rows, ctx.scale, out=torch.empty_like(a))
        of_b = torch.mul(gradient.t() @ narrow, ctx.scale, out=torch.empty_like(b))
        return of_x, None, None, of_a, of_b, None, None


def apply_in_half(transformer: nn.Module) -> bool:
    """Let adapters beside half-precision weights compute in half precision. Return False if there are none."""
    modules: list[Any] = list(transformer.modules())
    linear = [module for module in modules if type(module) is Linear]
    layers = [layer for layer in linear if layer.get_base_layer().weight.dtype in (torch.bfloat16, torch.float16)]
    if not layers:
        return False
    for layer in layers:
        layer.__class__ = HalfAdaptedLinear
    transformer.register_forward_pre_hook(RoundedAdapters(layers))
    return True
