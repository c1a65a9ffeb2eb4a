"""Divide the groups of an optimiser step over the ranks of the trainer. LoRA only: every rank has all weights.

    publish  rank 0 copies the trained weights, the old policy's, and those of early groups, to the other ranks
    begin    the same if the trained weights changed since then: after the first step of a batch
    add      the group at place i of the mini-batch belongs to rank i mod ranks; rank 0 sends the others' groups at once
    commit   every rank has trained its groups -> gradients are added in the order of the ranks -> rank 0 takes the step
    evaluate rank 0 copies the evaluated weights; ranks serve the evaluation until it is complete

Rank 0 runs the training loop and alone holds the optimiser, the average and the checkpoint. The other ranks compute
gradients, and sample rollouts while rank 0 has no order for them (`follow`, rank_sampling.py). A run may therefore
continue from a checkpoint with another number of ranks.

A rank's share depends on the manifest and not on arrival. With `order: fixed` the update repeats bit for bit for a
given number of ranks. Updates of different numbers of ranks differ by rounding, because a sum has another order.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from engine.algorithm.health import Health
from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import DoesNotFit, Trainer, Transaction
from engine.diffusion.sampler import Plan
from engine.events import Phase
from engine.parallel.communicator import TornGroup
from engine.parallel.rank_group import Inbox, RankGroup
from engine.protocol.request import Manifest, WeightsKey
from engine.trainer.rank_messages import (
    BeginEvaluation,
    BeginStep,
    EndEvaluation,
    EndStep,
    LetSample,
    Order,
    Published,
    SentWeights,
    Share,
    Start,
    TrainGroup,
    decoded_order,
    decoded_share,
    encoded,
)
from engine.worker.usage import Usage


class Step(Protocol):
    """An optimiser step: a `Transaction`, or a transaction that ranks share."""

    @property
    def missing(self) -> list[int]:
        """Return the group numbers not added yet, in the order in which complete groups should be added."""

    def add(self, number: int, group: FinishedGroup) -> None:
        """Add a group."""

    def commit(self) -> Health:
        """Take the step."""

    def abort(self) -> None:
        """Discard the step."""


class OtherRanks(Protocol):
    """Rank 0's view of the other ranks. Every call raises TornGroup if a rank is lost."""

    def begin(self, manifest: Manifest, minibatch: int, plan: Plan, *, std: float | None) -> Step:
        """Begin an optimiser step. See `Trainer.begin`."""

    def published(self, key: WeightsKey, digest: str) -> None:
        """Let the other ranks sample with the weights that the coordinator now has under this key."""

    def let_sample(self, *, is_on: bool) -> None:
        """Let the other ranks sample while they have no group to train. They may from the start."""

    def evaluating(self, key: WeightsKey, digest: str) -> AbstractContextManager[None]:
        """Let the other ranks serve an evaluation inside the context, if they can.

        The trained parameters of this rank hold the evaluated weights, which the coordinator has under this key.
        """

    def take_phases(self) -> Mapping[str, float]:
        """Return the milliseconds of the other ranks by phase, added up, since the last call."""


class Ranks:
    """Rank 0's view of the other ranks, which have all weights. See `OtherRanks`."""

    def __init__(self, group: RankGroup | None, trainer: Trainer, usage: Usage, *, is_started: bool) -> None:
        """Send the first weights to the other ranks. `group`: None if the trainer has a single rank.

        `is_started`: the run has start weights. Call before a checkpoint is restored.
        """
        self._group, self._trainer, self._usage = group, trainer, usage
        self._have_weights = False
        """True if the other ranks have the trainer's weights as they are now."""
        self._let_sample = True
        self._phase_ms: Counter[str] = Counter()
        if group is not None:
            self._order(group, Start(is_started=is_started))
            _copy_weights(group, trainer.parameters.values())

    def published(self, key: WeightsKey, digest: str) -> None:
        """Give the other ranks the weights that the coordinator now has under this key, to sample with.

        Raises TornGroup if a rank is lost, as all calls do.
        """
        if self._group is None:
            return
        with self._usage.measure(Phase.COLLECTIVE):
            self._order(self._group, Published(key=key, digest=digest, weights=self._sent_weights()))
            self._send_weights(self._group)
        self._have_weights = True

    def take_phases(self) -> Mapping[str, float]:
        """Return the milliseconds of the other ranks by phase, added up, since the last call."""
        spent, self._phase_ms = dict(self._phase_ms), Counter()
        return spent

    def let_sample(self, *, is_on: bool) -> None:
        """Let the other ranks sample while they have no group to train. They may from the start."""
        if self._group is not None and is_on != self._let_sample:
            self._order(self._group, LetSample(is_on=is_on))
        self._let_sample = is_on

    @contextmanager
    def evaluating(self, key: WeightsKey, digest: str) -> Iterator[None]:
        """Let the other ranks serve an evaluation inside the context. See `OtherRanks`."""
        if self._group is None:
            yield
            return
        with self._usage.measure(Phase.COLLECTIVE):
            self._order(self._group, BeginEvaluation(key=key, digest=digest))
            _copy_weights(self._group, self._trainer.parameters.values())
        yield
        self._order(self._group, EndEvaluation())

    def begin(self, manifest: Manifest, minibatch: int, plan: Plan, *, std: float | None) -> Step:
        """Begin an optimiser step. See `Trainer.begin`. Raises TornGroup if a rank is lost, as all calls do."""
        group, trainer = self._group, self._trainer
        if group is None:
            return trainer.begin(manifest, minibatch, plan, std=std)
        weights = None if self._have_weights else self._sent_weights()
        begin = BeginStep(
            manifest=manifest,
            minibatch=minibatch,
            plan=plan,
            std=std,
            rows_per_forward=trainer.rows_per_forward,
            weights=weights,
        )
        with self._usage.measure(Phase.COLLECTIVE):
            self._order(group, begin)
            if weights is not None:
                self._send_weights(group)
        self._have_weights = False  # the step changes them
        numbers = manifest.minibatches[minibatch]
        own = trainer.begin(manifest, minibatch, plan, std=std, share=share_of(numbers, 0, group.ranks))
        return _SharedStep(self, group, numbers, own)

    def _sent_weights(self) -> SentWeights:
        old = self._trainer.old
        return SentWeights(with_old=old.tensors is not None, with_before=old.before is not None)

    def _send_weights(self, group: RankGroup) -> None:
        trainer = self._trainer
        _copy_weights(group, trainer.parameters.values())
        for copy in (trainer.old.tensors, trainer.old.before):
            if copy is not None:
                _copy_weights(group, [copy[name] for name in trainer.parameters])

    def _order(self, group: RankGroup, order: Order) -> None:
        data = encoded(order)
        for rank in range(1, group.ranks):
            group.send(rank, data)

    def gather(self, group: RankGroup, health: Health) -> None:
        """Wait for the other ranks. Add their gradients to the trainer's, and their health to `health`.

        The seconds count as collectives. Raises DoesNotFit if a training pass of one row does not fit on another rank.
        """
        with self._usage.measure(Phase.COLLECTIVE):
            self._gather(group, health)

    def _gather(self, group: RankGroup, health: Health) -> None:
        self._order(group, EndStep())
        group.finish_sending()
        for rank in range(1, group.ranks):
            share = decoded_share(group.receive(rank))
            if share.does_not_fit:
                raise DoesNotFit(f"rank {rank} of the trainer: {share.does_not_fit}")
            if share.rows_per_forward < self._trainer.rows_per_forward:
                self._trainer.rows_per_forward = share.rows_per_forward
                self._trainer.on_fewer_rows(share.rows_per_forward, f"rank {rank}: {share.memory_error}")
            health.merge(share.health)
            self._phase_ms.update(share.phase_ms)
        _sum_gradients(group, self._trainer.parameters.values())


class _SharedStep:
    """An optimiser step whose groups are divided over the ranks. See `Step`."""

    def __init__(self, ranks: Ranks, group: RankGroup, numbers: Sequence[int], own: Transaction) -> None:
        self._ranks, self._group, self._own = ranks, group, own
        self._others = {
            number: rank for rank in range(1, group.ranks) for number in share_of(numbers, rank, group.ranks)
        }
        """Ranks of the groups that were not sent yet, by group number."""

    @property
    def missing(self) -> list[int]:
        return [*self._others, *self._own.missing]  # first the groups for other ranks, which wait for them

    def add(self, number: int, group: FinishedGroup) -> None:
        if number in self._others:
            self._group.send(self._others.pop(number), encoded(TrainGroup.of(number, group)))
        else:
            self._own.add(number, group)

    def commit(self) -> Health:
        if self.missing:
            raise ValueError(f"groups {self.missing} have not been added")
        self._ranks.gather(self._group, self._own.health)
        return self._own.commit()

    def abort(self) -> None:
        self._own.abort()


def share_of(numbers: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """Return a rank's groups of a mini-batch."""
    return tuple(numbers[rank::ranks])


OrderT = TypeVar("OrderT")

MeasurePhase = Callable[[Phase], AbstractContextManager[None]]
"""Makes the context around work of a phase, to measure its time (`Usage.measure`)."""

Stepped = Callable[[], None]


def unmeasured(phase: Phase) -> AbstractContextManager[None]:
    """Measure nothing: the times of a rank on rank 0's node are not reported."""
    return nullcontext()


def nothing() -> None:
    """Do nothing after a step."""


class Sampler(Protocol):
    """Samples with the weights of a rank. All calls come from the thread that obeys rank 0."""

    def published(self, key: WeightsKey, digest: str) -> None:
        """Take the rank's weights as those of this key."""

    def begin_evaluation(self, key: WeightsKey, digest: str) -> None:
        """Take the rank's weights as those of this key, and serve evaluations only."""

    def end_evaluation(self) -> None:
        """Serve rollouts again, with the weights of before."""

    def sample(self, is_called: Callable[[], bool]) -> bool:
        """Sample a lease. Returns False if there is no work.

        `is_called`: looked at between denoising steps; True gives the rest of the lease back.
        """

    @property
    def waits_for_scores(self) -> bool:
        """Return True if a sampled lease has no scores yet."""

    def beside(self) -> AbstractContextManager[None]:
        """Keep the leases that wait for scores while the rank does other work in the context."""

    def end(self) -> None:
        """Give everything back."""


class NoSampler:
    """A rank that only trains."""

    def published(self, key: WeightsKey, digest: str) -> None: ...

    def begin_evaluation(self, key: WeightsKey, digest: str) -> None: ...

    def end_evaluation(self) -> None: ...

    def sample(self, is_called: Callable[[], bool]) -> bool:
        return False

    waits_for_scores = False

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self) -> None: ...


LOOK_SECONDS = 0.1
"""Interval at which a rank without an order asks for rollouts. An order ends the wait at once."""


class SamplingRank(ABC, Generic[OrderT]):
    """A rank other than rank 0: obeys rank 0, and samples while it has no order, for as long as the group lives.

    Orders arrive in a thread. An order ends the rank's sampling at the next denoising step, unless it can wait.
    """

    def __init__(
        self,
        group: RankGroup,
        decoded: Callable[[bytes], OrderT],
        *,
        sampler: Sampler | None,
        usage: Usage | None,
    ) -> None:
        """Start without an order. `usage`: of the rank's time; None: not measured."""
        self._group, self._decoded, self._usage = group, decoded, usage
        self._measure: MeasurePhase = unmeasured if usage is None else usage.measure
        self._reported_ms: Counter[str] = Counter()
        self._sampler, self._let_sample = sampler or NoSampler(), True
        self._inbox = Inbox(group, 0)
        self._orders: deque[OrderT] = deque()

    def follow(self) -> None:
        """Obey rank 0. Raises TornGroup when the group ends, because rank 0 ended or another rank was lost."""
        try:
            while True:
                self.follow_step()
        except TornGroup:
            self._sampler.end()
            raise

    def follow_step(self) -> None:
        """Obey rank 0 until the end of an optimiser step. Raises as `follow`."""
        while not self._ends_step(order := self._next()):
            self._obey(order)
        self._obey(order)

    def _next(self) -> OrderT:
        """Return the next order. Samples until it is there."""
        while not self._is_called():
            if not (self._may_sample() and self._sampler.sample(self._is_called)):
                # As with every worker, waiting for scores counts as rollouts.
                phase = Phase.ROLLOUT if self._sampler.waits_for_scores else Phase.IDLE
                with self._measure(phase), self._sampler.beside():
                    self._inbox.wait(LOOK_SECONDS)
        if not self._orders:
            self._inbox.check()
        return self._orders.popleft()

    def _is_called(self) -> bool:
        """Return True if rank 0 or another rank waits for this rank, or the group has ended."""
        self._orders.extend(map(self._decoded, self._inbox.take()))
        return self._inbox.is_torn or not all(map(self._can_wait, self._orders))

    def _obey(self, order: OrderT) -> None:
        with self._sampler.beside():
            self._carry_out(order)

    def _spent_ms(self) -> Mapping[str, float]:
        """Return the rank's milliseconds by phase since the last call."""
        total = Counter({} if self._usage is None else self._usage.total)
        spent, self._reported_ms = total - self._reported_ms, total
        return spent

    def _may_sample(self) -> bool:
        """Return True if the rank may sample while it has no order."""
        return self._let_sample

    def _can_wait(self, order: OrderT) -> bool:
        """Return True if no other rank waits until this rank obeys the order."""
        return False

    @abstractmethod
    def _ends_step(self, order: OrderT) -> bool:
        """Return True for the last order of an optimiser step."""

    @abstractmethod
    def _carry_out(self, order: OrderT) -> None:
        """Obey the order."""


class Follower(SamplingRank[Order]):
    """A rank that has all weights (LoRA). `BeginStep` without weights can wait: no other rank waits for it."""

    def __init__(
        self,
        group: RankGroup,
        trainer: Trainer,
        *,
        sampler: Sampler | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Start without a step. `trainer`: made after `take_start`. `usage`: of the rank's time; None: not measured."""
        super().__init__(group, decoded_order, sampler=sampler, usage=usage)
        self._trainer = trainer
        self._step: Transaction | None = None
        self._own_weights: dict[str, Tensor] | None = None
        """The trained weights while the rank serves an evaluation."""
        self._memory_error = self._does_not_fit = ""
        trainer.on_fewer_rows = self._fewer_rows

    def _may_sample(self) -> bool:
        return self._own_weights is not None or super()._may_sample()

    def _can_wait(self, order: Order) -> bool:
        return isinstance(order, BeginStep) and order.weights is None

    def _ends_step(self, order: Order) -> bool:
        return isinstance(order, EndStep)

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, LetSample):
            self._let_sample = order.is_on
        elif isinstance(order, Published):
            with self._measure(Phase.COLLECTIVE):
                self._take_weights(order.weights)
            self._sampler.published(order.key, order.digest)
        elif isinstance(order, BeginEvaluation):
            with self._measure(Phase.COLLECTIVE):
                self._begin_evaluation(order)
        elif isinstance(order, EndEvaluation):
            self._end_evaluation()
        elif isinstance(order, BeginStep):
            with self._measure(Phase.COLLECTIVE):
                self._begin(order)
        elif self._step is None:
            raise ValueError(f"rank 0 sent {type(order).__name__} before BeginStep")
        elif isinstance(order, TrainGroup) and not self._does_not_fit:
            try:
                with self._measure(Phase.TRAINING):
                    self._step.add(order.number, order.group)
            except DoesNotFit as error:
                self._does_not_fit = str(error)
        elif isinstance(order, EndStep):
            with self._measure(Phase.COLLECTIVE):
                self._end(self._step)

    def _begin_evaluation(self, order: BeginEvaluation) -> None:
        parameters = self._trainer.parameters
        self._own_weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        _copy_weights(self._group, parameters.values())
        self._sampler.begin_evaluation(order.key, order.digest)

    def _end_evaluation(self) -> None:
        if self._own_weights is None:
            raise ValueError("rank 0 sent EndEvaluation before BeginEvaluation")
        with torch.no_grad():
            for name, parameter in self._trainer.parameters.items():
                parameter.copy_(self._own_weights[name])
        self._own_weights = None
        self._sampler.end_evaluation()

    def _begin(self, order: BeginStep) -> None:
        trainer, group = self._trainer, self._group
        if order.weights is not None:
            self._take_weights(order.weights)
        trainer.rows_per_forward = order.rows_per_forward
        self._memory_error = self._does_not_fit = ""
        share = share_of(order.manifest.minibatches[order.minibatch], group.rank, group.ranks)
        self._step = trainer.begin(order.manifest, order.minibatch, order.plan, std=order.std, share=share)

    def _take_weights(self, sent: SentWeights) -> None:
        trainer, group = self._trainer, self._group
        _copy_weights(group, trainer.parameters.values())
        trainer.old.advance(0)
        for is_sent, restore in (
            (sent.with_old, trainer.old.restore),
            (sent.with_before, trainer.old.restore_before),
        ):
            if is_sent:
                weights = {name: torch.empty_like(parameter) for name, parameter in trainer.parameters.items()}
                _copy_weights(group, weights.values())
                restore(weights)

    def _end(self, step: Transaction) -> None:
        share = Share.of(
            step.health,
            memory_error=self._memory_error,
            does_not_fit=self._does_not_fit,
            phase_ms=self._spent_ms(),
        )
        self._group.send(0, encoded(share))
        self._group.finish_sending()
        if not self._does_not_fit:
            _sum_gradients(self._group, self._trainer.parameters.values())
        step.abort()
        self._step = None

    def _fewer_rows(self, rows: int, error: str) -> None:
        print(f"a training pass ran out of memory; passes have at most {rows} rows from now on ({error})", flush=True)
        self._memory_error = error


def take_start(group: RankGroup, parameters: Iterable[nn.Parameter]) -> bool:
    """Take the run's first weights from rank 0. Returns True if the run has start weights."""
    order = decoded_order(group.receive(0, idle=True))
    if not isinstance(order, Start):
        raise ValueError(f"rank 0 sent {type(order).__name__} first, and must send Start")
    _copy_weights(group, parameters)
    return order.is_started


@torch.no_grad()
def _copy_weights(group: RankGroup, tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors with those of rank 0, in one message."""
    tensors = list(tensors)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    group.copy_from_first(flat)
    if group.rank > 0:
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def _sum_gradients(group: RankGroup, parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients by their sum over the ranks. A parameter without a gradient counts as zeros."""
    parameters = list(parameters)
    own = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    total = group.sum(torch.cat([gradient.reshape(-1) for gradient in own]))
    for parameter, gradient, part in zip(
        parameters, own, total.split([parameter.numel() for parameter in parameters]), strict=True
    ):
        parameter.grad = gradient.copy_(part.view_as(gradient))
