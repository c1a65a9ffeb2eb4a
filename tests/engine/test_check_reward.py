"""The engine's part of `spotrl check-reward`: images of the job, their scores, the times, the bill and the sheet."""

import io
import sys

import pytest
from PIL import Image

from engine.config import EngineConfig
from engine.entrypoints.check_reward import CheckRequest, Till, check_reward
from engine.entrypoints.preflight import JobUnfit
from engine.protocol.messages import PaidCall
from engine.rewards.purse import BudgetUsedUp


@pytest.fixture
def check(tmp_path):
    def run(function, images=4, **reward):
        (tmp_path / "mine.py").write_text(f"def score(images, prompts):\n    {function}\n")
        config = EngineConfig.model_validate({"reward": {"name": "mine:score", **reward}, "sampler": {"steps": 2}})
        request = CheckRequest(
            engine=config, workdir=tmp_path, start=None, images=images, sheet=tmp_path / "out" / "sheet.png"
        )
        return check_reward(request), request.sheet

    yield run
    sys.modules.pop("mine", None)


def test_each_image_has_its_prompt_seed_and_score(check):
    found, sheet = check("return [image.mean().item() for image in images]")
    assert [image.seed for image in found.images] == [0, 1, 2, 3]
    assert len({image.prompt for image in found.images}) == 4
    assert len({image.reward for image in found.images}) == 4
    assert found.sampling_ms > 0
    assert found.judge_micro_usd == 0
    assert Image.open(io.BytesIO(sheet.read_bytes())).format == "PNG"


def test_scoring_is_timed_without_the_first_image(check):
    found, _ = check(
        "import time; time.sleep(1.0 if len(prompts) == 1 else 0.02 * len(prompts)); return [0.0] * len(prompts)"
    )
    assert found.first_score_ms >= 1000
    assert 20 <= found.score_ms < 950


def test_an_image_without_a_score_has_none(check):
    found, _ = check("return [float('nan')] + [1.0] * (len(prompts) - 1)")
    assert [image.reward for image in found.images] == [None, None, 1.0, 1.0]


def test_a_reward_that_cannot_score_is_an_error_of_the_job(check):
    with pytest.raises(JobUnfit, match="0 values for 1 images"):
        check("return []")


@pytest.mark.parametrize(
    ("reward", "setting"),
    [
        ({"timeout_seconds": 0.2}, "reward.timeout_seconds"),
        ({"placed": "pool", "pool": {"timeout_seconds": 0.2}}, "reward.pool.timeout_seconds"),
    ],
)
def test_a_scorer_that_hangs_is_an_error_of_the_job_after_its_limit(check, reward, setting):
    with pytest.raises(JobUnfit, match=r"mine:score gave no score for 3 images in 0\.2 s") as unfit:
        check("import threading; len(prompts) == 1 or threading.Event().wait(); return [0.0]", **reward)
    assert setting in unfit.value.remedy


def test_a_time_out_of_the_scorer_itself_is_not_taken_for_a_hang(check):
    with pytest.raises(TimeoutError, match="its own"):
        check("raise TimeoutError('its own')")


def test_a_check_pays_no_more_than_the_judges_budget():
    till = Till(1000)
    hold = till.hold(900, wait=True)
    with pytest.raises(BudgetUsedUp, match=r"0\.0001 of max_usd is left"):
        till.hold(200, wait=True)
    calls = [PaidCall(input_tokens=10, output_tokens=2, micro_usd=300)]
    till.bill(hold, calls)
    till.bill(hold, calls)
    assert till.paid == 300
    till.hold(700, wait=True)
