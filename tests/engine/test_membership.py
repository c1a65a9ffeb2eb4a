"""Membership: a group is ordered once all its members wait, under a new communicator number."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator.membership import Membership
from engine.parallel.groups import plan_groups
from engine.protocol.request import ALONE, Regroup

SETTLING_MS = 300


def fixed(degree):
    def planner(live, groups):
        return plan_groups(live, step_seconds={}, regroup_seconds=0.0, groups=groups, sp_degree=degree)

    return planner


@dataclass
class Process:
    """A worker without work: it follows orders and notices dead peers."""

    name: str
    boot: int
    epoch: int = ALONE
    order: Regroup | None = None
    torn: list[int] = field(default_factory=list)
    busy: bool = False


class World:
    """Workers around a membership that die, restart and work."""

    def __init__(self, names, degree):
        self.membership = Membership(settling_ms=SETTLING_MS)
        self.names, self.degree = names, degree
        self.now_ms = 0
        self.boots = 0
        self.processes = {}
        self.orders = {}
        """The order of the first member, by epoch."""
        self.communicators = {}
        """Processes of each communicator, by its number."""

    def start(self, name):
        self.boots += 1
        self.processes[name] = Process(name, self.boots)

    def kill(self, name):
        dead = self.processes.pop(name, None)
        if dead is not None and dead.epoch != ALONE:
            for other in self.processes.values():
                if other.epoch == dead.epoch:
                    other.torn.append(dead.order.communicator)

    def report_death(self, name):
        if name not in self.processes and self.membership.gone([name]):
            self.membership.plan(fixed(self.degree))

    def pull(self, name):
        process = self.processes.get(name)
        if process is None:
            return
        if process.torn:
            process.epoch, process.busy = ALONE, False
        if process.busy and not self.membership.must_come(name):
            return
        process.busy = False
        torn, process.torn = process.torn, []
        if self.membership.pulled(name, process.boot, process.epoch, torn, now_ms=self.now_ms):
            self.membership.plan(fixed(self.degree))
        order = self.membership.order(name)
        for processes, number in self.membership.communicators.numbers().items():
            assert self.communicators.setdefault(number, dict(processes)) == dict(processes)
        if order is None:
            if self.membership.leads(name):
                process.busy = True
                self.membership.busy(name)
            return
        self.obey(process, order)

    def obey(self, process, order):
        assert order.members[order.rank] == process.name
        assert order.degree == len(order.members)
        if order.epoch == ALONE:
            process.epoch, process.order = ALONE, None
            return
        first = self.orders.setdefault(order.epoch, order)
        assert (first.members, first.communicator) == (order.members, order.communicator), "one epoch, two groups"
        for number, rank, degree in order.prepare:
            whose = self.communicators[number]
            assert len(whose) == degree < order.degree
            assert set(whose) < set(order.members), "a communicator is prepared whose members are not all at the table"
            assert sorted(whose, key=order.members.index).index(process.name) == rank
            assert whose[process.name] == process.boot
        assert order.communicator in order.keep
        for number in order.keep:
            assert self.communicators[number][process.name] == process.boot, "kept, but of another process"
        boots = self.communicators[order.communicator]
        assert boots[process.name] == process.boot, "a communicator met another process"
        others = [self.processes.get(other) for other in order.members if other != process.name]
        others = [other for other in others if other is not None and other.boot == boots[other.name]]
        elsewhere = [other for other in others if other.busy and other.epoch != order.epoch]
        assert not elsewhere, "ordered while a peer works elsewhere"
        if len(others) + 1 < order.degree:
            process.torn.append(order.communicator)  # the rendezvous times out
            return
        process.epoch, process.order = order.epoch, order

    def want(self, degree):
        self.degree = degree
        self.membership.plan(fixed(degree))

    def pass_time(self, ms):
        self.now_ms += ms
        if self.membership.settled(self.now_ms):
            self.membership.plan(fixed(self.degree))

    def calm_down(self):
        """Let all workers live and call in, with every death known."""
        for name in self.names:
            self.report_death(name)
        for _ in range(12):
            for name in sorted(self.processes):
                self.pull(name)
            self.pass_time(SETTLING_MS)


NAMES = [f"{node}/{place}" for node in ("a", "b") for place in range(4)]

moves = st.lists(
    st.tuples(
        st.sampled_from(["start", "kill", "report_death", "pull", "pull", "pull", "wait", "halve", "double"]),
        st.sampled_from(NAMES),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(moves, st.sampled_from([1, 2, 4]))
def test_live_workers_always_end_in_the_planned_groups(steps, degree):
    world = World(NAMES, degree)
    for move, name in steps:
        if move == "wait":
            world.pass_time(100)
        elif move in ("halve", "double"):
            world.want(max(1, min(4, world.degree * 2 if move == "double" else world.degree // 2)))
        elif move != "start" or name not in world.processes:
            getattr(world, move)(name)
    world.calm_down()
    in_their_groups(world)


def in_their_groups(world):
    """Assert that every live worker is in its planned group and every leader works."""
    live = sorted(world.processes)
    wanted = {group.members for group in fixed(world.degree)(live, [])}
    there = {formed.members for formed in world.membership.table.groups()}
    sizes = sorted(len(members) for members in wanted if len(members) > 1)
    assert sorted(map(len, there)) == sizes
    for formed in world.membership.table.groups():
        assert {world.processes[name].epoch for name in formed.members} == {formed.epoch}
        assert [world.membership.leads(name) for name in formed.members] == [True] + [False] * (len(formed.members) - 1)
    grouped = {name for members in there for name in members}
    for name in set(live) - grouped:
        assert world.processes[name].epoch == ALONE
        assert world.membership.leads(name)
    assert all(world.processes[name].busy for name in live if world.membership.leads(name))


def together(names=("a/0", "a/1"), degree=2):
    world = World(list(names), degree)
    for name in names:
        world.start(name)
    world.calm_down()
    return world


def test_a_busy_worker_must_report_before_its_group_is_ordered():
    world = World(["a/0", "a/1"], 2)
    world.start("a/0")
    world.pull("a/0")
    assert world.processes["a/0"].busy
    world.start("a/1")
    world.pull("a/1")
    assert world.membership.must_come("a/0")
    assert not world.orders
    world.pull("a/0")
    world.pull("a/1")
    assert {process.epoch for process in world.processes.values()} == set(world.orders)


def test_the_same_processes_reuse_their_communicator_under_a_new_epoch():
    world = together()
    (first,) = world.membership.table.groups()
    world.want(1)
    world.calm_down()
    assert world.membership.table.groups() == []
    world.want(2)
    world.calm_down()
    (again,) = world.membership.table.groups()
    assert again.communicator == first.communicator
    assert again.epoch != first.epoch


def test_a_restarted_worker_gets_a_new_communicator():
    world = together()
    (first,) = world.membership.table.groups()
    world.kill("a/1")
    world.start("a/1")
    world.calm_down()
    (again,) = world.membership.table.groups()
    assert again.communicator != first.communicator


def test_survivors_of_a_broken_group_are_waited_for_until_a_limit():
    world = together([f"a/{place}" for place in range(4)], degree=4)
    world.kill("a/3")
    world.degree = 2
    world.pull("a/0")
    assert not world.membership.leads("a/0")
    world.pull("a/1")
    world.pull("a/2")
    assert not world.membership.leads("a/2")
    world.pass_time(SETTLING_MS)
    for name in ("a/0", "a/1", "a/2", "a/0", "a/1"):
        world.pull(name)
    assert [formed.members for formed in world.membership.table.groups()] == [("a/0", "a/1")]
    assert world.processes["a/2"].busy


def test_a_worker_outside_every_group_may_always_work():
    assert Membership(settling_ms=SETTLING_MS).leads("node/trainer")
    assert Membership(settling_ms=SETTLING_MS).order("node/trainer") is None


@pytest.mark.parametrize("seed", range(20))
def test_long_random_histories_end_in_the_planned_groups(seed):
    rng = random.Random(seed)
    world = World(NAMES, 2)
    for _ in range(600):
        name = rng.choice(NAMES)
        if name not in world.processes:
            world.start(name)
        elif rng.random() < 0.03:
            world.kill(name)
        elif rng.random() < 0.1:
            world.pass_time(50)
        world.pull(rng.choice(NAMES))
    world.calm_down()
    in_their_groups(world)
