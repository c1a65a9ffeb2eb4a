"""A rank that samples while it has no order, and rank 0's orders to it. The group is a queue of this process.

Ranks that train over real gloo: test_rank_threads.py. Killed and frozen ranks: end_to_end/test_rank_sampling.py.
"""

import queue
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine.algorithm.health import Health
from engine.algorithm.objective import FinishedGroup
from engine.algorithm.old_policy import OldPolicy
from engine.clock import ScaledClock
from engine.parallel.communicator import TornGroup
from engine.protocol.request import WeightsKey
from engine.trainer.rank_messages import (
    BeginStep,
    EndStep,
    LetSample,
    Published,
    SentWeights,
    Share,
    TrainGroup,
    decoded_order,
    decoded_share,
    encoded,
)
from engine.trainer.ranks import Follower, Ranks
from engine.worker.usage import Usage
from tests.rank_training import PLAN, manifest_of

SECONDS = 20.0
SENT = SentWeights(with_old=False, with_before=False)
PUBLISHED = Published(key=WeightsKey(version=1), digest="d", weights=SENT)
END_OF_GROUP = None


def begin(*, weights=None):
    return BeginStep(manifest=manifest_of(0), minibatch=0, plan=PLAN, std=None, rows_per_forward=8, weights=weights)


def group_order(number):
    return TrainGroup.of(
        number, FinishedGroup(prompt=f"{number:02d}", seeds=(), trajectories=(), rewards=(), is_early=False)
    )


def wait_until(is_true):
    until = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.001)


class Group:
    """The group as one rank sees it. `rank`: of this process. Every tensor from rank 0 is full of `value`."""

    ranks = 2

    def __init__(self, rank=1, value=7.0):
        self.rank, self.value, self.sent = rank, value, []
        self._messages, self._given, self._asked = queue.Queue(), 0, 0

    def give(self, *messages):
        """Send messages to this rank, and wait until its inbox has them: it asks for the next one."""
        for message in messages:
            self._messages.put(message)
        self._given += len(messages)
        wait_until(lambda: self._asked > self._given)

    def end(self):
        self._messages.put(END_OF_GROUP)

    def answer(self, share):
        """Answer rank 0."""
        self._messages.put(share)

    def receive(self, rank, *, idle=False):
        self._asked += 1
        message = self._messages.get()
        if message is END_OF_GROUP:
            raise TornGroup("rank 0 has ended")
        return encoded(message)

    def send(self, rank, data):
        self.sent.append(decoded_order(data) if self.rank == 0 else decoded_share(data))

    def finish_sending(self): ...

    def copy_from_first(self, x):
        if self.rank:
            x.fill_(self.value)

    def sum(self, x):
        return x


class Step:
    """A step that logs its groups. `adds`: called for each of them."""

    missing = ()

    def __init__(self, log, adds):
        self._log, self._adds, self.health = log, adds, Health(neutral={})

    def add(self, number, group):
        self._adds()
        self._log.append(f"add {number}")

    def commit(self):
        return self.health

    def abort(self):
        self._log.append("abort")


class Trainer:
    """A trainer of one parameter. `adds`: as of `Step`."""

    def __init__(self, log):
        self.parameters = {"w": nn.Parameter(torch.zeros(2))}
        self.old, self.rows_per_forward, self.on_fewer_rows = OldPolicy(self.parameters), 8, None
        self._log, self.adds = log, lambda: None

    def begin(self, manifest, minibatch, plan, *, std, share):
        self._log.append("begin")
        return Step(self._log, self.adds)


class Sampler:
    """Logs its calls. `during`: what happens during each lease, with `is_called`. Without one more, there is no work.

    `aside`: what happens when the rank waits or obeys. `is_beside`: leases are kept now.
    """

    def __init__(self, log):
        self.log, self.during, self.aside, self.is_beside = log, [], lambda: None, False
        self.waits_for_scores, self.key = False, None

    def published(self, key, digest):
        self.log.append(f"published {digest}")
        self.key = key

    def sample(self, is_called):
        assert not self.is_beside, "a rank that samples renews its leases itself"
        if not self.during:
            return False
        self.log.append("sample")
        self.during.pop(0)(is_called)
        return True

    @contextmanager
    def beside(self):
        self.is_beside = True
        self.aside()
        yield
        self.is_beside = False

    def end(self):
        self.log.append("end")


@pytest.fixture
def rank():
    """A follower with its group, sampler, trainer, and the log of all calls."""
    log = []
    group, sampler, trainer, usage = Group(), Sampler(log), Trainer(log), Usage(ScaledClock(origin_ms=0))
    follower = Follower(group, trainer, sampler=sampler, usage=usage)
    return SimpleNamespace(group=group, sampler=sampler, trainer=trainer, usage=usage, follower=follower, log=log)


def test_a_rank_samples_until_an_order_comes_for_which_another_rank_waits(rank):
    def begins(is_called):
        rank.group.give(begin())
        assert not is_called(), "no rank waits until this one has begun a step"

    def has_a_group(is_called):
        rank.group.give(group_order(1))
        assert is_called()

    rank.sampler.during = [begins, has_a_group, lambda is_called: rank.group.give(EndStep())]
    rank.follower.follow_step()
    assert rank.log == ["sample", "sample", "begin", "add 1", "sample", "abort"]
    assert len(rank.group.sent) == 1


def test_weights_interrupt_sampling_because_rank_0_sends_them_to_all_ranks_at_once(rank):
    def begins(is_called):
        rank.group.give(begin(weights=SENT))
        assert is_called()
        rank.group.give(EndStep())

    rank.sampler.during = [begins]
    rank.follower.follow_step()
    assert rank.log == ["sample", "begin", "abort"]
    assert rank.trainer.parameters["w"].tolist() == [7.0, 7.0]


def test_a_rank_samples_with_published_weights_only_once_it_has_them(rank):
    seen = []
    rank.sampler.published = lambda key, digest: seen.append((key, digest, rank.trainer.parameters["w"].tolist()))
    rank.group.give(PUBLISHED, begin(), EndStep())
    rank.follower.follow_step()
    assert seen == [(PUBLISHED.key, "d", [7.0, 7.0])]


def test_a_rank_that_may_not_sample_waits_and_goes_on_when_it_may(rank):
    rank.group.give(LetSample(is_on=False))
    rank.sampler.during = [lambda is_called: rank.group.give(EndStep())]

    def waits():
        asides.append("begin" in rank.log)
        if len(asides) == 2:  # the first one obeys `LetSample`
            rank.group.give(begin(weights=SENT))
        elif len(asides) == 4:
            rank.group.give(LetSample(is_on=True))

    asides = []
    rank.sampler.aside = waits
    rank.follower.follow_step()
    assert rank.log == ["begin", "sample", "abort"], "it samples in the middle of the step too"


@pytest.mark.parametrize("samples", [True, False])
def test_a_rank_gives_its_leases_back_when_its_group_ends(rank, samples):
    def ends(is_called):
        rank.group.end()
        wait_until(is_called)

    rank.sampler.during = [ends] if samples else []
    if not samples:
        rank.group.end()
    with pytest.raises(TornGroup):
        rank.follower.follow()
    assert rank.log[-1] == "end"


def test_leases_that_wait_for_scores_are_kept_while_the_rank_obeys_or_waits(rank):
    beside, obeyed = [], []
    rank.sampler.waits_for_scores = True
    rank.trainer.adds = lambda: obeyed.append(rank.sampler.is_beside)

    def waits():
        beside.append(len(beside))
        if len(beside) == 1:
            time.sleep(0.01)
            rank.group.give(begin(weights=SENT), group_order(1), EndStep())

    rank.sampler.aside = waits
    rank.follower.follow_step()
    assert obeyed == [True]
    assert len(beside) == 4, "once while it waits, and once for each order"
    assert "idle" not in rank.usage.total, "as with every worker, waiting for scores counts as rollouts"


def test_each_answer_has_the_times_since_the_last_one(rank):
    rank.trainer.adds = lambda: time.sleep(0.01)
    for number in (1, 3):
        rank.group.give(begin(weights=SENT), group_order(number), EndStep())
        rank.follower.follow_step()
    first, second = (Counter(share.phase_ms) for share in rank.group.sent)
    assert min(first["training"], second["training"]) > 0
    assert first["training"] + second["training"] == pytest.approx(rank.usage.total["training"])


# --- rank 0


@pytest.fixture
def leader():
    """Rank 0's view of one other rank, after the start of the run. `sent`: the orders since then."""
    group, trainer, usage = Group(rank=0), Trainer([]), Usage(ScaledClock(origin_ms=0))
    ranks = Ranks(group, trainer, usage, is_started=False)
    group.sent.clear()
    return SimpleNamespace(ranks=ranks, group=group, trainer=trainer)


def share_of_rank_1(**phase_ms):
    return Share.of(Health(neutral={}, rows_per_forward=8), memory_error="", does_not_fit="", phase_ms=phase_ms)


def take_step(leader, minibatch=0, **phase_ms):
    leader.group.answer(share_of_rank_1(**phase_ms))
    step = leader.ranks.begin(manifest_of(0), minibatch, PLAN, std=0.25)
    for number in list(step.missing):
        step.add(number, FinishedGroup(prompt="", seeds=(), trajectories=(), rewards=(), is_early=False))
    step.commit()


def test_weights_that_a_rank_has_from_publishing_are_not_sent_again_until_a_step_changed_them(leader):
    leader.ranks.published(PUBLISHED.key, "d")
    take_step(leader)
    take_step(leader, 1)
    published, first, second = (one for one in leader.group.sent if isinstance(one, Published | BeginStep))
    assert published == PUBLISHED
    assert (first.weights, second.weights) == (None, SENT)
    assert {first.std, second.std} == {0.25}


def test_ranks_are_told_to_sample_or_not_only_when_that_changes(leader):
    for is_on in (True, False, False, True, True, False):
        leader.ranks.let_sample(is_on=is_on)
    assert leader.group.sent == [LetSample(is_on=is_on) for is_on in (False, True, False)]


def test_the_times_of_other_ranks_are_reported_once(leader):
    take_step(leader, training=5.0)
    take_step(leader, 1, training=2.0, idle=1.0)
    assert leader.ranks.take_phases() == {"training": 7.0, "idle": 1.0}
    assert leader.ranks.take_phases() == {}
