"""The facts of a run, from which every decision is made: nodes, budget, other runs, the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from engine.events import EngineFinished, Market
from launcher.decide import budget_guard
from launcher.decide.clock_doubt import Doubt
from launcher.decide.failover import LaunchRate
from launcher.decide.launch_history import MoveRules
from launcher.decide.point_cost import Scored
from launcher.decide.work_left import WorkLeft
from launcher.market.side_prices import disk_micro_usd_per_hour, side_micro_usd_per_hour
from launcher.placement.options import Option, SiteOptions
from launcher.placement.plan import Slot


class Stage(StrEnum):
    """The stage of a run's life (`run_status.status`)."""

    PLANNED = "planned"
    RUNNING = "running"
    STOPPING = "stopping"
    DRAINING = "draining"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


OVER = frozenset({Stage.FINISHED, Stage.STOPPED, Stage.FAILED})
"""The final stages. The controller buys nothing more, and no node may be left running."""

ENDS = frozenset({"gone", "released", "denied", "no_capacity"})
"""The event kinds that end a node. A node has exactly one end event."""

INSTANCE_ENDED = "instance_ended"
"""Kind of the event of a node whose VM has ended while a disk of the node cannot be removed yet. The VM costs nothing
more; the disk does. The node's end event follows."""

INSTANCE_ENDS = ENDS | {INSTANCE_ENDED}
"""The event kinds after which a node's VM costs nothing more."""

INCOMPLETE = "incomplete"
"""Kind of the event of a node that is given back because its trainer of several nodes never was whole. It comes before
the node's release, and says why."""

KEPT = "kept"
"""Kind of the event of a node that failed and whose VM is kept for a look (`recovery.keep_failed`). It costs money
until its end event."""

FOUND = "found"
"""Kind of the event of a node that the ledger did not know: the ledger was restored from a backup."""

PROMOTED = "promoted"
"""Kind of the event of a node that takes the role of the trainer. Its evidence begins with the slot and generation that
the node has from then on."""

STEADY_ITERATIONS = 3
"""New iterations for which a trainer stays on demand after it was preempted again and again without one."""

FAILING = "failed: "
"""Prefix of the reason of a run that drains after a failure. The run becomes `failed` once all its nodes are gone."""

FINISHING = "finished: "
"""Prefix of the reason of a run that drains because it no longer pays. The run becomes `finished`, as at its target."""

YOUNG_MS = 300_000
"""Age in ms below which an ended node counts as died young. A node that ended within 5 minutes of being ready, or was
never ready, did no work worth its start. A node preempted after real work does not predict the next failure: its
zone and instance type cool down (failover.py), and its slot does not wait."""

AT_ONCE_MS = 180_000
"""Age in ms below which an instance that the cloud ended before its node was ready counts as never given. The cloud is
looked at for two minutes until a stopped instance counts as ended. The set-up of a node takes longer. Assumed."""

OWN_ENDS = ("it ", "its ")
"""Beginnings of the evidence of an end that spotrl itself decided: a failed set-up, an agent that exited, a silence.
The texts of clouds begin differently."""

PATIENT = MoveRules()


def promotion_text(slot: str, generation: int, why: str) -> str:
    """Return the evidence of the event `promoted`."""
    return f"{slot} g{generation}: {why}"


def promotion_of(evidence: str) -> tuple[str, int]:
    """Return the slot and generation that the event `promoted` gives to its node."""
    slot, _, generation = evidence.partition(":")[0].rpartition(" g")
    return slot, int(generation)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """The ledger's record of a node. `happened` maps each event kind to its first time (run's clock).

    `slot`, `generation` and `role` are those that the node has now: a promotion changes them, and `ready` is then the
    time at which the node's processes called in again.
    """

    name: str
    slot: str
    generation: int
    role: str
    market: Market
    micro_usd_per_hour: int
    requested_ms: int
    reserved_micro_usd: int
    happened: Mapping[str, int]
    evidence: str = ""
    reclaimed: bool = False
    wanted: Option | None = None
    """The requested offer, for a run with several possible sites. None on the local infra."""
    zone: str = ""
    instance_type: str = ""
    """The real zone and instance type; before the cloud reports both, the requested values."""
    is_live: bool = field(init=False, repr=False, compare=False)
    """True until an end is recorded. A node without a recorded end is billed, so the node counts as running."""
    ended_ms: int | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ended_ms = next((at_ms for kind, at_ms in self.happened.items() if kind in ENDS), None)
        object.__setattr__(self, "ended_ms", ended_ms)
        object.__setattr__(self, "is_live", ended_ms is None)

    @property
    def beside_micro_usd_per_hour(self) -> int:
        """Return the hourly price of the disk and address on a real cloud."""
        if self.wanted is None:
            return 0
        return side_micro_usd_per_hour(self.wanted.placement.cloud, self.market, self.wanted.placement.disk_gib)

    @property
    def has_instance(self) -> bool:
        """Return True while the VM is billed, or may be billed once the cloud has started it."""
        return self.is_live and INSTANCE_ENDED not in self.happened

    @property
    def running_micro_usd_per_hour(self) -> int:
        """Return the cost of an hour from now on: VM, disk and address. After the end of the VM only the disk."""
        if not self.is_live:
            return 0
        if self.has_instance:
            return self.micro_usd_per_hour + self.beside_micro_usd_per_hour
        wanted = self.wanted
        return 0 if wanted is None else disk_micro_usd_per_hour(wanted.placement.cloud, wanted.placement.disk_gib)

    @property
    def site(self) -> tuple[str, str] | None:
        """Return the requested cloud and region. None on the local infra."""
        return None if self.wanted is None else (self.wanted.placement.cloud, self.wanted.placement.region)

    @property
    def is_kept(self) -> bool:
        """Return True while a failed node's VM is kept."""
        return self.is_live and KEPT in self.happened

    def as_failed(self) -> "NodeRecord":
        """Return the record for decisions on slots: a node that was kept ended when it failed, whatever came later."""
        if KEPT not in self.happened:
            return self
        later = ENDS | {"releasing", INSTANCE_ENDED}
        happened = {kind: at_ms for kind, at_ms in self.happened.items() if kind not in later}
        return replace(self, happened=happened | {"gone": self.happened[KEPT]}, reclaimed=False)

    @property
    def is_ready(self) -> bool:
        """Return True if the node came up and its workers have called in.

        A ledger of an older version may have `ready` before `up`: the inventory listed the instance later.
        """
        return {"up", "ready"} <= self.happened.keys()

    @property
    def is_leaving(self) -> bool:
        return self.is_live and not self.happened.keys().isdisjoint({"notice", "releasing", INSTANCE_ENDED})

    @property
    def is_ordered_to_end(self) -> bool:
        """Return True if the launcher ordered the node's end and the cloud still bills the VM, or may bill it."""
        return "releasing" in self.happened and self.has_instance

    @property
    def was_refused(self) -> bool:
        """Return True if the request gave no instance that could have worked, whatever words the cloud used.

        The cloud refused the request, no instance was ever there, or the cloud ended the instance at once (a disk whose
        key cannot be used). The pool cools down by itself (failover.py), and such an end never ends a run. False on the
        local infra, which has no pools.
        """
        if self.wanted is None or self.ended_ms is None or self.reclaimed or "released" in self.happened:
            return False
        if {"no_capacity", "denied"} & self.happened.keys() or "up" not in self.happened:
            return True
        is_at_once = "ready" not in self.happened and self.ended_ms - self.happened["up"] < AT_ONCE_MS
        return is_at_once and not self.evidence.startswith(OWN_ENDS)

    @property
    def died_young(self) -> bool:
        if self.ended_ms is None or "released" in self.happened:
            return False
        if "ready" not in self.happened:
            return True
        return not self.reclaimed and self.ended_ms - max(self.happened["ready"], self.requested_ms) < YOUNG_MS


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """The spending of all other runs in the ledger.

    The limits across all runs apply to the sum of these runs and this run.
    """

    metered: int = 0
    reserved: int = 0
    hourly: int = 0
    planned_hourly: int = 0
    """The most that the unfinished other runs may cost an hour at once, in micro-dollars."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The state of the run, its nodes and its money at one moment of the run's clock."""

    now_ms: int
    stage: Stage
    reason: str
    stage_ms: int
    """The time at which the run entered its stage."""
    planned_ms: int
    """The time at which the run was last planned or resumed. Earlier failures do not count."""
    nodes: Sequence[NodeRecord]
    """All nodes. A kept node counts as ended at its failure (`NodeRecord.as_failed`)."""
    metered: int
    kept: Sequence[NodeRecord] = ()
    """Failed nodes whose VMs are kept, and cost money."""
    finished: EngineFinished | None = None
    finished_ms: int = 0
    advances_ms: Sequence[int] = ()
    """The times at which the last `STEADY_ITERATIONS` new iterations were first reached, oldest first."""
    saved_ms: int | None = None
    """The time at which the newest checkpoint was saved. None: none is known."""
    still_since_ms: int | None = None
    """Start of the current standstill: since then the trainer has answered without a break, has not waited for a
    person and has reached no new iteration."""
    trouble: str | None = None
    """The engine's own description of a problem that waits for a person (a full disk)."""
    store_away_ms: int | None = None
    """Since when the trainer waits for a bucket that does not answer it. None: it does not wait."""
    store_answers: bool = False
    """Whether the bucket answers the controller."""
    metered_when_ordered: Mapping[str, int] = field(default_factory=dict)
    """By node that was ordered to end and is still billed: the nodes' cost up to the order, in micro-dollars."""
    others: Others = Others()
    doubt: Doubt | None = None
    """The reason to doubt the clock. While set, the controller buys nothing, and a limit that seems reached too
    early ends no run."""
    login: str = ""
    """The user's login at a cloud has expired and a node waits for it, in words with the command. While set, nothing is
    bought and nothing is given back: no order would reach the cloud."""
    sites: Sequence[SiteOptions] = ()
    """The candidate sites with their current prices. Empty: each slot is bought as the plan says."""
    scores: Sequence[Scored] = ()
    """All evaluations, oldest first. Empty: the job has no limit on the cost of a point."""
    work: WorkLeft | None = None
    """The work left. None: the plan predicts no iteration times (the local infra, plans of older versions)."""

    @property
    def advanced_ms(self) -> int:
        """Return the time at which the newest iteration was first reached; 0 before the first."""
        return self.advances_ms[-1] if self.advances_ms else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The plan and limits of the run.

    `allowance_ms`: longest time of a stop; `settle_ms`: time the engine gets to stop.
    """

    run: str
    slots: Sequence[Slot]
    limits: budget_guard.Limits
    deadline_ms: int | None
    """Time by which the run should be done. None: no such goal."""
    allowance_ms: int
    settle_ms: int
    rules: MoveRules = PATIENT
    launch_rate: LaunchRate | None = None
    """The launch rate limit. None: no limit."""
    iteration_ms: int | None = None
    """The predicted time of an iteration with the trainer alone. None: no prediction exists, or the run is on the local
    infra, where time costs nothing."""
    all_runs: budget_guard.Limits = budget_guard.NO_LIMITS
    """The limits from the user's own configuration, which bind the sum over all runs."""
    others_at_most: int | None = None
    """On the local infra: the most that all other runs may have spent and hold when this run starts, so that the budget
    of its judges fits into `all_runs.max_total`. None: no limit, or no paid judge."""
    ends_ms: int | None = None
    """Time at which the run ends, done or not. None: at the deadline."""
    moved_bytes: int = 0
    """Bytes that a move to another region carries along: the model for each node, and a checkpoint."""
    micro_usd_per_point: int | None = None
    """Most micro-dollars for +.01 of the smoothed target metric (`stop.usd_per_point`). None: no limit."""
    metric: str = ""
    """The target metric."""
    trainer_may_lack: bool = False
    """True if a trainer of several nodes trains without one that was lost (`RuntimeConfig.trainer_nodes`)."""

    @property
    def last_ms(self) -> int | None:
        """Return the time at which the run ends, done or not. None: no limit."""
        return self.deadline_ms if self.ends_ms is None else self.ends_ms

    def goal_ms(self, now_ms: int) -> int | None:
        """Return the time to be done by: the deadline, and after a missed deadline the end of the run."""
        is_missed = self.deadline_ms is not None and now_ms >= self.deadline_ms
        return self.last_ms if is_missed else self.deadline_ms
