"""THE CONTRACT between launcher and engine: capacity goes in, progress comes out.

Frozen values, standard library only, one JSON object a line. Both directions survive repeats:

- capacity is a *snapshot* with a generation; an older generation than the last one seen is ignored;
- progress is numbered by `(run, source, lineage, seq)`; the ledger keeps each number once.

`lineage` counts how often the run went back to an older checkpoint: a step lost with its machine is
redone under the next lineage. Rewards count once (newest lineage), dollars always.
Times are milliseconds UTC on the run's clock (`engine/clock.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar


class Market(StrEnum):
    """How a node was bought."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"


class NodeState(StrEnum):
    """What the launcher knows of a node."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class Phase(StrEnum):
    """What a node-second was spent on. A second belongs to one phase; what is left over is idle."""

    COLD_START = "cold_start"
    ROLLOUT = "rollout"
    EXPLORATION = "exploration"
    TRAINING = "training"
    EVALUATION = "evaluation"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"
    LOST = "lost"
    IDLE = "idle"


# --- capacity: launcher -> engine -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCapacity:
    """One node as the launcher sees it. `deadline_ms`: when a draining node will be gone."""

    node: str
    market: Market
    state: NodeState
    workers: int
    deadline_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Everything there is to compute on, at one moment. Sent on connect, on change and every 10 s."""

    generation: int
    nodes: tuple[NodeCapacity, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Capacity":
        """Raises ValueError when a field is missing, unknown or of an unknown state."""
        try:
            raw = json.loads(text)
            nodes = tuple(
                NodeCapacity(**{**node, "market": Market(node["market"]), "state": NodeState(node["state"])})
                for node in raw["nodes"]
            )
            return cls(generation=int(raw["generation"]), nodes=nodes)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a capacity snapshot: {error}") from error


# --- progress: engine -> launcher -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStarted:
    """The engine runs. `iteration` is the checkpoint's: the first batch it will train."""

    KIND: ClassVar[str] = "engine_started"
    iteration: int
    config_digest: str
    devices: str
    versions: Mapping[str, str]
    started_from: str = ""
    """Whose weights the run started from, in words; empty: the base model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationDone:
    """One batch is trained, its checkpoint is durable, version `iteration` + 1 is published.

    `manifest_digest` names the trained multiset. `phase_ms` is the trainer's own time by phase.
    `health` holds zero_variance_share, ratio_mean, ratio_max, clip_share, kl, gradient_norm,
    dlogp_abs_mean, staleness, skipped_groups. `made_by`: how many of its rollouts each node finished.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Held-out prompts with fixed noise, ODE sampler, EMA weights of version `iteration`.

    `metrics` holds the target's metric by name (exact_match, similarity, reward, ...), and `drift`: how far the
    pictures are from the base model's (engine/drift.py).
    `pictures` is a PNG contact sheet, relative to the checkpoint store, if one was kept.
    """

    KIND: ClassVar[str] = "evaluated"
    iteration: int
    metrics: Mapping[str, float]
    prompts: int
    pictures: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """How well stale rewards ranked the seeds, over the last explored batches up to this one.

    The figures are those of engine.exploration.ranking.RankingReport, which explains them; `profile` explored this
    batch, `control` of its unselected candidates were rolled out afresh, `explores_on` is the verdict.
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
class CheckpointSaved:
    KIND: ClassVar[str] = "checkpoint_saved"
    iteration: int
    path: str
    digest: str


WorkerSpan = tuple[str, str, int, int]
"""Worker, phase, and from when to when in milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUsage:
    """What one node's workers did between two moments, in node-milliseconds by phase.

    Divided by the node's workers, so that the phases of a node never sum to more than its time. `spans` say when,
    worker by worker: what `spotrl trace` draws.
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
    """A worker of this node called in for the first time: its cold start is over."""

    KIND: ClassVar[str] = "node_seen"
    node: str
    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeServed:
    """A worker of this node finished its first request: from here on the node is worth its price."""

    KIND: ClassVar[str] = "node_served"
    node: str
    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMissed:
    """The engine gave a node's work away. `lost_steps`: denoising steps that must be done again."""

    KIND: ClassVar[str] = "node_missed"
    node: str
    reason: str
    lost_steps: int
    fenced_requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped:
    """A node's workers share pictures otherwise from now on.

    `groups`: all of its live workers, each group's members in rank order; who works alone is a group of one.
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
    """Something a person should read: a skipped group, a poisoned request, a full disk."""

    KIND: ClassVar[str] = "warned"
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFinished:
    """No more work: `reason` is target, iterations, unhealthy, failed or stopped; `text` explains."""

    KIND: ClassVar[str] = "engine_finished"
    reason: str
    iteration: int
    text: str = ""


ProgressEvent = (
    EngineStarted
    | IterationDone
    | Evaluated
    | Ranked
    | CheckpointSaved
    | NodeUsage
    | NodeSeen
    | NodeServed
    | NodeMissed
    | Regrouped
    | TargetReached
    | Warned
    | EngineFinished
)

_KINDS: dict[str, type[Any]] = {
    kind.KIND: kind
    for kind in (
        EngineStarted,
        IterationDone,
        Evaluated,
        Ranked,
        CheckpointSaved,
        NodeUsage,
        NodeSeen,
        NodeServed,
        NodeMissed,
        Regrouped,
        TargetReached,
        Warned,
        EngineFinished,
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One line of a progress file: a numbered event. `(run, source, lineage, seq)` is its identity."""

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
        """Raises ValueError for anything but a whole progress line (a half-written one, say)."""
        try:
            raw = json.loads(line)
            kind = _KINDS[raw.pop("kind")]
            event = raw.pop("event")
            known = {f.name for f in fields(kind)}
            return cls(event=kind(**{k: v for k, v in event.items() if k in known}), **raw)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a progress line: {error}: {line[:120]}") from error
