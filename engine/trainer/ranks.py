"""Divide the groups of an optimiser step over the ranks of the trainer. LoRA only: every rank has all weights.

    begin   rank 0 copies the trained weights, the old policy's, and those of early groups, to the other ranks
    add     the group at place i of the mini-batch belongs to rank i mod ranks; rank 0 sends the others' groups at once
    commit  every rank has trained its groups -> gradients are added in the order of the ranks -> rank 0 takes the step

Rank 0 runs the training loop and alone holds the optimiser, the average and the checkpoint. The other ranks only
compute gradients (`follow`). A run may therefore continue from a checkpoint with another number of ranks.

A rank's share depends on the manifest and not on arrival. With `order: fixed` the update repeats bit for bit for a
given number of ranks. Updates of different numbers of ranks differ by rounding, because a sum has another order.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.algorithm.health import Health
from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import DoesNotFit, Trainer, Transaction
from engine.diffusion.sampler import Plan
from engine.events import Phase
from engine.parallel.rank_group import RankGroup
from engine.protocol.request import Manifest
from engine.trainer.rank_messages import (
    BeginStep,
    EndStep,
    Order,
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


class Steps(Protocol):
    """Begins optimiser steps."""

    def begin(self, manifest: Manifest, minibatch: int, plan: Plan, *, std: float | None) -> Step:
        """Begin an optimiser step. See `Trainer.begin`."""


class Ranks:
    """Rank 0's view of the other ranks."""

    def __init__(self, group: RankGroup | None, trainer: Trainer, usage: Usage, *, is_started: bool) -> None:
        """Send the first weights to the other ranks. `group`: None if the trainer has a single rank.

        `is_started`: the run has start weights. Call before a checkpoint is restored.
        """
        self._group, self._trainer, self._usage = group, trainer, usage
        if group is not None:
            self._order(group, Start(is_started=is_started))
            _copy_weights(group, trainer.parameters.values())

    def begin(self, manifest: Manifest, minibatch: int, plan: Plan, *, std: float | None) -> Step:
        """Begin an optimiser step. See `Trainer.begin`. Raises TornGroup if a rank is lost, as all calls do."""
        group, trainer = self._group, self._trainer
        if group is None:
            return trainer.begin(manifest, minibatch, plan, std=std)
        old = trainer.old.tensors
        before = trainer.old.before if manifest.early else None
        begin = BeginStep(
            manifest=manifest,
            minibatch=minibatch,
            plan=plan,
            std=std,
            rows_per_forward=trainer.rows_per_forward,
            with_old=old is not None,
            with_before=before is not None,
        )
        with self._usage.measure(Phase.COLLECTIVE):
            self._order(group, begin)
            _copy_weights(group, trainer.parameters.values())
            if old is not None:
                _copy_weights(group, [old[name] for name in trainer.parameters])
            if before is not None:
                _copy_weights(group, [before[name] for name in trainer.parameters])
        numbers = manifest.minibatches[minibatch]
        own = trainer.begin(manifest, minibatch, plan, std=std, share=share_of(numbers, 0, group.ranks))
        return _SharedStep(self, group, numbers, own)

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


MeasurePhase = Callable[[Phase], AbstractContextManager[None]]
"""Makes the context around work of a phase, to measure its time (`Usage.measure`)."""

Stepped = Callable[[], None]


def unmeasured(phase: Phase) -> AbstractContextManager[None]:
    """Measure nothing: the times of a rank on rank 0's node are not reported."""
    return nullcontext()


def nothing() -> None:
    """Do nothing after a step."""


class Follower:
    """A rank other than rank 0: computes the gradients of its groups, for as long as the group lives."""

    def __init__(
        self, group: RankGroup, trainer: Trainer, *, measure: MeasurePhase = unmeasured, stepped: Stepped = nothing
    ) -> None:
        """Start without a step. `trainer`: made after `take_start`. `stepped`: called after each optimiser step."""
        self._group, self._trainer = group, trainer
        self._measure, self._stepped = measure, stepped
        self._step: Transaction | None = None
        self._memory_error = self._does_not_fit = ""
        trainer.on_fewer_rows = self._fewer_rows

    def follow(self) -> None:
        """Obey rank 0. Raises TornGroup when the group ends, because rank 0 ended or another rank was lost."""
        while True:
            self.follow_step()

    def follow_step(self) -> None:
        """Obey rank 0 until the end of an optimiser step. Raises as `follow`."""
        while not isinstance(order := self._next(), EndStep):
            self._obey(order)
        self._obey(order)
        self._stepped()

    def _next(self) -> Order:
        with self._measure(Phase.IDLE):
            return decoded_order(self._group.receive(0, idle=True))

    def _obey(self, order: Order) -> None:
        if isinstance(order, BeginStep):
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

    def _begin(self, order: BeginStep) -> None:
        trainer, group = self._trainer, self._group
        _copy_weights(group, trainer.parameters.values())
        trainer.old.advance(0)
        for is_sent, restore in (
            (order.with_old, trainer.old.restore),
            (order.with_before, trainer.old.restore_before),
        ):
            if is_sent:
                weights = {name: torch.empty_like(parameter) for name, parameter in trainer.parameters.items()}
                _copy_weights(group, weights.values())
                restore(weights)
        trainer.rows_per_forward = order.rows_per_forward
        self._memory_error = self._does_not_fit = ""
        share = share_of(order.manifest.minibatches[order.minibatch], group.rank, group.ranks)
        self._step = trainer.begin(order.manifest, order.minibatch, order.plan, std=order.std, share=share)

    def _end(self, step: Transaction) -> None:
        share = Share.of(step.health, memory_error=self._memory_error, does_not_fit=self._does_not_fit)
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
    own = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    total = group.sum(torch.cat([gradient.reshape(-1) for gradient in own]))
    for parameter, gradient, part in zip(
        parameters, own, total.split([one.numel() for one in parameters]), strict=True
    ):
        parameter.grad = gradient.copy_(part.view_as(gradient))
