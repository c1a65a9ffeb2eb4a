"""The node agent restarts a dead worker at once, and the worker reuses the node's weights."""

import contextlib
import json
import os
import re
import signal
import time
from types import SimpleNamespace

import psutil
import pytest

from engine.config import EngineConfig, ModelConfig, RuntimeConfig, SamplerConfig
from engine.diffusion.sampler import plan_to_dict, rollout_plan
from engine.events import IterationDone, Progress
from engine.models.load import load_adapter, trainable
from engine.models.weights import get_weights
from engine.node.agent import EXIT_BROKEN, _Child
from engine.node.child import (
    EXIT_SUPERSEDED,
    EXIT_TORN,
    EXIT_UNANSWERED,
    Deaths,
    died_too_often,
    note_start,
    progress_of,
)
from engine.pool.server import EXIT_SCORER_HANGS
from engine.protocol.request import Kind, RequestId, WeightsKey
from engine.protocol.task import Task
from tests.end_to_end.sharing import Sharing
from tests.engine.heads import task_to_dict, weights_to_list
from tests.engine.nursery import NurseryFleet
from tests.engine.served import Served
from tests.engine.test_node_agent_on_cloud import spec_of

V0 = WeightsKey(version=0)
STEPS = 40
LONG = 5 * STEPS
"""Steps of an image that lasts ten seconds: long enough to hear of a notice in the middle of it on a busy computer."""
CONFIG = EngineConfig(runtime=RuntimeConfig(shape=2, step_seconds=0.05, commit_every=4))


@contextlib.contextmanager
def a_node(folder, config):
    """Start a spot node with two workers, and a coordinator for them."""
    served = Served(folder / "coordinator", config.runtime)
    fleet = NurseryFleet(folder, config)
    fleet.port = served.port
    try:
        fleet.start("spot", workers=2)
        transport = served.transport()
        data = get_weights(trainable(load_adapter(ModelConfig())))
        transport.call({"call": "publish", "weights": weights_to_list(V0)}, {"weights": data})
        yield SimpleNamespace(fleet=fleet, served=served, transport=transport)
    finally:
        fleet.close()
        served.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A node whose images take two seconds each."""
    with a_node(tmp_path_factory.mktemp("node"), CONFIG) as node:
        yield node


def submit(node, batch, count, steps=STEPS):
    requests = tuple(
        RequestId(run="r", lineage=0, batch=batch, prompt=f"{seed:04d}", seed=seed, kind=Kind.TRAIN)
        for seed in range(count)
    )
    sampler = json.dumps(plan_to_dict(rollout_plan(SamplerConfig(steps=steps), 0, batch)))
    task = Task(requests=requests, weights=V0, sampler=sampler, steps=steps, shape=2, dtype="float32")
    node.transport.call({"call": "submit", "task": task_to_dict(task)})


def pulls(node, worker):
    return [(at, head) for at, head in node.served.of("pull") if head["worker"] == worker]


def wait_for_both_to_commit(node, since=0.0):
    def both():
        late = {head["worker"] for at, head in node.served.of("commit") if at > since}
        return len(late) == 2

    node.fleet.wait_for(both, seconds=60.0)


def both_are_in_an_image(node, batch):
    """Whether the newest call of each worker committed an image of this batch whose second half is still to come.

    A worker that reads the notice after its last step has no lease to give back; a short image of the test before is at
    its last step after fewer steps.
    """
    newest = {head["worker"]: head for _, head in list(node.served.calls) if head.get("worker")}
    states = [head["states"][0] if head["call"] == "commit" else None for head in newest.values()]
    return len(states) == 2 and all(state and state[0][2] == batch and state[1] <= LONG // 2 for state in states)


@pytest.mark.slow
def test_two_workers_fetch_weights_once_and_a_restarted_worker_reuses_them(node):
    submit(node, 0, 8)
    wait_for_both_to_commit(node)
    assert len(node.served.of("weights")) == 1

    os.kill(node.fleet.pid_of("spot", "worker-0"), signal.SIGKILL)
    killed = time.monotonic()

    def died():
        return [(at, head["worker"]) for at, head in node.served.of("died") if at > killed]

    node.fleet.wait_for(died, seconds=60.0)
    ((reported, who),) = died()
    assert who == "spot/0"
    assert reported - killed < 5.0  # a silent worker is noticed later: its lease lasts longer
    wait_for_both_to_commit(node, since=reported)
    successor = psutil.Process(node.fleet.pid_of("spot", "worker-0"))
    assert successor.ppid() == node.fleet.agents["spot"].pid  # the worker was forked, so it imported nothing
    again = next(at for at, head in pulls(node, "spot/0") if at > killed and head["seq"] == 1)
    print(f"killed: death reported after {reported - killed:.3f} s, pulls again {again - killed:.3f} s after")
    assert len(node.served.of("weights")) == 1
    assert node.served.coordinator.queue.poisoned == {}


@pytest.mark.slow
def test_a_worker_ends_with_its_agent_while_another_worker_is_frozen(tmp_path):
    with a_node(tmp_path, CONFIG) as node:
        node.fleet.wait_for((tmp_path / "nodes/spot/ready.json").exists)
        frozen, other = (psutil.Process(node.fleet.pid_of("spot", f"worker-{number}")) for number in (1, 0))
        frozen.suspend()
        os.kill(node.fleet.agents["spot"].pid, signal.SIGKILL)
        psutil.wait_procs([other], timeout=60)
        assert not other.is_running()
        assert frozen.is_running()


@pytest.mark.slow
def test_finished_rollouts_count_as_progress_of_a_spot_node(node):
    spec = spec_of(node.fleet.folder / "nodes/spot")
    before = progress_of(spec)
    submit(node, 5, 4)
    node.fleet.wait_for(lambda: progress_of(spec) != before, seconds=60.0)
    assert node.served.of("finish")


@pytest.mark.slow
def test_a_node_under_notice_commits_returns_its_leases_and_pulls_no_more(node):
    submit(node, 1, 40, steps=LONG)
    node.fleet.wait_for(lambda: both_are_in_an_image(node, batch=1), seconds=60.0)
    noticed = time.monotonic()
    node.fleet.notice("spot", seconds=60.0)

    def both_gave_back():
        return {head["worker"] for at, head in node.served.of("give_back") if at > noticed} == {"spot/0", "spot/1"}

    node.fleet.wait_for(both_gave_back, seconds=60.0)
    last = node.served.calls[-1][0]
    node.fleet.wait_for(lambda: len(node.served.of("notice")) == 1, seconds=60.0)
    time.sleep(0.5)
    assert [head for at, head in node.served.of("pull") if at > last] == []
    # The next worker repeats no step: the last commit is of the step at which the lease was returned.
    for worker in ("spot/0", "spot/1"):
        mine = [head for at, head in node.served.calls if at > noticed and head.get("worker") == worker]
        names = [head["call"] for head in mine if head["call"] in ("commit", "give_back")]
        assert names[-2:] == ["commit", "give_back"]


@pytest.mark.slow
def test_a_node_whose_store_dies_starts_a_new_one_and_its_workers_regroup(tmp_path):
    shared = {"sp_degree": 2, "sp_timeout_seconds": 1.0, "trace_steps": True}
    config = CONFIG.model_copy(update={"runtime": CONFIG.runtime.model_copy(update=shared)})
    with a_node(tmp_path, config) as node:
        submit(node, 0, 200)
        sharing = Sharing(node.fleet.folder / "nodes", workers=2)
        sharing.wait({"spot": 0})
        store = node.fleet.pid_of("spot", "store")
        began_ns = time.time_ns()
        os.kill(store, signal.SIGKILL)
        sharing.wait({"spot": 0}, began_ns)
        assert node.fleet.pid_of("spot", "store") != store


class Dead:
    """A process that has ended."""

    sentinel = None

    def __init__(self, exitcode):
        self.exitcode = exitcode

    def is_alive(self):
        return False


class SupervisedProcess:
    """One process of a node. The test sets how long each start lives; `progress` counts the node's progress."""

    def __init__(self):
        self.progress, self.starts = 0, 0
        past = Deaths(lambda: self.progress)
        self.child = _Child(name="worker-0", start=self.start, heartbeat=SimpleNamespace(value=0.0), past=past)

    def start(self):
        self.starts += 1
        return Dead(0)

    def dies(self, exitcode, after_seconds, **more):
        """End the process, and return the reason why the node gives up, or None."""
        self.child.process, self.child.started = Dead(exitcode), time.monotonic() - after_seconds
        return self.child.keep_alive(**more)


@pytest.mark.parametrize("after_seconds", [1, 25, 3600])
def test_three_equal_exits_without_progress_end_the_node_at_any_interval(after_seconds):
    process = SupervisedProcess()
    assert [process.dies(1, after_seconds) for _ in range(3)] == [
        None,
        None,
        "worker-0 ended with exit code 1 3 times without progress",
    ]


def test_a_process_is_restarted_without_limit_while_its_node_makes_progress():
    process = SupervisedProcess()
    for process.progress in range(20):
        assert [process.dies(-9, 25), process.dies(-9, 25)] == [None, None]


def test_the_fifth_of_different_exits_ends_the_node():
    process = SupervisedProcess()
    exits = [1, -9, 2, -11, 3]
    assert [process.dies(code, 25) for code in exits][:4] == [None] * 4
    assert process.child.past.give_up() == "ended 5 times without progress, at last with exit code 3"


def test_an_exit_on_a_node_under_preemption_does_not_count():
    process = SupervisedProcess()
    assert [process.dies(-9, 25, leaving=True) for _ in range(10)] == [None] * 10


def test_a_worker_without_a_coordinator_is_restarted_without_limit():
    process = SupervisedProcess()
    assert [process.dies(EXIT_UNANSWERED, 61) for _ in range(10)] == [None] * 10


def test_the_first_restart_is_immediate_and_repeated_restarts_back_off():
    process = SupervisedProcess()
    assert process.dies(-9, 25) is None
    assert process.starts == 1
    assert process.dies(-11, 25) is None
    assert process.starts == 1
    assert process.child.started - time.monotonic() > 0.3


def iteration_done(lineage, iteration):
    event = IterationDone(
        iteration=iteration,
        reward_mean=0.0,
        reward_std=0.0,
        group_std_mean=0.0,
        explored=0,
        manifest_digest="",
        phase_ms={},
        wall_seconds=1.0,
        health={},
    )
    line = Progress(run="r", source="trainer", lineage=lineage, seq=iteration, at_ms=0, event=event)
    return f"{line.to_json()}\n"


def test_a_new_iteration_is_progress_and_a_repeated_one_is_not(tmp_path):
    spec = spec_of(tmp_path, role="trainer")
    (tmp_path / "progress").mkdir()
    file = tmp_path / "progress/trainer.jsonl"
    seen = [progress_of(spec)]
    for line in (iteration_done(1, 0), iteration_done(1, 1), iteration_done(2, 1), "cut short", iteration_done(2, 2)):
        file.write_text(line if not file.exists() else file.read_text() + line + "\n")
        seen.append(progress_of(spec))
    assert seen == [None, 0, 1, 1, 1, 2]


def test_restarting_a_coordinator_by_ray_stops_without_progress(tmp_path):
    spec, mark = spec_of(tmp_path, role="trainer"), tmp_path / "coordinator.json"
    (tmp_path / "progress").mkdir()
    for start in range(20):
        (tmp_path / "progress/trainer.jsonl").write_text(iteration_done(1, start))
        note_start(mark, spec)
    assert not died_too_often(mark)
    for _ in range(4):
        note_start(mark, spec)
    assert died_too_often(mark)


def test_a_node_that_gives_up_writes_its_reason_in_one_line(tmp_path):
    reward = CONFIG.reward.model_copy(update={"name": "no_such_package.rewards:score"})
    with a_node(tmp_path, CONFIG.model_copy(update={"reward": reward})) as node:
        assert node.fleet.agents["spot"].wait(timeout=120) == EXIT_BROKEN
        report = json.loads((tmp_path / "nodes/spot/exit.json").read_text())
    assert re.fullmatch(
        r"worker-\d ended with exit code 1 3 times without progress; its log ends: .*no_such_package.*", report["text"]
    )


def test_exit_codes_that_an_agent_tells_apart_differ():
    codes = [EXIT_UNANSWERED, EXIT_TORN, EXIT_SCORER_HANGS, EXIT_SUPERSEDED]
    assert len({*codes, 0, 1}) == len(codes) + 2
