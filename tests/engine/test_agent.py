"""A node whose worker dies has it back at once, without asking anyone for the weights again."""

import contextlib
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig, ModelConfig, RuntimeConfig, SamplerConfig
from engine.models.load import load_adapter, trainable
from engine.rollout.queue import Task
from engine.rollout.request import Kind, RequestId, WeightsKey
from engine.rollout.sampler import plan_to_dict, rollout_plan
from engine.rollout.wire import task_to_dict, weights_to_list
from engine.runtime.agent import CALM_SECONDS, _Child
from engine.runtime.worker import get_weights
from tests.end_to_end.sharing import Sharing
from tests.engine.fleet import Fleet
from tests.engine.served import Served

V0 = WeightsKey(version=0)
STEPS = 40
CONFIG = EngineConfig(runtime=RuntimeConfig(shape=2, step_seconds=0.05, commit_every=4))


@contextlib.contextmanager
def a_node(folder, config):
    """A spot node of two workers, and the coordinator that they call in to."""
    served = Served(folder / "coordinator", config.runtime)
    fleet = Fleet(folder, config)
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
    """Its pictures take two seconds."""
    with a_node(tmp_path_factory.mktemp("node"), CONFIG) as node:
        yield node


def submit(node, batch, count):
    requests = tuple(
        RequestId(run="r", lineage=0, batch=batch, prompt=f"{seed:04d}", seed=seed, kind=Kind.TRAIN)
        for seed in range(count)
    )
    sampler = json.dumps(plan_to_dict(rollout_plan(SamplerConfig(steps=STEPS), 0, batch)))
    task = Task(requests=requests, weights=V0, sampler=sampler, steps=STEPS, shape=2, dtype="float32")
    node.transport.call({"call": "submit", "task": task_to_dict(task)})


def pulls(node, worker):
    return [(at, head) for at, head in node.served.of("pull") if head["worker"] == worker]


def wait_for_both_to_commit(node, since=0.0):
    def both():
        late = {head["worker"] for at, head in node.served.of("commit") if at > since}
        return len(late) == 2

    node.fleet.wait_for(both, seconds=60.0)


def test_two_workers_ask_once_for_the_weights_and_a_killed_one_works_again_without_asking(node):
    submit(node, 0, 8)
    wait_for_both_to_commit(node)
    assert len(node.served.of("weights")) == 1

    os.kill(node.fleet.pid_of("spot", "worker-0"), signal.SIGKILL)
    killed = time.monotonic()
    wait_for_both_to_commit(node, since=killed)
    died = [(at, head["worker"]) for at, head in node.served.of("died") if at > killed]
    assert died[0][1] == "spot/0"
    assert died[0][0] - killed < 0.5
    again = next(at for at, head in pulls(node, "spot/0") if at > killed and head["seq"] == 1)
    assert again - killed < 5.0
    print(f"killed: died heard {died[0][0] - killed:.3f} s, pulls again {again - killed:.3f} s after")
    assert len(node.served.of("weights")) == 1
    assert node.served.coordinator.queue.poisoned == {}


def test_a_noticed_node_commits_gives_back_and_asks_for_nothing_more(node):
    submit(node, 1, 40)  # enough for both to be at work when the notice comes, however slow this machine is
    begun = time.monotonic()
    wait_for_both_to_commit(node, since=begun)
    node.fleet.notice("spot", seconds=60.0)
    noticed = time.monotonic()

    def both_gave_back():
        return {head["worker"] for at, head in node.served.of("give_back") if at > noticed} == {"spot/0", "spot/1"}

    node.fleet.wait_for(both_gave_back, seconds=5.0)
    last = node.served.calls[-1][0]
    node.fleet.wait_for(lambda: len(node.served.of("notice")) == 1, seconds=5.0)
    time.sleep(0.5)
    assert [head for at, head in node.served.of("pull") if at > last] == []
    # Whoever goes on repeats nothing: the last commit is of the step at which the work was given back.
    for worker in ("spot/0", "spot/1"):
        mine = [head for at, head in node.served.calls if at > noticed and head.get("worker") == worker]
        names = [head["call"] for head in mine if head["call"] in ("commit", "give_back")]
        assert names[-2:] == ["commit", "give_back"]


def test_a_node_whose_store_dies_gets_another_where_its_workers_meet_again(tmp_path):
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
    exitcode = -9
    sentinel = None

    def is_alive(self):
        return False


def test_a_first_death_costs_no_time_and_one_after_another_costs_more():
    started = []

    def start():
        started.append(time.monotonic())
        return Dead()

    child = _Child(name="worker", start=start, beat=SimpleNamespace(value=0.0))
    assert child.keep_alive()
    assert child.keep_alive()
    assert len(started) == 2
    assert child.keep_alive()
    assert len(started) == 2
    assert child.started - time.monotonic() > 0.3
    child.process, child.started = Dead(), time.monotonic() - CALM_SECONDS - 1
    assert child.keep_alive()
    assert len(started) == 3
