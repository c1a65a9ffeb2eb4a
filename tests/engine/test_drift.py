"""Drift grows with damage that the reward does not see, and hardly with what the reward asks for."""

import json
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from engine.drift import Look, drift, look_of
from engine.models.digits import render

DARK = 205
"""Pixels below this count as dark. The base model has .098 of them on the border of its images, a run that
overdid it had .457."""

WORDS = [f"{number:04d}" for number in range(0, 9600, 400)]


def written(words, seed):
    rng = random.Random(seed)
    return [np.rint((render(word, rng)[None] + 1) * 127.5).astype(np.uint8) for word in words]


def speckled(images, share, grey=180, seed=0):
    """Draw grey on this share of the background, on different pixels in each image."""
    rng = np.random.default_rng(seed)
    return [np.where((one >= DARK) & (rng.random(one.shape) < share), np.uint8(grey), one) for one in images]


def photograph(seed, size=(3, 64, 64)):
    """Draw smooth blobs of colour, like an image of a larger model."""
    noise = np.random.default_rng(seed).random((8, 8, 3)) * 255
    image = Image.fromarray(noise.astype(np.uint8)).resize(size[1:], Image.Resampling.BICUBIC)
    ImageDraw.Draw(image).rectangle((10, 10, 30, 24), fill=(30, 30, 30))
    return np.moveaxis(np.asarray(image), 2, 0)


def dark_border(images):
    inside = np.pad(np.zeros(np.array(images[0].shape[-2:]) - 2, bool), 1, constant_values=True)
    return float(np.mean([(one[..., inside] < DARK).mean() for one in images]))


def test_equal_images_have_no_drift():
    assert drift(look_of(written(WORDS, 1)), look_of(written(WORDS, 1))) == 0.0


def test_speckle_drifts_far_more_than_other_digits_and_ink():
    base = written(WORDS, 1)
    spoiled = speckled(base, 0.4)
    assert dark_border(base) < 0.12
    assert 0.35 < dark_border(spoiled) < 0.5
    others = drift(look_of(written([word[::-1] for word in WORDS], 2)), look_of(base))
    assert drift(look_of(spoiled), look_of(base)) > 5 * others


def test_more_speckle_is_more_drift():
    base = written(WORDS, 1)
    figures = [drift(look_of(speckled(base, share)), look_of(base)) for share in (0.02, 0.1, 0.2, 0.4)]
    assert figures == sorted(figures)
    assert figures[0] > 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: np.clip(one + np.random.default_rng(0).normal(0, 20, one.shape), 0, 255).astype(np.uint8),
        lambda one: np.clip(one * 1.4, 0, 255).astype(np.uint8),
        lambda one: np.moveaxis(
            np.asarray(Image.fromarray(np.moveaxis(one, 0, 2)).filter(ImageFilter.GaussianBlur(3))), 2, 0
        ),
    ],
    ids=["grain", "burnt", "blurred"],
)
def test_spoiled_colour_images_and_video_frames_drift_alike(spoil):
    base = [photograph(seed) for seed in range(4)]
    spoiled = [spoil(one) for one in base]
    seen = drift(look_of(spoiled), look_of(base))
    assert seen > 0.01
    as_video = [[np.stack([one, one], axis=1) for one in images] for images in (spoiled, base)]
    assert drift(*map(look_of, as_video)) == pytest.approx(seen)


def test_drift_is_a_fraction_of_the_value_range():
    white, black = [np.full((1, 4, 4), 255, np.uint8)], [np.zeros((1, 4, 4), np.uint8)]
    assert drift(look_of(white), look_of(black)) == 1.0


def test_drift_statistics_survive_json():
    look = look_of(written(WORDS[:2], 1))
    assert Look.from_dict(json.loads(json.dumps(look.to_dict()))) == look
