"""The pull queue: each request finishes exactly once, with one lease at a time and one weight version an attempt."""

import dataclasses
import itertools

import pytest
from msgspec.structs import replace

from engine.events import Capacity, Market, NodeCapacity, NodeMissed, NodeSeen, NodeServed, NodeState, Warned
from engine.protocol.request import (
    Drain,
    Exit,
    Fenced,
    Finished,
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
from engine.queue.pace import Rules, commit_interval
from engine.queue.queue import Queue

LEASE_MS = 1000
STEPS = 8
RULES = Rules(lease_ms=LEASE_MS, first_lease_ms=LEASE_MS, commit_every=None, preemption_ms=3_600_000)
V0, V1 = WeightsKey(version=0), WeightsKey(version=1)
DIGEST = {V0: "zero", V1: "one"}


def requests(count, kind=Kind.TRAIN, batch=0):
    return tuple(
        RequestId(run="run", lineage=1, batch=batch, prompt="1234", seed=seed, kind=kind) for seed in range(count)
    )


def task(count=2, kind=Kind.TRAIN, *, batch=0, weights=V0, shape=2, images=0):
    wanted = requests(count, kind, batch)
    return Task(
        requests=wanted, weights=weights, sampler="plan", steps=STEPS, shape=shape, dtype="float32", images=images
    )


def queue_with(*tasks, rules=RULES):
    queue = Queue(rules)
    queue.publish(V0, DIGEST[V0])
    for one in tasks:
        queue.submit(one)
    return queue


SEQ = itertools.count(1)


def pull(queue, worker="a/0", *, now_ms=0, holds=V0, boot=1, seq=None, **more):
    """Pull. Each call is a new pull unless it names the `seq` of an earlier one."""
    held = None if holds is None else (holds, DIGEST[holds])
    seq = next(SEQ) if seq is None else seq
    return queue.pull(worker, worker.split("/")[0], boot=boot, seq=seq, now_ms=now_ms, holds=held, **more)


def done(request, trajectory=None):
    return Finished(request=request, score=Score(reward=float(request.seed), metrics={}), trajectory=trajectory)


def finish(queue, work, worker="a/0", *, now_ms=0):
    results = [done(attempt.request) for attempt in work.attempts]
    return queue.finish(worker, worker.split("/")[0], work.lease, results, now_ms=now_ms)


def commit(queue, work, step, worker="a/0"):
    states = {attempt.request: (step, f"state-{attempt.request.seed}") for attempt in work.attempts}
    return queue.commit(worker, worker.split("/")[0], work.lease, states, now_ms=0)


def seeds(work):
    return [attempt.request.seed for attempt in work.attempts]


def capacity(generation, state, *, node="a", deadline_ms=None):
    fact = NodeCapacity(node=node, market=Market.SPOT, state=state, workers=1, deadline_ms=deadline_ms)
    return Capacity(generation=generation, nodes=(fact,))


# --- demand


def test_demand_counts_waiting_leases_and_the_remaining_steps_of_running_ones():
    queue = queue_with(task(5, shape=2), task(1, Kind.EVALUATE, shape=8))
    work = pull(queue)
    queue.heartbeat("a/0", "a", {work.lease: 3}, now_ms=0)
    demand = queue.demand(0)
    assert [(one.request_class, one.steps, one.count) for one in demand.waiting] == [
        ("2 x float32", STEPS, 2),
        ("8 x float32", STEPS, 1),
    ]
    assert {worker: one.steps for worker, one in demand.in_flight.items()} == {"a/0": STEPS - 3}
    assert demand.images == {"2 x float32": 2, "8 x float32": 8}


# --- leases


def test_training_comes_before_evaluation_and_exploration_last():
    queue = queue_with(task(1, Kind.EXPLORE), task(1, Kind.EVALUATE), task(1, Kind.TRAIN))
    kinds = [pull(queue).attempts[0].request.kind for _ in range(3)]
    assert kinds == [Kind.TRAIN, Kind.EVALUATE, Kind.EXPLORE]
    assert pull(queue) == Wait()


def test_a_worker_that_holds_the_weights_of_leftover_early_groups_samples_them_first():
    """Two early images of the open batch are left over. The worker of the old weights samples them, then loads."""
    queue = queue_with(task(2, Kind.EARLY))
    queue.publish(V1, DIGEST[V1])
    queue.submit(task(2, batch=1, weights=V1))
    assert pull(queue, "b/0", holds=V1).attempts[0].request.kind is Kind.TRAIN
    assert pull(queue, holds=V0).attempts[0].request.kind is Kind.EARLY


def test_a_training_request_replaces_the_early_request_for_its_image():
    """An early group whose spot nodes are gone is made anew: no later node loads old weights for it."""
    queue = queue_with(task(4, Kind.EARLY))
    finish(queue, pull(queue, holds=V0))
    work = pull(queue, holds=V0)
    queue.publish(V1, DIGEST[V1])
    queue.submit(task(4, weights=V1))
    assert finish(queue, work) == Fenced(lease=work.lease)
    assert queue.wanted(Kind.EARLY) == 0
    assert [request.seed for request in queue.finished] == [0, 1], "a finished early image is kept"
    queue.submit(task(4, Kind.EARLY))  # by a trainer that starts anew and does not know of it
    works = [pull(queue, name, holds=V1) for name in ("a/0", "b/0")]
    assert [attempt.request.kind for one in works for attempt in one.attempts] == [Kind.TRAIN] * 4
    for one, name in zip(works, ("a/0", "b/0"), strict=True):
        finish(queue, one, name)
    queue.submit(task(4, Kind.EARLY))
    assert pull(queue, holds=V0) == LoadWeights(weights=V1, digest=DIGEST[V1])
    queue.check()


def test_early_groups_of_the_next_batch_come_after_all_rollouts_of_the_open_batch():
    queue = queue_with(task(2, Kind.EARLY, batch=1), task(2))
    assert [pull(queue).attempts[0].request.kind for _ in range(2)] == [Kind.TRAIN, Kind.EARLY]


@pytest.mark.parametrize("idle", [Kind.CONTROL, Kind.EXPLORE])
@pytest.mark.parametrize("urgent", [Kind.TRAIN, Kind.EARLY])
def test_exploration_gives_way_to_rollouts(idle, urgent):
    queue = queue_with(task(2, idle))
    work = pull(queue)
    assert queue.heartbeat("a/0", "a", {work.lease: 1}, now_ms=0) == Wait()
    queue.submit(task(2, urgent, batch=1))
    assert queue.heartbeat("a/0", "a", {work.lease: 2}, now_ms=0) == Yield(lease=work.lease)
    assert queue.heartbeat("a/0", "a", {work.lease: STEPS}, now_ms=0) == Wait(), "its images are being scored"
    queue.give_back("a/0", work.lease, now_ms=0)
    assert [pull(queue).attempts[0].request.kind for _ in range(2)] == [urgent, idle]
    queue.check()


@pytest.mark.parametrize("more", [{"weights": V1}, {"shape": 4}, {"kind": Kind.EVALUATE}], ids=str)
def test_exploration_does_not_give_way_to_work_that_its_worker_cannot_take_or_that_may_wait(more):
    queue = queue_with(task(2, Kind.EXPLORE))
    work = pull(queue, most_images=2)
    queue.submit(task(2, batch=1, **more))
    assert queue.heartbeat("a/0", "a", {work.lease: 1}, now_ms=0) == Wait()


def test_rollouts_and_evaluations_do_not_give_way():
    queue = queue_with(task(2, Kind.EVALUATE))
    queue_of_rollouts = queue_with(task(4))
    for one in (queue, queue_of_rollouts):
        work = pull(one)
        one.submit(task(2, batch=1))
        assert one.heartbeat("a/0", "a", {work.lease: 1}, now_ms=0) == Wait()


def test_a_worker_gets_only_the_kinds_that_it_pulls():
    queue = queue_with(task(1, Kind.TRAIN), task(1, Kind.EXPLORE))
    assert pull(queue, kinds=[Kind.EXPLORE]).attempts[0].request.kind is Kind.EXPLORE


def test_a_lease_has_the_size_of_its_shape_and_is_of_one_task():
    queue = queue_with(task(3, batch=0), task(3, batch=1))
    leases = []
    for _ in range(4):
        leases.append([(attempt.request.batch, attempt.request.seed) for attempt in pull(queue).attempts])
    assert leases == [[(0, 0), (0, 1)], [(0, 2)], [(1, 0), (1, 1)], [(1, 2)]]


def test_the_scorer_that_a_task_names_is_in_its_work():
    student = replace(task(2, Kind.EXPLORE), scorer="student")
    queue = queue_with(student, task(2, Kind.EXPLORE, batch=1))
    assert [pull(queue).scorer for _ in range(2)] == ["student", "reward"]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.EXPLORE])
def test_a_student_never_scores_training_or_evaluation(kind):
    mixed = (*requests(1, Kind.EXPLORE), *requests(1, kind))
    for wanted in (requests(2, kind), mixed):
        with pytest.raises(ValueError, match=f"of kind {kind} names the student as its scorer; only exploration may"):
            replace(task(2, Kind.EXPLORE), requests=wanted, scorer="student")


def test_an_unknown_scorer_is_refused():
    with pytest.raises(ValueError, match="scorer is 'pupil'; use one of reward, student"):
        replace(task(2, Kind.EXPLORE), scorer="pupil")


def test_a_lease_holds_images_at_the_same_step():
    queue = queue_with(task(4))
    work = pull(queue)
    first = work.attempts[0].request
    queue.commit("a/0", "a", work.lease, {first: (3, "state")}, now_ms=0)
    queue.give_back("a/0", work.lease, now_ms=0)
    again = pull(queue)
    assert [(a.request.seed, a.step, a.state) for a in again.attempts] == [(0, 3, "state")]
    assert [(a.request.seed, a.step) for a in pull(queue).attempts] == [(1, 0), (2, 0)]


def test_only_the_first_images_of_a_task_are_sent_back():
    queue = queue_with(task(4, Kind.EVALUATE, images=1))
    first = pull(queue)
    assert first.images == (True, False)
    assert pull(queue).images == (False, False)


def test_weights_are_loaded_before_work_that_needs_them():
    queue = queue_with(task(1))
    assert pull(queue, holds=None) == LoadWeights(weights=V0, digest="zero")
    assert isinstance(pull(queue, holds=V0), Work)


def test_the_same_version_with_another_digest_is_loaded_again():
    queue = queue_with(task(1))
    queue.publish(V0, "other")
    assert pull(queue, holds=V0) == LoadWeights(weights=V0, digest="other")


def test_an_idle_worker_gets_the_order_to_load_the_live_weights():
    queue = queue_with()
    queue.publish(V1, DIGEST[V1])
    assert pull(queue, holds=V0) == LoadWeights(weights=V1, digest="one")
    assert pull(queue, holds=V1) == Wait()


def test_work_without_published_weights_is_not_leased():
    assert pull(queue_with(task(1, weights=V1))) == Wait()


def test_weights_that_an_attempt_needs_are_kept():
    queue = queue_with(task(1, Kind.EXPLORE))
    queue.publish(V1, DIGEST[V1])
    assert queue.forget_weights([]) == []
    queue.withdraw(requests(1, Kind.EXPLORE))
    assert queue.forget_weights([]) == [V0]


# --- valid and fenced leases


def test_the_second_finish_of_a_lease_is_fenced():
    queue = queue_with(task(2))
    work = pull(queue)
    assert finish(queue, work) == Wait()
    assert finish(queue, work) == Fenced(lease=work.lease)
    assert len(queue.finished) == 2
    assert queue.wanted(Kind.TRAIN) == 0


def test_a_lease_may_be_finished_in_parts():
    queue = queue_with(task(2))
    work = pull(queue)
    for attempt in work.attempts:
        assert queue.finish("a/0", "a", work.lease, [done(attempt.request)], now_ms=0) == Wait()
    assert len(queue.finished) == 2


def test_an_expired_lease_is_fenced_and_its_work_is_leased_to_another_worker():
    queue = queue_with(task(2))
    queue.tick(0)
    work = pull(queue)
    for now_ms in (400, 800, LEASE_MS):
        queue.tick(now_ms)
    assert isinstance(queue.heartbeat("a/0", "a", {work.lease: 0}, now_ms=LEASE_MS), Wait)
    for now_ms in range(LEASE_MS, 2 * LEASE_MS + 2, 400):
        queue.tick(now_ms)
    assert pull(queue, "b/0", now_ms=2 * LEASE_MS) == Wait()
    queue.tick(2 * LEASE_MS + 1)
    other = pull(queue, "b/0", now_ms=2 * LEASE_MS + 1)
    assert seeds(other) == [0, 1]
    assert finish(queue, work) == Fenced(lease=work.lease)
    assert queue.heartbeat("a/0", "a", {work.lease: 2}, now_ms=2 * LEASE_MS + 1) == Fenced(lease=work.lease)
    assert commit(queue, work, 3) == Fenced(lease=work.lease)
    assert queue.give_back("a/0", work.lease, now_ms=0) == Fenced(lease=work.lease)
    assert queue.finished == {}


def test_a_lease_number_is_valid_only_for_its_own_worker():
    queue = queue_with(task(2))
    work = pull(queue, "a/0")
    assert finish(queue, work, "b/0") == Fenced(lease=work.lease)
    assert finish(queue, work, "a/0") == Wait()


def test_a_worker_cannot_renew_another_workers_lease():
    queue = queue_with(task(2))
    work = pull(queue, "a/0")
    assert queue.heartbeat("b/0", "b", {work.lease: 3}, now_ms=LEASE_MS - 1) == Fenced(lease=work.lease)
    queue.tick(LEASE_MS + 1)
    assert seeds(pull(queue, "c/0", now_ms=LEASE_MS + 1)) == [0, 1]  # the lease was not renewed


def test_a_worker_cannot_commit_under_another_workers_lease():
    queue = queue_with(task(2))
    work = pull(queue, "a/0")
    assert commit(queue, work, 5, "b/0") == Fenced(lease=work.lease)
    assert list(queue.committed(requests(2))) == []
    assert commit(queue, work, 2, "a/0") == Wait()


def test_a_lost_answer_is_repeated():
    queue = queue_with(task(4))
    lost = pull(queue, seq=10**9)
    assert pull(queue, seq=10**9) == lost
    assert seeds(pull(queue, seq=10**9 + 1)) == [2, 3]


def test_a_late_duplicate_of_an_older_pull_gets_no_work():
    queue = queue_with(task(4))
    work = pull(queue, seq=10**9)
    assert pull(queue, seq=10**9 - 1) == Wait()
    assert finish(queue, work) == Wait()


def test_a_lost_answer_is_not_repeated_once_its_lease_is_over():
    queue = queue_with(task(2))
    lost = pull(queue, seq=10**9)
    queue.lost("a", "gone", now_ms=0)
    queue.capacity(capacity(1, NodeState.READY), now_ms=0)
    again = pull(queue, seq=10**9)
    assert seeds(again) == [0, 1]
    assert again.lease > lost.lease


def test_a_restarted_worker_loses_the_leases_of_its_old_process():
    queue = queue_with(task(2))
    lost = pull(queue, boot=1)
    again = pull(queue, boot=2)
    assert seeds(again) == seeds(lost)
    assert again.lease > lost.lease
    assert finish(queue, lost) == Fenced(lease=lost.lease)
    assert [e.fenced_requests for e in queue.events if isinstance(e, NodeMissed)] == [2]


def test_a_replaced_process_is_ordered_to_exit():
    queue = queue_with(task(2))
    pull(queue, boot=2)
    assert isinstance(pull(queue, boot=1), Exit)


def test_leases_of_a_dead_worker_are_requeued_at_once():
    queue = queue_with(task(2))
    pull(queue, boot=5)
    queue.died("a/0", 4, "an older process", now_ms=0)
    assert pull(queue, "b/0") == Wait()
    queue.died("a/0", 5, "its connection closed", now_ms=0)
    assert seeds(pull(queue, "b/0")) == [0, 1]


def test_a_worker_wrongly_reported_dead_is_fenced_and_pulls_again():
    queue = queue_with(task(2))
    work = pull(queue)
    queue.died("a/0", 1, "its connection closed", now_ms=0)
    assert queue.heartbeat("a/0", "a", {work.lease: 1}, now_ms=0) == Fenced(lease=work.lease)
    assert seeds(pull(queue)) == [0, 1]
    assert queue.poisoned == {}


def test_a_lease_stays_valid_while_its_worker_pulls_the_next():
    queue = queue_with(task(4))
    first = pull(queue)
    assert seeds(pull(queue)) == [2, 3]
    assert finish(queue, first) == Wait()


def test_withdrawn_work_is_fenced_and_removed():
    queue = queue_with(task(2))
    work = pull(queue)
    queue.withdraw(requests(2))
    assert queue.heartbeat("a/0", "a", {work.lease: 1}, now_ms=0) == Fenced(lease=work.lease)
    assert finish(queue, work) == Fenced(lease=work.lease)
    assert queue.finished == {}
    assert pull(queue) == Wait()


def test_withdrawing_half_a_lease_keeps_the_other_half():
    queue = queue_with(task(2))
    work = pull(queue)
    queue.withdraw(requests(1))
    assert finish(queue, work) == Wait()
    assert list(queue.finished) == list(requests(2)[1:])


def test_resubmitting_the_same_work_changes_nothing():
    queue = queue_with(task(2))
    work = pull(queue)
    queue.submit(task(2))
    assert pull(queue, "b/0") == Wait()
    finish(queue, work)
    queue.submit(task(2))
    assert pull(queue) == Wait()


def test_a_request_at_another_version_starts_from_the_first_step():
    queue = queue_with(task(2))
    old = pull(queue)
    commit(queue, old, 5)
    queue.publish(V1, DIGEST[V1])
    queue.submit(task(2, weights=V1))
    assert queue.heartbeat("a/0", "a", {old.lease: 6}, now_ms=0) == Fenced(lease=old.lease)
    assert commit(queue, old, 7) == Fenced(lease=old.lease)
    assert finish(queue, old) == Fenced(lease=old.lease)
    new = pull(queue, "b/0", holds=V1)
    assert [(a.weights, a.step, a.state) for a in new.attempts] == [(V1, 0, None)] * 2


def test_a_commit_ignores_a_request_that_has_a_new_attempt():
    queue = queue_with(task(2))
    old = pull(queue)
    queue.publish(V1, DIGEST[V1])
    queue.submit(task(1, weights=V1))
    assert queue.held("a/0", old.lease) == requests(2)[1:]
    assert commit(queue, old, 5) == Wait()
    assert [(a.request.seed, a.step) for a in pull(queue, "b/0", holds=V1).attempts] == [(0, 0)]
    assert [(r.seed, step) for r, step, _ in queue.committed(requests(2))] == [(1, 5)]


# --- nodes that drain or are lost


def test_a_notice_makes_the_workers_of_the_node_drain():
    queue = queue_with(task(4))
    work = pull(queue)
    queue.notice("a", 30_000, now_ms=0)
    drain = Drain(deadline_ms=30_000)
    assert queue.heartbeat("a/0", "a", {work.lease: 1}, now_ms=0) == drain
    assert commit(queue, work, 1) == drain
    assert pull(queue) == drain
    assert pull(queue, "a/1") == drain
    assert isinstance(pull(queue, "b/0"), Work)


def test_the_commit_of_a_drained_worker_is_resumed_first():
    queue = queue_with(task(4))
    work = pull(queue)
    commit(queue, work, 5)
    assert queue.give_back("a/0", work.lease, now_ms=0) == Wait()
    resumed = pull(queue, "b/0")
    assert [(a.request.seed, a.step, a.state) for a in resumed.attempts] == [(0, 5, "state-0"), (1, 5, "state-1")]


def test_a_commit_never_goes_backwards():
    queue = queue_with(task(1))
    work = pull(queue)
    commit(queue, work, 5)
    commit(queue, work, 3)
    assert [step for _, step, _ in queue.committed(requests(1))] == [5]


def test_a_lost_node_is_fenced_at_once_and_its_workers_are_ordered_to_exit():
    queue = queue_with(task(2))
    work = pull(queue)
    queue.capacity(capacity(1, NodeState.LOST), now_ms=0)
    assert seeds(pull(queue, "b/0")) == [0, 1]
    assert finish(queue, work) == Fenced(lease=work.lease)
    assert pull(queue, "a/0") == Exit(reason="this node was given up")
    missed = [event for event in queue.events if isinstance(event, NodeMissed)]
    assert [(event.node, event.fenced_requests) for event in missed] == [("a", 2)]


def test_a_lost_node_is_reported_once_over_repeated_snapshots():
    queue = queue_with()
    for _ in range(3):
        queue.capacity(capacity(1, NodeState.LOST), now_ms=0)
    assert sum(isinstance(event, NodeMissed) for event in queue.events) == 1


def test_a_snapshot_of_an_older_generation_is_ignored():
    queue = queue_with(task(1))
    queue.capacity(capacity(2, NodeState.READY), now_ms=0)
    queue.capacity(capacity(1, NodeState.LOST), now_ms=0)
    assert isinstance(pull(queue), Work)


def test_a_snapshot_makes_a_node_drain():
    queue = queue_with(task(1))
    queue.capacity(capacity(1, NodeState.DRAINING, deadline_ms=9000), now_ms=0)
    assert pull(queue) == Drain(deadline_ms=9000)


def test_a_cancelled_drain_ends():
    queue = queue_with(task(1))
    queue.capacity(capacity(1, NodeState.DRAINING, deadline_ms=9000), now_ms=0)
    assert pull(queue) == Drain(deadline_ms=9000)
    queue.capacity(capacity(2, NodeState.READY), now_ms=0)
    assert isinstance(pull(queue), Work)


def test_nodes_with_only_ranks_of_the_trainer_are_no_rollout_nodes():
    """Otherwise a run without spot nodes would wait for them to explore."""
    queue = queue_with(task())
    for worker in ("a/0", "trainer/trainer", "trainer-1/trainer-rank-1"):
        pull(queue, worker)
    assert sorted(queue.live_nodes(0, 600)) == ["a", "trainer", "trainer-1"]
    assert queue.rollout_nodes(0, 600) == ["a"]


def test_live_nodes_are_those_that_called_recently_and_stay():
    queue = queue_with()
    for node, now_ms in (("a", 0), ("b", 500), ("c", 900), ("d", 900)):
        pull(queue, f"{node}/0", now_ms=now_ms)
    queue.notice("c", 5000, now_ms=900)
    queue.lost("d", "gone", now_ms=900)
    assert queue.live_nodes(1000, 600) == ["b"]


def test_a_node_is_reported_seen_when_its_first_worker_calls():
    queue = queue_with()
    pull(queue, "a/0")
    pull(queue, "a/1")
    assert queue.events == [NodeSeen(node="a", worker="a/0")]


def test_a_node_is_reported_served_at_its_first_finished_request():
    queue = queue_with(task(2), task(3))
    finish(queue, pull(queue, "a/0"))
    finish(queue, pull(queue, "a/0"))
    assert [event for event in queue.events if isinstance(event, NodeServed)] == [NodeServed(node="a", worker="a/0")]


def test_a_freeze_of_the_coordinator_extends_every_lease():
    queue = queue_with(task(2))
    queue.tick(0)
    work = pull(queue, now_ms=0)
    queue.tick(10 * LEASE_MS)
    assert finish(queue, work, now_ms=10 * LEASE_MS) == Wait()


def test_a_freeze_extends_a_lease_once():
    queue = queue_with(task(2))
    queue.tick(0)
    work = pull(queue, now_ms=0)
    for now_ms in range(10 * LEASE_MS, 11 * LEASE_MS + 501, 500):
        queue.tick(now_ms)
    assert finish(queue, work) == Fenced(lease=work.lease)


def test_without_spot_nodes_the_trainers_worker_finishes_everything():
    queue = queue_with(task(5), task(3, Kind.EVALUATE))
    while not isinstance(work := pull(queue, "trainer/trainer"), Wait):
        finish(queue, work, "trainer/trainer")
    assert len(queue.finished) == 8


def test_a_stopped_run_makes_every_worker_exit_with_the_first_reason():
    queue = queue_with(task(2))
    work = pull(queue)
    queue.stop("budget")
    queue.stop("later")
    assert queue.heartbeat("a/0", "a", {work.lease: 1}, now_ms=0) == Exit(reason="budget")
    assert pull(queue, "b/0") == Exit(reason="budget")


# --- poisoned requests


def fault(queue, work, worker, text="boom"):
    return queue.fault(worker, worker.split("/")[0], work.lease, text, now_ms=0)


def test_a_request_with_three_faults_is_reported_as_poisoned():
    queue = queue_with(task(1))
    for number in range(3):
        work = pull(queue, f"{number}/0")
        assert fault(queue, work, f"{number}/0") == Wait()
    assert queue.poisoned == {requests(1)[0]: "boom"}
    assert pull(queue) == Wait()
    assert sum(isinstance(event, Warned) for event in queue.events) == 4  # three faults and the poisoned report


def test_a_request_that_three_processes_died_of_is_poisoned():
    queue = queue_with(task(1))
    for boot in (1, 2, 3):
        assert isinstance(pull(queue, boot=boot), Work)
    assert pull(queue, boot=4) == Wait()
    assert list(queue.poisoned) == list(requests(1))


def test_a_death_counts_against_its_work_once_the_node_starts_a_new_process():
    queue = queue_with(task(1))
    for number in range(5):  # processes of preempted nodes die too
        pull(queue, f"{number}/0")
        queue.died(f"{number}/0", 1, "its connection closed", now_ms=0)
    assert queue.poisoned == {}
    for boot in (1, 2, 3):
        pull(queue, boot=boot)
        queue.died("a/0", boot, "its connection closed", now_ms=0)
    assert pull(queue, boot=4) == Wait()
    assert list(queue.poisoned) == list(requests(1))


def test_the_poisoned_request_of_a_lease_is_found_and_the_others_finish():
    queue = queue_with(task(4, shape=4))
    guilty, boot = requests(4)[2], 1
    for boot in range(1, 20):
        work = pull(queue, boot=boot)
        if isinstance(work, Wait):
            break
        if guilty not in [attempt.request for attempt in work.attempts]:
            finish(queue, work)
    assert list(queue.poisoned) == [guilty]
    assert len(queue.finished) == 3
    assert boot <= 8


def test_a_request_is_not_blamed_alone_for_a_worker_that_still_samples_its_neighbour():
    """The neighbour left the lease for other weights, and the worker samples both images until its next call."""
    queue = queue_with(task(2))
    queue.publish(V1, DIGEST[V1])
    pull(queue)
    queue.died("a/0", 1, "its connection closed", now_ms=0)
    fault(queue, pull(queue, "b/0"), "b/0")
    work = pull(queue, "b/0")
    pull(queue, boot=2, kinds=[])  # the death counts now: both requests are suspects of two crashes
    queue.submit(
        Task(requests=requests(2)[1:], weights=V1, sampler="plan", steps=STEPS, shape=2, dtype="float32", images=0)
    )
    fault(queue, work, "b/0")
    assert queue.poisoned == {}
    queue.check()


def test_a_request_that_progressed_since_the_last_death_is_not_blamed():
    queue = queue_with(task(1))
    for step in range(1, STEPS):
        commit(queue, pull(queue, boot=step), step)
    assert queue.poisoned == {}


@pytest.mark.parametrize("times", [10])
def test_a_request_is_not_blamed_for_preempted_nodes(times):
    queue = queue_with(task(1))
    for number in range(times):
        assert isinstance(pull(queue, f"{number}/0"), Work)
        queue.capacity(capacity(number, NodeState.LOST, node=str(number)), now_ms=0)
    assert queue.poisoned == {}


def test_a_request_is_not_blamed_for_a_node_that_was_lost_and_comes_back():
    queue = queue_with(task(1))
    for boot in range(1, 10):
        assert isinstance(pull(queue, boot=boot), Work)
        queue.capacity(capacity(2 * boot, NodeState.LOST, node="a"), now_ms=0)
        queue.capacity(capacity(2 * boot + 1, NodeState.READY, node="a"), now_ms=0)
    assert queue.poisoned == {}


def test_withdrawing_a_poisoned_request_clears_it():
    queue = queue_with(task(1))
    for boot in range(4):
        pull(queue, boot=boot)
    assert queue.poisoned
    queue.withdraw(requests(1))
    assert queue.poisoned == {}


# --- how long leases last, and how often to commit


def heartbeat(queue, work, step, now_ms, worker="a/0"):
    return queue.heartbeat(worker, worker.split("/")[0], {work.lease: step}, now_ms=now_ms)


def test_a_lease_lasts_as_long_as_four_of_the_slowest_steps():
    queue = queue_with(task(6, shape=2), rules=dataclasses.replace(RULES, first_lease_ms=9000))
    work = pull(queue)
    assert work.expires_ms == 9000  # no step was timed yet
    heartbeat(queue, work, 1, 700)
    heartbeat(queue, work, 2, 1000)
    assert pull(queue, "b/0", now_ms=1000).expires_ms == pytest.approx(1000 + 4 * 700, rel=0.05)


def test_the_time_of_another_scorer_does_not_set_a_leases_length():
    queue = queue_with(task(2, Kind.EXPLORE), rules=dataclasses.replace(RULES, first_lease_ms=9000))
    heartbeat(queue, pull(queue), 1, 700)
    queue.submit(replace(task(2, Kind.EXPLORE, batch=1), scorer="student"))
    assert pull(queue, "b/0", now_ms=700).expires_ms == 700 + 9000


def test_a_lease_of_fast_steps_has_the_minimum_length():
    queue = queue_with(task(4, shape=2))
    heartbeat(queue, pull(queue), 4, 40)
    assert pull(queue, "b/0", now_ms=40).expires_ms == 40 + LEASE_MS


def test_work_with_steps_longer_than_a_lease_gets_longer_leases():
    queue = queue_with(task(1))
    now_ms, step_ms = 0, 10 * LEASE_MS
    queue.tick(now_ms)
    for _attempt in range(6):
        work = pull(queue, now_ms=now_ms)
        for _tick in range(step_ms // 400):
            now_ms += 400
            queue.tick(now_ms)
        if heartbeat(queue, work, 1, now_ms) == Wait():
            return
    pytest.fail("six attempts were given away")


def test_an_hour_long_freeze_of_a_node_at_most_doubles_a_lease():
    queue = queue_with(task(2, shape=1))
    heartbeat(queue, work := pull(queue), 1, 300)
    for now_ms in range(300, 3_600_000, 400):
        queue.tick(now_ms)
    heartbeat(queue, work, 2, 3_600_000)
    assert pull(queue, "b/0", now_ms=3_600_000).expires_ms <= 3_600_000 + 2 * 4 * 300


def test_a_fault_reported_after_its_lease_expired_counts():
    queue = queue_with(task(1))
    now_ms = 0
    queue.tick(now_ms)
    for _death in range(3):
        work = pull(queue, now_ms=now_ms)
        while now_ms <= work.expires_ms:
            now_ms += 400
            queue.tick(now_ms)
        assert queue.fault("a/0", "a", work.lease, "boom", now_ms=now_ms) == Fenced(lease=work.lease)
    assert list(queue.poisoned) == list(requests(1))


def test_each_kind_of_work_has_its_own_lease_length():
    queue = queue_with(task(2), task(2, Kind.EVALUATE))
    heartbeat(queue, pull(queue), 1, 5000)
    assert pull(queue, "b/0", now_ms=5000).expires_ms == 5000 + LEASE_MS


def test_a_counted_commit_interval_is_used_and_skips_the_last_step():
    queue = queue_with(task(4, shape=2), task(1, Kind.EVALUATE), rules=dataclasses.replace(RULES, commit_every=3))
    first = pull(queue)
    assert first.commit_every == 3
    commit(queue, first, 6)
    queue.give_back("a/0", first.lease, now_ms=0)
    assert pull(queue).commit_every == 0  # at 6 of 8 steps
    assert pull(queue).commit_every == 3
    assert pull(queue).commit_every == 0  # evaluation is cheap to do again


def test_the_commit_interval_follows_cost_and_risk():
    queue = queue_with(task(8, shape=2), rules=dataclasses.replace(RULES, preemption_ms=36_000))
    work = pull(queue)
    assert work.commit_every == STEPS // 2  # nothing measured yet
    heartbeat(queue, work, 1, 100)
    queue.commit("a/0", "a", work.lease, {work.attempts[0].request: (1, "s")}, now_ms=100, cost_ms=0.5)
    queue.tick(200)
    assert pull(queue, "b/0").commit_every == commit_interval(0.5, 36_000, 100) == 2
    assert commit_interval(20, 3 * 3_600_000, 500) == 42  # sqrt(2 * 20 ms * 3 h) / 500 ms


def test_a_higher_hazard_makes_commits_more_frequent():
    queue = queue_with(task(8, shape=2), rules=dataclasses.replace(RULES, preemption_ms=36_000))
    work = pull(queue)
    heartbeat(queue, work, 1, 100)
    queue.commit("a/0", "a", work.lease, {work.attempts[0].request: (1, "s")}, now_ms=100, cost_ms=0.5)
    for number in range(8):
        queue.capacity(capacity(number, NodeState.LOST, node=f"n{number}"), now_ms=100)
    queue.tick(200)
    assert pull(queue, "b/0").commit_every == 1


# --- the tail: speculative copies once no lease is waiting


def learned(shape=2):
    """Return a queue that has measured 100 ms a step, with one lease that worker a/0 began at 800 ms."""
    queue = queue_with(task(2 * shape, shape=shape))
    finish(queue, pull(queue), now_ms=800)
    return queue, pull(queue, now_ms=800)


def slow():
    """As `learned`, but a/0 takes a second for a step."""
    queue, work = learned()
    heartbeat(queue, work, 2, 2800)
    return queue, work


def test_work_at_normal_speed_gets_no_speculative_copy():
    queue, work = learned()
    assert pull(queue, "b/0", now_ms=1190) == Wait()  # no heartbeat came yet, so its speed is unknown
    heartbeat(queue, work, 4, 1200)
    assert pull(queue, "b/0", now_ms=1200) == Wait()


def test_an_idle_worker_copies_the_slowest_lease_from_its_commit():
    queue, work = learned()
    heartbeat(queue, work, 2, 1600)  # 400 ms a step instead of 100
    commit(queue, work, 2)
    copy = pull(queue, "b/0", now_ms=1700)
    assert [(a.request, a.step) for a in copy.attempts] == [(a.request, 2) for a in work.attempts]
    assert pull(queue, "c/0", now_ms=1700) == Wait()  # twice is enough
    assert pull(queue, "a/1", now_ms=1700) == Wait()
    queue.check()


@pytest.mark.parametrize("copy_wins", [True, False])
def test_the_first_finished_copy_counts_and_the_other_is_fenced(copy_wins):
    queue, work = slow()
    copy = pull(queue, "b/0", now_ms=3000)
    first, second = ((copy, "b/0"), (work, "a/0")) if copy_wins else ((work, "a/0"), (copy, "b/0"))
    assert finish(queue, *first, now_ms=3000) == Wait()
    assert finish(queue, *second, now_ms=3000) == Fenced(lease=second[0].lease)
    assert len(queue.finished) == 4
    queue.check()


def test_the_original_lease_continues_if_the_copy_is_lost():
    queue, work = slow()
    assert isinstance(pull(queue, "b/0", now_ms=3000), Work)
    queue.lost("b", "gone", now_ms=3000)
    assert pull(queue, "a/1", now_ms=3000) != Wait()  # and may be copied again
    assert heartbeat(queue, work, 3, 3500) == Wait()
    queue.check()


def test_a_suspect_request_gets_no_speculative_copy():
    """A copy could kill a second worker and yield little evidence."""
    queue, _ = learned(shape=1)
    work = pull(queue, boot=2, now_ms=800)  # its first process may have died of the request
    heartbeat(queue, work, 2, 2800)
    assert pull(queue, "b/0", now_ms=3000) == Wait()
    queue.check()


def test_exploration_comes_after_copies_of_the_tail_and_gets_no_copy():
    queue, _ = slow()
    queue.submit(task(2, Kind.EXPLORE))
    assert pull(queue, "b/0", now_ms=3000).attempts[0].request.kind is Kind.TRAIN
    assert pull(queue, "c/0", now_ms=3000).attempts[0].request.kind is Kind.EXPLORE
    assert pull(queue, "d/0", now_ms=99_000) == Wait()


# --- free memory


def test_a_worker_gets_only_work_that_fits_into_its_memory():
    queue = queue_with(task(4, shape=4), task(2, Kind.EXPLORE, shape=2))
    assert pull(queue, most_images=3).attempts[0].request.kind is Kind.EXPLORE
    assert pull(queue, "b/0", most_images=4).attempts[0].request.kind is Kind.TRAIN


def test_work_too_large_for_a_worker_is_warned_of_once():
    queue = queue_with(task(4, shape=4))
    for _ in range(3):
        assert pull(queue, most_images=3) == Wait()
    (warning,) = [event.text for event in queue.events if isinstance(event, Warned)]
    assert "room for 3" in warning
    assert "needs 4" in warning


# --- lost steps


def lost_steps(queue):
    return [event.lost_steps for event in queue.events if isinstance(event, NodeMissed)]


def test_lost_steps_count_per_image_since_the_last_commit():
    queue = queue_with(task(2))
    work = pull(queue)
    commit(queue, work, 2)
    queue.heartbeat("a/0", "a", {work.lease: 5}, now_ms=100)
    queue.lost("a", "gone", now_ms=100)
    assert lost_steps(queue) == [2 * (5 - 2)]


def test_lost_steps_of_a_silent_node_are_estimated_from_finished_leases():
    queue = queue_with(task(4, shape=2))
    work = pull(queue, now_ms=0)
    finish(queue, work, now_ms=800)  # 8 steps in 800 ms: 100 ms a step
    pull(queue, now_ms=800)
    queue.lost("a", "gone", now_ms=800 + 350)
    assert lost_steps(queue) == [2 * 3]


def test_lost_steps_never_exceed_the_steps_of_the_lease():
    queue = queue_with(task(4, shape=2))
    finish(queue, pull(queue, now_ms=0), now_ms=8)
    pull(queue, now_ms=8)
    queue.lost("a", "gone", now_ms=100_000)
    assert lost_steps(queue) == [2 * STEPS]


# --- after a restart


def test_lease_numbers_continue_above_those_of_an_earlier_coordinator():
    queue = queue_with(task(2))
    queue.begin_leases(1000)
    assert pull(queue).lease == 1000


def test_restored_results_are_not_repeated_and_restored_states_continue():
    queue = queue_with(task(3, shape=3))
    first, second, _ = requests(3)
    queue.restore_finished(done(first))
    queue.restore_state(second, 4, "state")
    one = pull(queue)
    other = pull(queue)
    assert [(a.request.seed, a.step) for a in (*one.attempts, *other.attempts)] == [(1, 4), (2, 0)]
