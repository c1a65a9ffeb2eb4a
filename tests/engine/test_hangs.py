"""Scorers that do not return: the queue's rules, a worker's limits, and the time limits of a job."""

import threading
import time

import pytest
from pydantic import ValidationError

from engine.protocol.request import Kind, RequestId, Score
from engine.queue.hangs import PROMPTS_IN_A_ROW, Hangs
from engine.reward_config import LONGEST_PAUSE_SECONDS, NODE_SCORER_SECONDS, RewardConfig
from engine.worker.scoring_call import ScoreLimits, ScorerHangs
from tests.engine.test_worker import Line, order, worker


def request(prompt="a", batch=0, seed=0, kind=Kind.TRAIN):
    return RequestId(run="r", lineage=0, batch=batch, prompt=prompt, seed=seed, kind=kind)


def test_a_group_with_a_hung_image_is_scored_no_more_and_its_prompt_is_tried_in_another_batch():
    hangs = Hangs()
    hangs.alone(request(), "late")
    assert hangs.reason(request(seed=1)) == "late"
    assert hangs.reason(request("b")) == ""
    assert hangs.reason(request(batch=1)) == ""
    hangs.scored()
    hangs.alone(request(batch=1), "late")
    assert "in 2 batches" in hangs.reason(request(batch=2))
    assert hangs.reasons([request("b"), request("c")]) == ()


def test_after_three_hung_prompts_without_a_score_nothing_is_scored():
    hangs = Hangs()
    for number in range(PROMPTS_IN_A_ROW - 1):
        hangs.alone(request(f"p{number}"), "late")
    hangs.scored()
    for number in range(PROMPTS_IN_A_ROW - 1):
        hangs.alone(request(f"q{number}"), "late")
    assert hangs.reason(request("good")) == ""
    hangs.alone(request("last"), "late")
    assert "not called any more" in hangs.reason(request("good"))


# --- a worker


def stopped(images, prompts):
    threading.Event().wait()


def limited(line, seconds=0.1, reward=stopped, **options):
    limits = ScoreLimits(reward=RewardConfig(name="m:mine", timeout_seconds=seconds))
    serving = worker(line, score_limits=limits, heartbeat_seconds=0.05, **options)
    serving.scorer.reward = reward
    return serving


def test_a_worker_whose_scorer_hangs_commits_reports_a_fault_and_ends():
    line = Line(order(2))
    with pytest.raises(ScorerHangs):
        limited(line).serve()
    assert line.names() == ["pull", "commit", "fault"]
    (fault,) = line.of("fault")
    assert fault["hangs"]
    assert "reward m:mine gave no score for 2 images in 0.1 s (reward.timeout_seconds)" in fault["text"]


def test_an_image_whose_scorer_hangs_alone_is_finished_without_a_score():
    line = Line(order(1))
    with pytest.raises(ScorerHangs):
        limited(line).serve()
    (finish,) = line.of("finish")
    assert finish["results"][0]["reward"] is None
    assert finish["results"][0]["trajectory"] is not None
    assert "m:mine" in finish["hangs"]


def test_the_trainers_worker_goes_on_beside_a_scorer_that_hangs():
    first = threading.Event()

    def hangs_once(images, prompts):
        if not first.is_set():
            first.set()
            threading.Event().wait()
        return [Score(reward=0.5, metrics={}) for _ in prompts]

    line = Line(order(1), order(1, lease=8))
    serving = limited(line, reward=hangs_once)
    serving.serve_once(wait=False)
    serving.serve_once(wait=False)
    assert [call["results"][0]["reward"] for call in line.of("finish")] == [None, 0.5]
    assert serving.stuck_calls == 1


def test_a_decoder_that_hangs_is_a_late_call_too():
    line = Line(order(1))
    serving = limited(line)
    serving.adapter.decode = lambda latents: threading.Event().wait()
    with pytest.raises(ScorerHangs):
        serving.serve()
    assert line.of("finish")[0]["results"][0]["reward"] is None


def test_a_call_that_waits_for_its_turn_has_its_whole_time():
    """One call runs at a time and takes two thirds of the limit: the second ends after the limit of its submission."""

    def slow(images, prompts):
        time.sleep(0.6)
        return [Score(reward=0.5, metrics={}) for _ in prompts]

    line = Line(order(1), order(1, lease=8))
    limited(line, seconds=0.9, reward=slow, scored_beside=1).serve()
    assert [call["results"][0]["reward"] for call in line.of("finish")] == [0.5, 0.5]


# --- limits


def limits(**reward):
    return ScoreLimits(reward=RewardConfig.model_validate(reward))


def test_a_first_call_has_the_whole_time_and_a_later_one_twenty_times_the_slowest():
    node = limits(name="m:f")
    assert node.seconds("reward", 12) == NODE_SCORER_SECONDS
    node.returned("reward", 0.01)
    assert node.seconds("reward", 12) == 60.0
    node.returned("reward", 10.0)
    node.returned("reward", 0.1)
    assert node.seconds("reward", 12) == 200.0
    assert node.seconds("reward", 1) == NODE_SCORER_SECONDS  # the second try
    node.returned("reward", 100.0)
    assert node.seconds("reward", 12) == NODE_SCORER_SECONDS


def test_the_users_own_time_is_kept():
    own = limits(name="m:f", timeout_seconds=1800.0)
    own.returned("reward", 0.01)
    assert own.seconds("reward", 12) == 1800.0


def test_a_server_has_the_time_of_all_its_tries():
    http = {"url": "http://127.0.0.1:1", "tries": 2, "timeout_seconds": 10.0, "batch": 4, "concurrency": 2}
    server = limits(name="http", http=http)
    server.returned("reward", 0.01)
    assert server.seconds("reward", 12) == NODE_SCORER_SECONDS + 2 * 2 * (10.0 + LONGEST_PAUSE_SECONDS)
    vlm = {"url": "http://127.0.0.1:1", "model": "m", "tries": 1, "concurrency": 12, "requests_per_minute": 60}
    assert limits(name="vlm", vlm=vlm).seconds("reward", 12) == NODE_SCORER_SECONDS + 120.0 + 30.0 + 12 * 64


def test_a_student_has_limits_and_a_name_of_its_own():
    both = limits(name="m:f", timeout_seconds=5.0, student={"name": "m:quick"})
    assert both.seconds("student", 12) == NODE_SCORER_SECONDS
    assert both.late("student", 1).startswith("student m:quick gave no score for an image")


def test_a_pool_has_its_own_limit_and_refuses_another():
    assert limits(name="m:f", placed="pool").seconds("reward", 12) == float("inf")
    with pytest.raises(ValidationError, match=r"use reward\.pool\.timeout_seconds"):
        RewardConfig(name="m:f", placed="pool", timeout_seconds=5.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_no_time_is_refused(seconds):
    with pytest.raises(ValidationError, match="timeout_seconds"):
        RewardConfig(name="m:f", timeout_seconds=seconds)
