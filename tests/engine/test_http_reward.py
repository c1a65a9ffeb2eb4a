"""The scorer `http`: three protocols, every fault of a server, and no score that the server did not give."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import stamina
import torch

from engine.config import EngineConfig, RewardConfig
from engine.prompt_set import NO_METADATA
from engine.reward_config import HttpConfig
from engine.rewards.http_call import BadAnswer, HttpCall, NoAnswer
from engine.rewards.http_protocols import scores_of_answer
from engine.rewards.http_reward import HttpReward
from engine.rewards.load import load_reward, load_reward_of_job
from engine.rewards.reward import RewardError
from tests.engine.scorer_server import ScorerServer
from tests.engine.test_loop import TINY, build, progress

pytestmark = pytest.mark.usefixtures("one_layer")

PROTOCOLS = ("json", "verl-omni", "flow-grpo")
TAGGED = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "two cups"}


@pytest.fixture(autouse=True)
def no_pauses():
    with stamina.set_testing(True, attempts=3, cap=True):
        yield


def grey(count):
    """Images of even grey, from black to white."""
    return torch.linspace(-1, 1, count)[:, None, None, None].expand(-1, 3, 8, 8)


def ask(server, count=5, **fields):
    config = HttpConfig(**{"url": server.url, "protocol": server.protocol, "batch": 2, "concurrency": 2, **fields})
    return HttpReward(config).score(grey(count), ["two cups"] * count, [TAGGED] * count)


def rewards(scores):
    return [score.reward for score in scores]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_image_gets_its_own_score_from_requests_of_at_most_a_batch(protocol):
    with ScorerServer(protocol) as server:
        scores = ask(server)
    assert rewards(scores) == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.01)
    assert sorted(server.sizes) == [1, 2, 2]


def test_metrics_are_those_that_the_server_computed():
    with ScorerServer("json") as server:
        assert ask(server, 1)[0].metrics == {"words": 8.0}
    with ScorerServer("verl-omni") as server:
        assert ask(server, 1)[0].metrics == {}
    with ScorerServer("flow-grpo") as server:
        assert [score.metrics for score in ask(server, 2)] == [
            {"accuracy": 1.0, "strict_accuracy": 0.0},
            {"accuracy": 1.0, "strict_accuracy": 1.0},
        ]


def test_metadata_of_the_prompt_file_is_sent():
    with ScorerServer("flow-grpo") as server:
        ask(server, 1)
        assert server.asked[0]["meta_datas"] == [TAGGED]
    with ScorerServer("json") as server:
        ask(server, 1)
        assert server.asked[0]["metadata"] == [TAGGED]


FAULTS = [408, 425, 429, 500, 502, 503, "garbage", "short", "nan", "range", "dies", "error"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_request_is_repeated_after_each_fault_that_may_pass(protocol):
    for fault in FAULTS:
        with ScorerServer(protocol, [fault]) as server:
            scores = ask(server, 2, score_range=(0.0, 1.0))
        assert rewards(scores) == pytest.approx([0, 1], abs=0.01), fault
        assert len(server.sizes) == 2, fault


@pytest.mark.parametrize("fault", FAULTS)
def test_images_without_a_good_answer_are_unscored_and_the_others_keep_their_scores(fault, capsys):
    with ScorerServer("json", [fault] * 3) as server:
        scores = ask(server, 4, concurrency=1, score_range=(0.0, 1.0))
    assert [math.isnan(reward) for reward in rewards(scores)] == [True, True, False, False]
    assert [score.metrics for score in scores[:2]] == [{}, {}]
    assert "2 images have no score, and their groups are skipped" in capsys.readouterr().out
    assert len(server.sizes) == 4


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_a_refused_request_is_an_error_at_once(status):
    with ScorerServer("json", [status]) as server, pytest.raises(RewardError, match=rf"refused .* HTTP {status}"):
        ask(server, 1)
    assert len(server.sizes) == 1


def test_a_server_that_answers_byte_by_byte_is_cut_at_the_deadline(capsys):
    with ScorerServer("json", ["drip"] * 3) as server:
        assert math.isnan(ask(server, 1, timeout_seconds=0.1)[0].reward)
    assert "the last with no whole answer in 0.1 s" in capsys.readouterr().out


def test_a_dead_server_leaves_images_unscored_and_fails_the_check_before_a_launch(capsys):
    with ScorerServer("json") as server:
        pass
    assert math.isnan(ask(server, 1)[0].reward)
    assert "ConnectError" in capsys.readouterr().out
    config = RewardConfig(name="http", http=HttpConfig(url=server.url))
    with pytest.raises(RewardError, match=r"gave no score: http://127.0.0.1:\d+: 1 try, the last with ConnectError"):
        load_reward_of_job(EngineConfig(reward=config), None, must_answer=True)(grey(1), ["a"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_frozen_server_leaves_images_unscored_and_a_killed_one_too(protocol):
    command = [sys.executable, "-m", "tests.engine.scorer_server", protocol]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()

            def scores(means=(-1.0, 1.0), timeout_seconds=60.0):
                config = HttpConfig(url=url, protocol=protocol, timeout_seconds=timeout_seconds, tries=3)
                images = torch.tensor(means)[:, None, None, None].expand(-1, 3, 8, 8)
                return HttpReward(config).score(images, ["two cups"] * 2, [TAGGED] * 2)

            assert rewards(scores()) == pytest.approx([0, 1], abs=0.01)
            os.kill(process.pid, signal.SIGSTOP)
            frozen = scores(timeout_seconds=0.5)
            os.kill(process.pid, signal.SIGCONT)
            again = scores((1.0, -1.0))  # an answer to the frozen requests would be 0 and 1
            process.kill()
            process.wait()
            dead = scores()
        finally:
            process.kill()
    assert [math.isnan(reward) for reward in rewards([*frozen, *dead])] == [True] * 4
    assert "3 tries, the last with no whole answer in 0.5 s" in frozen[0].fault
    assert rewards(again) == pytest.approx([1, 0], abs=0.01)
    assert "the last with ConnectError" in dead[0].fault


def test_pauses_grow_to_half_a_minute_and_follow_the_servers_wish(monkeypatch):
    waited, sleep = [], time.sleep
    # Shorter sleeps are of other threads of the process, which must not spin.
    monkeypatch.setattr("time.sleep", lambda seconds: (waited.append if seconds >= 0.5 else sleep)(seconds))
    with stamina.set_testing(False), ScorerServer("json", [503] * 7) as server:
        server.retry_after = "99"
        assert not math.isnan(ask(server, 1)[0].reward)
    assert waited[::2] == [30.0] * 7, "wanted by the server, at most half a minute"
    for number, pause in enumerate(waited[1::2]):
        assert min(30, 0.5 * 2**number) <= pause <= min(30, 0.5 * 2**number + 1)


def test_an_answer_that_would_run_code_is_not_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    with pytest.raises(BadAnswer, match=r"posix.mkdir is not allowed"):
        scores_of_answer("verl-omni", pickle.dumps({"scores": [Evil()]}), 1, None)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("value", ["0.5", True, None, [0.5], 10**400, float("inf")])
def test_only_finite_numbers_are_scores(value):
    with pytest.raises(BadAnswer, match=r"under 'scores' for image 1, which is no finite number"):
        scores_of_answer("verl-omni", pickle.dumps({"scores": [0.5, value]}), 2, None)


def test_a_key_is_sent_and_appears_in_no_message(monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_KEY", "sk-planted")
    with ScorerServer("json", [503, 503, 503, 403]) as server:
        assert math.isnan(ask(server, 1, key="JUDGE_KEY")[0].reward)
        with pytest.raises(RewardError, match=r"key was Bearer \*\*\*") as caught:
            ask(server, 1, key="JUDGE_KEY")
    assert {head["Authorization"] for head in server.heads} == {"Bearer sk-planted"}
    output = capsys.readouterr()
    assert "key was Bearer ***" in output.out
    assert "sk-planted" not in f"{output}{caught.value!r}"


def test_no_message_repeats_a_key_that_a_server_or_a_header_does_not_take(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-planted")
    with ScorerServer("json") as server:
        server.list_faults = [503, 403]
        call = HttpCall(server.url, key_name="JUDGE_KEY", timeout_seconds=10.0, tries=1)
        with pytest.raises(NoAnswer, match=r"key was Bearer \*\*\*"):
            call.get()
        with pytest.raises(RewardError, match=r"key was Bearer \*\*\*"):
            call.get()
    monkeypatch.setenv("JUDGE_KEY", "sk-planted\x07")
    with pytest.raises(RewardError, match="the key in JUDGE_KEY has characters") as caught:
        HttpCall("http://127.0.0.1:1", key_name="JUDGE_KEY", timeout_seconds=10.0, tries=1)
    assert "planted" not in str(caught.value)


def test_a_key_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(RewardError, match="needs a key in JUDGE_KEY, which is not set"):
        HttpReward(HttpConfig(url="http://127.0.0.1:1", key="JUDGE_KEY"))


def run_with_a_key(folder, monkeypatch, status):
    """A run whose server answers every request with this status, and repeats the key in its answer."""
    monkeypatch.setenv("JUDGE_KEY", "sk-planted")
    with ScorerServer("json", [status] * 1000) as server:
        config = RewardConfig(name="http", http=HttpConfig(url=server.url, tries=1, key="JUDGE_KEY"))
        job = TINY.model_copy(update={"reward": config})
        finished = build(job, folder, reward=load_reward(config, None)).loop.run()
    assert {head["Authorization"] for head in server.heads} == {"Bearer sk-planted"}
    return finished


def planted_in(folder):
    return [path for path in folder.rglob("*") if path.is_file() and b"sk-planted" in path.read_bytes()]


def test_a_run_skips_unscored_groups_stops_after_three_and_keeps_the_key_to_itself(tmp_path, monkeypatch, capsys):
    finished = run_with_a_key(tmp_path, monkeypatch, 503)
    assert (finished.reason, finished.iteration) == ("unhealthy", 1)
    assert "3 groups in a row had a reward or loss that is not finite" in finished.text
    first = next(iter(progress(tmp_path, "iteration_done")))
    assert (first.health["skipped_groups"], first.reward_mean) == (2, 0.0)
    output = capsys.readouterr()
    assert "the last with HTTP 503 and 'key was Bearer ***'" in output.out
    assert not planted_in(tmp_path)
    assert "sk-planted" not in f"{output}"


def test_a_run_that_a_server_refuses_stops_with_its_words_and_without_the_key(tmp_path, monkeypatch, capsys):
    finished = run_with_a_key(tmp_path, monkeypatch, 403)
    assert finished.reason == "unhealthy"
    assert "refused a request with HTTP 403 and 'key was Bearer ***'" in finished.text
    assert any(b"HTTP 403" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not planted_in(tmp_path)
    assert "sk-planted" not in f"{capsys.readouterr()}"


def test_prompts_without_metadata_send_an_empty_object():
    with ScorerServer("json") as server:
        HttpReward(HttpConfig(url=server.url)).score(grey(1), ["a"], [NO_METADATA])
        assert server.asked[0]["metadata"] == [{}]


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"reward.name is http, without an address"):
        RewardConfig(name="http")
    with pytest.raises(ValueError, match=r"reward.http is set, but reward.name is ocr"):
        RewardConfig(http=HttpConfig(url="http://a"))
    with pytest.raises(ValueError, match=r"score_range is \[1.0, 0.0\]"):
        HttpConfig(url="http://a", score_range=(1.0, 0.0))
    for url in ("10.0.0.5:80", "ftp://a", "http://", "http://a:port"):
        with pytest.raises(ValueError, match="use an address like http"):
            HttpConfig(url=url)
