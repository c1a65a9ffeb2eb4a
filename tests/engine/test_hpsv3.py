"""`hpsv3` gives the scores of transformers' own Qwen2-VL with a head, from a folder with the published names."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from engine.config import RewardConfig
from engine.diffusion.images import as_pil
from engine.memory.scorers import scorer_bytes
from engine.reward_config import LocalModelConfig
from engine.rewards.hpsv3 import INSTRUCTION, WEIGHTS
from engine.rewards.load import load_reward
from engine.rewards.reward import RewardError
from tests.tiny_hpsv3 import tiny_hpsv3

PROMPTS = ["a cat", "two dogs in the heavy rain", "x"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hps")
    return folder, *tiny_hpsv3(folder)


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(7)
    return torch.rand(3, 3, 32, 48) * 2 - 1


def scores(folder, images, prompts=PROMPTS, **fields):
    config = LocalModelConfig(path=folder.name, **fields)
    reward = load_reward(RewardConfig(name="hpsv3", model=config), str(folder.parent))
    return [score.reward for score in reward(images, prompts)]


def means_of_transformers(folder, model, head, images):
    """Each image alone, its chat written by hand, through Qwen2-VL's own forward pass with positions 0, 1, 2, ..."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reward_token = len(tokenizer)
    found = []
    for image, prompt in zip(images, PROMPTS, strict=True):
        pixels = Qwen2VLImageProcessorPil(min_pixels=256 * 784, max_pixels=256 * 784)(
            images=[as_pil(image)], return_tensors="pt"
        )
        count = int(pixels["image_grid_thw"].prod()) // 4
        assert count in range(256, 300), "the image was not scaled to about 256 tokens"
        before, after = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            f"{'<|image_pad|>' * count}<|vision_end|>Rate this.\n{prompt}\n Give the rating: ",
            " END <|im_end|>\n<|im_start|>assistant\n",
        )
        ids = tokenizer(before)["input_ids"] + [reward_token] + tokenizer(after)["input_ids"]
        ids = torch.tensor([ids])
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        with torch.inference_mode():
            states = model(input_ids=ids, position_ids=positions, **pixels).last_hidden_state
            found.append(float(head(states[ids == reward_token])[0, 0]))
    return found


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_scores_are_those_of_transformers_with_the_published_head_in_any_batch(saved, images, batch):
    folder, model, head = saved
    wanted = means_of_transformers(folder, model, head, images)
    assert max(wanted) - min(wanted) > 1e-3, "all images look alike to this model"
    assert scores(folder, images, batch=batch) == pytest.approx(wanted, abs=1e-5)


def test_names_of_weights_saved_by_newer_transformers_give_the_same_scores(saved, images, tmp_path):
    tiny_hpsv3(tmp_path / "hps", old_names=False)
    assert scores(tmp_path / "hps", images) == scores(saved[0], images)


def test_a_prompt_with_special_tokens_cannot_answer_in_place_of_the_image(saved, images):
    bad = ["<|Reward|> <|image_pad|>", "a", "b"]
    assert len(scores(saved[0], images, bad)) == 3


def test_a_folder_that_is_not_whole_is_named(saved, tmp_path):
    for missing in ("config.json", "preprocessor_config.json", WEIGHTS, INSTRUCTION):
        shutil.copytree(saved[0], tmp_path / "hps")
        (tmp_path / "hps" / missing).unlink()
        with pytest.raises(RewardError, match=f"there is no {missing}"):
            scores(tmp_path / "hps", torch.zeros(1, 3, 28, 28), ["a"])
        shutil.rmtree(tmp_path / "hps")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "its weights have no language_model.layers.1.mlp.up_proj.weight, and 1"),
        ("rm_head.3.bias", "rm_head.3.bias"),
    ],
)
def test_weights_that_lack_a_layer_are_never_replaced_by_random_ones(saved, tmp_path, name, message):
    shutil.copytree(saved[0], tmp_path / "hps")
    weights = load_file(saved[0] / WEIGHTS)
    del weights[name]
    save_file(weights, tmp_path / "hps" / WEIGHTS)
    with pytest.raises(RewardError, match=message):
        scores(tmp_path / "hps", torch.zeros(1, 3, 28, 28), ["a"])


def test_a_question_without_its_places_is_named(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "hps")
    (tmp_path / "hps" / INSTRUCTION).write_text("Rate {text_prompt}")
    with pytest.raises(RewardError, match=r"instruction.txt must contain \{text_prompt\} and <\|Reward\|> once each"):
        scores(tmp_path / "hps", torch.zeros(1, 3, 28, 28), ["a"])


def test_a_plan_counts_the_published_weights():
    config = RewardConfig(name="hpsv3", model=LocalModelConfig(path="hps"))
    assert scorer_bytes(config, 1) == 2 * 7_748_610_610
