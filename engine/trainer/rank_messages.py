"""Messages between rank 0 of a trainer, which runs the loop, and the other ranks. msgpack, checked by type; no pickle.

    LoRA: Start -> (Published | LetSample | BeginEvaluation -> EndEvaluation
                    | BeginStep -> TrainGroup* -> EndStep -> Share)*                                   (ranks.py)
    full: Start -> (BeginPasses -> TrainRows* -> TakeStep -> Share | Follow | a tensor | GatherAll | LetSample)*
                                                                                                       (shards.py)

Weights follow `Start`, `Published`, `BeginEvaluation` and `BeginStep` as tensors, and gradients follow a `Share`
without an error. With full weights every order but `BeginPasses` and `LetSample` is a collective of all ranks. Rank 0
obeys its own orders.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
from safetensors.torch import load, save

from engine.algorithm.health import Health
from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import GroupRows
from engine.diffusion.sampler import Plan
from engine.diffusion.trajectory import Trajectory
from engine.protocol.request import Manifest, WeightsKey

Part = Literal["weights", "average", "old", "moments"]
"""A set of tensors that are divided over the ranks. `old`: the old policy. `moments`: of the optimiser."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first weights of the run follow: the reference of the KL divergence.

    `is_started`: the run has start weights, so the base without adapters is no reference.
    """

    is_started: bool


class SentWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The trained weights follow an order as tensors.

    `with_old`: the old policy's weights follow too. False: the old policy is the trained weights. `with_before`: then
    the weights that made the batch's early groups.
    """

    with_old: bool
    with_before: bool


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator has the old policy's weights under this key, with this digest: a rank may sample with them."""

    key: WeightsKey
    digest: str
    weights: SentWeights


class LetSample(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Whether ranks sample while they have no group to train."""

    is_on: bool


class BeginEvaluation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The evaluated weights follow. Until `EndEvaluation` a rank serves the evaluation with them, and nothing else."""

    key: WeightsKey
    digest: str


class EndEvaluation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The evaluation is complete. A rank takes its own weights again."""


class BeginStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An optimiser step begins. A step that was not ended before is void.

    `weights`: they follow. None: the rank has them since `Published`.
    """

    manifest: Manifest
    minibatch: int
    plan: Plan
    std: float | None
    rows_per_forward: int
    weights: SentWeights | None


class TrainGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A finished group of the rank's share. `trajectories`: safetensors bytes, one a seed."""

    number: int
    prompt: str
    seeds: tuple[int, ...]
    trajectories: tuple[bytes, ...]
    rewards: tuple[float, ...]
    is_early: bool = False

    @classmethod
    def of(cls, number: int, group: FinishedGroup) -> "TrainGroup":
        trajectories = tuple(trajectory.to_bytes() for trajectory in group.trajectories)
        return cls(
            number=number,
            prompt=group.prompt,
            seeds=group.seeds,
            trajectories=trajectories,
            rewards=group.rewards,
            is_early=group.is_early,
        )

    @property
    def group(self) -> FinishedGroup:
        trajectories = tuple(Trajectory.from_bytes(data) for data in self.trajectories)
        return FinishedGroup(
            prompt=self.prompt,
            seeds=self.seeds,
            trajectories=trajectories,
            rewards=self.rewards,
            is_early=self.is_early,
        )


class EndStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All groups of the share were sent."""


Order: TypeAlias = Start | Published | LetSample | BeginEvaluation | EndEvaluation | BeginStep | TrainGroup | EndStep


class BeginPasses(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An optimiser step begins. A step that was not ended before is void. `planned_rows`: of the whole step."""

    plan: Plan
    planned_rows: int
    rows_per_forward: int


class RowsOfGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group as training rows. `tensors`: safetensors bytes of the tensors of `Objective.rows`."""

    number: int
    prompt: str
    tensors: bytes
    is_early: bool = False

    @classmethod
    def of(cls, rows: GroupRows) -> "RowsOfGroup":
        tensors = {name: value.contiguous() for name, value in rows.tensors.items()}
        return cls(number=rows.number, prompt=rows.prompt, tensors=save(tensors), is_early=rows.is_early)

    @property
    def rows(self) -> GroupRows:
        return GroupRows(number=self.number, prompt=self.prompt, is_early=self.is_early, tensors=load(self.tensors))


class TrainRows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round of passes. `counts`: False if the rank has no groups in this round, and trains another's without weight.

    `passes`: of every rank in this round.
    """

    groups: tuple[RowsOfGroup, ...]
    passes: int
    counts: bool


class TakeStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All groups of the step were trained. Ranks take the optimiser step, each with its part."""


class Follow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The batch is trained: average and old policy move. `decay`: of the old policy."""

    batch: int
    decay: float


class GiveTensor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 needs a whole tensor."""

    part: Part
    name: str


class TakeTensor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 has a whole tensor of a checkpoint, and every rank takes its part. `dtype`: name in safetensors."""

    part: Part
    name: str
    shape: tuple[int, ...]
    dtype: str


class GatherAll(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 needs all weights, to make passes alone. `old`: those of the old policy, if it differs.

    `key`, `digest`: the coordinator has the gathered weights under this key, so every rank keeps them, and may sample
    with them. `for_evaluation`: every rank keeps them, for `BeginEvaluation`. Neither: only rank 0 keeps them.
    """

    old: bool
    key: WeightsKey | None = None
    digest: str = ""
    for_evaluation: bool = False


ShardOrder: TypeAlias = (
    Start
    | BeginPasses
    | TrainRows
    | TakeStep
    | Follow
    | GiveTensor
    | TakeTensor
    | GatherAll
    | LetSample
    | BeginEvaluation
    | EndEvaluation
)


class Share(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank's answer to `EndStep`.

    neutral, rows, ...  fields of the share's `Health`
    memory_error        first line of the last memory error of the step, or empty
    phase_ms            milliseconds of the rank by phase since its last answer, on the engine's clock
    does_not_fit        text of `DoesNotFit`, or empty; no gradients follow then
    """

    neutral: Mapping[str, float]
    rows: int
    sums: dict[str, float]
    largest: dict[str, float]
    groups: int
    without_variance: int
    skipped: list[int]
    rows_per_forward: int
    early_rows: float = 0.0
    early_outside: float = 0.0
    memory_error: str = ""
    does_not_fit: str = ""
    phase_ms: dict[str, float] = {}

    @classmethod
    def of(
        cls, health: Health, *, memory_error: str, does_not_fit: str, phase_ms: Mapping[str, float] | None = None
    ) -> "Share":
        return cls(
            neutral=health.neutral,
            rows=health.rows,
            sums=health.sums,
            largest=health.largest,
            groups=health.groups,
            without_variance=health.without_variance,
            skipped=health.skipped,
            rows_per_forward=health.rows_per_forward,
            early_rows=health.early_rows,
            early_outside=health.early_outside,
            memory_error=memory_error,
            does_not_fit=does_not_fit,
            phase_ms=dict(phase_ms or {}),
        )

    @property
    def health(self) -> Health:
        return Health(
            neutral=self.neutral,
            rows=self.rows,
            sums=self.sums,
            largest=self.largest,
            groups=self.groups,
            without_variance=self.without_variance,
            skipped=self.skipped,
            rows_per_forward=self.rows_per_forward,
            early_rows=self.early_rows,
            early_outside=self.early_outside,
        )


def encoded(message: Order | ShardOrder | Share) -> bytes:
    """Return a message as bytes. Numbers that are not finite survive."""
    return msgspec.msgpack.encode(message)


def decoded_order(data: bytes) -> Order:
    """Return the order in these bytes. Raises msgspec.ValidationError for anything else."""
    order: Order = msgspec.msgpack.decode(data, type=Order)
    return order


def decoded_shard_order(data: bytes) -> ShardOrder:
    """Return the order in these bytes. Raises msgspec.ValidationError for anything else."""
    order: ShardOrder = msgspec.msgpack.decode(data, type=ShardOrder)
    return order


def decoded_share(data: bytes) -> Share:
    """Return the share in these bytes. Raises msgspec.ValidationError for anything else."""
    return msgspec.msgpack.decode(data, type=Share)
