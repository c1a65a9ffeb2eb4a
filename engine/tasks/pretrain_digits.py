"""Make the base of digits-ocr again: `python -m engine.tasks.pretrain_digits`, three to four minutes on one core.

Flow matching on rendered digits. The captions are noisy on purpose, like web captions: every character is another
digit with probability 0.153. The base therefore draws sharp digits but often the wrong digits, which gives
reinforcement learning a real error to correct. The reward plays no part in this loss, and held-out prompts are never
shown.

Steps are counted, not timed: the same seed on the same machine gives the same base.
"""

import random
import string
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.config import SamplerConfig
from engine.diffusion.sampler import denoise, evaluation_plan
from engine.models.digits import (
    BASE,
    CHARACTERS,
    ByteText,
    DigitsAdapter,
    build_transformer,
    load_digits,
    patchify,
    render,
    velocity,
)
from engine.prompts import held_out_digits
from engine.protocol.request import Score, Stream, seed_of
from engine.rewards.ocr import OcrReward

STEPS = 1400
BATCH = 64
LEARNING_RATE = 2e-3
WARM_UP = 100
DECAY_FROM = 0.6
"""Share of the steps before the learning rate starts to fall, to 5 % at the end."""
CAPTION_NOISE = 0.17
"""Probability of drawing each caption character anew. A character is wrong with 0.9 times the probability."""
EMA = 0.995


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=BASE, help="Where the safetensors file goes.")
@click.option("--steps", default=STEPS, show_default=True, help="Optimiser steps.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, steps: int, seed: int) -> None:
    """Pre-train the base of digits-ocr.

    Example: python -m engine.tasks.pretrain_digits --out base.safetensors
    """
    torch.set_num_threads(1)
    started = time.monotonic()
    adapter = pretrain(steps, seed)
    seconds = time.monotonic() - started
    facts = {"steps": str(steps), "seed": str(seed), "seconds": f"{seconds:.0f}", "torch": torch.__version__}
    save(adapter, out, facts)
    # Measure the saved fp16 file first, then store the figures in the file.
    scores = evaluate(load_digits(out), held_out_digits())
    for metric in ("exact_match", "similarity"):
        facts[metric] = f"{np.mean([score.metrics[metric] for score in scores]):.4f}"
    save(adapter, out, facts)
    click.echo(f"{out}: {facts}")


def pretrain(steps: int, seed: int) -> DigitsAdapter:
    """Return a model with the moving average of the weights over `steps` steps of flow matching."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    transformer, text = build_transformer(), ByteText()
    parameters: list[Tensor] = [*transformer.parameters(), *text.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.99))
    average = [parameter.detach().clone() for parameter in parameters]
    losses = []
    for step, (pictures, captions) in zip(range(steps), training_pairs(rng), strict=False):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = flow_matching_loss(transformer, text(captions), pictures)
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
    return DigitsAdapter(transformer, text)


def training_pairs(rng: random.Random) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield batches of clean images as tokens [BATCH, 24, 16], with their noisy captions."""
    while True:
        words = training_words(rng, BATCH)
        pictures = torch.from_numpy(np.stack([render(word, rng) for word in words]))
        yield patchify(pictures[:, None]), [noisy_caption(word, rng) for word in words]


def training_words(rng: random.Random, count: int) -> list[str]:
    """Return strings of four digits, none held out."""
    held_out = set(held_out_digits())
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choice(string.digits) for _ in range(CHARACTERS))
        if word not in held_out:
            words.append(word)
    return words


def noisy_caption(word: str, rng: random.Random) -> str:
    return "".join(rng.choice(string.digits) if rng.random() < CAPTION_NOISE else digit for digit in word)


def flow_matching_loss(transformer: nn.Module, text: Tensor, pictures: Tensor) -> Tensor:
    """Return the squared error of the velocity at a noise level drawn near the middle. pictures [B, 24, 16]."""
    noise = torch.randn_like(pictures)
    sigma = torch.sigmoid(torch.randn(len(pictures)))
    s = sigma[:, None, None]
    predicted = velocity(transformer, (1.0 - s) * pictures + s * noise, sigma, text)
    return (predicted - (noise - pictures)).square().mean()


def learning_rate(step: int, steps: int) -> float:
    done = step / steps
    decay = 1.0 if done < DECAY_FROM else max(0.05, (1.0 - done) / (1.0 - DECAY_FROM))
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * decay


def evaluate(adapter: DigitsAdapter, prompts: list[str]) -> list[Score]:
    """Return the scores of an 8-step ODE sampler, with an image per prompt, like the engine's evaluation."""
    plan = evaluation_plan(SamplerConfig(), steps=8)
    reward = OcrReward("ocr")
    scores: list[Score] = []
    for start in range(0, len(prompts), 32):
        part = prompts[start : start + 32]
        seeds = [seed_of(0, Stream.EVAL, 0, prompt, 0) for prompt in part]
        latents = denoise(adapter, plan, adapter.encode(part), seeds)
        scores.extend(reward(adapter.decode(latents), part))
    return scores


def save(adapter: DigitsAdapter, path: Path, facts: Mapping[str, str]) -> None:
    """Save transformer and text embedding in fp16, with the facts of the training as metadata."""
    tensors = {
        f"{part}.{name}": tensor.half().contiguous()
        for part, module in (("transformer", adapter.transformer), ("text", adapter.text))
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, path, metadata=dict(facts))


if __name__ == "__main__":
    main()
