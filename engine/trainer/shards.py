"""Train full weights with several ranks: every rank holds a part of each tensor (engine/parallel/sharding.py).

    begin    rank 0 tells the ranks the divisor of the loss
    add      a round has as many groups for each rank as fit into a pass; once a round's groups are complete, all ranks
             make their passes together
    commit   every rank takes the optimiser step with its part of weights, gradients and moments

Rank 0 runs the training loop, and obeys its own orders like the other ranks. The groups of a round and of a rank depend
on the manifest and not on arrival. With `order: fixed` or `exact`, rounds are trained in order, so the update repeats
bit for bit for a given number of ranks. Updates of different numbers of ranks differ by rounding.

Each rank reads its own rows from the model's folder. Checkpoints and published weights have whole tensors: rank 0
gathers them one at a time, so a run continues from a checkpoint with any number of ranks. Rank 0 samples with a copy of
all weights, which lives until the next round. Where every GPU has room for such a copy (`JobMemory.have_room`), all
ranks keep one whenever rank 0 has no group to train, and sample as ranks with LoRA do (rank_sampling.py).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import assert_never

import torch
from torch import Tensor

from engine.algorithm.average import Average
from engine.algorithm.health import Health
from engine.algorithm.lockstep import LockstepPasses
from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import DoesNotFit, GroupRows, Trainer, Transaction
from engine.algorithm_config import AlgorithmConfig
from engine.diffusion.sampler import Plan
from engine.events import Phase
from engine.models.adapter import DiTAdapter
from engine.models.load import computing_dtype, trainable
from engine.models.unread import read_values
from engine.models.weights import DTYPE_NAMES, DTYPES, exchanged, fill_tensors, read_each
from engine.out_of_memory import first_line, is_out_of_memory, memory_of
from engine.parallel.rank_group import RankGroup
from engine.parallel.sharding import Measure, Sharding, fill_shard, mesh_of, torn_if_lost, whole_of
from engine.protocol.request import Manifest, WeightsKey
from engine.storage.tensor_files import Stored
from engine.trainer.rank_messages import (
    BeginEvaluation,
    BeginPasses,
    EndEvaluation,
    Follow,
    GatherAll,
    GiveTensor,
    LetSample,
    Part,
    RowsOfGroup,
    ShardOrder,
    Share,
    Start,
    TakeStep,
    TakeTensor,
    TrainRows,
    decoded_shard_order,
    decoded_share,
    encoded,
)
from engine.trainer.ranks import Sampler, SamplingRank, Step, Stepped, nothing
from engine.trainer.reference import reference_of
from engine.worker.usage import Usage


class Shard:
    """A rank's part of the model under training. Every method is a collective: all ranks call it, in the same order."""

    def __init__(self, group: RankGroup, sharding: Sharding, trainer: Trainer, average: Average) -> None:
        """`trainer`, `average`: of the divided parameters."""
        self.group, self.trainer, self.average = group, trainer, average
        self._sharding = sharding
        self._passes: LockstepPasses | None = None

    def tensors(self, part: Part) -> dict[str, Tensor]:
        """Return this rank's part of some tensors by name. The old policy is the weights unless it differs."""
        match part:
            case "weights":
                return dict(self.trainer.parameters)
            case "average":
                return self.average.tensors
            case "old":
                return dict(self.trainer.old.tensors or self.trainer.parameters)
            case "moments":
                return self.trainer.optimizer_state()
            case _:
                assert_never(part)

    @property
    def is_whole(self) -> bool:
        """Return True while this rank keeps a copy of all weights."""
        return self._sharding.is_whole

    @property
    def passes(self) -> LockstepPasses:
        """Return the passes of the open step. Raises ValueError if no step is open."""
        if self._passes is None:
            raise ValueError("a round or a step was ordered before BeginPasses")
        return self._passes

    def begin(self, order: BeginPasses) -> None:
        self.trainer.rows_per_forward = order.rows_per_forward
        self._passes = LockstepPasses(self.trainer, order.plan, order.planned_rows)

    def train(self, order: TrainRows) -> list[int]:
        """Make the passes of a round.

        Returns the ranks with a loss that is not finite. The gradients of all ranks are then dropped. Raises DoesNotFit
        if a pass runs out of memory: in the middle of a pass, the other ranks wait for collectives of this rank, so the
        ranks cannot go on with fewer rows.
        """
        self._sharding.divide()
        try:
            round_ = self.passes.train([group.rows for group in order.groups], order.passes, counts=order.counts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            rows = self.trainer.rows_per_forward
            raise DoesNotFit(
                f"a pass of {rows} rows does not fit into {memory_of(self.trainer.device)}, and ranks that share full "
                f"weights do not halve the rows: set algorithm.rows_per_forward: {max(1, rows // 2)} "
                f"({first_line(error)})"
            ) from error
        bad = torch.zeros(self.group.ranks)
        bad[self.group.rank] = 0.0 if round_.is_finite else 1.0
        bad_ranks = [rank for rank, value in enumerate(self.group.sum(bad.to(self.trainer.device)).tolist()) if value]
        if bad_ranks:
            round_.drop()
        else:
            round_.keep()
        return bad_ranks

    def take_step(self) -> Health:
        """Take the optimiser step. Returns the health of this rank's rows, with the norm of all gradients."""
        self._sharding.divide()
        health = self.passes.health
        self._passes = None
        norm = self.trainer.take_step()
        health.gradient_norm = float("nan") if norm is None else norm
        return health

    def follow(self, batch: int, decay: float) -> None:
        self._sharding.divide()
        self.average.follow(batch)
        self.trainer.old.advance(decay)

    def give(self, order: GiveTensor) -> Tensor:
        """Return a whole tensor."""
        self._sharding.divide()
        return whole_of(self.tensors(order.part)[order.name].detach())

    def take(self, order: TakeTensor, whole: Tensor) -> None:
        """Overwrite this rank's part of a tensor. `whole`: any values on ranks other than rank 0."""
        self._sharding.divide()
        if order.part == "old":
            self.trainer.old.keep()
        if order.part == "moments":
            self.trainer.fill_moment(order.name, whole, fill_shard)
        else:
            fill_shard(self.tensors(order.part)[order.name].detach(), whole)

    def gather_all(self, order: GatherAll) -> None:
        """Gather all weights on rank 0, and on the other ranks if they may sample with them."""
        self._sharding.divide()
        old = self.trainer.old.tensors if order.old else None
        swap: AbstractContextManager[None] = nullcontext()
        if old is not None:
            swap = exchanged(self.trainer.parameters, old)
        with swap:
            others_keep = order.key is not None or order.for_evaluation
            self._sharding.gather_all(keeps=self.group.rank == 0 or others_keep)

    def copy_whole(self) -> None:
        """Overwrite every rank's own gathered copy with that of rank 0, one tensor at a time."""
        for value in self._sharding.whole.values():
            flat = value.detach().flatten()
            self.group.copy_from_first(flat)
            if self.group.rank:
                value.detach().copy_(flat.view_as(value))

    def divide(self) -> None:
        """Free this rank's gathered copy."""
        self._sharding.divide()

    @contextmanager
    def holding(self, data: Stored) -> Iterator[None]:
        """Give this rank's own gathered copy other weights inside the context. Call after `gather_all`."""
        fill_tensors({name: value.detach() for name, value in self._sharding.whole.items()}, data)
        try:
            yield
        finally:
            self._sharding.divide()


def shard_of(
    group: RankGroup,
    adapter: DiTAdapter,
    algorithm: AlgorithmConfig,
    measure: Measure,
    *,
    is_started: bool,
    start: Stored | None = None,
    compiles: bool,
) -> Shard:
    """Divide the model over the ranks, and return this rank's part. All ranks call this function.

    `is_started`: the run has start weights. `start`: the start weights, on rank 0. `compiles`: rollout workers compile
    blocks.
    """
    mesh = mesh_of(group.store, group.rank, group.ranks, group.device)
    sharding = Sharding(adapter.transformer, mesh, measure, dtype=computing_dtype(adapter.transformer))
    read_values(adapter.transformer, group.device)
    parameters = trainable(adapter)
    if is_started:
        with torn_if_lost():
            _take_start(parameters, start)
    reference = reference_of(adapter, algorithm, is_started=is_started)
    trainer = Trainer(adapter, parameters, algorithm, reference, workers_compile=compiles)
    return Shard(group, sharding, trainer, Average(parameters, algorithm.ema_decay))


def _take_start(parameters: Mapping[str, Tensor], start: Stored | None) -> None:
    """Overwrite the weights of all ranks with rank 0's start weights, one tensor at a time. `start`: on rank 0."""
    if start is not None:
        for name, whole in read_each(start, parameters):
            fill_shard(parameters[name].detach(), whole)
        return
    for parameter in parameters.values():
        fill_shard(parameter.detach(), torch.empty(parameter.shape, dtype=parameter.dtype))


def led_shard(
    group: RankGroup,
    adapter: DiTAdapter,
    algorithm: AlgorithmConfig,
    measure: Measure,
    *,
    start: Stored | None,
    compiles: bool,
) -> Shard:
    """Return rank 0's part. Tell the other ranks how the run starts. `start`: the start weights, if there are any."""
    is_started = start is not None
    for rank in range(1, group.ranks):
        group.send(rank, encoded(Start(is_started=is_started)))
    shard = shard_of(group, adapter, algorithm, measure, is_started=is_started, start=start, compiles=compiles)
    group.finish_sending()
    return shard


def joined_shard(
    group: RankGroup, adapter: DiTAdapter, algorithm: AlgorithmConfig, measure: Measure = nullcontext, *, compiles: bool
) -> Shard:
    """Return the part of a rank other than rank 0, and wait for rank 0. `measure`: context around collectives."""
    start = decoded_shard_order(group.receive(0, idle=True))
    if not isinstance(start, Start):
        raise ValueError(f"rank 0 sent {type(start).__name__} first, and must send Start")
    return shard_of(group, adapter, algorithm, measure, is_started=start.is_started, compiles=compiles)


class ShardFollower(SamplingRank[ShardOrder]):
    """A rank other than rank 0. It samples while it keeps a copy of the weights that rank 0 named."""

    def __init__(
        self,
        shard: Shard,
        *,
        sampler: Sampler | None = None,
        usage: Usage | None = None,
        stepped: Stepped = nothing,
    ) -> None:
        """`usage`: of the rank's time; None: not measured. `stepped`: called after each optimiser step."""
        super().__init__(shard.group, decoded_shard_order, sampler=sampler, usage=usage)
        self._shard, self._stepped = shard, stepped
        self._evaluates = self._holds_published = False

    def _may_sample(self) -> bool:
        if not self._shard.is_whole:
            return False
        return self._evaluates or (self._let_sample and self._holds_published)

    def _can_wait(self, order: ShardOrder) -> bool:
        return isinstance(order, BeginPasses)

    def _ends_step(self, order: ShardOrder) -> bool:
        return isinstance(order, TakeStep)

    def _carry_out(self, order: ShardOrder) -> None:
        trains = isinstance(order, BeginPasses | TrainRows | TakeStep | Follow)
        with torn_if_lost(), self._measure(Phase.TRAINING if trains else Phase.COLLECTIVE):
            self._take_part(order)
        if isinstance(order, TakeStep):
            self._stepped()

    def _take_part(self, order: ShardOrder) -> None:
        shard = self._shard
        match order:
            case BeginPasses():
                shard.begin(order)
            case TrainRows():
                shard.train(order)
            case TakeStep():
                health = shard.take_step()
                share = Share.of(health, memory_error="", does_not_fit="", phase_ms=self._spent_ms())
                shard.group.send(0, encoded(share))
                shard.group.finish_sending()
            case Follow():
                shard.follow(order.batch, order.decay)
            case GiveTensor():
                shard.give(order)
            case TakeTensor():
                shard.take(order, torch.empty(order.shape, dtype=DTYPES[order.dtype]))
            case GatherAll():
                shard.gather_all(order)
                self._holds_published = order.key is not None
                if order.key is not None:
                    self._sampler.published(order.key, order.digest)
            case BeginEvaluation():
                shard.copy_whole()
                self._sampler.begin_evaluation(order.key, order.digest)
                self._evaluates = True
            case EndEvaluation():
                self._evaluates = False
                self._sampler.end_evaluation()
                shard.divide()
            case LetSample():
                self._let_sample = order.is_on
            case Start():
                raise ValueError("rank 0 sent Start twice")
            case _:
                assert_never(order)


class Shards:
    """Rank 0's view of the other ranks, which have a part of the weights each. See `OtherRanks`."""

    def __init__(self, shard: Shard, measure: Measure, *, all_sample: bool = False) -> None:
        """`measure`: context around collectives. `all_sample`: every rank has room to sample."""
        self._shard, self._measure, self._all_sample = shard, measure, all_sample
        self._old_is_whole = False
        """True while this rank has a copy of the old policy's weights, as they are now."""
        self._published: tuple[WeightsKey, str] | None = None
        """Key and digest under which the coordinator has the old policy's weights. None: it has them not yet."""
        self._let_sample = True
        self._phase_ms: Counter[str] = Counter()

    @property
    def ranks(self) -> int:
        return self._shard.group.ranks

    @property
    def in_order(self) -> bool:
        """Return True if rounds are trained in order, whichever groups come first."""
        return self._shard.trainer.config.order != "arrival"

    def begin(self, manifest: Manifest, minibatch: int, plan: Plan, *, std: float | None) -> Step:
        """Begin an optimiser step. See `Trainer.begin`."""
        trainer = self._shard.trainer
        rows = trainer.begin(manifest, minibatch, plan, std=std)
        order = BeginPasses(plan=plan, planned_rows=rows.planned_rows, rows_per_forward=trainer.rows_per_forward)
        with self._ordered(order, forget=False):
            self._shard.begin(order)
        return _LockstepStep(self, manifest, minibatch, rows)

    def train(self, orders: Sequence[TrainRows]) -> list[int]:
        """Have each rank make its passes. Returns the ranks with a loss that is not finite, whose round was dropped."""
        group = self._shard.group
        self._old_is_whole = False
        for rank in range(1, group.ranks):
            group.send(rank, encoded(orders[rank]))
        with torn_if_lost():
            bad_ranks = self._shard.train(orders[0])
        group.finish_sending()
        return bad_ranks

    def take_step(self) -> list[Health]:
        """Take the optimiser step. Returns the health of each rank's rows."""
        with self._ordered(TakeStep()):
            own = [self._shard.take_step()]
        group = self._shard.group
        with self._measure():
            shares = [decoded_share(group.receive(rank)) for rank in range(1, group.ranks)]
        for share in shares:
            self._phase_ms.update(share.phase_ms)
        return [*own, *(share.health for share in shares)]

    def follow(self, batch: int, decay: float) -> None:
        self._published = None
        with self._ordered(Follow(batch=batch, decay=decay)):
            self._shard.follow(batch, decay)

    def published(self, key: WeightsKey, digest: str) -> None:
        """Gather the old policy's weights, for the other ranks to sample with."""
        self._published = (key, digest)
        if self._all_sample and self._let_sample:
            self._gather_old()

    def let_sample(self, *, is_on: bool) -> None:
        """Let the other ranks sample while they have no group to train, with weights that are gathered here."""
        if not self._all_sample:
            return
        if is_on != self._let_sample:
            with self._ordered(LetSample(is_on=is_on), forget=False):
                self._let_sample = is_on
        if is_on:
            self._gather_old()

    @contextmanager
    def evaluating(self, key: WeightsKey, digest: str) -> Iterator[None]:
        """Let the other ranks serve an evaluation inside the context, if they have room. Call inside `holding`."""
        if not self._all_sample:
            yield
            return
        with self._measure(), self._ordered(BeginEvaluation(key=key, digest=digest)):
            self._shard.copy_whole()
        yield
        with self._ordered(EndEvaluation()):
            pass

    def take_phases(self) -> Mapping[str, float]:
        """Return the milliseconds of the other ranks by phase, added up, since the last call."""
        spent, self._phase_ms = dict(self._phase_ms), Counter()
        return spent

    def give(self, part: Part, name: str) -> Tensor:
        """Return a whole tensor. One tensor at a time is in memory."""
        order = GiveTensor(part=part, name=name)
        with self._ordered(order):
            return self._shard.give(order)

    def take(self, part: Part, data: Stored) -> None:
        """Restore tensors from a file, one at a time."""
        self._published = None
        for name, whole in read_each(data):
            order = TakeTensor(part=part, name=name, shape=tuple(whole.shape), dtype=DTYPE_NAMES[whole.dtype])
            with self._ordered(order):
                self._shard.take(order, whole)

    @contextmanager
    def old_policy(self) -> Iterator[None]:
        """Let this rank make passes alone with the old policy inside the context."""
        self._gather_old()
        yield

    def _gather_old(self) -> None:
        """Gather the old policy's weights, unless they are whole. Every rank that may sample keeps a copy."""
        if self._old_is_whole:
            return
        key, digest = self._published if self._all_sample and self._published is not None else (None, "")
        order = GatherAll(old=True, key=key, digest=digest)
        with self._ordered(order):
            self._shard.gather_all(order)
        self._old_is_whole = True

    @contextmanager
    def holding(self, data: Stored) -> Iterator[None]:
        """Let this rank sample with the weights of a file inside the context; `evaluating` shares them."""
        order = GatherAll(old=False, for_evaluation=self._all_sample)
        with self._ordered(order):
            self._shard.gather_all(order)
        with self._shard.holding(data):
            yield

    @contextmanager
    def _ordered(self, order: ShardOrder, *, forget: bool = True) -> Iterator[None]:
        """Send an order to all other ranks. The context obeys it on this rank. `forget`: gathered weights are freed."""
        self._old_is_whole = self._old_is_whole and not forget
        group, data = self._shard.group, encoded(order)
        for rank in range(1, group.ranks):
            group.send(rank, data)
        with torn_if_lost():
            yield
        group.finish_sending()


class _LockstepStep:
    """An optimiser step of all ranks. See `Step`."""

    def __init__(self, shards: Shards, manifest: Manifest, minibatch: int, own: Transaction) -> None:
        """`own`: makes rows of groups, and counts groups that add nothing."""
        numbers = manifest.minibatches[minibatch]
        groups_per_rank = own.groups_of_unit
        if manifest.unit:
            groups_per_rank = min(groups_per_rank, -(-manifest.unit // shards.ranks))
        size = shards.ranks * groups_per_rank
        self._shards, self._own, self._numbers = shards, own, numbers
        self._rounds = [tuple(numbers[first : first + size]) for first in range(0, len(numbers), size)]
        """Groups of the rounds that were not trained yet."""
        self._groups: dict[int, FinishedGroup] = {}

    @property
    def missing(self) -> list[int]:
        return [number for numbers in self._rounds for number in numbers if number not in self._groups]

    def add(self, number: int, group: FinishedGroup) -> None:
        if number not in self.missing:
            raise ValueError(f"group {number} is not wanted: missing {self.missing}")
        self._groups[number] = group
        for numbers in list(self._rounds):
            if not all(group_number in self._groups for group_number in numbers):
                if self._shards.in_order:
                    return
                continue
            rows_of_group = {
                group_number: self._own.rows_of(group_number, self._groups.pop(group_number))
                for group_number in numbers
            }
            self._rounds.remove(numbers)
            ranks = self._shards.ranks
            shares = [[rows_of_group[group_number] for group_number in numbers[rank::ranks]] for rank in range(ranks)]
            self._train([[rows for rows in share if rows is not None] for share in shares])

    def _train(self, shares: Sequence[Sequence[GroupRows]]) -> None:
        """Train some groups of each rank: together if all losses are finite, else one group of each rank at a time."""
        first = next((share[:1] for share in shares if share), None)
        if first is None:
            return
        most = self._own.health.rows_per_forward
        passes = max(-(-sum(len(rows) for rows in share) // most) for share in shares)
        encoded_rows = [tuple(RowsOfGroup.of(rows) for rows in share or first) for share in shares]
        orders = [
            TrainRows(groups=rows, passes=passes, counts=bool(share))
            for rows, share in zip(encoded_rows, shares, strict=True)
        ]
        bad = self._shards.train(orders)
        if not bad:
            return
        most_groups = max(len(share) for share in shares)
        if most_groups > 1:
            for place in range(most_groups):
                self._train([share[place : place + 1] for share in shares])
            return
        self._own.health.skipped.extend(rows.number for rank in bad for rows in shares[rank])
        self._train([() if rank in bad else share for rank, share in enumerate(shares)])

    def commit(self) -> Health:
        if self.missing:
            raise ValueError(f"groups {self.missing} have not been added")
        health = self._own.health
        own, *other_ranks = self._shards.take_step()
        for health_of_rank in (own, *other_ranks):
            health.merge(health_of_rank)
        health.gradient_norm = own.gradient_norm
        if not math.isfinite(health.gradient_norm):
            health.gradient_norm, health.skipped = 0.0, list(self._numbers)
        return health

    def abort(self) -> None:
        """Nothing to discard: the next `begin` of all ranks clears the gradients."""
