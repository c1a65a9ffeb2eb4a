"""Scoring processes of a node: each image gets its own score, whichever process dies, hangs or mixes things up."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from math import isnan, nan

import pytest
import torch

from engine.node.child import EXIT_TORN, EXIT_UNANSWERED
from engine.node_spec import EXIT_UNFIT
from engine.pool.client import PoolReward
from engine.pool.messages import Failed, Scored, Scores, digest_of, receive, send
from engine.pool.server import EXIT_SCORER_HANGS, Request, ScoringProcess, listen
from engine.protocol.request import Score
from engine.rewards.reward import RewardError


def images_of(*means):
    return torch.tensor(means)[:, None, None, None].expand(-1, 1, 2, 2).contiguous()


def means(images, prompts):
    """Score by the mean, so a score for another image is noticed."""
    return [
        Score(reward=float(image.mean()), metrics={"words": float(len(p))})
        for image, p in zip(images, prompts, strict=True)
    ]


class Pool:
    """Scoring processes in threads of the test process. `rewards`: one for each process."""

    def __init__(self, folder, *rewards, batch=16):
        self.folder = folder
        self.listeners = [listen(folder, number) for number in range(len(rewards))]
        self.processes = [ScoringProcess(reward, batch=batch, timeout_seconds=60.0) for reward in rewards]
        for listener, process in zip(self.listeners, self.processes, strict=True):
            threading.Thread(target=self._serve, args=(process, listener), daemon=True).start()
        self.reward = PoolReward(folder, processes=len(rewards), tries=3)

    @staticmethod
    def _serve(process, listener):
        with contextlib.suppress(OSError):  # the test is over
            process.serve(listener)

    def close(self):
        for listener in self.listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@pytest.fixture
def open_pool(tmp_path):
    pools = []

    def make(*rewards, **options):
        pools.append(Pool(tmp_path, *rewards, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def rewards(scores):
    return [score.reward for score in scores]


def test_a_pool_gives_the_scores_and_metrics_of_the_reward(open_pool):
    scored = open_pool(means).reward(images_of(0.25, -0.5), ["a", "abc"])
    assert scored == [
        Score(reward=0.25, metrics={"words": 1.0}),
        Score(reward=-0.5, metrics={"words": 3.0}),
    ]


def test_an_image_without_a_score_keeps_none(open_pool):
    pool = open_pool(lambda images, prompts: [Score(reward=nan, metrics={"seen": nan}, fault="blind") for _ in prompts])
    (score,) = pool.reward(images_of(0.0), ["a"])
    assert isnan(score.reward)
    assert isnan(score.metrics["seen"])
    assert score.fault == "blind"


def test_requests_that_wait_share_a_batch_and_keep_their_scores(open_pool):
    sizes, first, go_on = [], threading.Event(), threading.Event()

    def slow(images, prompts):
        sizes.append(len(prompts))
        first.set()
        go_on.wait(60)
        return means(images, prompts)

    pool = open_pool(slow, batch=4)
    found = {}

    def ask(number):
        found[number] = rewards(pool.reward(images_of(number / 8, -number / 8), ["a", "b"]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    threads[0].start()
    assert first.wait(60)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: pool.processes[0]._waiting.qsize() == 4)  # fewer would make smaller batches
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == {number: [number / 8, -number / 8] for number in range(5)}
    assert sizes == [2, 4, 4]


def test_free_processes_share_the_images_of_a_request(open_pool):
    together, sizes = threading.Barrier(3), []

    def shared(images, prompts):
        sizes.append(len(prompts))
        together.wait(60)  # breaks unless three processes score at the same time
        return means(images, prompts)

    values = [number / 8 for number in range(5)]
    assert rewards(open_pool(shared, shared, shared).reward(images_of(*values), ["a"] * 5)) == values
    assert sorted(sizes) == [1, 2, 2]


def test_a_large_request_is_scored_in_batches(open_pool):
    sizes = []

    def counted(images, prompts):
        sizes.append(len(prompts))
        return means(images, prompts)

    values = [number / 16 for number in range(10)]
    assert rewards(open_pool(counted, batch=4).reward(images_of(*values), ["a"] * 10)) == values
    assert sizes == [4, 4, 2]


def test_an_error_of_the_scorer_fails_only_the_request_that_caused_it():
    def picky(images, prompts):
        if "bad" in prompts:
            raise ValueError("cannot read this")
        return means(images, prompts)

    near, far = socket.socketpair()
    with near, far:
        requests = [Request(images=images_of(0.5), prompts=(word,), connection=near) for word in ("good", "bad")]
        good, bad = ScoringProcess(picky, batch=8, timeout_seconds=60.0).scores_of(requests)
    assert [one.reward for one in good.scores] == [0.5]
    assert bad == Failed(text="ValueError: cannot read this")


def test_an_error_of_the_scorer_reaches_the_worker(open_pool):
    def broken(images, prompts):
        raise ValueError("cannot read this")

    with pytest.raises(RewardError, match="cannot read this"):
        open_pool(broken).reward(images_of(0.5), ["a"])


def test_a_wrong_number_of_scores_is_an_error(open_pool):
    with pytest.raises(RewardError, match="0 scores for 1 images"):
        open_pool(lambda images, prompts: []).reward(images_of(0.5), ["a"])


def test_a_request_of_a_worker_that_is_gone_is_not_scored():
    near, far = socket.socketpair()
    with near:
        far.close()
        request = Request(images=images_of(0.5), prompts=("a",), connection=near)
        (answer,) = ScoringProcess(lambda *_: pytest.fail("scored"), batch=8, timeout_seconds=60.0).scores_of([request])
    assert answer == Failed(text="the worker is gone")


# --- answers of a process that went wrong


class Wrong:
    """A scoring process that answers each request with the next of these functions of the request."""

    def __init__(self, folder, *answers):
        self.listener = listen(folder, 0)
        self.answers, self.asked = list(answers), 0
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        for answer in self.answers:
            connection, _ = self.listener.accept()
            with connection:
                ask, images = receive(connection)
                self.asked += 1
                message = answer(images, ask.prompts)
                if message is not None:
                    send(connection, message)

    def close(self):
        self.thread.join(20)
        self.listener.close()


def right(images, prompts):
    found = zip(images, prompts, means(images, prompts), strict=True)
    return Scores(scores=tuple(Scored.of(digest_of(image, prompt), score) for image, prompt, score in found))


def swapped(images, prompts):
    return right(images.flip(0), prompts)


def stale(images, prompts):
    """Return the answer to an earlier request for the same prompts, whose images were sampled with other weights."""
    return right(images + 0.125, prompts)


def short(images, prompts):
    return right(images[:1], prompts[:1])


def dies(images, prompts):
    return None


@pytest.mark.parametrize("wrong", [swapped, stale, short, dies])
def test_a_wrong_answer_is_never_taken_and_the_request_repeated(tmp_path, wrong):
    scorer = Wrong(tmp_path, wrong, wrong, right)
    scored = PoolReward(tmp_path, processes=1, tries=3)(images_of(0.25, 0.5), ["a", "a"])
    scorer.close()
    assert rewards(scored) == [0.25, 0.5]


@pytest.mark.parametrize("wrong", [swapped, dies])
def test_images_have_no_score_after_the_last_try(tmp_path, wrong, capsys):
    scorer = Wrong(tmp_path, *[wrong] * 3)
    scored = PoolReward(tmp_path, processes=1, tries=3)(images_of(0.25, 0.5), ["a", "a"])
    scorer.close()
    assert scorer.asked == 3
    assert all(isnan(reward) for reward in rewards(scored))
    assert scored[0].fault.startswith("scorer-0: try 3 of 3: the ")
    assert "2 images have no score" in capsys.readouterr().out


# --- real processes

SCORER = """\
import sys, time
from pathlib import Path
from engine.pool.server import ScoringProcess, listen
from engine.protocol.request import Score

def reward(images, prompts):
    while "hang" in prompts and not Path(sys.argv[2], "mended").exists():
        time.sleep(0.05)
    return [Score(reward=float(image.mean()), metrics={}) for image in images]

ScoringProcess(reward, batch=8, timeout_seconds=float(sys.argv[3])).serve(listen(Path(sys.argv[2]), int(sys.argv[1])))
"""


@pytest.fixture
def start(tmp_path):
    processes = []

    def begin(number, timeout_seconds=60.0):
        words = [sys.executable, "-c", SCORER, str(number), str(tmp_path), str(timeout_seconds)]
        processes.append(subprocess.Popen(words))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def ask_beside(reward, *arguments):
    """Ask in a thread. Return the thread and the list that will hold the scores."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(reward(*arguments)))
    thread.start()
    return thread, found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_request_to_a_lost_process_is_repeated_at_the_next(tmp_path, start, number):
    """The node's agent kills a frozen process after a while; the test does it in the agent's place."""
    victim = start(0)
    wait_until((tmp_path / "scorer-0.sock").exists)
    thread, found = ask_beside(PoolReward(tmp_path, processes=2, tries=3), images_of(0.25), ["hang"])
    time.sleep(0.3)
    os.kill(victim.pid, number)
    (tmp_path / "mended").touch()
    start(1)
    wait_until((tmp_path / "scorer-1.sock").exists)
    victim.kill()
    thread.join(60)
    assert rewards(found) == [0.25]


@pytest.mark.slow
def test_a_worker_waits_for_a_process_that_is_started_again(tmp_path, start):
    thread, found = ask_beside(PoolReward(tmp_path, processes=1, tries=1), images_of(0.25), ["a"])
    start(0)
    thread.join(60)
    assert rewards(found) == [0.25]


@pytest.mark.slow
def test_a_scorer_that_hangs_ends_its_process(tmp_path, start):
    process = start(0, timeout_seconds=0.3)
    wait_until((tmp_path / "scorer-0.sock").exists)
    thread, found = ask_beside(PoolReward(tmp_path, processes=1, tries=2), images_of(0.25), ["hang"])
    assert process.wait(60) == EXIT_SCORER_HANGS
    (tmp_path / "mended").touch()
    start(0)
    thread.join(60)
    assert rewards(found) == [0.25]


@pytest.mark.slow
def test_a_scorer_that_hangs_for_one_image_scores_the_others(tmp_path, start):
    """The second image hangs in the common call and alone; the first and the last are scored by new processes."""
    processes = [start(0, timeout_seconds=0.3)]
    wait_until((tmp_path / "scorer-0.sock").exists)
    pool = PoolReward(tmp_path, processes=1, tries=3)
    thread, found = ask_beside(pool, images_of(0.25, 0.5, 0.75, 0.5), ["a", "hang", "b", "hang"])
    while thread.is_alive():
        if processes[-1].poll() is not None:
            processes.append(start(0, timeout_seconds=0.3))
        time.sleep(0.05)
    assert [process.poll() for process in processes[:2]] == [EXIT_SCORER_HANGS] * 2
    assert len(processes) == 3
    assert [score.reward for score in found if not isnan(score.reward)] == [0.25, 0.75]
    assert all("reward.pool.timeout_seconds" in score.fault for score in found if isnan(score.reward))


def wait_until(is_so):
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_scorer_that_hangs_is_not_taken_for_a_rank_that_lost_another():
    """The agent counts exits by code: only a hanging scorer may use up the tries of its process."""
    assert len({EXIT_SCORER_HANGS, EXIT_TORN, EXIT_UNANSWERED, EXIT_UNFIT}) == 4
