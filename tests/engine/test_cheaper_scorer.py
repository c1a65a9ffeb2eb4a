"""`reward.student`: a cheaper scorer ranks candidates; what is trained, evaluated or a control is scored in full."""

import pytest
import torch

from engine.config import EngineConfig
from engine.entrypoints.preflight import JobUnfit, check
from engine.memory.scorers import CLIP_L14, scorer_bytes
from engine.reward_config import RewardConfig
from engine.rewards.load import load_student
from engine.trainer.state import config_digest
from tests.engine.test_loop import TINY, build

pytestmark = pytest.mark.usefixtures("one_layer")

QUICK, OF_FRAMES = "tests.engine.test_cheaper_scorer:quick", "tests.engine.test_cheaper_scorer:of_frames"
VIDEO = {"model": {"name": "wan", "path": "wan"}, "prompts": "prompts.txt"}


def quick(images, prompts):
    """Rank like `brightness`, in a range that no reward of `brightness` has."""
    return [100 + image.mean().item() for image in images]


def of_frames(images, prompts):
    assert images.dim() == 4
    return [image.mean().item() for image in images]


def nothing(images, prompts):
    return [float("nan")] * len(prompts)


def job(student, name="ocr", **more):
    profiles = [{"name": "quick", "scorer": "student"}]
    reward = {"name": name, "student": student}
    return EngineConfig.model_validate({"reward": reward, "exploration": {"profiles": profiles}, **more})


def test_candidates_get_the_students_scores_and_what_is_trained_the_rewards(tmp_path):
    explored = TINY.exploration.model_copy(update={"profiles": job({"name": QUICK}).exploration.profiles})
    reward = RewardConfig.model_validate({"student": {"name": QUICK}})
    run = build(TINY.model_copy(update={"exploration": explored, "reward": reward, "iterations": 2}), tmp_path)
    assert run.loop.run().reason == "iterations"
    scores = {kind: set() for kind in ("train", "explore", "evaluate", "control")}
    for head, answer in run.loop.coordinator.transport.answers:
        if head["call"] == "collect":
            scores[head["kind"]] |= {one["reward"] for one in answer["results"]}
    assert len(scores["explore"]) == 8
    assert min(scores["explore"]) > 50
    assert scores["train"]
    assert scores["evaluate"]
    assert max(scores["train"] | scores["evaluate"] | scores["control"]) <= 1


def test_a_student_may_score_fewer_frames_of_a_video(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n")
    config = job({"name": OF_FRAMES, "frames": 1}, name="mine:score", **VIDEO)
    student = load_student(config, str(tmp_path))
    video = torch.arange(5.0)[None, None, :, None, None].expand(1, 3, 5, 2, 2)
    assert [score.reward for score in student(video, ["a"])] == [2.0]


def test_a_student_that_no_profile_uses_is_refused():
    with pytest.raises(ValueError, match=r"reward.student is set, but no exploration profile has scorer: student"):
        EngineConfig.model_validate({"reward": {"student": {"name": "ocr"}}})


def test_a_student_of_images_needs_frames_for_a_video():
    with pytest.raises(ValueError, match=r"reward.student: model.name is wan, and reward ocr scores images, not video"):
        job({"name": "ocr"}, name="mine:score", **VIDEO)


@pytest.mark.parametrize(
    ("name", "found"),
    [("nothing", "gives one image of noise a reward that is not finite"), ("missing", "has no function")],
)
def test_a_student_without_scores_is_found_before_a_launch(name, found):
    with pytest.raises(JobUnfit, match=found) as unfit:
        check(job({"name": f"tests.engine.test_cheaper_scorer:{name}"}), None)
    assert unfit.value.field == "reward.student"


def test_keys_money_and_memory_of_a_student_count():
    vlm = {"url": "http://a", "model": "b", "key": "KEY", "usd_per_million_input": 1, "max_usd": 2}
    assert RewardConfig.model_validate({"student": {"name": "vlm", "vlm": vlm}}).key_names == ("KEY",)
    assert RewardConfig.model_validate({"student": {"name": "vlm", "vlm": vlm}}).judge_micro_usd == 2_000_000
    pool = {"name": "mine:score", "placed": "pool", "pool": {"processes": 4}}
    clip = RewardConfig.model_validate(pool | {"student": {"name": "clip", "model": {"path": "clip"}}})
    assert scorer_bytes(clip, 1) == 2 * CLIP_L14


def test_a_job_without_a_student_keeps_its_digest():
    assert config_digest(EngineConfig()) == config_digest(EngineConfig(reward=RewardConfig(student=None)))
    assert config_digest(EngineConfig()) != config_digest(job({"name": QUICK}))
