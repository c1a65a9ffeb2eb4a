"""Independent readers that check the reward's reader; a reader that is not installed is reported."""

import random
import shutil

import numpy as np
import pytest
import torch

from engine.models.digits import render
from tests.benchmarks.readers import exact_or_none, read_templates, read_tesseract

WORDS = ["0123", "4567", "8901", "2468", "1357", "9876", "5550", "3141"]


def written(words):
    rng = random.Random(5)
    return torch.from_numpy(np.stack([render(word, rng) for word in words]))[:, None]


def test_templates_read_digits_of_any_ink_shift_and_noise():
    images = written(WORDS * 4)
    assert read_templates(images) == WORDS * 4
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert read_templates(images + 0.3 * noise) == WORDS * 4


def test_templates_do_not_read_another_digit_as_the_prompt():
    assert exact_or_none("templates", written(["1234", "1235"]), ["1234", "1234"]) == 0.5


def test_a_missing_tesseract_is_skipped_with_an_install_hint(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert exact_or_none("tesseract", written(WORDS), WORDS) is None
    assert "apt-get install tesseract-ocr" in capsys.readouterr().err


@pytest.mark.skipif(
    shutil.which("tesseract") is None, reason="tesseract is not installed: apt-get install tesseract-ocr"
)
def test_tesseract_reads_one_text_per_image_in_order():
    texts = read_tesseract(written(WORDS))
    assert len(texts) == len(WORDS)
    assert sum(text == word for text, word in zip(texts, WORDS, strict=True)) >= 6
