"""Wire format: every message survives encoding, and a truncated message is refused."""

import math
from typing import get_args

import pytest
from msgspec.structs import replace

from engine.protocol.codec import (
    decode_answer,
    decode_call,
    decode_record,
    encode,
    encode_record,
    pack,
    unpack,
)
from engine.protocol.exploration_order import ExplorationOrder
from engine.protocol.messages import (
    Answer,
    BeginLineage,
    BillJudge,
    Call,
    Collect,
    Commit,
    CommittedState,
    Done,
    Explore,
    Fault,
    FetchStates,
    FetchWeights,
    Finish,
    GiveBack,
    GroupReport,
    Heartbeat,
    Held,
    HeldWeights,
    HoldMoney,
    Known,
    Late,
    LookAhead,
    NodeLost,
    NoMoney,
    Notice,
    Outlook,
    PaidCall,
    Peek,
    Publish,
    Published,
    Pull,
    Result,
    Results,
    States,
    StepTime,
    Stop,
    Submit,
    TakeTurn,
    Turn,
    UnderWay,
    Waiting,
    WeightsBytes,
    Withdraw,
    WorkerDied,
)
from engine.protocol.records import (
    CoordinatorStarted,
    JudgeBilled,
    JudgesFunded,
    LeaseRecord,
    MoneyHeld,
    Record,
    RequestPoisoned,
    ResultsAccepted,
    StatesCommitted,
    WeightsPublished,
)
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
    Yield,
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
        images=(True, False),
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
    Yield(lease=6),
    Fenced(lease=5),
    Exit(reason="the run is over"),
]


def travelled(head):
    return unpack(pack(head))[0]


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_every_reply_survives_encoding(reply):
    assert reply_from_dict(travelled(reply_to_dict(reply))) == reply


TASK = Task(requests=(REQUEST,), weights=WEIGHTS, sampler="plan", steps=8, shape=4, dtype="float32", images=1)


@pytest.mark.parametrize("task", [TASK, replace(TASK, requests=(CANDIDATE,), scorer="student")])
def test_a_task_survives_encoding(task):
    assert task_from_dict(travelled(task_to_dict(task))) == task


def test_a_training_task_with_a_student_scorer_is_refused():
    with pytest.raises(ValueError, match="only exploration may"):
        task_from_dict(task_to_dict(TASK) | {"scorer": "student"})


def test_a_result_survives_encoding():
    result = Finished(request=REQUEST, score=Score(reward=0.1, metrics={"exact": 1.0}), trajectory="blob", node="a")
    assert finished_from_dict(travelled(finished_to_dict(result))) == result


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_non_finite_reward_survives_encoding(reward):
    result = Finished(request=REQUEST, score=Score(reward=reward, metrics={"exact": reward, "similar": 0.5}))
    there = finished_from_dict(travelled(finished_to_dict(result)))
    assert math.isnan(there.score.reward)
    assert math.isnan(there.score.metrics["exact"])
    assert there.score.metrics["similar"] == 0.5


def test_an_unknown_order_kind_is_refused():
    with pytest.raises(ValueError, match="dance"):
        reply_from_dict({"do": "dance"})


def test_blobs_survive_encoding_beside_the_head():
    blobs = {"a": b"\0\1\2", "empty": b"", "b": b"x" * 1000}
    assert unpack(pack({"n": 1}, blobs)) == ({"n": 1}, blobs)


def test_a_truncated_message_is_refused():
    whole = pack({"n": 1}, {"a": b"abc"})
    for size in range(len(whole)):
        with pytest.raises(ValueError, match=r"^message of |: line 1 column "):
            unpack(whole[:size])
    with pytest.raises(ValueError, match="bytes should have"):
        unpack(whole + b"x")


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"head": 1, "blobs": []}', '{"head": {}, "blobs": [["a"]]}'])
def test_a_message_of_another_format_is_refused(text):
    with pytest.raises(ValueError, match=r"^not a message of ours: |not enough values"):
        unpack(len(text).to_bytes(8, "little") + text.encode())


def test_a_head_never_carries_a_number_that_json_cannot_hold():
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack({"reward": math.nan})


CALLER = {"worker": "a/0", "node": "a", "boot": 3, "of": 2, "usage": (("sync", 0.5, 1.5),)}
ORDER = {"node": "trainer", "boot": 3, "seq": 4}
PLAN = ExplorationOrder(
    run="run",
    run_seed=0,
    lineage=2,
    batch=3,
    prompts=("1234",),
    keep=1,
    most=4,
    policy="bayes",
    chunk=2,
    counted=None,
    version=7,
    sampler="plan",
    steps=8,
    shape=4,
    dtype="float32",
    scorer="reward",
    priors={"1234": {"count": 1.0, "mean": 0.5, "variance": 0.25}},
)
CALLS = [
    HoldMoney(**CALLER, seq=3, micro_usd=10_120),
    TakeTurn(**CALLER, judge="http://a judge", gap_seconds=0.5),
    BillJudge(**CALLER, seq=3, calls=(PaidCall(input_tokens=1000, output_tokens=50, micro_usd=5500),)),
    Pull(
        **CALLER,
        seq=9,
        holds=HeldWeights(version=7, average=True, digest="abc"),
        kinds=(Kind.TRAIN, Kind.EXPLORE),
        most_images=2,
        group=GroupReport(epoch=4, torn=(3,), believed={1: 1.0, 2: 0.6}),
    ),
    Pull(**CALLER, seq=9),
    Heartbeat(**CALLER, leases={2_000_000_001: 5}),
    Finish(
        **CALLER,
        lease=7,
        results=(Result(request=REQUEST, reward=0.5, metrics={"exact": None}, trajectory="blob"),),
        pace=StepTime(request_class="4 x float32", degree=2, seconds=0.25),
    ),
    Commit(**CALLER, lease=7, states=(CommittedState(request=REQUEST, step=3, blob="blob"),), commit_ms=12.5),
    GiveBack(**CALLER, lease=7),
    Fault(**CALLER, lease=7, text="boom"),
    FetchStates(names=("a", "b")),
    FetchWeights(weights=WEIGHTS),
    Notice(node="a", deadline_ms=99),
    WorkerDied(worker="a/0", node="a", boot=3, reason="killed"),
    NodeLost(node="a", reason="gone"),
    Peek(node="trainer"),
    LookAhead(node="trainer", batch=3),
    Collect(kind=Kind.TRAIN, batch=3, have=2, poisoned=1, wait_ms=500),
    BeginLineage(**ORDER, lineage=2),
    Submit(**ORDER, task=TASK),
    Explore(**ORDER, order=PLAN),
    Publish(**ORDER, weights=WEIGHTS),
    Withdraw(**ORDER, batches=((Kind.TRAIN, 3), (Kind.EXPLORE, 4))),
    Stop(**ORDER, reason="budget"),
]
ANSWERS = [
    Done(),
    Held(),
    Turn(seconds=1.5),
    NoMoney(text="the judges' budget is used up"),
    Late(),
    Known(lineage=2, version=None),
    Published(digest="abc"),
    States(),
    WeightsBytes(),
    Results(
        results=(),
        stop=None,
        poisoned=("boom",),
        nodes=("a",),
        to_come=3,
        exploring_seconds=1.5,
        poisoned_requests=(REQUEST,),
    ),
    Outlook(
        waiting=(Waiting(prompt="1234", seed=2**63, step=3),),
        leases=(UnderWay(worker="a/0", left_ms=12.5, steps_left=4, images=(("1234", 2**63),)),),
        idle=("b/0",),
        step_ms=60.0,
    ),
]
RECORDS = [
    JudgesFunded(micro_usd=2_000_000),
    MoneyHeld(worker="spot-0/0", boot=5, seq=3, micro_usd=10_120),
    JudgeBilled(worker="spot-0/0", boot=5, seq=3, micro_usd=5500),
    CoordinatorStarted(first_lease=2_000_000_001),
    BeginLineage(lineage=2, boot=3, seq=4),
    WeightsPublished(weights=WEIGHTS, digest="abc", boot=3, seq=4),
    Submit(task=TASK),
    Explore(order=PLAN, boot=3),
    Withdraw(batches=((Kind.TRAIN, 3),), seq=4),
    ResultsAccepted(results=(Result(request=REQUEST, reward=None, metrics={}, trajectory=None, node="a"),)),
    StatesCommitted(states=(CommittedState(request=REQUEST, step=3, blob="blob"),)),
    RequestPoisoned(request=REQUEST, text="boom"),
    LeaseRecord(
        number=7,
        worker="a/0",
        node="a",
        boot=3,
        seq=9,
        weights=WEIGHTS,
        requests=(REQUEST,),
        lease_ms=1000,
        copy=False,
    ),
]


def named(message):
    return type(message).__name__


@pytest.mark.parametrize("call", CALLS, ids=named)
def test_every_call_survives_encoding(call):
    assert decode_call(travelled(encode(call))) == call


@pytest.mark.parametrize("answer", [*REPLIES, *ANSWERS], ids=named)
def test_every_answer_survives_encoding(answer):
    assert decode_answer(travelled(encode(answer))) == answer


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_every_journal_record_survives_encoding(record):
    assert decode_record(travelled(encode_record(record))) == record


@pytest.mark.parametrize("number", [5, None, [1], [1, 2, 3], ["a", "b"]])
def test_a_record_with_a_malformed_order_number_is_refused(number):
    with pytest.raises(ValueError, match=r"said|unpack|Expected"):
        decode_record({"op": "hello", "lineage": 1, "said": number})


@pytest.mark.parametrize(
    ("union", "sent"),
    [(Call, CALLS), (Answer, [*REPLIES, *ANSWERS]), (Record, RECORDS)],
    ids=["call", "answer", "record"],
)
def test_these_tests_cover_every_message(union, sent):
    assert {type(message) for message in sent} == set(get_args(union))
