"""Elastic groups of live processes: the model's output is the same while groups form, dissolve and break."""

import os
import signal
import time

import pytest
import torch

from engine.config import ModelConfig
from engine.diffusion.sampler import initial
from engine.models.load import load_adapter
from engine.parallel.communicator import Communicators, TornGroup, join_store
from engine.parallel.elastic import Elastic
from engine.parallel.ulysses import Ulysses
from engine.protocol.request import ALONE, Regroup
from tests.benchmarks.sp_parity import Failed, Ranks

TIMEOUT_SECONDS = 3.0
NAMES = ("a/0", "a/1", "a/2", "a/3")


@pytest.fixture
def ranks():
    live = Ranks(4, (), preload=[__name__])
    live.run(range(4), begin, live._store.port)
    yield live
    live.close()


def begin(member, port):
    adapter = load_adapter(ModelConfig())
    store = join_store(port, timeout_seconds=120.0)
    communicators = Communicators(store, timeout_seconds=TIMEOUT_SECONDS)
    member.kept["adapter"] = adapter
    member.kept["elastic"] = Elastic(Ulysses(adapter.transformer), communicators, store)


def regroup(member, epoch, communicator, members):
    elastic = member.kept["elastic"]
    began = time.perf_counter()
    if member.rank in members:
        elastic.follow(order(epoch, communicator, members, member.rank))
    else:
        elastic.follow(order(ALONE, ALONE, (member.rank,), member.rank))
    return elastic.epoch, elastic.degree, elastic.rank, list(elastic.torn), time.perf_counter() - began


def order(epoch, communicator, members, rank):
    names = tuple(NAMES[one] for one in members)
    return Regroup(epoch=epoch, rank=members.index(rank), degree=len(members), members=names, communicator=communicator)


def velocity(member):
    adapter = member.kept["adapter"]
    x = initial(range(3), adapter.latent_shape())
    with torch.no_grad():
        return adapter.velocity(x, torch.full((3,), 0.5), adapter.encode(["12", "7", "0042"]), 1.0)


def endless(member):
    try:
        while True:
            velocity(member)
    except TornGroup:
        member.kept["elastic"].tore()
        raise


def storages(member):
    adapter = member.kept["adapter"]
    return os.getpid(), [parameter.data_ptr() for parameter in adapter.transformer.parameters()]


def begin_in_place_of(member, place, port):
    member.rank = place
    begin(member, port)


def states(found):
    return [tuple(one[:3]) for one in found]


@pytest.mark.slow
def test_regrouping_changes_nothing_but_the_groups(ranks):
    everyone = range(4)
    before = ranks.run(everyone, storages)
    (alone, *_) = ranks.run(everyone, velocity)
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    for epoch in (10, 20, 30):
        assert states(ranks.run(everyone, regroup, epoch, 1, (0, 1, 2, 3))) == [
            (
                epoch,
                4,
                r,
            )
            for r in everyone
        ]
        for together in ranks.run(everyone, velocity):
            assert (together - alone).abs().max() <= 5e-6 * alone.abs().max()
        for rank, members in pairs.items():
            ranks.send([rank], regroup, epoch + 1 + members[0], 2 + members[0], members)
        assert [found[1] for found in ranks.answers(everyone)] == [2] * 4
        for together in ranks.run(everyone, velocity):
            assert (together - alone).abs().max() <= 5e-6 * alone.abs().max()
    ranks.run(everyone, regroup, 90, 1, ())
    assert all(torch.equal(one, alone) for one in ranks.run(everyone, velocity))
    assert ranks.run(everyone, storages) == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_death_breaks_its_group_and_the_survivors_form_a_new_one(ranks, how):
    everyone, survivors = range(4), (0, 1, 3)
    (alone, *_) = ranks.run(everyone, velocity)
    ranks.run(everyone, regroup, 10, 1, (0, 1, 2, 3))
    ranks.send(everyone, endless)
    time.sleep(0.3)
    died = time.monotonic()
    os.kill(ranks.processes[2].pid, how)
    found = ranks.answers(survivors)
    assert all(isinstance(one, Failed) and "TornGroup" in str(one) for one in found), found
    assert time.monotonic() - died < TIMEOUT_SECONDS + 20.0
    assert [torn[3] for torn in ranks.run(survivors, regroup, ALONE, ALONE, ())] == [[1]] * 3
    for rank, members in {0: (0, 1), 1: (0, 1)}.items():
        ranks.send([rank], regroup, 11, 2, members)
    assert [one[1] for one in ranks.answers((0, 1))] == [2, 2]
    for together in ranks.run((0, 1), velocity):
        assert (together - alone).abs().max() <= 5e-6 * alone.abs().max()
    assert torch.equal(ranks.run([3], velocity)[0], alone)


def test_a_regroup_a_death_and_a_join_move_only_the_joiners_weights(ranks):
    everyone, survivors = range(4), (0, 1, 3)
    before = ranks.run(everyone, storages)
    (alone, *_) = ranks.run(everyone, velocity)
    ranks.run(everyone, regroup, 10, 1, (0, 1, 2, 3))
    assert ranks.run(everyone, storages) == before
    ranks.send(everyone, endless)
    time.sleep(0.1)
    os.kill(ranks.processes[2].pid, signal.SIGKILL)
    assert all(isinstance(one, Failed) for one in ranks.answers(survivors))
    assert ranks.run(survivors, storages) == [before[place] for place in survivors]
    joiner = Ranks(1, (), preload=[__name__])
    try:
        joiner.run([0], begin_in_place_of, 2, ranks._store.port)
        ranks.send(survivors, regroup, 11, 2, (0, 1, 2, 3))
        joiner.send([0], regroup, 11, 2, (0, 1, 2, 3))
        assert states(ranks.answers(survivors) + joiner.answers([0])) == [(11, 4, place) for place in (0, 1, 3, 2)]
        ranks.send(survivors, velocity)
        joiner.send([0], velocity)
        for together in ranks.answers(survivors) + joiner.answers([0]):
            assert (together - alone).abs().max() <= 5e-6 * alone.abs().max()
        assert ranks.run(survivors, storages) == [before[place] for place in survivors]
        ((process, joined),) = joiner.run([0], storages)
    finally:
        joiner.close()
    assert process not in [one for one, _ in before]
    assert len(joined) == len(before[2][1])


def test_a_worker_whose_peers_never_come_continues_alone_and_reports_the_epoch(ranks):
    epoch, degree, _, torn, seconds = ranks.run([0], regroup, 10, 7, (0, 1))[0]
    assert (epoch, degree, torn) == (ALONE, 1, [7])
    assert seconds < TIMEOUT_SECONDS + 20.0


def lead(member):
    elastic = member.kept["elastic"]
    elastic.hand_out(b"first")
    x = torch.ones(3)
    elastic.share(x)
    elastic.hand_out(b"second")
    decisions = [elastic.agree(go_on, torch.device("cpu")) for go_on in (True, False)]
    elastic.leave()
    return decisions, x.tolist(), elastic.epoch


def follow(member):
    elastic = member.kept["elastic"]
    assert elastic.follows
    received = [elastic.handed(60.0)]
    x = torch.zeros(3)
    elastic.share(x)
    received.append(elastic.handed(60.0))
    decisions = [elastic.agree(True, torch.device("cpu")) for _ in range(2)]
    assert elastic.handed(60.0) is None
    return received, decisions, x.tolist(), elastic.epoch


def test_the_group_leader_sends_work_decides_and_regroups_its_followers(ranks):
    ranks.run((0, 1), regroup, 10, 1, (0, 1))
    ranks.send([1], follow)
    ranks.send([0], lead)
    ((decisions, x, epoch),) = ranks.answers([0])
    assert (decisions, x, epoch) == ([True, False], [1.0] * 3, ALONE)
    ((received, decisions, x, epoch),) = ranks.answers([1])
    assert received == [b"first", b"second"]
    assert (decisions, x, epoch) == ([True, False], [1.0] * 3, ALONE)


def test_a_follower_waits_for_work_no_longer_than_its_timeout(ranks):
    ranks.run((0, 1), regroup, 10, 1, (0, 1))
    ((nothing, seconds),) = ranks.run([1], wait_for_work)
    assert nothing is None
    assert seconds < 10.0


def wait_for_work(member):
    began = time.perf_counter()
    return member.kept["elastic"].handed(0.3), time.perf_counter() - began
