"""The student of the OCR rewards: it scores almost like the recogniser at a fraction of the cost."""

import math
import random
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open

from engine.config import EngineConfig, SamplerConfig
from engine.diffusion.sampler import rollout_plan
from engine.models.digits import load_digits, render
from engine.prompts import held_out_digits
from engine.protocol.request import Score, Stream
from engine.rewards.load import load_student
from engine.rewards.ocr import OcrReward
from engine.rewards.student import BLOCK, NOTHING, STUDENT, DigitReader, DigitsStudent, load_digits_student
from engine.tasks.train_student import (
    CLEAN_BATCH,
    DRAWN_BATCH,
    classes_of,
    draw,
    draw_examples,
    in_group_correlation,
    save,
    train,
    training_batch,
)


def images_of(words, seed=0):
    rng = random.Random(seed)
    return torch.from_numpy(np.stack([render(word, rng) for word in words]))[:, None]


def values(scores):
    return [score.reward for score in scores]


@pytest.fixture(scope="module")
def student():
    return load_digits_student()


# --- scores


def test_a_clean_rendering_scores_high_for_its_own_string_and_low_for_another(student):
    words = held_out_digits()[:64]
    images = images_of(words)
    others = ["".join(str((int(digit) + 1) % 10) for digit in word) for word in words]
    assert np.mean(values(student(images, words))) > 0.9
    assert np.mean(values(student(images, others))) < 0.1


def test_one_wrong_digit_of_four_costs_about_a_quarter(student):
    words = held_out_digits()[:64]
    images = images_of(words)
    one_off = [word[:3] + str((int(word[3]) + 5) % 10) for word in words]
    lost = np.subtract(values(student(images, words)), values(student(images, one_off)))
    assert np.mean(lost) == pytest.approx(0.25, abs=0.05)


def test_there_is_one_score_per_image_between_0_and_1(student):
    for count in (1, BLOCK - 1, BLOCK, BLOCK + 1):
        images = torch.randn(count, 1, 12, 32, generator=torch.Generator().manual_seed(count))
        scores = student(images, held_out_digits()[:count])
        assert len(scores) == count
        assert all(0 <= score.reward <= 1 and score.metrics == {} for score in scores)


def test_the_score_is_the_mean_over_the_four_places():
    reader = DigitReader()
    with torch.no_grad():
        for parameter in reader.parameters():
            parameter.zero_()
        reader.decide[-1].bias.view(4, 11)[:, 7] = 200.0
    assert values(DigitsStudent(reader)(torch.zeros(3, 1, 12, 32), ["7777", "7778", "0000"])) == [1.0, 0.75, 0.0]


def test_a_score_does_not_depend_on_the_batch_bit_for_bit(student):
    words = held_out_digits()[: 2 * BLOCK + 3]
    images = images_of(words) + 0.5 * torch.randn(len(words), 1, 12, 32, generator=torch.Generator().manual_seed(1))
    repeated = [words[0]] * len(words)
    together = student(images, repeated)
    assert together == [student(image[None], repeated[:1])[0] for image in images]
    assert together == student(images.flip(0), repeated)[::-1]


@pytest.mark.parametrize("shape", [(1, 3, 12, 32), (1, 1, 12, 36), (1, 3, 2, 12, 32)])
def test_images_of_another_size_are_refused(student, shape):
    with pytest.raises(ValueError, match=r"scores images \[B, 1, 12, 32\]; it was given"):
        student(torch.zeros(shape), ["1234"])


@pytest.mark.parametrize("prompt", ["123", "12345", "12a4", "", "१२३४"])
def test_other_prompts_are_refused(student, prompt):
    with pytest.raises(ValueError, match="is not 4 digits"):
        student(torch.zeros(1, 1, 12, 32), [prompt])


# --- accuracy and cost


def test_the_student_ranks_seeds_of_a_prompt_like_the_recogniser(student):
    prompts = held_out_digits()[100:104]
    images = draw(load_digits(), rollout_plan(SamplerConfig(), 5, 3), prompts, 16, 5, Stream.EVAL)
    repeated = [prompt for prompt in prompts for _ in range(16)]
    assert in_group_correlation(student, OcrReward("ocr"), images, repeated) >= 0.5


def test_the_student_costs_less_than_a_tenth_of_the_recogniser(student):
    words = held_out_digits()[:32]
    images = images_of(words)

    def seconds(reward):
        reward(images, words)
        begun = time.process_time()
        reward(images, words)
        return time.process_time() - begun

    assert seconds(student) < seconds(OcrReward("ocr")) / 10


def test_correlation_is_per_prompt_and_skips_prompts_without_spread():
    images, prompts = torch.zeros(6, 1, 12, 32), ["a", "a", "a", "b", "b", "c"]

    def scorer(*scores):
        return lambda images, prompts: [Score(reward=score, metrics={}) for score in scores]

    alike, other = scorer(0.0, 0.1, 0.2, 0.9, 0.8, 0.5), scorer(0.5, 0.6, 0.7, 0.3, 0.4, 0.0)
    assert in_group_correlation(alike, alike, images, prompts) == pytest.approx(1.0)
    assert in_group_correlation(alike, other, images, prompts) == pytest.approx(0.0)
    only_between = scorer(0.0, 0.0, 0.0, 1.0, 1.0, 0.5)
    assert math.isnan(in_group_correlation(only_between, alike, images, prompts))


# --- training


def test_the_shipped_student_is_small_and_records_how_it_was_trained():
    assert STUDENT.stat().st_size < 500_000
    with safe_open(STUDENT, "pt") as file:
        facts = file.metadata()
    assert int(facts["pictures"]) >= 2_900
    assert {"steps", "seed", "seconds", "torch", "ms_per_picture"} <= facts.keys()
    assert float(facts["correlation_ocr"]) > 0.7


def test_a_reading_that_is_not_four_digits_has_no_digit_classes():
    assert classes_of("1290") == [1, 2, 9, 0]
    assert classes_of("123") == classes_of("12b4") == classes_of("12345") == [NOTHING] * 4


@pytest.fixture(scope="module")
def examples():
    return draw_examples(load_digits(), 20, seed=3)


def test_training_examples_are_the_readings_of_the_recogniser(examples):
    assert examples.images.shape == (20, 1, 12, 32)
    assert examples.classes.shape == (20, 4)
    assert examples.images.abs().max() <= 1
    rows = examples.classes.tolist()
    shown = [i for i, row in enumerate(rows) if row != [NOTHING] * 4]
    assert len(shown) > 10
    words = ["".join(map(str, rows[i])) for i in shown]
    assert values(OcrReward("ocr_strict")(examples.images[shown], words)) == [1.0] * len(shown)


def test_a_training_batch_is_mostly_images_of_the_base(examples):
    torch.manual_seed(0)
    images, classes = training_batch(examples, examples, random.Random(0))
    assert images.shape == (DRAWN_BATCH + CLEAN_BATCH, 1, 12, 32)
    assert classes.shape == (DRAWN_BATCH + CLEAN_BATCH, 4)
    assert CLEAN_BATCH / len(classes) == pytest.approx(0.37, abs=0.01)
    assert (images == 0).float().mean() == pytest.approx(0.05, abs=0.01)


def test_training_repeats_bit_for_bit_and_survives_its_file(examples, tmp_path):
    torch.set_num_threads(1)
    again = draw_examples(load_digits(), 20, seed=3)
    assert torch.equal(again.images, examples.images)
    first, second, other = train(examples, 3, seed=1), train(again, 3, seed=1), train(examples, 3, seed=2)
    save(first, tmp_path / "student.safetensors", {"steps": "3"})
    repeated = [held_out_digits()[0]] * 20
    scores = DigitsStudent(first)(examples.images, repeated)
    assert scores == DigitsStudent(second)(examples.images, repeated)
    assert scores != DigitsStudent(other)(examples.images, repeated)
    assert scores == load_digits_student(tmp_path / "student.safetensors")(examples.images, repeated)


# --- from the job file


def job(**changes):
    return EngineConfig.model_validate(changes)


@pytest.mark.parametrize("name", ["ocr", "ocr_strict", "ocr_smooth"])
def test_the_ocr_rewards_of_digits_have_a_student(name):
    assert isinstance(load_student(job(reward={"name": name})), DigitsStudent)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": {"name": "mine:score"}},
        {"prompts": "prompts.txt"},
        {"model": {"name": "qwen-image", "path": "folder"}},
    ],
    ids=["a-users-reward", "other-prompts", "another-model"],
)
def test_a_job_unlike_the_students_training_data_has_no_student(changes):
    assert load_student(job(**changes)) is None
