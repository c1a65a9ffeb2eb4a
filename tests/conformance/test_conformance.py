"""One suite for every runtime: no kill, freeze, drain or broken connection loses, doubles or changes an image.

Each case ends with the same assertion (`Drill.assert_whole`): every request finished exactly once, its latents,
log-probs and reward bit for bit those of an undisturbed run in one process. No runtime may skip a case.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from engine.clock import ScaledClock
from engine.coordinator.weight_book import digest_of
from engine.events import NodeState
from engine.models.weights import set_weights
from engine.protocol.request import Exit, Kind, WeightsKey
from engine.worker.transport import Transport
from engine.worker.worker import Worker
from tests.conformance.cluster import ClusterStage
from tests.conformance.drill import Drill
from tests.conformance.full_disk import NO_ROOM
from tests.conformance.inproc import InprocStage
from tests.conformance.stage import COMMIT_EVERY, SHAPE, STEPS, Stage, Step, engine_config

NODES, SPARE = 2, 1
WAVE = NODES * SHAPE
"""Number of images that keeps two nodes busy once."""


def open_stage(runtime: Literal["inproc", "local", "ray"], folder: Path) -> Stage:
    match runtime:
        case "inproc":
            return InprocStage(folder)
        case "local" | "ray":
            return ClusterStage(folder, engine_config(runtime))


# Ray's processes take minutes of a core to start, again after each loss. `make test-slow` has test_ray_runtime.py.
RUNTIMES = ["inproc", pytest.param("local", marks=pytest.mark.slow), pytest.param("ray", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=RUNTIMES)
def whole_drill(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    threads = torch.get_num_threads()
    stage = open_stage(request.param, tmp_path_factory.mktemp(request.param))
    try:
        yield Drill(stage)
    finally:
        stage.close()
        torch.set_num_threads(threads)


@pytest.fixture
def drill(whole_drill: Drill) -> Drill:
    """Provide a drill with two nodes. The spare node replaces one lost in the last case, and a new spare starts."""
    whole_drill.need(NODES, spare=SPARE)
    return whole_drill


def in_time(case: Callable[..., bool]) -> Callable[..., None]:
    """Retry a case that also asserts something about time: the number of lost steps, or a kept or lost lease.

    A computer that stalls for a step or a whole lease breaks such an assertion without a fault of ours, so the case
    gets three attempts. Invariants are asserted in each.
    """

    @functools.wraps(case)
    def tried(drill: Drill, **arguments: object) -> None:
        for _ in range(3):
            drill.need(NODES, spare=SPARE)
            if case(drill, **arguments):
                return
        pytest.fail("three times in a row more steps were lost than may be, or fewer than must be")

    return tried


@in_time
def test_a_worker_killed_during_a_lease_loses_no_result(drill: Drill) -> bool:
    batch = drill.submit(3 * WAVE)
    hit = drill.in_the_middle(batch)
    drill.stage.kill(f"{hit.node}/worker-0")
    drill.assert_whole(batch)
    drill.must_work_again(hit.node)
    return drill.repeated(batch, hit.lease) <= COMMIT_EVERY


@pytest.mark.parametrize("part", ["/agent", ""], ids=["agent", "all of it"])
@in_time
def test_a_node_killed_during_a_lease_loses_no_result(drill: Drill, part: str) -> bool:
    """The workers end with their agent."""
    batch = drill.submit(3 * WAVE)
    hit = drill.in_the_middle(batch)
    drill.stage.kill(hit.node + part)
    drill.assert_whole(batch)
    drill.lose(hit.node)
    return drill.repeated(batch, hit.lease) <= COMMIT_EVERY


@in_time
def test_a_coordinator_frozen_longer_than_a_lease_requeues_nothing(drill: Drill) -> bool:
    batch = drill.submit(4 * WAVE)
    hit = drill.in_the_middle(batch, step=3)
    drill.stage.freeze("coordinator")
    time.sleep(2 * drill.lease_seconds)
    drill.stage.thaw("coordinator")
    drill.assert_whole(batch)
    return last_step(drill, hit) == STEPS


@pytest.mark.parametrize("part", ["/worker-0", ""], ids=["worker", "node"])
@in_time
def test_a_zombie_worker_changes_no_result_and_works_again(drill: Drill, part: str) -> bool:
    batch = drill.submit(2 * WAVE)
    hit = drill.in_the_middle(batch)
    drill.stage.freeze(hit.node + part)
    drill.collect_all(batch)
    drill.stage.thaw(hit.node + part)
    drill.works(hit.node)
    drill.assert_whole(batch)
    return last_step(drill, hit) < STEPS  # the worker was frozen before its last step


def test_a_full_disk_pauses_the_run_and_loses_no_result(drill: Drill) -> None:
    batch = drill.submit(3 * WAVE)
    drill.in_the_middle(batch, step=2)
    drill.stage.fill_disk()
    publishing = threading.Thread(target=drill.publish)
    publishing.start()  # now: a slow test may have filled the disk after the last image, and weights never fit
    try:
        text = drill.wait(drill.stage.trouble, "the coordinator says that its disk is full")
        assert any(os.strerror(number) in text for number in NO_ROOM), text
        time.sleep(drill.lease_seconds)
        paused = drill.collect(batch)[0]
        time.sleep(drill.lease_seconds)
        assert drill.collect(batch)[0] == paused
        assert publishing.is_alive()
    finally:
        drill.stage.free_disk()
    drill.assert_whole(batch)
    publishing.join()
    drill.wait(lambda: drill.stage.trouble() is None, "the coordinator has room")


@in_time
def test_a_node_that_drains_within_its_notice_loses_no_step(drill: Drill) -> bool:
    batch = drill.submit(3 * WAVE)
    hit = drill.in_the_middle(batch, step=3)
    drill.stage.notice(hit.node, drill.lease_seconds)
    time.sleep(drill.lease_seconds)
    drill.stage.kill(hit.node)
    drill.lose(hit.node)
    drill.assert_whole(batch)
    return drill.repeated(batch, hit.lease) <= 1


def test_a_node_with_repeated_notices_loses_no_result(drill: Drill) -> None:
    batch = drill.submit(4 * WAVE)
    node = drill.in_the_middle(batch, step=2).node
    for _ in range(3):
        drill.send_capacity(node, state=NodeState.DRAINING, seconds=5.0)
        time.sleep(0.3 * drill.lease_seconds)
        drill.send_capacity(node, state=NodeState.READY)
        time.sleep(0.3 * drill.lease_seconds)
    drill.assert_whole(batch)
    drill.works(node)


@in_time
def test_a_coordinator_killed_during_leases_loses_no_result(drill: Drill) -> bool:
    batch = drill.submit(4 * WAVE)
    drill.wait(lambda: drill.collect(batch)[0], "something is finished")
    hit = drill.in_the_middle(batch, step=3)
    before = [result.request for result in drill.collect(batch)[0]]
    drill.stage.kill("coordinator")
    after = [result.request for result in drill.collect(batch)[0]]
    assert after[: len(before)] == before
    drill.assert_whole(batch)
    return last_step(drill, hit) == STEPS


@in_time
def test_late_doubled_and_cut_messages_lose_no_result(drill: Drill) -> bool:
    batch = drill.submit(8 * WAVE)  # the nodes leave some of it for the line, even if they are fast
    drill.in_the_middle(batch)
    with drill.stage.bad_line() as line:
        serve(drill, line.transport, lambda: len(drill.collect(batch)[0]) == len(batch.requests))
        faults = line.faults()
    drill.assert_whole(batch)
    return faults > 0  # something went wrong on this line


@in_time
def test_a_worker_that_stays_frozen_is_replaced_by_its_node(drill: Drill) -> bool:
    batch = drill.submit(3 * WAVE)
    hit = drill.in_the_middle(batch)
    drill.stage.freeze(f"{hit.node}/worker-0")
    drill.assert_whole(batch)
    drill.must_work_again(hit.node)
    return drill.repeated(batch, hit.lease) <= COMMIT_EVERY


@in_time
def test_a_notice_shorter_than_a_step_costs_as_much_as_a_kill(drill: Drill) -> bool:
    batch = drill.submit(3 * WAVE)
    hit = drill.in_the_middle(batch)
    drill.stage.notice(hit.node, 0.01)
    time.sleep(0.01)
    drill.stage.kill(hit.node)
    drill.lose(hit.node)
    drill.assert_whole(batch)
    return drill.repeated(batch, hit.lease) <= COMMIT_EVERY


def test_losing_all_spot_nodes_for_a_while_loses_no_result(drill: Drill) -> None:
    batch = drill.submit(2 * WAVE)
    drill.in_the_middle(batch)
    nodes = drill.ready()
    for node in nodes:
        drill.stage.freeze(node)
    time.sleep(2 * drill.lease_seconds)
    for node in nodes:
        drill.stage.thaw(node)
    drill.assert_whole(batch)


def test_requests_resubmitted_at_new_weights_are_made_with_them(drill: Drill) -> None:
    drill.undisturbed.weights(drill.version + 1)  # computed now, so that publishing takes no time
    batch = drill.submit(3 * WAVE)
    hit = drill.in_the_middle(batch, step=1)
    drill.publish()
    open_ones = [request for request in batch.requests if request.seed in hit.seeds] + batch.requests[-WAVE:]
    finished = {result.request for result in drill.collect(batch)[0]}
    drill.submit_again(batch, [request for request in open_ones if request not in finished])
    drill.assert_whole(batch)
    assert len(set(batch.versions.values())) == 2


def test_a_working_node_reported_lost_by_the_launcher_loses_no_result(drill: Drill) -> None:
    batch = drill.submit(3 * WAVE)
    hit = drill.in_the_middle(batch)
    drill.send_capacity(hit.node, state=NodeState.LOST)
    drill.assert_whole(batch)
    drill.wait(lambda: drill.stage.has_ended(hit.node), "its worker was sent home")
    drill.lose(hit.node)


@in_time
def test_workers_continue_while_their_agent_is_frozen(drill: Drill) -> bool:
    batch = drill.submit(3 * WAVE)
    hit = drill.in_the_middle(batch)
    drill.stage.freeze(f"{hit.node}/agent")
    drill.assert_whole(batch)
    drill.stage.thaw(f"{hit.node}/agent")
    drill.works(hit.node)
    return last_step(drill, hit) == STEPS


def test_a_node_that_freezes_repeatedly_loses_no_result(drill: Drill) -> None:
    batch = drill.submit(4 * WAVE)
    node = drill.in_the_middle(batch, step=2).node
    for seconds in (0.1, 1.2 * drill.lease_seconds, 0.2):
        drill.stage.freeze(node)
        time.sleep(seconds)
        drill.stage.thaw(node)
        time.sleep(0.1)
    drill.assert_whole(batch)
    drill.works(node)


def test_the_trainer_alone_finishes_while_all_spot_nodes_are_lost(drill: Drill) -> None:
    """The nodes are away long enough for every runtime to give them up; they still come back."""
    batch = drill.submit(2 * WAVE)
    drill.in_the_middle(batch)
    nodes, began = drill.ready(), time.monotonic()
    for node in nodes:
        drill.stage.freeze(node)
    serve(drill, drill.line, lambda: len(drill.collect(batch)[0]) == len(batch.requests))
    time.sleep(max(0.0, began + drill.stage.given_up_seconds - time.monotonic()))
    for node in nodes:
        drill.stage.thaw(node)
        drill.must_work_again(node)
    drill.assert_whole(batch)


def test_every_node_that_came_back_works(drill: Drill) -> None:
    for node in sorted(drill.came_back):
        drill.works(node)


# --- the trainer's own worker ---------------------------------------------------------------------------------------


def serve(drill: Drill, line: Transport, is_enough) -> None:
    """Work like the trainer's process while it waits, with its own model and transport."""
    undisturbed = drill.undisturbed
    worker = Worker(
        name="trainer/trainer",
        node="trainer",
        workers_of_node=1,
        transport=line,
        adapter=undisturbed.adapter,
        parameters=undisturbed.parameters,
        reward=undisturbed.reward,
        clock=ScaledClock(origin_ms=0),
        heartbeat_seconds=drill.stage.config.runtime.heartbeat_seconds,
        kinds=(Kind.TRAIN,),
        may_load=False,
        step_seconds=drill.stage.config.runtime.step_seconds,
    )
    weights = undisturbed.weights(drill.version)
    set_weights(undisturbed.parameters, weights)
    worker.assume(WeightsKey(version=drill.version), digest_of(weights))
    while not is_enough():
        assert not isinstance(worker.serve_once(wait=False), Exit)


def last_step(drill: Drill, hit: Step) -> int:
    return max(step.step for step in drill.stage.steps() if step.lease == hit.lease)
