"""Compile the repeated transformer blocks with `torch.compile`, for the passes of rollout workers.

The blocks of a model share one compiled program, because diffusers compiles each block and torch passes weights as
inputs. So a new weight version, merged or not, takes effect without compiling again. Another shape, dtype or switched
adapter compiles once more. Compiled operations round differently, so the trainer computes old log-probs itself.
"""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton

COMPILERS = ("cc", "gcc", "clang", "c++", "g++")
"""Programs of which torch's default backend needs one, on GPUs too."""

MOST_TRACES = 64
"""Traces that torch keeps: each shape, dtype, and state of the adapters is one. Torch's limit of 8 counts all blocks
together, because all are called through the same function; above it, blocks run uncompiled."""

INDUCTOR = "inductor"
"""The backend that `torch.compile` uses by default."""


def compile_blocks(transformer: nn.Module, backend: str | Callable[..., Any] = INDUCTOR) -> None:
    """Compile every repeated block. Each compilation happens at the first pass of its shape.

    Without a C compiler, print the reason and leave the blocks uncompiled: rollouts are slower, and nothing else
    changes. Raises ValueError if the transformer's class names no repeated blocks.
    """
    if not repeated_blocks(transformer):
        raise ValueError(
            f"{type(transformer).__name__} names no repeated block to compile (diffusers' _repeated_blocks); use "
            "model.compile: off"
        )
    if backend == INDUCTOR and (problem := missing_compiler()):
        print(f"model.compile is on, but blocks stay uncompiled: {problem}", flush=True)
        return
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_TRACES)
    transformer.compile_repeated_blocks(backend=backend)  # type: ignore[operator]
    print(f"blocks are compiled at their first pass: {', '.join(repeated_blocks(transformer))}", flush=True)


def repeated_blocks(transformer: nn.Module) -> tuple[str, ...]:
    """Return the class names of the repeated blocks. Empty if diffusers names none for this class."""
    return tuple(getattr(transformer, "_repeated_blocks", None) or ())


def missing_compiler() -> str | None:
    """Return the reason why torch cannot compile on this machine. None: it can."""
    configured = [os.environ[name] for name in ("CXX", "CC") if name in os.environ]
    if not any(shutil.which(program) for program in (*configured, *COMPILERS)):
        return f"torch.compile needs a C compiler, and none of {', '.join(COMPILERS)} is installed"
    if torch.cuda.is_available() and not has_triton():
        return "torch.compile needs Triton for a GPU, and Triton is not installed or does not support the GPU"
    return None
