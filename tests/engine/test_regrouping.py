"""The coordinator regroups workers when one joins or dies, when a node is preempted, and as demand changes."""

import itertools

import pytest

from engine.coordinator.regrouping import Regrouping
from engine.parallel.forecast import Demand, Requests
from engine.protocol.messages import GroupReport
from engine.protocol.request import ALONE

PLAN_MS = 500
CLASS = "24 x float32"
NOTHING = Demand(waiting=(), in_flight={}, images={})
BELIEVED = {1: 1.0, 2: 0.6, 4: 0.4}


class World:
    """Workers that pull, follow orders, and follow the leader of their group."""

    def __init__(self, *workers, sp_degree, demand=NOTHING, believed=BELIEVED):
        self.demand = demand
        self.groups = Regrouping(lambda: self.demand, sp_degree=sp_degree, run_ms=lambda seconds: round(1000 * seconds))
        self.believed = believed
        self.epochs = dict.fromkeys(workers, ALONE)
        self.torn = {worker: [] for worker in workers}
        self.boots = dict.fromkeys(workers, 1)
        self.orders = {}
        self.draining = set()
        self.now_ms = 0

    def pull(self, worker):
        torn, self.torn[worker] = self.torn[worker], []
        report = GroupReport(epoch=self.epochs[worker], torn=tuple(torn), believed=dict(self.believed))
        self.groups.pulled(worker, self.boots[worker], report, now_ms=self.now_ms)
        order = self.groups.members.order(worker)
        if order is not None:
            self.epochs[worker], self.orders[worker] = order.epoch, order

    def settle(self, rounds=4):
        """Let every worker pull a few times while time passes."""
        for _ in range(rounds):
            for worker in self.epochs:
                self.pull(worker)
            self.tick()

    def tick(self, ms=PLAN_MS):
        self.now_ms += ms
        self.groups.tick(lambda node: node not in self.draining, now_ms=self.now_ms)

    def kill(self, worker):
        number = self.orders[worker].communicator
        del self.epochs[worker]
        for other, order in self.orders.items():
            if other in self.epochs and order.communicator == number:
                self.epochs[other] = ALONE
                self.torn[other].append(number)

    def shared(self):
        return [formed.members for formed in self.groups.members.table.groups()]

    def reported(self):
        return [(event.node, event.groups) for event in self.groups.events]


def waiting(count, steps=8):
    return Demand(waiting=[Requests(request_class=CLASS, steps=steps, count=count)], in_flight={}, images={CLASS: 24})


def test_a_fixed_degree_groups_a_node_as_its_workers_come():
    world = World("a/0", "a/1", "a/2", sp_degree=2)
    world.settle()
    assert world.shared() == [("a/0", "a/1")]
    assert world.reported() == [("a", (("a/0", "a/1"), ("a/2",)))]
    assert world.groups.events[0].reason == "a/2 came"


def test_survivors_of_a_death_regroup_and_the_event_names_the_reason():
    world = World("a/0", "a/1", "a/2", "a/3", sp_degree=4)
    world.settle()
    world.kill("a/3")
    world.groups.gone(["a/3"], "a/3 died", now_ms=world.now_ms)
    world.settle()
    assert world.shared() == [("a/0", "a/1")]
    assert world.reported()[-1] == ("a", (("a/0", "a/1"), ("a/2",)))


def test_survivors_reuse_a_communicator_made_with_their_old_group():
    world = World("a/0", "a/1", "a/2", "a/3", sp_degree=4)
    world.settle()
    before = {worker: set(order.keep) for worker, order in world.orders.items()}
    assert [degree for _, _, degree in world.orders["a/2"].prepare] == [2]
    world.kill("a/3")
    world.groups.gone(["a/3"], "a/3 died", now_ms=world.now_ms)
    world.settle()
    pair = world.orders["a/0"]
    assert world.shared() == [("a/0", "a/1")]
    assert pair.communicator in before["a/0"]
    assert pair.prepare == ()
    assert not set(pair.keep) & before["a/2"], "what the dead one was part of is not kept"


def test_a_worker_waiting_for_a_lost_peer_is_woken_even_if_the_plan_is_unchanged():
    world = World("a/0", "a/1", "a/2", sp_degree=2)
    world.settle()
    world.kill("a/1")
    world.pull("a/0")  # the worker reports a broken group, and its peer is waited for
    assert world.groups.tick(lambda node: True, now_ms=world.now_ms) is False
    assert world.groups.tick(lambda node: True, now_ms=world.now_ms + 1000) is True


def test_a_node_under_preemption_forms_no_group():
    world = World("a/0", "a/1", "b/0", "b/1", sp_degree=2)
    world.settle()
    world.draining.add("a")
    world.tick()
    assert world.shared() == [("b/0", "b/1")]


def test_many_requests_run_on_single_workers_and_the_last_one_on_a_group():
    world = World("a/0", "a/1", "a/2", "a/3", sp_degree="auto", demand=waiting(40))
    world.settle()
    assert world.shared() == []
    world.demand = waiting(1)
    world.settle()
    assert world.shared() == [("a/0", "a/1", "a/2", "a/3")]
    world.demand = waiting(40)
    world.settle()
    assert world.shared() == []
    assert [reason.reason for reason in world.groups.events] == ["demand", "demand"]


@pytest.mark.parametrize(("seconds", "shares"), [(0.6, True), (1.2, False)])
def test_measured_step_times_decide_the_groups(seconds, shares):
    world = World("a/0", "a/1", sp_degree="auto", demand=waiting(1))
    for _ in range(3):
        world.groups.measured(CLASS, 1, 1.0)
        world.groups.measured(CLASS, 2, seconds)
    world.settle()
    assert bool(world.shared()) == shares


def test_an_unseen_request_class_is_assumed_as_slow_as_the_seen_ones():
    two = Demand(waiting=(), in_flight={}, images={"8 x float32": 8, CLASS: 24})
    world = World("a/0", sp_degree="auto", demand=two)
    world.settle(1)
    world.groups.measured(CLASS, 1, 48.0)  # estimated: 24
    table = world.groups._step_seconds(two.images)
    assert table["8 x float32"] == pytest.approx({1: 16.0, 2: 9.6, 4: 6.4})


def test_a_run_without_groups_reports_no_regroup():
    world = World("a/0", "a/1", sp_degree="auto", demand=waiting(100))
    world.settle()
    assert world.reported() == []


@pytest.mark.parametrize("order", list(itertools.permutations(["a/0", "a/1", "a/2"])))
def test_a_degree_that_the_model_does_not_allow_is_lowered(order):
    world = World(*order, sp_degree=3)
    world.settle()
    assert [len(members) for members in world.shared()] == [2]
