"""The training loop of the two small base models: flow matching, and the moving average of the weights.

Steps are counted, not timed: the same seed on the same machine gives the same base.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

WARM_UP = 100
DECAY_FROM = 0.6
"""Share of the steps before the learning rate starts to fall, to 5 % at the end."""
EMA = 0.995


def train_flow(
    modules: Sequence[nn.Module],
    pairs: Iterator[tuple[Tensor, list[str]]],
    loss_of: Callable[[Tensor, list[str]], Tensor],
    *,
    steps: int,
    highest_rate: float,
    fused: bool | None = None,
) -> None:
    """Train the modules on `steps` pairs of images and captions. Leave the moving average of the weights in them.

    `fused`: as in AdamW. The two forms round differently.
    """
    parameters: list[Tensor] = [parameter for module in modules for parameter in module.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=highest_rate, weight_decay=0.01, betas=(0.9, 0.99), fused=fused)
    average = [parameter.detach().clone() for parameter in parameters]
    losses = []
    for step, (images, captions) in zip(range(steps), pairs, strict=False):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, highest_rate)
        loss = loss_of(images, captions)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        # The early average follows quickly, because a slow average would remember the random start.
        decay = min(EMA, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 1.0 - decay)
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            click.echo(f"step {step + 1}: loss {np.mean(losses[-100:]):.4f}")
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Return the learning rate of a step: up to `highest`, then down to 5 % of `highest`."""
    done = step / steps
    decay = 1.0 if done < DECAY_FROM else max(0.05, (1.0 - done) / (1.0 - DECAY_FROM))
    return highest * min(1.0, (step + 1) / WARM_UP) * decay


def save_parts(transformer: nn.Module, text: nn.Module, path: Path, facts: Mapping[str, str]) -> None:
    """Save transformer and text embedding in fp16, with the facts of the training as metadata."""
    tensors = {
        f"{part}.{name}": tensor.half().contiguous()
        for part, module in (("transformer", transformer), ("text", text))
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, path, metadata=dict(facts))
