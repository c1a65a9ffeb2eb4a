"""The worker: it keeps its leases, commits as it goes, and learns the batch size that fits into its memory."""

import dataclasses
import json
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from msgspec.structs import replace

from engine.clock import ScaledClock
from engine.config import ModelConfig, RuntimeConfig, SamplerConfig
from engine.diffusion.sampler import plan_to_dict, rollout_plan
from engine.diffusion.trajectory import Trajectory
from engine.events import Phase
from engine.models.load import load_adapter, trainable
from engine.models.weights import get_weights, set_weights
from engine.out_of_memory import is_out_of_memory
from engine.protocol.request import (
    Attempt,
    Drain,
    Exit,
    Fenced,
    Kind,
    LoadWeights,
    RequestId,
    Score,
    Wait,
    WeightsKey,
    Work,
    Yield,
)
from engine.protocol.task import Task
from engine.worker.worker import Worker
from tests.engine.heads import reply_to_dict, task_to_dict, weights_to_list
from tests.engine.served import Served

pytestmark = pytest.mark.usefixtures("one_layer")

V0 = WeightsKey(version=0)
STEPS = 8
SAMPLER = json.dumps(plan_to_dict(rollout_plan(SamplerConfig(steps=STEPS), 0, 0)))
LEASE = 7
LEASE_SECONDS = 1.5


class Toy:
    """A model of two weights. `largest`: the number of images that fit into its memory."""

    def __init__(self, largest=None, error=torch.OutOfMemoryError):
        self.transformer = torch.nn.Linear(1, 1)
        self.largest, self.error = largest, error
        self.steps = 0
        self.between = lambda step: None
        """Called in every step with the number of steps since the start."""

    def encode(self, prompts):
        return {"text": torch.tensor([[float(prompt)] for prompt in prompts])}

    def latent_shape(self):
        return (2,)

    def velocity(self, x, sigma, conditioning, guidance):
        self.steps += 1
        self.between(self.steps)
        if self.largest is not None and len(x) > self.largest:
            raise self.error("DefaultCPUAllocator: can't allocate memory")
        return 0.1 * x * conditioning["text"]

    def decode(self, x):
        return x[:, None, None, :]


class Line:
    """A scripted coordinator: it answers pulls with the given orders, and every other call with one answer a kind."""

    def __init__(self, *orders, **answers):
        self.orders, self.answers = list(orders), answers
        self.calls, self.blobs = [], {}
        self.before = lambda head: None
        """Function that is called in the caller's thread before each answer."""

    def call(self, head, blobs=None, *, wait=False):
        self.calls.append(dict(head))
        self.blobs |= blobs or {}
        self.before(head)
        match head["call"]:
            case "pull":
                reply = self.orders.pop(0) if self.orders else Exit(reason="done")
            case "states":
                return {"do": "states"}, {name: self.blobs[name] for name in head["names"]}
            case other:
                reply = self.answers.get(other, Wait())
        return reply_to_dict(reply), {}

    def of(self, *names):
        return [call for call in self.calls if call["call"] in names]

    def names(self):
        return [call["call"] for call in self.calls if call["call"] != "heartbeat"]


def order(count=1, shape=None, *, commit_every=0, kind=Kind.TRAIN, lease=LEASE, scorer="reward"):
    requests = (RequestId(run="r", lineage=0, batch=0, prompt="3", seed=seed, kind=kind) for seed in range(count))
    return Work(
        lease=lease,
        attempts=tuple(Attempt(request=request, weights=V0) for request in requests),
        sampler=SAMPLER,
        shape=shape or count,
        dtype="float32",
        expires_ms=0,
        commit_every=commit_every,
        images=(False,) * count,
        scorer=scorer,
    )


def worker(line, model=None, **options):
    model = model or Toy()
    options = {"scored_beside": 0, "overlap_commits": False, "heartbeat_seconds": 60.0} | options
    return Worker(
        name="spot/0",
        node="spot",
        workers_of_node=1,
        transport=line,
        adapter=model,
        parameters=dict(model.transformer.named_parameters()),
        reward=lambda pictures, prompts: [Score(reward=float(p.sum()), metrics={}) for p in pictures],
        clock=ScaledClock(origin_ms=0, factor=10.0),
        **options,
    )


def trajectories(line):
    """Return the trajectories of the last `finish`."""
    names = [result["trajectory"] for result in line.of("finish")[-1]["results"]]
    return [Trajectory.from_bytes(line.blobs[name]) for name in names]


def steps_committed(line):
    return [call["states"][0][1] for call in line.of("commit")]


# --- interrupted work


def half_made(degrees):
    """Return two images at step 4, made with the given degrees, and work that resumes from there."""
    line = Line(order(2, commit_every=4))
    worker(line).serve()
    (call,) = line.of("commit")
    names = [name for _, _, name in call["states"]]
    for name in names:
        state = dataclasses.replace(
            Trajectory.from_bytes(line.blobs[name]), degrees=torch.tensor(degrees, dtype=torch.uint8)
        )
        line.blobs[name] = state.to_bytes()
    work = order(2)
    attempts = tuple(replace(a, step=4, state=name) for a, name in zip(work.attempts, names, strict=True))
    return replace(work, attempts=attempts), line.blobs


@pytest.mark.parametrize(
    ("resume", "degrees", "steps"),
    [
        ("exact", [1, 1, 1, 1], 4),
        ("exact", [2, 2, 2, 2], 8),
        ("exact", [2, 2, 1, 1], 8),
        ("close", [2, 2, 1, 1], 4),
        ("restart", [1, 1, 1, 1], 8),
    ],
)
def test_interrupted_work_resumes_or_restarts_as_configured(resume, degrees, steps):
    work, blobs = half_made(degrees)
    line, model = Line(work), Toy()
    line.blobs = dict(blobs)
    worker(line, model, resume=resume).serve()
    assert model.steps == steps
    (made, _) = trajectories(line)
    assert made.degrees.tolist() == (degrees if steps == 4 else [1] * 4) + [1] * 4


def test_work_that_would_restart_is_not_committed_on_a_drain():
    line = Line(order(), heartbeat=Drain(deadline_ms=0))
    worker(line, heartbeat_seconds=0.0, resume="restart").serve()
    assert line.of("commit") == []
    assert line.of("give_back")


def test_a_worker_whose_rollouts_wait_gives_its_candidates_back_after_the_step():
    line, model = Line(order(kind=Kind.EXPLORE), heartbeat=Yield(lease=LEASE)), Toy()
    worker(line, model, heartbeat_seconds=0.0).serve()
    assert model.steps == 1
    assert line.names() == ["pull", "give_back", "pull"]
    assert line.of("commit") == [], "candidates are made anew"


# --- commits


def test_a_training_rollout_is_committed_at_its_interval():
    line = Line(order(2, commit_every=3))
    worker(line).serve()
    assert steps_committed(line) == [3, 6]
    first, second = line.of("commit")
    assert first.get("commit_ms") is None
    assert 0 < second["commit_ms"] < 60_000
    for call in line.of("commit"):
        for _, step, name in call["states"]:
            assert Trajectory.from_bytes(line.blobs[name]).step == step


@pytest.mark.parametrize(
    ("work", "options"),
    [
        (order(commit_every=0), {}),
        (order(commit_every=2, kind=Kind.EXPLORE), {}),
        (order(commit_every=2), {"may_load": False}),
    ],
    ids=["on-notice-only", "exploration", "the-trainers-own-worker"],
)
def test_work_without_a_commit_interval_is_not_committed(work, options):
    line = Line(work)
    worker(line, **options).serve()
    assert line.names() == ["pull", "finish", "pull"]


def test_resuming_from_a_commit_gives_the_same_bits():
    whole = Line(order(2, commit_every=3))
    worker(whole).serve()
    _, step, _ = whole.of("commit")[1]["states"][0]
    names = [name for _, _, name in whole.of("commit")[1]["states"]]
    half = order(2)
    attempts = tuple(replace(a, step=step, state=name) for a, name in zip(half.attempts, names, strict=True))
    resumed = Line(replace(half, attempts=attempts))
    resumed.blobs = dict(whole.blobs)
    model = Toy()
    worker(resumed, model).serve()
    assert model.steps == STEPS - step
    for one, other in zip(trajectories(whole), trajectories(resumed), strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.latents, other.latents)
        assert torch.equal(one.log_probs, other.log_probs)


def test_steps_do_not_wait_for_a_commit_and_only_one_commit_runs():
    answered = threading.Event()
    under_way, most = [], []

    def before(head):
        if head["call"] == "commit":
            under_way.append(head)
            most.append(len(under_way))
            answered.wait(60)
            under_way.remove(head)

    model = Toy()

    def let_go(step):
        if step == 6:  # the first commit, of step 1, has not been answered so far
            while not under_way:  # the commit thread may begin late
                time.sleep(0.001)
            assert steps_committed(line) == [1]
            answered.set()
            busy._commits._under_way.answer.result(timeout=60)

    line = Line(order(commit_every=1))
    line.before, model.between = before, let_go
    busy = worker(line, model, overlap_commits=True)
    busy.serve()
    assert steps_committed(line)[:2] == [1, 6]
    assert set(most) == {1}


def test_work_fenced_in_a_commits_answer_is_dropped_at_the_next_step():
    line = Line(order(commit_every=2), commit=Fenced(lease=LEASE))
    model = Toy()
    worker(line, model).serve()
    assert model.steps == 3
    assert line.names() == ["pull", "commit", "pull"]


def test_a_fence_for_an_earlier_lease_stops_nothing():
    line = Line(order(commit_every=2), commit=Fenced(lease=LEASE - 1))
    worker(line).serve()
    assert "finish" in line.names()


# --- notice


def test_a_notice_commits_the_current_step_and_returns_the_lease():
    line = Line(order(2))
    model = Toy()
    serving = worker(line, model, draining=lambda: model.steps >= 4)
    serving.serve_once(wait=False)
    assert model.steps == 4
    assert line.names() == ["pull", "commit", "give_back"]
    assert steps_committed(line) == [4]


def test_a_drained_worker_waits_for_its_running_commit_before_the_last_one():
    line = Line(order(commit_every=3))
    ended = []

    def before(head):
        if head["call"] == "commit":
            time.sleep(0.1 if not ended else 0.0)
            ended.append(head["states"][0][1])

    line.before = before
    model = Toy()
    serving = worker(line, model, overlap_commits=True, draining=lambda: model.steps >= 4)
    serving.serve_once(wait=False)
    assert ended == [3, 4]
    assert line.names() == ["pull", "commit", "commit", "give_back"]


def test_a_drained_worker_sends_scored_results_and_pulls_no_more():
    line = Line(order())
    model = Toy()
    serving = worker(line, model, scored_beside=1, draining=lambda: model.steps >= STEPS)
    serving.serve_once(wait=False)
    assert isinstance(serving.serve_once(wait=False), Drain)
    assert line.names() == ["pull", "finish"]


def test_a_drained_worker_gives_unscored_images_back_whole():
    let_go = threading.Event()

    def slow(pictures, prompts):
        let_go.wait(20)
        return [Score(reward=0.0, metrics={}) for _ in prompts]

    line = Line(order(2))
    model = Toy()
    serving = worker(line, model, scored_beside=1, draining=lambda: model.steps >= STEPS)
    serving.scorer.reward = slow
    serving.serve_once(wait=False)
    began = time.monotonic()
    assert isinstance(serving.serve_once(wait=False), Drain)
    assert time.monotonic() - began < 10
    let_go.set()
    assert line.names() == ["pull", "commit", "give_back"]
    assert steps_committed(line) == [STEPS]
    names = [name for _, _, name in line.of("commit")[0]["states"]]
    attempts = tuple(replace(a, step=STEPS, state=n) for a, n in zip(order(2).attempts, names, strict=True))
    resumed, rested = Line(replace(order(2), attempts=attempts)), Toy()
    resumed.blobs = dict(line.blobs)
    worker(resumed, rested).serve()
    assert rested.steps == 0
    assert [made.step for made in trajectories(resumed)] == [STEPS, STEPS]


def test_a_slow_scorer_keeps_no_worker_from_new_work():
    let_go = threading.Event()

    def slow(pictures, prompts):
        let_go.wait(20)
        return [Score(reward=float(picture.sum()), metrics={}) for picture in pictures]

    line = Line(order(), Wait(), order(lease=LEASE + 1))
    serving = worker(line, scored_beside=1, heartbeat_seconds=0.05)
    serving.scorer.reward = slow
    line.before = lambda head: let_go.set() if head["call"] == "pull" and len(line.of("pull")) == 3 else None
    serving.serve()
    assert [call["lease"] for call in line.of("finish")] == [LEASE, LEASE + 1]


def test_a_drained_worker_still_obeys_an_exit_order():
    line = Line(heartbeat=Exit(reason="target"))
    assert worker(line, draining=lambda: True).serve() == "target"


# --- free memory


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_a_shape_that_does_not_fit_is_returned_and_not_pulled_again(error):
    line = Line(order(2, shape=4), order(2, shape=3), order(2, shape=2))
    worker(line, Toy(largest=2, error=error)).serve()
    assert line.names() == ["pull", "give_back", "pull", "give_back", "pull", "finish", "pull"]
    assert [call.get("room") for call in line.of("pull")] == [None, 3, 2, 2]


def test_a_reward_that_runs_out_of_memory_is_not_a_fault():
    line = Line(order(2))
    serving = worker(line)

    def reward(pictures, prompts):
        raise torch.OutOfMemoryError("no room to decode")

    serving.scorer.reward = reward
    serving.serve()
    assert line.names() == ["pull", "give_back", "pull"]


def test_other_errors_are_faults():
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    line = Line(order())
    worker(line, Toy(largest=0, error=ValueError)).serve()
    assert line.names() == ["pull", "fault", "pull"]


# --- scorers


class Always:
    """A scorer that gives every image the same reward."""

    def __init__(self, reward):
        self.reward = reward

    def __call__(self, pictures, prompts):
        return [Score(reward=self.reward, metrics={}) for _ in prompts]


def rewards_sent(line):
    return [result["reward"] for call in line.of("finish") for result in call["results"]]


def test_the_named_scorer_scores_and_a_student_is_loaded_once_on_demand():
    explored = order(kind=Kind.EXPLORE), order(kind=Kind.EXPLORE, scorer="student")
    line = Line(explored[0], explored[1], order(), explored[1])
    loaded = []

    def load():
        loaded.append(len(line.of("finish")))
        return Always(0.25)

    serving = worker(line, student=load)
    serving.scorer.reward = Always(1.0)
    serving.serve()
    assert rewards_sent(line) == [1.0, 0.25, 1.0, 0.25]
    assert loaded == [1]  # after the first lease was finished


def test_without_a_student_the_reward_scores_with_one_log_line(capsys):
    line = Line(*[order(kind=Kind.EXPLORE, scorer="student")] * 3)
    serving = worker(line)
    serving.scorer.reward = Always(1.0)
    serving.serve()
    assert rewards_sent(line) == [1.0, 1.0, 1.0]
    assert capsys.readouterr().out.count("no student") == 1


def test_a_student_that_cannot_be_loaded_is_a_fault_with_its_reason():
    def load():
        raise ValueError("the file is cut short")

    line = Line(order(kind=Kind.EXPLORE, scorer="student"))
    worker(line, student=load).serve()
    assert line.names() == ["pull", "fault", "pull"]
    assert "the file is cut short" in line.of("fault")[0]["text"]


# --- pulls, pace, weights


def test_pulls_are_numbered_and_every_call_names_the_process():
    line = Line(Wait(), order(commit_every=4), Wait())
    worker(line, boot=5).serve()
    assert [call["seq"] for call in line.of("pull")] == [1, 2, 3, 4]
    assert {call["boot"] for call in line.calls} == {5}


def test_a_step_takes_at_least_its_configured_time():
    began = time.perf_counter()
    worker(Line(order()), step_seconds=0.02).serve()
    assert time.perf_counter() - began >= STEPS * 0.02


def test_time_of_the_commit_thread_alone_is_not_sync_time():
    line = Line(order(commit_every=STEPS - 1))

    def slow(head):
        if head["call"] == "commit":
            time.sleep(1.0)

    line.before = slow
    serving = worker(line, overlap_commits=True)
    serving.serve()
    ms_per_second = 1 / serving.clock.wall_seconds(1)
    assert serving.usage.total[str(Phase.SYNC)] < 0.9 * ms_per_second


def test_weights_load_from_any_buffer_and_a_missing_tensor_changes_nothing():
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    parameters = dict(other.named_parameters())
    data = get_weights(dict(one.named_parameters()))
    with pytest.raises(KeyError, match="scale"):
        set_weights(parameters | {"scale": other.bias}, data)
    assert not torch.equal(one.weight, other.weight)
    set_weights(parameters, memoryview(bytearray(data)))
    assert get_weights(parameters) == data


def test_weights_replaced_during_loading_do_not_count_as_held():
    class Gone:
        @contextmanager
        def get(self, weights, digest):
            yield None

    line = Line(LoadWeights(weights=V0, digest="old"), Wait())
    worker(line, source=Gone()).serve()
    assert [call.get("holds") for call in line.of("pull")] == [None, None, None]


# --- over HTTP


@pytest.mark.slow
@pytest.mark.parametrize("other", [Kind.TRAIN, Kind.EXPLORE], ids=str)
def test_a_reward_slower_than_a_lease_loses_no_work(tmp_path, other):
    """One lease is scored while the other is sampled, or before it. Scoring takes twice as long as a lease lasts."""
    torch.set_num_threads(1)
    clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
    # Over HTTP the coordinator checks its leases while the worker waits.
    front = Served(tmp_path, RuntimeConfig(lease_seconds=LEASE_SECONDS, first_lease_seconds=LEASE_SECONDS))
    transport, coordinator = front.transport(), front.coordinator
    adapter = load_adapter(ModelConfig())
    scored = []

    def slow(pictures, prompts):
        time.sleep(2 * LEASE_SECONDS)
        scored.append(tuple(prompts))
        return [Score(reward=1.0, metrics={}) for _ in prompts]

    serving = Worker(
        name="spot/0",
        node="spot",
        workers_of_node=1,
        transport=transport,
        adapter=adapter,
        parameters=trainable(adapter),
        reward=slow,
        clock=clock,
        heartbeat_seconds=0.2,
    )
    plan = rollout_plan(SamplerConfig(steps=2), 0, 0)
    v0 = WeightsKey(version=0)
    transport.call({"call": "publish", "weights": weights_to_list(v0)}, {"weights": get_weights(trainable(adapter))})
    sampler = json.dumps(plan_to_dict(plan))
    for seed, kind in enumerate([Kind.TRAIN, other]):
        request = RequestId(run="r", lineage=0, batch=0, prompt=f"{seed:04d}", seed=seed, kind=kind)
        task = Task(requests=(request,), weights=v0, sampler=sampler, steps=2, shape=1, dtype="float32")
        transport.call({"call": "submit", "task": task_to_dict(task)})
    try:
        while any(map(coordinator.queue.wanted, (Kind.TRAIN, other))) and len(scored) < 4:
            serving.serve_once(wait=False)
    finally:
        front.close()
    assert scored == [("0000",), ("0001",)]
    assert [event.KIND for event in coordinator.queue.events] == ["node_seen", "node_served"]
