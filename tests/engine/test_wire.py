"""What travels arrives as it was sent, and what is cut short is refused."""

import math

import pytest
from msgspec.structs import replace

from engine.protocol.codec import pack, unpack
from engine.protocol.request import (
    Attempt,
    Drain,
    Exit,
    Fenced,
    Finished,
    Kind,
    LoadWeights,
    Regroup,
    RequestId,
    Score,
    Wait,
    WeightsKey,
    Work,
)
from engine.protocol.task import Task
from tests.engine.heads import (
    finished_from_dict,
    finished_to_dict,
    reply_from_dict,
    reply_to_dict,
    task_from_dict,
    task_to_dict,
)

REQUEST = RequestId(run="run", lineage=2, batch=3, prompt='Zwölf "Boxkämpfer"\n', seed=2**64 - 1, kind=Kind.TRAIN)
CANDIDATE = replace(REQUEST, kind=Kind.EXPLORE)
WEIGHTS = WeightsKey(version=7, average=True)
REPLIES = [
    Wait(),
    Work(
        lease=2_000_000_001,
        attempts=(
            Attempt(request=REQUEST, weights=WEIGHTS),
            Attempt(request=REQUEST, weights=WEIGHTS, step=3, state="blob"),
        ),
        sampler='{"name": "cps"}',
        shape=4,
        dtype="bfloat16",
        expires_ms=12345,
        pictures=(True, False),
    ),
    Work(
        lease=7,
        attempts=(Attempt(request=CANDIDATE, weights=WEIGHTS),),
        sampler="plan",
        shape=1,
        dtype="float32",
        expires_ms=1,
        scorer="student",
    ),
    LoadWeights(weights=WEIGHTS, digest="abc"),
    Regroup(epoch=4, rank=1, degree=2, members=("a/0", "a/1"), communicator=3),
    Drain(deadline_ms=99),
    Fenced(lease=5),
    Exit(reason="the run is over"),
]


def travelled(head):
    return unpack(pack(head))[0]


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_every_reply_arrives_as_it_was_sent(reply):
    assert reply_from_dict(travelled(reply_to_dict(reply))) == reply


TASK = Task(requests=(REQUEST,), weights=WEIGHTS, sampler="plan", steps=8, shape=4, dtype="float32", pictures=1)


@pytest.mark.parametrize("task", [TASK, replace(TASK, requests=(CANDIDATE,), scorer="student")])
def test_a_task_arrives_as_it_was_sent(task):
    assert task_from_dict(travelled(task_to_dict(task))) == task


def test_a_task_that_arrives_with_a_student_for_training_is_refused():
    with pytest.raises(ValueError, match="only exploration may"):
        task_from_dict(task_to_dict(TASK) | {"scorer": "student"})


def test_a_result_arrives_as_it_was_sent():
    result = Finished(request=REQUEST, score=Score(reward=0.1, metrics={"exact": 1.0}), trajectory="blob", node="a")
    assert finished_from_dict(travelled(finished_to_dict(result))) == result


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_travels_and_stays_not_finite(reward):
    result = Finished(request=REQUEST, score=Score(reward=reward, metrics={"exact": reward, "similar": 0.5}))
    there = finished_from_dict(travelled(finished_to_dict(result)))
    assert math.isnan(there.score.reward)
    assert math.isnan(there.score.metrics["exact"])
    assert there.score.metrics["similar"] == 0.5


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="dance"):
        reply_from_dict({"do": "dance"})


def test_blobs_travel_beside_the_head():
    blobs = {"a": b"\0\1\2", "empty": b"", "b": b"x" * 1000}
    assert unpack(pack({"n": 1}, blobs)) == ({"n": 1}, blobs)


def test_a_message_cut_anywhere_is_refused():
    whole = pack({"n": 1}, {"a": b"abc"})
    for size in range(len(whole)):
        with pytest.raises(ValueError):
            unpack(whole[:size])
    with pytest.raises(ValueError, match="bytes should have"):
        unpack(whole + b"x")


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"head": 1, "blobs": []}', '{"head": {}, "blobs": [["a"]]}'])
def test_a_message_that_is_not_ours_is_refused(text):
    with pytest.raises(ValueError):
        unpack(len(text).to_bytes(8, "little") + text.encode())


def test_a_head_never_carries_a_number_that_json_does_not_know():
    with pytest.raises(ValueError):
        pack({"reward": math.nan})
