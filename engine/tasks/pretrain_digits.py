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
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import torch
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
from engine.tasks.pretraining import save_parts, train_flow

STEPS = 1400
BATCH = 64
LEARNING_RATE = 2e-3
CAPTION_NOISE = 0.17
"""Probability of drawing each caption character anew. A character is wrong with 0.9 times the probability."""


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
    save_parts(adapter.transformer, adapter.text, out, facts)
    # Measure the saved fp16 file first, then store the figures in the file.
    scores = evaluate(load_digits(out), held_out_digits())
    for metric in ("exact_match", "similarity"):
        facts[metric] = f"{np.mean([score.metrics[metric] for score in scores]):.4f}"
    save_parts(adapter.transformer, adapter.text, out, facts)
    click.echo(f"{out}: {facts}")


def pretrain(steps: int, seed: int) -> DigitsAdapter:
    """Return a model with the moving average of the weights over `steps` steps of flow matching."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    transformer, text = build_transformer(), ByteText()
    train_flow(
        [transformer, text],
        training_pairs(rng),
        lambda images, captions: flow_matching_loss(transformer, text(captions), images),
        steps=steps,
        highest_rate=LEARNING_RATE,
    )
    return DigitsAdapter(transformer, text)


def training_pairs(rng: random.Random) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield batches of clean images as tokens [BATCH, 24, 16], with their noisy captions."""
    while True:
        words = training_words(rng, BATCH)
        images = torch.from_numpy(np.stack([render(word, rng) for word in words]))
        yield patchify(images[:, None]), [noisy_caption(word, rng) for word in words]


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


def flow_matching_loss(transformer: nn.Module, text: Tensor, images: Tensor) -> Tensor:
    """Return the squared error of the velocity at a noise level drawn near the middle. images [B, 24, 16]."""
    noise = torch.randn_like(images)
    sigma = torch.sigmoid(torch.randn(len(images)))
    s = sigma[:, None, None]
    predicted = velocity(transformer, (1.0 - s) * images + s * noise, sigma, text)
    return (predicted - (noise - images)).square().mean()


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


if __name__ == "__main__":
    main()
