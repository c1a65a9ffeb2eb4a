"""Rewards: reading, scoring, and the return values of a user's own function."""

import math
import random
import sys

import numpy as np
import pytest
import torch

from engine.config import RewardConfig
from engine.models.digits import render
from engine.prompts import held_out_digits
from engine.protocol.request import Score
from engine.rewards.load import RewardError, load_reward
from engine.rewards.ocr import OcrReward, edit_distance, similarity, target_text
from engine.rewards.shapes import ShapesReward
from tests.benchmarks.word_readings import WIDTHS, image_of


def images_of(words, seed=0):
    rng = random.Random(seed)
    return torch.from_numpy(np.stack([render(word, rng) for word in words]))[:, None]


# --- OCR


def test_every_clean_rendering_is_read():
    words = held_out_digits()[:100]
    scores = OcrReward("ocr_strict")(images_of(words), words)
    assert [score.reward for score in scores] == [1.0] * 100


def test_one_wrong_digit_of_four_costs_a_quarter():
    (score,) = OcrReward("ocr")(images_of(["1234"]), ["1235"])
    assert score == Score(reward=0.75, metrics={"exact_match": 0.0, "similarity": 0.75})


def test_the_strict_reward_is_all_or_nothing():
    scores = OcrReward("ocr_strict")(images_of(["1234", "1234"]), ["1235", "1234"])
    assert [score.reward for score in scores] == [0.0, 1.0]
    assert [score.metrics["similarity"] for score in scores] == [0.75, 1.0]


def test_the_smooth_reward_is_graded_and_declares_it():
    right, wrong = OcrReward("ocr_smooth")(images_of(["1234", "1234"]), ["1234", "1235"])
    assert 0.9 < right.reward <= 1.0
    assert 0.0 <= wrong.reward < 0.7
    assert right.metrics["smooth"] == right.reward


def test_the_smooth_reward_of_repeated_digits_and_unknown_characters():
    repeated, unknown = OcrReward("ocr_smooth")(images_of(["1122", "1122"]), ["1122", "112\u0e3f"])
    assert repeated.reward > 0.9
    assert unknown.reward == 0.0


def test_a_score_does_not_depend_on_the_batch():
    words = held_out_digits()[:11]
    images, reward = images_of(words), OcrReward("ocr")
    together = reward(images, ["1234"] * 11)
    assert together == [reward(image[None], ["1234"])[0] for image in images]


def test_colour_images_are_read_too():
    assert OcrReward("ocr")(images_of(["1234"]).expand(-1, 3, -1, -1), ["1234"])[0].reward == 1.0


def test_a_video_is_refused():
    with pytest.raises(ValueError, match=r"\[1, 3, 2, 12, 32\]"):
        OcrReward("ocr")(torch.zeros(1, 3, 2, 12, 32), ["1234"])


@pytest.mark.parametrize(
    ("prompt", "target"),
    [("1234", "1234"), ('A shop sign that says "Open Late", at night', "openlate"), ('a "" b', 'a""b'), ("Hi", "hi")],
)
def test_the_target_is_the_quoted_text_or_the_whole_prompt(prompt, target):
    assert target_text(prompt) == target


def test_a_prompt_without_text_has_no_target():
    with pytest.raises(ValueError, match="asks for no text"):
        target_text("   ")


@pytest.mark.parametrize(
    ("a", "b", "edits"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("1234", "1243", 2)]
)
def test_edit_distance(a, b, edits):
    assert edit_distance(a, b) == edit_distance(b, a) == edits


def test_text_around_the_target_costs_nothing_and_no_reading_scores_below_0():
    assert similarity("x1234y", "1234") == 1.0
    assert similarity("a very long other reading", "1234") == 0.0


@pytest.mark.parametrize(
    ("text", "width", "prompt"),
    [
        ("Pharmacy", WIDTHS["full"], 'a shop sign that says "Pharmacy"'),
        ("Mountain", WIDTHS["half"], 'a postcard with "Mountain" on it'),
        ("Open\nLate", WIDTHS["half"], 'a neon sign: "OPEN late"'),
    ],
)
def test_a_512_px_rendering_is_read_at_any_width_line_count_and_case(text, width, prompt):
    (score,) = OcrReward("ocr")(image_of(text, width)[None], [prompt])
    assert score == Score(reward=1.0, metrics={"exact_match": 1.0, "similarity": 1.0})


def test_a_large_image_scores_by_edit_distance_and_an_empty_one_scores_0():
    images = torch.stack([image_of("Coffee", 0.9, 96), torch.ones(3, 96, 96)])
    wrong, empty = OcrReward("ocr")(images, ['a sign that says "Toffee"', 'a sign that says "Toffee"'])
    assert (wrong.reward, wrong.metrics["exact_match"]) == (pytest.approx(5 / 6), 0.0)
    assert empty.reward == 0.0


@pytest.mark.parametrize(("rows", "columns", "is_one_line"), [(48, 144, True), (49, 144, False), (48, 145, False)])
def test_the_size_of_an_image_decides_which_reader_scores_it(rows, columns, is_one_line):
    reward, image = OcrReward("ocr_smooth"), torch.ones(1, 1, rows, columns)
    if is_one_line:
        assert reward(image, ["1234"])[0].metrics.keys() == {"exact_match", "similarity", "smooth"}
    else:
        with pytest.raises(ValueError, match=rf"at most 48 x 144 pixels; it was given {rows} x {columns}: use ocr"):
            reward(image, ["1234"])


# --- from the job file


@pytest.mark.parametrize("name", ["ocr", "ocr_strict", "ocr_smooth"])
def test_built_in_rewards_are_chosen_by_name(name):
    assert isinstance(load_reward(RewardConfig(name=name), None), OcrReward)


@pytest.mark.parametrize("name", ["shapes", "shapes_strict"])
def test_shapes_rewards_are_chosen_by_name_too(name):
    assert isinstance(load_reward(RewardConfig(name=name), None), ShapesReward)


def test_an_unknown_reward_is_refused_with_the_nearest_known_name():
    with pytest.raises(RewardError, match="did you mean 'ocr_strict'"):
        load_reward(RewardConfig(name="ocr_strikt"), None)


def user_reward(folder, source, module):
    (folder / f"{module}.py").write_text(source)
    return load_reward(RewardConfig(name=f"{module}:score"), str(folder))


@pytest.mark.parametrize(
    ("case", "returned"),
    [
        ("floats", "[0.5, 1]"),
        ("tuple", "(0.5, True)"),
        ("tensor", "torch.tensor([0.5, 1.0])"),
        ("array", "np.array([0.5, 1.0], dtype=np.float32)"),
        ("scalars", "[torch.tensor(0.5), np.float64(1.0)]"),
        ("scores", "[Score(reward=0.5, metrics={}), 1.0]"),
    ],
)
def test_a_function_may_return_numbers_in_any_usual_shape(tmp_path, case, returned):
    source = (
        "import numpy as np\nimport torch\nfrom engine.protocol.request import Score\n"
        f"def score(pictures, prompts):\n    return {returned}\n"
    )
    reward = user_reward(tmp_path, source, f"returns_{case}")
    assert [score.reward for score in reward(torch.zeros(2, 1, 4, 4), ["a", "b"])] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("case", "returned", "complaint"),
    [
        ("count", "[1.0]", r"bad_count:score returned 1 values for 2 images"),
        ("number", "1.0", r"returned float 1\.0; return a list"),
        ("none", "None", r"returned NoneType None"),
        ("strings", "['good', 'bad']", r"returned str 'good' for image 0"),
        ("matrix", "torch.zeros(2, 3)", r"array of shape \[2, 3\]"),
    ],
)
def test_a_wrong_return_value_is_named_in_the_error(tmp_path, case, returned, complaint):
    source = f"import torch\ndef score(pictures, prompts):\n    return {returned}\n"
    reward = user_reward(tmp_path, source, f"bad_{case}")
    with pytest.raises(RewardError, match=complaint):
        reward(torch.zeros(2, 1, 4, 4), ["a", "b"])


def test_a_reward_that_is_not_finite_becomes_nan(tmp_path):
    source = (
        "from engine.protocol.request import Score\n"
        "def score(pictures, prompts):\n"
        "    return [float('inf'), Score(reward=float('-inf'), metrics={'a': 1.0})]\n"
    )
    scores = user_reward(tmp_path, source, "not_finite")(torch.zeros(2, 1, 4, 4), ["a", "b"])
    assert all(math.isnan(score.reward) for score in scores)
    assert scores[1].metrics == {"a": 1.0}


def test_a_users_module_imports_its_neighbours_and_keeps_the_import_path(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 0.25\n")
    before = list(sys.path)
    source = "from neighbour_of_reward import VALUE\ndef score(pictures, prompts):\n    return [VALUE] * len(prompts)\n"
    reward = user_reward(tmp_path, source, "has_a_neighbour")
    assert reward(torch.zeros(1, 1, 4, 4), ["a"])[0].reward == 0.25
    assert sys.path == before


def test_a_folder_that_is_on_the_import_path_keeps_its_place_there(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.path)
    user_reward(tmp_path, "def score(pictures, prompts): ...\n", "is_found_first")
    assert sys.path == before


def test_a_users_file_never_replaces_an_installed_module(tmp_path):
    (tmp_path / "safetensors.py").write_text("raise AssertionError('the wrong one')\n")
    source = "import safetensors\ndef score(pictures, prompts):\n    return [hasattr(safetensors, 'safe_open')]\n"
    assert user_reward(tmp_path, source, "imports_safetensors")(torch.zeros(1, 1, 4, 4), ["a"])[0].reward == 1.0
    with pytest.raises(RewardError, match=rf"has the name of {tmp_path}/safetensors.py; rename safetensors.py"):
        load_reward(RewardConfig(name="safetensors:score"), str(tmp_path))


def test_a_users_package_hidden_by_an_installed_one_must_be_renamed(tmp_path):
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "mine.py").write_text("def score(pictures, prompts): ...\n")
    with pytest.raises(RewardError, match=rf"has the name of {tmp_path}/safetensors; rename safetensors"):
        load_reward(RewardConfig(name="safetensors.mine:score"), str(tmp_path))


def test_a_reward_that_calls_exit_is_an_error_and_ends_no_process(tmp_path):
    with pytest.raises(RewardError, match=r"failed: SystemExit\(3\)"):
        user_reward(tmp_path, "import sys\nsys.exit(3)\n", "exits_at_once")
    reward = user_reward(tmp_path, "import sys\ndef score(pictures, prompts):\n    sys.exit(3)\n", "exits_later")
    with pytest.raises(RewardError, match=r"called sys.exit\(3\); raise an error instead"):
        reward(torch.zeros(1, 1, 4, 4), ["a"])


def test_a_missing_module_error_names_the_folder(tmp_path):
    with pytest.raises(RewardError, match=rf"no module 'not_there' in {tmp_path}"):
        load_reward(RewardConfig(name="not_there:score"), str(tmp_path))


def test_a_missing_dependency_is_not_mistaken_for_a_missing_module(tmp_path):
    with pytest.raises(RewardError, match="needs 'never_heard_of', which is not installed"):
        user_reward(tmp_path, "import never_heard_of\n", "needs_more")


def test_a_broken_module_error_names_the_cause(tmp_path):
    with pytest.raises(RewardError, match="importing 'is_broken' failed: ZeroDivisionError"):
        user_reward(tmp_path, "1 / 0\n", "is_broken")


def test_a_missing_function_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(RewardError, match="no function 'score'; did you mean 'scores'"):
        user_reward(tmp_path, "def scores(pictures, prompts): ...\n", "misspelt")


def test_an_error_in_a_users_reward_is_passed_on(tmp_path):
    reward = user_reward(tmp_path, "def score(pictures, prompts):\n    raise KeyError('theirs')\n", "raises")
    with pytest.raises(KeyError, match="theirs"):
        reward(torch.zeros(1, 1, 4, 4), ["a"])
