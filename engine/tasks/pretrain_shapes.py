"""Make the base of shapes again: `python -m engine.tasks.pretrain_shapes`, five to eight minutes on one core.

Flow matching on rendered requests. The captions are noisy on purpose, like web captions: each number, colour, kind
and relation is drawn anew with probability `CAPTION_NOISE`. The base therefore draws clean shapes but often the wrong
shapes, which gives reinforcement learning a real error to correct. The reward plays no part in this loss, and held-out
prompts are never shown.

Steps are counted, not timed: the same seed on the same machine gives the same base.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from math import log
from pathlib import Path
from typing import TypeVar

import click
import numpy as np
import torch
from torch import Tensor, nn

from engine.config import SamplerConfig
from engine.diffusion.sampler import denoise, evaluation_plan
from engine.models.shapes import (
    BASE,
    ShapesAdapter,
    WordText,
    build_transformer,
    load_shapes,
    patchify,
    render,
    velocity,
)
from engine.prompts import held_out_shapes, trained_shapes
from engine.protocol.request import Score, Stream, seed_of
from engine.rewards.shapes import ShapesReward
from engine.shapes import COLOURS, KINDS, NUMBERS, RELATIONS, Clause, Request, Task, parse
from engine.tasks.pretraining import save_parts, train_flow

T = TypeVar("T")

STEPS = 3000
BATCH = 32
LEARNING_RATE = 1.5e-3
CAPTION_NOISE = 0.12
"""Probability of drawing each number, colour, kind and relation of a caption anew."""
SHIFT = 3.0
"""Shift of the sampled noise levels. Strong noise decides the layout: the many pixels of a shape change together."""
TRAINED_SHIFT = 5.0
TRAINED_SPREAD = 1.3
"""Shift and spread of the trained noise levels, a shifted logit-normal. Captions matter in strong noise, and training
therefore uses more strong noise than sampling. A spread wider than 1 keeps the weak noise levels, in which edges become
clean."""
EASY_TASKS = (Task.SINGLE, Task.COLOURS, Task.COUNTING)
EASY_STEPS = 400
"""Number of first steps with easy tasks only. Most easy tasks ask for a single clause: words come before bindings."""
MIX = (
    *(Task.SINGLE, Task.COLOURS, Task.COLOURS, Task.TWO, Task.COUNTING, Task.COUNTING),
    *(Task.POSITION, Task.POSITION, Task.POSITION, Task.ATTRIBUTION, Task.ATTRIBUTION, Task.ATTRIBUTION),
)
"""Tasks of all later steps. The slowest tasks to learn are more frequent than in a run's batches."""
EVALUATED = 512
"""Number of held-out prompts to evaluate, the first of the list; equal to the engine's default."""


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=BASE, help="Where the safetensors file goes.")
@click.option("--steps", default=STEPS, show_default=True, help="Optimiser steps.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, steps: int, seed: int) -> None:
    """Pre-train the base of shapes.

    Example: python -m engine.tasks.pretrain_shapes --out base.safetensors
    """
    torch.set_num_threads(1)
    started = time.monotonic()
    adapter = pretrain(steps, seed)
    seconds = time.monotonic() - started
    facts = {"steps": str(steps), "seed": str(seed), "seconds": f"{seconds:.0f}", "torch": torch.__version__}
    save_parts(adapter.transformer, adapter.text, out, facts)
    # Measure the saved fp16 file first, then store the figures in the file.
    prompts = held_out_shapes()[:EVALUATED]
    scores = evaluate(load_shapes(out), prompts)
    for metric in ("exact_match", "similarity"):
        facts[metric] = f"{np.mean([score.metrics[metric] for score in scores]):.4f}"
    for task in Task:
        mine = [score for score, prompt in zip(scores, prompts, strict=True) if parse(prompt).task is task]
        exact = np.mean([score.metrics["exact_match"] for score in mine])
        facts[f"exact_match/{task}"] = f"{exact:.4f} of {len(mine)}"
    save_parts(adapter.transformer, adapter.text, out, facts)
    click.echo(f"{out}: {facts}")


def pretrain(steps: int, seed: int) -> ShapesAdapter:
    """Return a model with the moving average of the weights over `steps` steps of flow matching."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    transformer, text = build_transformer(), WordText()
    train_flow(
        [transformer, text],
        training_pairs(rng),
        lambda images, captions: flow_matching_loss(transformer, text(captions), images),
        steps=steps,
        highest_rate=LEARNING_RATE,
        fused=True,
    )
    return ShapesAdapter(transformer, text)


def training_pairs(rng: random.Random) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield batches of clean images as tokens [BATCH, 16, 243], with their noisy captions."""
    for step in count():
        requests = training_requests(rng, BATCH, EASY_TASKS if step < EASY_STEPS else MIX)
        images = torch.from_numpy(np.stack([render(request, rng) for request in requests]))
        yield patchify(images), [noisy_caption(request, rng) for request in requests]


def training_requests(rng: random.Random, number: int, tasks: Sequence[Task]) -> list[Request]:
    """Return requests of tasks drawn from `tasks`, none held out."""
    trained = trained_shapes()
    return [parse(rng.choice(trained[rng.choice(tasks)])) for _ in range(number)]


def noisy_caption(request: Request, rng: random.Random) -> str:
    """Return a prompt of the same task, with every part drawn anew with probability `CAPTION_NOISE`.

    An invalid prompt (two clauses of equal colour) or a held-out prompt is drawn again.
    """
    while True:
        clauses = tuple(_noisy(clause, rng) for clause in request.clauses)
        relation = request.relation and _drawn_anew(request.relation, RELATIONS, rng)
        caption = replace(request, clauses=clauses, relation=relation).prompt
        if caption in _trained():
            return caption


def _noisy(clause: Clause, rng: random.Random) -> Clause:
    return Clause(
        kind=_drawn_anew(clause.kind, tuple(KINDS), rng),
        colour=clause.colour and _drawn_anew(clause.colour, tuple(COLOURS), rng),
        count=clause.count if clause.count == 1 else _drawn_anew(clause.count, tuple(NUMBERS), rng),
    )


def _drawn_anew(value: T, choices: Sequence[T], rng: random.Random) -> T:
    return rng.choice(choices) if rng.random() < CAPTION_NOISE else value


@cache
def _trained() -> frozenset[str]:
    return frozenset(prompt for prompts in trained_shapes().values() for prompt in prompts)


def flow_matching_loss(transformer: nn.Module, text: Tensor, images: Tensor) -> Tensor:
    """Return the squared error of the velocity at a shifted noise level around the middle. images [B, 16, 243]."""
    noise = torch.randn_like(images)
    sigma = torch.sigmoid(TRAINED_SPREAD * torch.randn(len(images)) + log(TRAINED_SHIFT))
    s = sigma[:, None, None]
    predicted = velocity(transformer, (1.0 - s) * images + s * noise, sigma, text)
    return (predicted - (noise - images)).square().mean()


def evaluate(adapter: ShapesAdapter, prompts: Sequence[str], shift: float = SHIFT) -> list[Score]:
    """Return the scores of an 8-step ODE sampler, with an image per prompt, like the engine's evaluation."""
    plan = evaluation_plan(SamplerConfig(shift=shift), steps=8)
    reward = ShapesReward("shapes")
    scores: list[Score] = []
    for start in range(0, len(prompts), 32):
        part = prompts[start : start + 32]
        seeds = [seed_of(0, Stream.EVAL, 0, prompt, 0) for prompt in part]
        latents = denoise(adapter, plan, adapter.encode(part), seeds)
        scores.extend(reward(adapter.decode(latents), part))
    return scores


if __name__ == "__main__":
    main()
