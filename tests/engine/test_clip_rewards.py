"""`clip`, `pickscore` and `aesthetic` give the scores of transformers' own classes, from a local folder."""

import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from engine.config import RewardConfig
from engine.diffusion.images import as_pil
from engine.reward_config import LocalModelConfig
from engine.rewards.aesthetic import HEAD
from engine.rewards.load import load_reward
from engine.rewards.reward import RewardError
from tests.tiny_clip import tiny_clip, tiny_head

PROMPTS = ["a cat", "two dogs in the rain", "a cat", "x", "a long prompt " * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(7)
    return torch.rand(5, 3, 20, 32) * 2 - 1


def reward(folder, name, **fields):
    config = LocalModelConfig(path=folder.name, **fields)
    return load_reward(RewardConfig(name=name, model=config), str(folder.parent))


def scores(scorer, images, prompts=PROMPTS):
    return [score.reward for score in scorer(images, prompts)]


def logits_of_transformers(folder, images):
    """Each image alone with its prompt, through CLIPModel's own forward pass."""
    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    found = []
    for image, prompt in zip(images, PROMPTS, strict=True):
        tokens = tokenizer([prompt], truncation=True, max_length=77, return_tensors="pt")
        pixels = processor(images=[as_pil(image)], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            found.append(float(model(pixel_values=pixels, **tokens).logits_per_image[0, 0]))
    return found


@pytest.mark.parametrize(("name", "divisor"), [("clip", 30), ("pickscore", 26)])
@pytest.mark.parametrize("batch", [1, 2, 16])
def test_scores_are_the_logits_of_transformers_in_any_batch(folder, images, name, divisor, batch):
    wanted = [logit / divisor for logit in logits_of_transformers(folder, images)]
    assert max(wanted) - min(wanted) > 0.01, "all images look alike to this model"
    assert scores(reward(folder, name, batch=batch), images) == pytest.approx(wanted, abs=1e-5)


def test_grey_images_are_scored_too(folder):
    images = torch.rand(5, 1, 48, 144) * 2 - 1
    assert scores(reward(folder, "clip"), images) == pytest.approx(
        scores(reward(folder, "clip"), images.expand(-1, 3, -1, -1))
    )


def test_bfloat16_differs_little(folder, images):
    full = scores(reward(folder, "clip"), images)
    half = scores(reward(folder, "clip", dtype="bfloat16"), images)
    assert half != full
    assert half == pytest.approx(full, abs=0.03)


def test_the_aesthetic_score_is_that_of_the_published_layers(folder, images, tmp_path):
    shutil.copytree(folder, tmp_path / "clip")
    layers = tiny_head(tmp_path / "clip")
    model = CLIPModel.from_pretrained(folder).eval()
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    pixels = processor(images=[as_pil(image) for image in images], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        embeddings = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
        wanted = layers(embeddings / torch.linalg.vector_norm(embeddings, dim=-1, keepdim=True))[:, 0].tolist()
    scorer = reward(tmp_path / "clip", "aesthetic", batch=2)
    assert scores(scorer, images) == pytest.approx(wanted, abs=1e-5)
    assert scores(scorer, images, ["other"] * 5) == scores(scorer, images), "the prompt does not count"


def test_a_head_that_is_missing_or_of_another_clip_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "clip")
    with pytest.raises(RewardError, match=rf"has no {HEAD.replace('+', '.')}; copy the head"):
        reward(tmp_path / "clip", "aesthetic")
    tiny_head(tmp_path / "clip", width=7)
    with pytest.raises(RewardError, match=r"and the folder's CLIP embeds in 12 numbers"):
        reward(tmp_path / "clip", "aesthetic")
    (tmp_path / "clip" / HEAD).write_bytes(b"garbage")
    with pytest.raises(RewardError, match="cannot be read as linear layers"):
        reward(tmp_path / "clip", "aesthetic")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"])
def test_a_folder_that_is_not_whole_is_named(folder, tmp_path, missing):
    shutil.copytree(folder, tmp_path / "clip")
    (tmp_path / "clip" / missing).unlink()
    with pytest.raises(RewardError, match=r"clip cannot be read as CLIP .*it needs config.json, the weights"):
        reward(tmp_path / "clip", "clip")


def test_weights_that_lack_a_layer_are_never_replaced_by_random_ones(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "clip")
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "clip/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"its weights have no visual_projection.weight, and 1 names are missing"):
        reward(tmp_path / "clip", "clip")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RewardError, match=r"reward.model.path is 'nowhere', and there is no folder"):
        reward(tmp_path / "nowhere", "pickscore")


def test_a_model_belongs_to_the_scorers_that_load_one():
    with pytest.raises(ValueError, match=r"reward.name is pickscore, without a model"):
        RewardConfig(name="pickscore")
    with pytest.raises(ValueError, match=r"reward.model is set, but reward.name is ocr"):
        RewardConfig(model=LocalModelConfig(path="clip"))


def test_images_become_pil_images_of_equal_pixels():
    image = torch.tensor([[[-1.0, 1.0]], [[0.0, 0.0]], [[1.0, -1.0]]])
    assert as_pil(image).tobytes() == bytes([0, 128, 255, 255, 128, 0])
    assert isinstance(as_pil(image[:1]), Image.Image)
