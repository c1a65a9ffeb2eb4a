"""THE CONTRACT between launcher and engine: capacity goes in, progress comes out.

Frozen values, standard library only, one JSON object a line. Both directions survive repeats:

- capacity is a *snapshot* with a generation; the engine ignores a generation older than the newest received;
- progress is numbered by `(run, source, lineage, seq)`; the ledger keeps each number once.

`lineage` counts how often the run went back to an older checkpoint. A step lost with its machine is repeated under the
next lineage. Rewards count once (newest lineage), dollars always. Times are milliseconds UTC on the run's clock
(`engine/clock.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar


class Market(StrEnum):
    """Capacity type of a node."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"


class NodeState(StrEnum):
    """State of a node, as known to the launcher."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class Phase(StrEnum):
    """Purpose of a node-second. A second belongs to one phase; the remainder is idle."""

    COLD_START = "cold_start"
    ROLLOUT = "rollout"
    EXPLORATION = "exploration"
    TRAINING = "training"
    COLLECTIVE = "collective"
    EVALUATION = "evaluation"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"
    LOST = "lost"
    IDLE = "idle"


# --- capacity: launcher -> engine -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCapacity:
    """A node as known to the launcher. `deadline_ms`: end of a draining node (run's clock)."""

    node: str
    market: Market
    state: NodeState
    workers: int
    deadline_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Snapshot of all nodes at one moment.

    The launcher sends a snapshot to the engine when it connects, after every change, and every 10 s.
    """

    generation: int
    nodes: tuple[NodeCapacity, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Capacity":
        """Parse a snapshot. Raises ValueError if a field is missing or unknown, or a state is unknown."""
        try:
            raw = json.loads(text)
            nodes = tuple(
                NodeCapacity(**{**node, "market": Market(node["market"]), "state": NodeState(node["state"])})
                for node in raw["nodes"]
            )
            return cls(generation=int(raw["generation"]), nodes=nodes)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a capacity snapshot: {error}") from error


# --- progress: engine -> launcher -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStarted:
    """Start of the engine. `iteration` comes from the checkpoint: the first batch to train."""

    KIND: ClassVar[str] = "engine_started"
    iteration: int
    config_digest: str
    devices: str
    versions: Mapping[str, str]
    started_from: str = ""
    """Source of the start weights, in words; empty: the base model."""


UNLEARNED = "unlearned_batches"
"""Name in the health of a batch: batches in a row up to this one that taught nothing."""

LEARNS_NOTHING_AFTER = 3
"""Batches in a row that teach nothing before a warning. One or two are usual while exact rewards are rare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationDone:
    """End of one batch: the batch is trained, its checkpoint is durable, version `iteration` + 1 is published.

    `manifest_digest` names the trained multiset. `phase_ms` is the trainer's own time by phase. `health` holds
    zero_variance_share, gradient_norm, staleness (mean weight versions behind), skipped_groups, unlearned_batches
    (batches in a row that taught nothing), rows_per_forward (most rows of a training pass, which a memory error
    halves), for batches with early groups stale_share and
    early_outside_share (of their training rows, outside the clip range), and the figures of the algorithm: ratio_mean,
    ratio_max, clip_share, kl and dlogp_abs_mean, or velocity_change, positive_loss, negative_loss and
    reference_distance (engine/algorithm). Where workers merge adapters: worker_dlogp_abs_mean and worker_dlogp_abs_max,
    the distance of their log-probs from the trainer's. With several LoRA ranks: idle_gpu_share and
    collective_gpu_share, the shares of all ranks' time without work and in collectives. images_per_gpu_second: of the
    trained images by the wall seconds of all GPUs; mfu: the share of their arithmetic, on a GPU with a known peak.
    `made_by`: number of the batch's rollouts finished by each node. `scores`: mean of each metric of the reward over
    the rollouts, such as the scores of a sum. `schedule`, in wall seconds: seconds (of training the batch, with
    rollouts, and of the last publishing before), waited_seconds, helped_seconds and switch_seconds of the trainer; with
    known rates expected_seconds and expected_waiting, and expected_stale_share of a job with early groups. `ranks`: of
    the trainer, which trained the batch.
    """

    KIND: ClassVar[str] = "iteration_done"
    iteration: int
    reward_mean: float
    reward_std: float
    group_std_mean: float
    explored: int
    manifest_digest: str
    phase_ms: Mapping[str, int]
    wall_seconds: float
    health: Mapping[str, float]
    made_by: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    schedule: Mapping[str, float] = field(default_factory=dict)
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Evaluation of held-out prompts with fixed noise, an ODE sampler and the EMA weights of version `iteration`.

    `metrics` holds the target's metric by name (exact_match, similarity, reward, ...) and `drift`, the distance of the
    images from the base model's (engine/drift.py). `pictures` is the path of a PNG contact sheet, relative to the
    checkpoint store; None if no sheet was kept.
    """

    KIND: ClassVar[str] = "evaluated"
    iteration: int
    metrics: Mapping[str, float]
    prompts: int
    pictures: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """Quality of the seed ranking by stale rewards, over the last explored batches up to this batch.

    engine.exploration.ranking.RankingReport explains the figures. `profile` explored this batch. `control` counts the
    unselected candidates rolled out again with current weights. `explores_on` is the verdict: exploration continues.
    """

    KIND: ClassVar[str] = "ranked"
    iteration: int
    profile: str
    control: int
    explores_on: bool
    spearman: float | None
    kendall: float | None
    low: float
    high: float
    corrected: bool
    batches: int
    prompts: int
    left_out: int
    pairs: int
    selection_gain: float | None
    predicted_gain: float | None
    realised_gain: float | None
    refused_stale: int
    refused_sampler: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationRests:
    """First rest of exploration in this process: for information, because training goes on as well without.

    In `short_batches` batches in a row up to this batch, no prompt had more candidates than the `trained` ones of a
    group. Exploration rests for `batches` batches at a time (engine/exploration/rest.py).
    """

    KIND: ClassVar[str] = "exploration_rests"
    iteration: int
    short_batches: int
    trained: int
    batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved:
    KIND: ClassVar[str] = "checkpoint_saved"
    iteration: int
    path: str
    digest: str


WorkerSpan = tuple[str, str, int, int]
"""Worker, phase, begin and end in milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUsage:
    """Usage of one node between two moments, in node-milliseconds by phase.

    Worker time is divided by the node's number of workers, so the phases of a node never sum to more than elapsed time.
    `spans` hold the times of each worker's phases, drawn by `spotrl trace`.
    """

    KIND: ClassVar[str] = "node_usage"
    node: str
    from_ms: int
    to_ms: int
    phase_ms: Mapping[str, int]
    spans: tuple[WorkerSpan, ...] = ()

    def __post_init__(self) -> None:
        # JSON has no tuples.
        object.__setattr__(self, "spans", tuple(tuple(span) for span in self.spans))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSeen:
    """First call of a worker of the node: the cold start is over."""

    KIND: ClassVar[str] = "node_seen"
    node: str
    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeServed:
    """First finished request of a worker of the node: the node now does useful work for its price."""

    KIND: ClassVar[str] = "node_served"
    node: str
    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMissed:
    """Requeue of a node's work by the engine. `lost_steps`: denoising steps to repeat."""

    KIND: ClassVar[str] = "node_missed"
    node: str
    reason: str
    lost_steps: int
    fenced_requests: int


JUDGES_USED_UP = "budget: the judges' money is used up"
"""Begin of the reason of a run that stopped because its paid judges may spend no more. The launcher looks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Paid calls of a judge by one worker: (input tokens, output tokens, micro-dollars) of each call.

    `unaccounted`: micro-dollars held for calls of a worker that died. The calls may have been made, so they count.
    """

    KIND: ClassVar[str] = "judged"
    worker: str
    calls: tuple[tuple[int, int, int], ...] = ()
    unaccounted: int = 0

    def __post_init__(self) -> None:
        # JSON has no tuples.
        object.__setattr__(self, "calls", tuple(tuple(call) for call in self.calls))

    @property
    def micro_usd(self) -> int:
        return self.unaccounted + sum(micro_usd for _, _, micro_usd in self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped:
    """Change of a node's SP groups.

    `groups`: all live workers of the node, each group's members in rank order. A worker alone is a group of one.
    """

    KIND: ClassVar[str] = "regrouped"
    node: str
    groups: tuple[tuple[str, ...], ...]
    reason: str

    def __post_init__(self) -> None:
        # JSON has no tuples.
        object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetReached:
    KIND: ClassVar[str] = "target_reached"
    iteration: int
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """Warning for the user: a skipped group, a poisoned request, a full disk."""

    KIND: ClassVar[str] = "warned"
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAway:
    """The trainer begins to wait for a checkpoint store that does not answer it, or goes on (`is_away` False)."""

    KIND: ClassVar[str] = "store_away"
    is_away: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFinished:
    """End of the engine. `reason` is target, iterations, unhealthy, failed or stopped; `text` explains the reason."""

    KIND: ClassVar[str] = "engine_finished"
    reason: str
    iteration: int
    text: str = ""


ProgressEvent = (
    EngineStarted
    | IterationDone
    | Evaluated
    | Ranked
    | ExplorationRests
    | CheckpointSaved
    | NodeUsage
    | NodeSeen
    | NodeServed
    | NodeMissed
    | Judged
    | Regrouped
    | TargetReached
    | Warned
    | StoreAway
    | EngineFinished
)

_KINDS: dict[str, type[Any]] = {
    kind.KIND: kind
    for kind in (
        EngineStarted,
        IterationDone,
        Evaluated,
        Ranked,
        ExplorationRests,
        CheckpointSaved,
        NodeUsage,
        NodeSeen,
        NodeServed,
        NodeMissed,
        Judged,
        Regrouped,
        TargetReached,
        Warned,
        StoreAway,
        EngineFinished,
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A numbered event: one line of a progress file. `(run, source, lineage, seq)` identifies the line."""

    run: str
    source: str
    lineage: int
    seq: int
    at_ms: int
    event: ProgressEvent = field()

    def to_json(self) -> str:
        head = {"run": self.run, "source": self.source, "lineage": self.lineage, "seq": self.seq}
        body = {"at_ms": self.at_ms, "kind": self.event.KIND, "event": asdict(self.event)}
        return json.dumps(head | body, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Progress":
        """Parse a progress line. Raises ValueError for anything but a whole line, such as a half-written line."""
        try:
            raw = json.loads(line)
            kind = _KINDS[raw.pop("kind")]
            event = raw.pop("event")
            names = {f.name for f in fields(kind)}
            return cls(event=kind(**{k: v for k, v in event.items() if k in names}), **raw)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a progress line: {error}: {line[:120]}") from error
