"""The scorer `vlm`: OpenAI's protocol, a judge's score, a reader's text, faults of a server, and a key in no file."""

import base64
import io
import math
import os
import signal
import subprocess
import sys

import pytest
import stamina
import torch
from PIL import Image

from engine.config import EngineConfig, RewardConfig
from engine.coordinator.judge_turns import JudgeTurns
from engine.prompt_set import NO_METADATA
from engine.reward_config import VlmConfig
from engine.rewards.chat import score_of, text_of
from engine.rewards.http_call import BadAnswer
from engine.rewards.load import load_reward, load_reward_of_job
from engine.rewards.pace import Pace
from engine.rewards.reward import RewardError
from engine.rewards.vlm import VlmReward
from engine.worker.coordinator_purse import CoordinatorPurse
from engine.worker.transport import InprocTransport
from tests.engine.judge_server import JudgeServer
from tests.engine.test_http_reward import FAULTS, grey, planted_in, rewards
from tests.engine.test_loop import TINY, build, progress


@pytest.fixture(autouse=True)
def no_pauses():
    with stamina.set_testing(True, attempts=3, cap=True):
        yield


def config(url, **fields):
    return VlmConfig(**{"url": url, "model": "judge-7b", "concurrency": 2, **fields})


def ask(server, count=5, prompt="two cups", metadata=NO_METADATA, **fields):
    reward = VlmReward(config(server.url, **fields))
    return reward.score(grey(count), [prompt] * count, [metadata] * count)


def words(server, number=0):
    return server.asked[number]["messages"][0]["content"][1]["text"]


@pytest.mark.parametrize("image", ["png", "jpeg"])
def test_each_image_gets_its_own_score_on_the_scale(image):
    with JudgeServer() as server:
        scores = ask(server, image=image)
    assert rewards(scores) == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.01)
    assert server.sizes == [1] * 5
    assert {asked["model"] for asked in server.asked} == {"judge-7b"}


def test_a_rubric_has_the_prompt_and_its_metadata_and_the_form_of_the_answer():
    with JudgeServer() as server:
        ask(server, 1, prompt="a {metadata}", metadata={"count": 2}, rubric="{prompt}: {metadata} {x}", scale=(1, 5))
    assert words(server).startswith('a {metadata}: {"count": 2} {x}\n\nThe worst score is 1 and the best is 5.')
    assert words(server).endswith('{"score": NUMBER}')


def test_a_reader_is_scored_like_the_ocr_reward():
    with JudgeServer(reads="Hello\n World") as server:
        good = ask(server, 1, prompt='a sign "HELLO WORLD"', task="read")[0]
        near = ask(server, 1, prompt='a sign "HELLO WORLDS"', task="read")[0]
    assert (good.reward, good.metrics) == (1.0, {"exact_match": 1.0, "similarity": 1.0})
    assert (near.reward, near.metrics["exact_match"]) == (pytest.approx(10 / 11), 0.0)


def test_large_images_are_sent_smaller_and_small_images_as_they_are():
    sizes = []
    with JudgeServer() as server:
        reward = VlmReward(config(server.url, longest_side=32))
        for shape in ((3, 64, 128), (1, 16, 8)):
            reward.score(torch.zeros(1, *shape), ["a"], [NO_METADATA])
            url = server.asked[-1]["messages"][0]["content"][0]["image_url"]["url"]
            sizes.append(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size)
    assert sizes == [(32, 16), (8, 16)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_is_repeated_after_each_fault_that_may_pass(fault):
    with JudgeServer([fault]) as server:
        scores = ask(server, 2)
    assert rewards(scores) == pytest.approx([0, 1], abs=0.01)
    assert len(server.sizes) == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_an_image_without_a_good_answer_is_unscored_and_the_others_keep_their_scores(fault, capsys):
    with JudgeServer([fault] * 3) as server:
        scores = ask(server, 3, concurrency=1)
    assert [math.isnan(reward) for reward in rewards(scores)] == [True, False, False]
    assert scores[0].metrics == {}
    assert "an image has no score, and its group is skipped" in capsys.readouterr().out
    assert len(server.sizes) == 5


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refused_request_is_an_error_at_once(status):
    with JudgeServer([status]) as server, pytest.raises(RewardError, match=rf"refused .* HTTP {status}"):
        ask(server, 1)
    assert len(server.sizes) == 1


def test_a_server_that_answers_byte_by_byte_is_cut_at_the_deadline(capsys):
    with JudgeServer(["drip"] * 3) as server:
        assert math.isnan(ask(server, 1, timeout_seconds=0.1)[0].reward)
    assert "the last with no whole answer in 0.1 s" in capsys.readouterr().out


def test_a_frozen_server_leaves_images_unscored_and_scores_again_when_it_goes_on(capsys):
    command = [sys.executable, "-m", "tests.engine.judge_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            patient = VlmReward(config(url, timeout_seconds=60.0, tries=3))
            reward = VlmReward(config(url, timeout_seconds=0.5, tries=3))
            assert patient.score(grey(1), ["a"], [NO_METADATA])[0].reward == pytest.approx(0, abs=0.01)
            os.kill(process.pid, signal.SIGSTOP)
            assert math.isnan(reward.score(grey(1), ["a"], [NO_METADATA])[0].reward)
            assert "3 tries, the last with no whole answer in 0.5 s" in capsys.readouterr().out
            os.kill(process.pid, signal.SIGCONT)
            assert patient.score(grey(1), ["a"], [NO_METADATA])[0].reward == pytest.approx(0, abs=0.01)
            assert reward.score(grey(2), ["a"] * 2, [NO_METADATA] * 2)[1].reward == pytest.approx(1, abs=0.01)
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()


def test_the_check_before_a_launch_needs_an_answer():
    with JudgeServer() as server:
        pass
    job = EngineConfig(reward=RewardConfig(name="vlm", vlm=config(server.url)))
    with pytest.raises(RewardError, match=r"the model gave no score: .*/chat/completions: 1 try, .*ConnectError"):
        load_reward_of_job(job, None, must_answer=True)(grey(1), ["a"])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 5}', 0.5),
        ('{"score": 10.0}', 1),
        ('Good. 3 of 4 cups.\n```json\n{"score": 7.5}\n```', 0.75),
        ('{"score": 2} no, rather {"score": 4}', 0.4),
    ],
)
def test_the_last_object_of_an_answer_is_the_score(text, score):
    assert score_of(text, (0, 10)) == score


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "I give 8 of 10",
        "{score: 8}",
        '{"score": "8"}',
        '{"score": true}',
        '{"score": null}',
        '{"score": 1e999}',
        '{"score": NaN}',
        '{"score": 11}',
        '{"score": -1}',
        '{"points": 8}',
        "[8]",
        '{"score": 8',
        "}{",
        '{"a": ' * 100_000,
    ],
)
def test_an_answer_without_one_clear_score_is_bad(text):
    with pytest.raises(BadAnswer):
        score_of(text, (0, 10))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"choices": []}', b'{"choices": [{"message": {}}]}', b"\xff"])
def test_an_answer_that_is_no_completion_is_bad(content):
    with pytest.raises(BadAnswer):
        text_of(content)


def test_requests_of_all_workers_are_evenly_spaced_and_unused_turns_are_not_saved():
    now, slept = [0.0], []
    turns = JudgeTurns(now=lambda: now[0])

    class Line:
        def turn(self, judge, gap_seconds):
            return turns.take(judge, gap_seconds)

    first, second = (Pace(Line(), "a judge", 60, sleep=slept.append) for _ in range(2))
    for pace in (first, second, first):
        pace.wait()
    now[0] = 10.0
    second.wait()
    first.wait()
    Pace(Line(), "another judge", 60, sleep=slept.append).wait()
    assert slept == [1.0, 2.0, 1.0]
    Pace(Line(), "a judge", None, sleep=slept.append).wait()
    assert len(slept) == 3


def test_each_judge_has_turns_of_its_own_that_all_askers_share():
    now = [5.0]
    turns = JudgeTurns(now=lambda: now[0])
    asked = [("slow", 10.0), ("fast", 1.0), ("fast", 1.0), ("slow", 10.0), ("fast", 1.0), ("slow", 10.0)]
    assert [turns.take(judge, gap) for judge, gap in asked] == [0.0, 0.0, 1.0, 10.0, 2.0, 20.0]
    now[0] = 8.0
    assert [turns.take(judge, gap) for judge, gap in asked[:2]] == [27.0, 0.0]


def test_the_coordinator_gives_two_workers_turns_of_one_judge(tmp_path):
    run = build(TINY, tmp_path)
    purses = [CoordinatorPurse(InprocTransport(run.coordinator), worker=f"{n}/0", node=f"{n}") for n in range(2)]
    waits = [purse.turn("a judge", 30.0) for purse in purses]
    assert waits == pytest.approx([0.0, 30.0], abs=5)
    run.loop.reporter.close()


def test_a_key_of_a_judge_is_in_no_file_of_a_run_and_in_no_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_KEY", "sk-planted")
    with JudgeServer([503] * 1000) as server:
        judge = RewardConfig(name="vlm", vlm=config(server.url, tries=1, key="JUDGE_KEY"))
        job = TINY.model_copy(update={"reward": judge})
        finished = build(job, tmp_path, reward=load_reward(judge, None)).loop.run()
    assert {head["Authorization"] for head in server.heads} == {"Bearer sk-planted"}
    assert (finished.reason, finished.iteration) == ("unhealthy", 1)
    assert finished.text.endswith("chat/completions: 1 try, the last with HTTP 503 and 'key was Bearer ***'")
    assert next(iter(progress(tmp_path, "iteration_done"))).health["skipped_groups"] == 2
    output = capsys.readouterr()
    assert "the last with HTTP 503 and 'key was Bearer ***'" in output.out
    assert not planted_in(tmp_path)
    assert "sk-planted" not in f"{output}"


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"reward.name is vlm, without a model"):
        RewardConfig(name="vlm")
    with pytest.raises(ValueError, match=r"reward.vlm is set, but reward.name is ocr"):
        RewardConfig(vlm=config("http://a"))
    with pytest.raises(ValueError, match=r"scale is \[5.0, 1.0\]; give the worst score first"):
        config("http://a", scale=(5, 1))
    with pytest.raises(ValueError, match="scale is set, but task is read"):
        config("http://a", scale=(1, 5), task="read")
    judge = RewardConfig(name="sum", parts=[{"name": "ocr"}, {"name": "vlm", "vlm": config("http://a", key="KEY")}])
    assert judge.key_names == ("KEY",)
