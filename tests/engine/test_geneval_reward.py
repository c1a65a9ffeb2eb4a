"""GenEval as a reward: a real Mask2Former and a real CLIP with tiny random weights, colours as in GenEval."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from engine.config import RewardConfig
from engine.reward_config import LocalModelConfig
from engine.rewards.clip_folder import ClipFolder
from engine.rewards.detector import FoundObject, Mask2FormerFolder, box_of
from engine.rewards.geneval_reward import COLOURS, ColourNames, GenEvalReward, cut_out
from engine.rewards.load import load_reward
from engine.rewards.reward import RewardError
from tests.tiny_clip import tiny_clip
from tests.tiny_detector import tiny_detector


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory):
    return tiny_detector(tmp_path_factory.mktemp("detector"))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return tiny_clip(tmp_path_factory.mktemp("clip"))


def pictures(count=3, size=(40, 48)):
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8)) for _ in range(count)]


def detector(folder, **fields):
    return Mask2FormerFolder(LocalModelConfig(path=str(folder), **fields), None, "cpu")


def test_objects_are_those_of_transformers_own_pass(detector_folder):
    from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil

    images = pictures(1)
    model = Mask2FormerForUniversalSegmentation.from_pretrained(detector_folder).eval()
    inputs = Mask2FormerImageProcessorPil.from_pretrained(detector_folder)(images=images, return_tensors="pt")
    with torch.inference_mode():
        outputs = model(**inputs)
    # The published rule, by hand: class probability times the mean probability inside the mask.
    masks = torch.nn.functional.interpolate(outputs.masks_queries_logits, size=(384, 384), mode="bilinear")[0]
    chances = outputs.class_queries_logits[0].softmax(-1)[:, :-1].flatten()
    expected = []
    for place in chances.topk(5).indices.tolist():
        query, label = divmod(place, 3)
        inside = masks[query] > 0
        if inside.any():
            expected.append((label, float(chances[place] * masks[query].sigmoid()[inside].mean())))
    found = detector(detector_folder).detect(images, threshold=0.0)[0]
    names = {"cup": 0, "computer mouse": 1, "dining table": 2}
    by_rule, ours = sorted(expected), sorted((names[one.label], one.confidence) for one in found)
    assert [label for label, _ in ours] == [label for label, _ in by_rule]
    assert [sure for _, sure in ours] == pytest.approx([sure for _, sure in by_rule], abs=1e-4)
    assert len(found) > 1
    for one in found:
        left, top, right, bottom = one.box
        assert one.mask.shape == (40, 48)
        assert one.mask[top:bottom, left:right].sum() == one.mask.sum()
        assert one.mask[top].any()
        assert one.mask[:, right - 1].any()


def test_batches_do_not_change_what_is_found(detector_folder):
    images = pictures()
    one, three = (detector(detector_folder, batch=batch).detect(images, threshold=0.1) for batch in (1, 3))
    assert [[(found.label, found.box) for found in of] for of in one] == [
        [(found.label, found.box) for found in of] for of in three
    ]
    assert any(one)


def test_only_confident_objects_are_returned(detector_folder):
    everything, some = (detector(detector_folder).detect(pictures(), threshold=least) for least in (0.0, 0.3))
    kept = [[found for found in of if found.confidence >= 0.3] for of in everything]
    assert [len(of) for of in some] == [len(of) for of in kept]
    assert sum(map(len, some)) < sum(map(len, everything))


def test_a_box_is_the_smallest_around_its_mask():
    mask = np.zeros((6, 8), dtype=bool)
    mask[2:4, 3] = mask[3, 5] = True
    assert box_of(mask) == (3, 2, 6, 4)


def test_a_folder_that_is_no_whole_detector_is_refused(detector_folder, clip_folder, tmp_path):
    with pytest.raises(RewardError, match=r"reward.model.path is 'nowhere', and there is no folder"):
        detector("nowhere")
    with pytest.raises(RewardError, match=r"cannot be read as Mask2Former \(there is no config.json\)"):
        detector(tmp_path)
    with pytest.raises(RewardError, match="cannot be read as Mask2Former"):
        detector(clip_folder)
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((detector_folder / name).read_bytes())
    weights = load_file(detector_folder / "model.safetensors")
    weights.pop("class_predictor.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"its weights have no class_predictor.weight, and 1 names are missing"):
        detector(tmp_path)


# --- colours ---------------------------------------------------------------------------------------------


def red_in_blue():
    """An image of 20 x 10 pixels: blue, with a red box at 4, 2 of 6 x 5 pixels."""
    pixels = np.zeros((10, 20, 3), dtype=np.uint8)
    pixels[..., 2] = 255
    mask = np.zeros((10, 20), dtype=bool)
    mask[2:7, 4:10] = True
    pixels[mask] = (255, 0, 0)
    return Image.fromarray(pixels), FoundObject(label="cup", confidence=0.9, box=box_of(mask), mask=mask)


def test_an_object_is_cut_out_on_grey_in_its_box():
    image, found = red_in_blue()
    found.mask[3, 5] = False
    alone = np.asarray(cut_out(image, found))
    assert alone.shape == (5, 6, 3)
    assert alone[1, 1].tolist() == [0x99, 0x99, 0x99]
    assert (alone.reshape(-1, 3) == [255, 0, 0]).all(axis=1).sum() == 29


def test_a_colour_is_the_nearest_of_ten_by_the_mean_of_three_sentences(clip_folder):
    clip = ClipFolder(LocalModelConfig(path=str(clip_folder)), None, "cpu")
    image, found = red_in_blue()
    of_image = clip.embeddings_of([cut_out(image, found)])[0]
    similar = []
    for colour in COLOURS:
        texts = [f"a photo of a {colour} cup", f"a photo of a {colour}-colored cup", f"a photo of a {colour} object"]
        similar.append(float(of_image @ normalize(clip.text_embeddings(texts).mean(dim=0), dim=0)))
    assert ColourNames(clip).name(image, [found, found], "cup") == [COLOURS[int(np.argmax(similar))]] * 2
    assert ColourNames(clip).name(image, [], "cup") == []


# --- scores ----------------------------------------------------------------------------------------------


class Finds:
    """A detector that finds these objects in every image: label, confidence, left, top, right, bottom."""

    names = frozenset({"cup", "dog"})

    def __init__(self, *objects):
        self.objects = objects

    def detect(self, images):
        found = []
        for label, confidence, *box in self.objects:
            mask = np.zeros(images[0].size[::-1], dtype=bool)
            mask[box[1] : box[3], box[0] : box[2]] = True
            found.append(FoundObject(label=label, confidence=confidence, box=tuple(box), mask=mask))
        return [found for _ in images]


class Named:
    """Names colours in turn."""

    def __init__(self, *colours):
        self.colours, self.asked = colours, []

    def name(self, image, objects, label):
        self.asked.append((label, [one.confidence for one in objects]))
        return list(self.colours[: len(objects)])


def ask(reward, tag="two_object", include=(), exclude=(), count=1):
    metadata = {"tag": tag, "include": list(include), "exclude": list(exclude), "prompt": "p"}
    return reward.score(torch.zeros(count, 3, 32, 32), ["p"] * count, [metadata] * count)


CUP, DOG = ("cup", 0.95, 0, 0, 8, 8), ("dog", 0.5, 20, 20, 30, 30)


def test_the_reward_is_the_share_of_clauses_and_accuracy_is_the_verdict():
    wanted = [{"class": "cup", "count": 1}, {"class": "dog", "count": 1}]
    both, one = (ask(GenEvalReward(Finds(*found), None), include=wanted)[0] for found in ((CUP, DOG), (CUP,)))
    assert (both.reward, both.metrics) == (1.0, {"accuracy": 1.0})
    assert (one.reward, one.metrics) == (0.5, {"accuracy": 0.0})
    counted = ask(
        GenEvalReward(Finds(CUP, DOG), None),
        tag="counting",
        include=[{"class": "cup", "count": 1}, {"class": "dog", "count": 1}],
        exclude=[{"class": "cup", "count": 2}],
    )[0]
    assert (counted.reward, counted.metrics["accuracy"]) == (pytest.approx(2 / 3), 0.0), "the dog is not sure enough"


def test_colours_are_asked_for_the_most_confident_objects_of_classes_that_need_them():
    named = Named("red", "blue")
    reward = GenEvalReward(Finds(("cup", 0.4, 9, 9, 12, 12), CUP, DOG), named)
    scores = ask(reward, include=[{"class": "cup", "count": 1, "color": "red"}, {"class": "dog", "count": 1}])
    assert (scores[0].reward, named.asked) == (1.0, [("cup", [0.95, 0.4])])
    assert ask(reward, include=[{"class": "cup", "count": 1, "color": "blue"}])[0].reward == 0.0


def test_prompts_that_the_models_cannot_judge_are_refused():
    reward = GenEvalReward(Finds(CUP), None)
    with pytest.raises(RewardError, match="asks for 'zebra', which the detector does not know"):
        ask(reward, include=[{"class": "zebra", "count": 1}])
    with pytest.raises(RewardError, match="asks for a colour, and no model names colours"):
        ask(reward, include=[{"class": "cup", "count": 1, "color": "red"}])
    with pytest.raises(RewardError, match="has metadata that is not GenEval's"):
        reward.score(torch.zeros(1, 3, 8, 8), ["a cup"], [{}])


def test_the_scorer_loads_both_models_by_the_job(detector_folder, clip_folder):
    config = RewardConfig(name="geneval", model={"path": str(detector_folder)}, colours={"path": str(clip_folder)})
    clauses = [{"class": "cup", "count": 1, "color": "red"}, {"class": "computer mouse", "count": 1}]
    metadata = {"a red cup": {"tag": "colors", "include": clauses, "prompt": "a red cup"}}
    scores = load_reward(config, None, metadata)(torch.rand(3, 3, 40, 48) * 2 - 1, ["a red cup"] * 3)
    assert [score.reward in (0.0, 0.5, 1.0) for score in scores] == [True] * 3
    again = load_reward(config, None, metadata)(torch.zeros(1, 1, 40, 48), ["a red cup"])
    assert len(again) == 1, "a grey image of one channel"


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"reward.name is geneval, without a model"):
        RewardConfig(name="geneval")
    with pytest.raises(ValueError, match=r"reward.colours is set, but reward.name is ocr"):
        RewardConfig(colours={"path": "clip"})
