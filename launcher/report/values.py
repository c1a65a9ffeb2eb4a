"""The values of a report: what a run reached, cost and lost.

Money is in integer micro-dollars, time in integer milliseconds.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.decide.point_cost import NOT_EVALUATED, PointCost
from launcher.ledger.accounting import Charge, TakenRole
from launcher.ledger.left_in_buckets import LeftInBucket
from launcher.placement.front import ParetoFront
from launcher.report.bill import Bill
from launcher.report.exploration import Exploration
from launcher.report.provenance import Provenance
from launcher.report.ranks import Collectives, TrainerTime
from launcher.report.schedule import ScheduleResult
from launcher.report.sharing import Sharing
from launcher.report.target import Gain
from launcher.report.throughput import Throughput

SCHEMA = 1
"""Version of the report's JSON. A new field keeps the version; a changed or removed field increments the version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Identity of the run, and the inputs needed to reproduce the run. Hours are on the run's clock."""

    name: str
    status: str
    reason: str
    infra: str
    created_at: str
    until: str
    """End of the run, or the time of the report if the run has not ended, on the run's clock; ISO, UTC.

    `provenance.ended_at` is the end by the wall clock.
    """
    hours: float
    wall_seconds: float
    clock_factor: float
    iterations: int
    lineages: int
    job_digest: str
    code_version: str
    lock_digest: str
    seeds: tuple[int, ...]
    devices: str
    started_from: str = ""
    """Source of the start weights (run and checkpoint); empty if the run started from the base model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An evaluation, with the hours and micro-dollars since the run was created."""

    iteration: int
    at_ms: int
    hours: float
    micro_usd: int
    score: float
    smoothed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftPoint:
    """Distance of an evaluation's images to the base model's images (engine/drift.py), and whether every guard held."""

    iteration: int
    drift: float
    guards_hold: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """One trained iteration. `health`: figures of the update by name, like kl, clip_share and gradient_norm."""

    iteration: int
    hours: float
    reward_mean: float
    reward_std: float
    explored: int
    health: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorePoint:
    """Score of one of several rewards in an evaluation, with the dollars spent until then."""

    name: str
    iteration: int
    micro_usd: int
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """A limit on a metric, required by the target. `value` is from the newest evaluation; None if not reported."""

    metric: str
    max: float
    value: float | None
    holds: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Factors of a cost and of a saving: iterations x seconds per iteration x dollars per hour (run's clock)."""

    iterations: int
    seconds_per_iteration: float
    micro_usd_per_hour: int
    micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The target score, and whether the run reached the target.

    A target is reached when the smoothed score is at or above `value` for `hold` evaluations in a row.
    `confirmed` is the last evaluation of the row; dollars and hours are counted up to `confirmed`. `first` is the
    first single evaluation at or above `value`. `value` is None if the run had no target.
    """

    metric: str
    value: float | None
    hold: int
    reached: bool
    confirmed: Moment | None
    first: Moment | None
    best: Moment | None
    """Evaluation with the highest smoothed score."""
    factors: Factors | None
    """Factors of the cost up to `confirmed`."""
    guards: tuple[Guard, ...] = ()
    """Guards in the newest evaluation. An evaluation counts towards the target only if all guards hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Total cost in micro-dollars, and five splits of the same total."""

    total: int
    by_role: Mapping[str, int]
    by_market: Mapping[str, int]
    by_place: Mapping[str, int]
    """Split by cloud and region."""
    by_node: Mapping[str, int]
    by_phase: Mapping[str, int]
    sums_equal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraLine:
    """A separate line of the bill. `micro_usd` is None if the cloud charges an amount that is not known."""

    kind: str
    """failed_launches, setup, idle (inside the total); disk, address, egress (not in the total)."""
    amount: str
    micro_usd: int | None
    in_total: bool
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLine:
    """One node: its offer, the intervals in which the node was billed, and the cost.

    `slot`, `generation` and `role`: as it was bought. `taken`: the role that it took later.
    """

    node: str
    slot: str
    generation: int
    role: str
    market: str
    zone: str
    instance_type: str
    micro_usd_per_hour: int
    charges: tuple[Charge, ...]
    seen_ms: int | None
    running: bool
    hours: float
    micro_usd: int
    phase_micro_usd: Mapping[str, int]
    taken: TakenRole | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionLine:
    """A preempted node, and the cost of the preemption.

    `micro_usd` = `cold_start_micro_usd` + `lost_work_micro_usd`:

    - cold start: cost of the successors in the same slot, or in the slot that a promoted node left, from the start of
      billing until a worker of the successor called in. Successors count up to the first successor with a call or with
      a preemption. A preempted successor's own preemption carries the next cold start, to count no cold start twice.
    - lost work: `lost_steps` x the run's own mean node-time per denoising step (node-time of rollouts and
      exploration / denoising steps of trained iterations and of their exploration) x the lost node's price.
      Lost work is at most the cost of the node. Lost work is 0 before the first trained iteration, because the
      time of a step is not known yet.

    `replaced_after_*`: time from the preemption to the first call of a later node of the slot; None if no later node
    has called.
    """

    node: str
    slot: str
    role: str
    """trainer or rollout: what the node did when it was preempted."""
    zone: str
    at_ms: int
    hours: float
    signal: str | None
    notice: bool
    lost_steps: int
    replaced_by: str | None
    recovered_by: str | None
    """`a new node`, or `a promotion` of a node that was up to the trainer. None: nothing took its place."""
    replaced_after_s: float | None
    """Seconds on the run's clock."""
    replaced_after_wall_s: float | None
    cold_start_micro_usd: int
    lost_work_micro_usd: int
    micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceEffect:
    """The run's node-time at the on-demand price of the same offers. The figure does not predict a run without spot."""

    paid_micro_usd: int
    on_demand_micro_usd: int
    difference_micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A saving against a named baseline: another run, or a counterfactual labelled as a counterfactual.

    `saved_micro_usd` is None if the two cannot be compared; `why` gives the reason.
    """

    kind: str
    """`run` or `counterfactual`."""
    against: str
    micro_usd: int | None
    saved_micro_usd: int | None
    why: str
    ours: Factors | None = None
    theirs: Factors | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceSource:
    """A source of prices. `age_days` is the price's age at the newest request for a node at the price."""

    source: str
    observed_at: str
    age_days: float | None
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """A contact sheet of held-out prompts; `path` is relative to the checkpoint store."""

    iteration: int
    path: str
    score: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StandInLine:
    """A node that replaced missing spot. `hours`: time of its request, since the start of the run."""

    node: str
    zone: str
    market: str
    hours: float
    why: str
    paid_hours: float
    micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveLine:
    """A move of the run to another region that has spot.

    `hours`: time of the request, since the start of the run. `minutes`: from the request until the trainer there was
    ready.
    """

    node: str
    hours: float
    minutes: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLosses:
    """What the preemptions of the trainer cost. Seconds are of the run's clock, dollars those of all nodes."""

    losses: int
    promotions: int
    """Losses after which a node that was up took the role."""
    made_again_seconds: float
    """Work since the last checkpoint, which was made again."""
    made_again_micro_usd: int
    without_trainer_seconds: float
    without_trainer_micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Every value `spotrl report` prints about a run."""

    schema: int
    run: RunFacts
    money_basis: str
    """`billed` if an imported bill covers every node. The dollars of this report are metered all the same: `bill`."""
    money_note: str
    target: Target
    costs: Costs
    curve: tuple[Moment, ...]
    drift: tuple[DriftPoint, ...]
    """Drift of each evaluation with a drift metric."""
    scores: tuple[ScorePoint, ...]
    """Scores of each of several rewards (`reward: [...]`); empty for one reward."""
    gains: tuple[Gain, ...]
    """Cost of each part of the climb, in at most `GAINS` parts."""
    micro_usd_per_hundredth: int | None
    """Micro-dollars per +0.01, from the first evaluation to the best smoothed score; None if the score did not rise."""
    extras: tuple[ExtraLine, ...]
    """Separate bill lines of a run on real clouds; empty on the local infra."""
    nodes: tuple[NodeLine, ...]
    preemptions: tuple[PreemptionLine, ...]
    exploration: Exploration | None
    sharing: Sharing | None
    price_effect: PriceEffect
    saved: tuple[Saving, ...]
    prices: tuple[PriceSource, ...]
    pictures_before: Pictures | None
    pictures_after: Pictures | None
    start_ms: int
    end_ms: int
    notes: tuple[str, ...]
    learning: tuple[Learning, ...] = ()
    """Every trained iteration."""
    pictures: tuple[Pictures, ...] = ()
    """The contact sheet of every evaluation that kept one, oldest first."""
    job_text: str = ""
    """The job file as it was launched."""
    schedule: ScheduleResult | None = None
    """Expected and measured iterations; None for a run without a forecast."""
    collectives: Collectives | None = None
    """Collectives of the trainer's ranks; None for a trainer with one rank."""
    trainer_time: TrainerTime | None = None
    """Time of every GPU of the trainer, by phase; None if no node of the trainer was seen."""
    throughput: Throughput | None = None
    """Images per GPU-second and MFU; None before the first trained iteration."""
    provenance: Provenance
    """Commands, git commits, hardware and versions behind the run, and the wall time of its end."""
    stand_ins: tuple[StandInLine, ...] = ()
    """Nodes bought for slots without spot, oldest first."""
    trainer_losses: TrainerLosses | None = None
    moves: tuple[MoveLine, ...] = ()
    """None: the trainer was never preempted."""
    resume_with: str = ""
    """Command that continues a stopped run; empty for any other run, and for one whose files were removed."""
    point: PointCost = NOT_EVALUATED
    """Dollars of the last +.01 of score, and a forecast for the next."""
    bill: Bill | None = None
    """What the clouds billed, beside what was metered; None if no imported bill names the run."""
    fleets: ParetoFront | None = None
    """The fleets that the run's own was chosen from; None for a job that names its nodes, and for older runs."""
    left_in_buckets: tuple[LeftInBucket, ...] = ()
    """Folders that the run left in buckets. Their price is in no sum. Empty for a run that goes on."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return asdict(self)
