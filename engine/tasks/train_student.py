"""Make the student of digits-ocr again: `python -m engine.tasks.train_student`, about a minute on one core.

The base draws images like exploration (Flow-SDE) and like evaluation (ODE). The recogniser reads the images, and the
student learns the reading, position by position. A reading without exactly four digits has no positions: all labels are
then `NOTHING`. Clean renderings, degraded in many ways, are mixed in. Without clean renderings the student knows only
the base's own mistakes and gets worse as the policy learns (correlation .71 and later .55 instead of .81 and .74).

Steps and images are counted, not timed: the same seed on the same machine gives the same student. Held-out prompts
are never shown; the ranking quality is measured on held-out prompts.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from engine.config import SamplerConfig
from engine.diffusion.sampler import Plan, denoise, evaluation_plan, rollout_plan
from engine.models.adapter import DiTAdapter
from engine.models.digits import CHARACTERS, HEIGHT, WIDTH, load_digits, render
from engine.prompts import held_out_digits
from engine.protocol.request import Stream, seed_of
from engine.rewards.ocr import LineRecogniser, OcrName, OcrReward
from engine.rewards.reward import Reward
from engine.rewards.student import NOTHING, STUDENT, DigitReader, digits_of, load_digits_student
from engine.tasks.pretrain_digits import training_words

IMAGES = 3_000
SEEDS = 12
"""Images per prompt. The images of a prompt share the requested digits and differ in the drawing."""
ODE_SHARE = 0.25
"""Share of the prompts drawn without noise (ODE). Exploration itself draws with noise."""
CLEAN = 3_000
"""Number of clean renderings in the pool."""

STEPS = 1_300
DRAWN_BATCH, CLEAN_BATCH = 80, 48
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.05
DECAY_FROM = 1 / 3
"""Share of the steps before the learning rate starts to fall, to 0 at the end."""
LABEL_SMOOTHING = 0.02
DRAWN_NOISE = 0.1
"""Standard deviation of the noise on images of the base."""
CLEAN_NOISE, BLUR = 0.5, 0.5
"""Upper limits of noise and blur on a clean rendering; the amounts are drawn for each rendering."""
DROPPED = 0.05
"""Share of all pixels set to grey."""
SHIFTS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))

MEASURED_PROMPTS, MEASURED_SEEDS = 12, 24
AT_ONCE = 48
"""Images per forward pass of the base: larger batches leave the cache (measured on one core)."""


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=STUDENT, help="Where the safetensors file goes.")
@click.option("--images", default=IMAGES, show_default=True, help="Images of the base to learn from.")
@click.option("--steps", default=STEPS, show_default=True, help="Optimiser steps.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, images: int, steps: int, seed: int) -> None:
    """Train the student of digits-ocr.

    Example: python -m engine.tasks.train_student --out student.safetensors
    """
    torch.set_num_threads(1)
    started = time.monotonic()
    adapter = load_digits()
    reader = train(draw_examples(adapter, images, seed), steps, seed)
    facts = {"steps": str(steps), "seed": str(seed), "pictures": str(images), "torch": torch.__version__}
    facts["seconds"] = f"{time.monotonic() - started:.0f}"
    save(reader, out, facts)
    # Measure the saved file first, then store the figures in the file.
    facts |= measure(load_digits_student(out), adapter)
    save(reader, out, facts)
    click.echo(f"{out}: {facts}")


# --- training data --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Images of the base [N, 1, 12, 32], and the recogniser's class for each of their positions [N, 4]."""

    images: Tensor
    classes: Tensor


def draw_examples(adapter: DiTAdapter, count: int, seed: int) -> Examples:
    """Return the base's images of prompts outside the held-out set, with the recogniser's readings."""
    words = training_words(random.Random(seed), -(-count // SEEDS))
    without_noise = round(ODE_SHARE * len(words))
    ode, sde = evaluation_plan(SamplerConfig(), steps=SamplerConfig().steps), rollout_plan(SamplerConfig(), seed, 0)
    drawn = [
        draw(adapter, plan, prompts, SEEDS, seed, Stream.TRAIN)
        for plan, prompts in ((ode, words[:without_noise]), (sde, words[without_noise:]))
        if prompts
    ]
    images = torch.cat(drawn)[:count]
    recogniser = LineRecogniser()
    readings = recogniser.read(recogniser.probabilities(images))
    return Examples(images=images, classes=torch.tensor([classes_of(reading) for reading in readings]))


def draw(adapter: DiTAdapter, plan: Plan, prompts: Sequence[str], seeds: int, run_seed: int, stream: Stream) -> Tensor:
    """Return images [prompts * seeds, 1, 12, 32], grouped by prompt."""
    pairs = [(prompt, seed_of(run_seed, stream, 0, prompt, index)) for prompt in prompts for index in range(seeds)]
    parts = []
    for start in range(0, len(pairs), AT_ONCE):
        words, numbers = zip(*pairs[start : start + AT_ONCE], strict=True)
        parts.append(adapter.decode(denoise(adapter, plan, adapter.encode(words), numbers)))
    return torch.cat(parts)


def classes_of(reading: str) -> list[int]:
    """Return the class of each position, or `NOTHING` everywhere if the reading is not four digits."""
    try:
        return digits_of(reading)
    except ValueError:
        return [NOTHING] * CHARACTERS


# --- training -------------------------------------------------------------------------------------------------


def train(examples: Examples, steps: int, seed: int) -> DigitReader:
    """Return a reader after `steps` steps of cross-entropy on the class of every position."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    words = training_words(rng, CLEAN)
    clean = Examples(
        images=torch.from_numpy(np.stack([render(word, rng) for word in words]))[:, None],
        classes=torch.tensor([digits_of(word) for word in words]),
    )
    reader = DigitReader()
    optimiser = torch.optim.AdamW(reader.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (1.0 - step / steps) / (1.0 - DECAY_FROM))
        images, classes = training_batch(examples, clean, rng)
        loss = functional.cross_entropy(
            reader(images).flatten(0, 1), classes.flatten(), label_smoothing=LABEL_SMOOTHING
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            click.echo(f"step {step + 1}: loss {np.mean(losses[-100:]):.4f}")
    return reader


def training_batch(drawn: Examples, clean: Examples, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Return images [128, 1, 12, 32], 37 % of them degraded renderings, and their classes [128, 4]."""
    i, j = torch.randint(len(drawn.images), (DRAWN_BATCH,)), torch.randint(len(clean.images), (CLEAN_BATCH,))
    noisy = drawn.images[i] + DRAWN_NOISE * torch.randn(DRAWN_BATCH, 1, HEIGHT, WIDTH)
    images = torch.cat([noisy, spoilt(clean.images[j])])
    images = images.roll(rng.choice(SHIFTS), dims=(2, 3)) * (torch.rand_like(images) > DROPPED)
    return images, torch.cat([drawn.classes[i], clean.classes[j]])


def spoilt(images: Tensor) -> Tensor:
    """Degrade each image [B, 1, 12, 32] with its own amount of blur and noise."""
    blur, noise = torch.rand(2, len(images), 1, 1, 1)
    blurred = images.lerp(functional.avg_pool2d(images, 3, stride=1, padding=1), BLUR * blur)
    soiled: Tensor = blurred + CLEAN_NOISE * noise * torch.randn_like(images)
    return soiled


# --- quality --------------------------------------------------------------------------------------------------


def measure(student: Reward, adapter: DiTAdapter) -> dict[str, str]:
    """Return the in-group correlation with each ocr reward, and the cost of a score in ms.

    Measured on base images of held-out prompts.
    """
    prompts = held_out_digits()[:MEASURED_PROMPTS]
    plan = rollout_plan(SamplerConfig(), 0, 0)
    images = draw(adapter, plan, prompts, MEASURED_SEEDS, 0, Stream.EVAL)
    asked = [prompt for prompt in prompts for _ in range(MEASURED_SEEDS)]
    rewards: tuple[OcrName, ...] = ("ocr", "ocr_strict", "ocr_smooth")
    facts = {
        f"correlation_{name}": f"{in_group_correlation(student, OcrReward(name), images, asked):.3f}"
        for name in rewards
    }
    started = time.process_time()  # warm by now
    student(images, asked)
    facts["ms_per_picture"] = f"{1000 * (time.process_time() - started) / len(images):.3f}"
    return facts


def in_group_correlation(student: Reward, reward: Reward, images: Tensor, prompts: Sequence[str]) -> float:
    """Return the mean over prompts of Pearson's correlation between the scores of a prompt's images.

    A prompt with equal scores on a side carries no information and is left out. NaN if all prompts are left out.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for prompt, mine, true in zip(prompts, student(images, prompts), reward(images, prompts), strict=True):
        pairs.setdefault(prompt, []).append((mine.reward, true.reward))
    groups = [np.array(group).T for group in pairs.values()]
    correlations = [float(np.corrcoef(group)[0, 1]) for group in groups if group.std(axis=1).min() > 0]
    return float(np.mean(correlations)) if correlations else float("nan")


def save(reader: DigitReader, path: Path, facts: Mapping[str, str]) -> None:
    """Save the weights in fp32, with the facts of the training as metadata."""
    tensors = {name: tensor.contiguous() for name, tensor in reader.state_dict().items()}
    save_file(tensors, path, metadata=dict(facts))


if __name__ == "__main__":
    main()
