"""GenEval's verdict equals the published rules on hand-made detections.

`tests/data/geneval/detections.json` holds 43 images as lists of detections, made by hand to touch each rule from both
sides. `correct` is the recorded output of `evaluate_image` of djghosh13/geneval, with these detections in the place of
its detector and of its colour classifier.
"""

import json
from pathlib import Path

import pytest
import torch

from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, RewardConfig
from engine.rewards.geneval import Detection, relations, verdict
from engine.rewards.load import load_reward_of_job

CASES = json.loads((Path(__file__).parent.parent / "data/geneval/detections.json").read_text("utf-8"))


def detections(case):
    return [Detection(**{**one, "box": tuple(one["box"])}) for one in case["detections"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_verdict_is_that_of_the_published_rules(case):
    found = verdict(case["metadata"], detections(case))
    assert found.correct == case["correct"], found.faults


def test_the_cases_are_balanced():
    assert (len(CASES), sum(case["correct"] for case in CASES)) == (43, 19)


def test_the_order_of_detections_does_not_count():
    for case in CASES:
        assert verdict(case["metadata"], detections(case)[::-1]).correct == case["correct"], case["name"]


def test_faults_name_the_clause():
    faults = {case["name"]: verdict(case["metadata"], detections(case)).faults for case in CASES}
    assert faults["one object"] == ()
    assert faults["two of three"] == ("found 2 cup, expected 3",)
    assert faults["four of three"] == ("found 4 cup, expected fewer than 4",)
    assert faults["wrong colour"] == ("found 0 pink vase, expected 1",)
    assert faults["left instead of right"] == ("cat is not right of its target",)
    assert faults["the target is missing"] == ("found 0 dog, expected 1", "nothing that cat could be left of")


def test_an_object_may_be_above_and_left():
    one, other = (Detection(label="a", confidence=1.0, box=box) for box in ((0, 0, 9, 9), (50, 50, 59, 59)))
    assert relations(one, other) == {"above", "left of"}
    assert relations(other, one) == {"below", "right of"}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "missing required field `tag`"),
        ({"tag": "colors", "include": [{"class": "cup", "count": "2"}]}, "Expected `int`"),
        ({"tag": "position", "include": [{"class": "cup", "position": ["near", 0]}]}, "Invalid enum value 'near'"),
        ({"tag": "position", "include": [{"class": "cup", "position": ["above", 0]}]}, "does not stand before"),
    ],
)
def test_other_metadata_is_refused(metadata, words):
    with pytest.raises(ValueError, match=words):
        verdict(metadata, [])


def test_a_users_detector_and_the_verdict_make_a_reward(tmp_path):
    metadata = [
        {"prompt": f"{count} cups", "tag": "counting", "include": [{"class": "cup", "count": count}]}
        for count in (1, 2, 3, 4, 5)
    ]
    (tmp_path / "cups.jsonl").write_text("\n".join(map(json.dumps, metadata)))
    (tmp_path / "finds_two_cups.py").write_text(
        "from engine.rewards.geneval import Detection, verdict\n"
        "def score(images, prompts, metadata):\n"
        "    cups = [Detection(label='cup', confidence=.95, box=(0, 0, 9, 9))] * 2\n"
        "    return [float(verdict(one, cups).correct) for one in metadata]\n"
    )
    job = EngineConfig(
        prompts="cups.jsonl",
        reward=RewardConfig(name="finds_two_cups:score"),
        algorithm=AlgorithmConfig(prompts_per_batch=2),
    )
    reward = load_reward_of_job(job, str(tmp_path))
    scores = reward(torch.zeros(3, 3, 8, 8), ["3 cups", "1 cups", "2 cups"])
    assert [score.reward for score in scores] == [0.0, 1.0, 1.0]
