"""Count parameters, and the bytes that autograd keeps for the backward pass, layer by layer.

A block of the network is described once, as its layers in the order of its forward pass (`blocks.py`). Each method of
`Tally` is one kind of layer and follows that layer's backward formula: the tensors that the formula needs are kept.

A layer whose weights are frozen keeps no input, because only the gradient of its input is needed. Adapters keep their
layer's input, once where several layers read the same one.

Counts are per row (one image at one step). Parameters are never counted as kept: they are in memory anyway.
"""

from dataclasses import dataclass
from typing import Literal

FP32, HALF = 4, 2
"""Bytes of an fp32 number, and of a bf16 number."""

NormKind = Literal["torch", "diffusers"]
"""`torch`: torch.nn.RMSNorm, one CUDA kernel. `diffusers`: a formula of several operations, which keeps more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is trained, and in which precision the network computes."""

    rank: int | None
    """Rank of the low-rank adapters, whose numbers are fp32. None: every weight is trained."""
    compute_bytes: int = HALF
    """Bytes of a number of the forward pass: 2 for bf16, 4 for fp32."""
    adapter_bytes: int = HALF
    """Bytes of a number of an adapter's pass beside half-precision weights. 4: peft's own layers, which copy each input
    to fp32, and diffusers' own norms, as the engine had until 2026-11-29."""

    @property
    def is_full(self) -> bool:
        return self.rank is None

    @property
    def has_half_layers(self) -> bool:
        """Return True with the layers of `engine/models/half_layers.py`."""
        return self.rank is not None and self.compute_bytes == self.adapter_bytes == HALF


class Tally:
    """Running counts of a part of the network, for one row."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.parameters = 0
        """Parameters of the network, without adapters."""
        self.adapter_parameters = 0
        self.adapted_parameters = 0
        """Parameters of the weights that have adapters."""
        self.kept = 0
        """Bytes kept for the backward pass."""
        self.widest = 0
        """Bytes of the gradients of the largest layer input, which exist while that layer goes backward."""
        self.operations = 0
        """Floating point operations of the forward pass, without adapters: 2 for each product of two numbers."""

    def vector(self, inputs: int, *outputs: int, bias: bool = True) -> None:
        """Linear layers over one vector a row (time, guidance, pooled text). Their kept bytes are left out: some KB."""
        self.parameters += sum(inputs * output + output * bias for output in outputs)

    def linear(
        self,
        tokens: int,
        inputs: int,
        *outputs: int,
        adapted: bool = False,
        kept_before: bool = False,
        bias: bool = True,
    ) -> None:
        """Linear layers, one for each of `outputs`, that read the same [tokens, inputs] tensor.

        y = W x + b. The gradient of W needs x; the gradient of x needs W. An adapter adds B A x and needs x and A x.
        `kept_before`: another layer keeps the same tensor.
        """
        size, training = self.training.compute_bytes, self.training
        self.parameters += sum(inputs * output + output * bias for output in outputs)
        self.operations += 2 * tokens * inputs * sum(outputs)
        copies, bytes_each = 0, size
        if training.is_full:
            copies = 0 if kept_before else 1
        elif adapted and training.rank is not None:
            self.adapter_parameters += sum(training.rank * (inputs + output) for output in outputs)
            self.adapted_parameters += sum(inputs * output for output in outputs)
            bytes_each = max(size, training.adapter_bytes)
            self.kept += len(outputs) * tokens * training.rank * bytes_each
            # A tensor that has the adapter's format already is not copied.
            copies = len(outputs) if size != bytes_each else int(not kept_before)
        self.kept += copies * tokens * inputs * bytes_each
        self.widest = max(self.widest, tokens * inputs * (size + (bytes_each if adapted else size)))

    def layer_norm(self, tokens: int, width: int, *, in_fp32: bool = False, affine: bool = False) -> None:
        """LayerNorm keeps its input, and mean and standard deviation of each token in fp32.

        `in_fp32`: the input is converted to fp32 first, and the conversion is what is kept.
        """
        self.parameters += 2 * width * affine
        self.kept += tokens * (width * (FP32 if in_fp32 else self.training.compute_bytes) + 2 * FP32)

    def scaled(self, tokens: int, width: int, *, in_fp32: bool = False) -> None:
        """A product with a trained vector, as in x (1 + scale) or gate x: keeps the vector, and x if it is trained."""
        size = FP32 if in_fp32 else self.training.compute_bytes
        self.kept += width * size + (tokens * width * size if self.training.is_full else 0)

    def head_norm(self, kind: NormKind, tokens: int, width: int, groups: int, weights: int) -> None:
        """RMSNorm of queries or keys over groups of numbers of each token; keeps one factor for each group in fp32.

        `torch` keeps its input. `diffusers` keeps the input, its fp32 copy, and the normalised input if the weights
        are trained.
        """
        size = self.training.compute_bytes
        self.parameters += weights
        self.kept += tokens * (width * size + groups * FP32)
        if kind == "diffusers" and not self.training.has_half_layers:
            self.kept += tokens * width * (FP32 if size != FP32 else 0)
            self.kept += tokens * width * size if self.training.is_full else 0

    def gelu(self, tokens: int, width: int) -> None:
        """GELU (and SiLU) keeps its input."""
        self.kept += tokens * width * self.training.compute_bytes

    def gated(self, tokens: int, width: int) -> None:
        """SwiGLU, SiLU(x) y, keeps x, y and SiLU(x), each [tokens, width]."""
        self.kept += 3 * tokens * width * self.training.compute_bytes

    def attention(self, queries: int, keys: int, width: int, heads: int) -> None:
        """Fused attention keeps queries, keys, values and output, and the log-sum of each query and head in fp32.

        The matrix of attention weights is never stored.
        """
        self.kept += (2 * queries + 2 * keys) * width * self.training.compute_bytes + queries * heads * FP32
        self.operations += 4 * queries * keys * width  # queries x keys, and weights x values

    def tensor(self, tokens: int, width: int, *, in_fp32: bool = False) -> None:
        """Any other tensor that is kept."""
        self.kept += tokens * width * (FP32 if in_fp32 else self.training.compute_bytes)
