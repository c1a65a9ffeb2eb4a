"""What a selftest knows about its run at one moment: the ledger's facts, the order to preempt, the cloud's own list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.clouds.preempting import OrderState


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """A node of the run. `happened`: first time of each kind of event, in milliseconds of the run's clock."""

    name: str
    slot: str
    generation: int
    role: str
    market: str
    zone: str
    instance_type: str
    micro_usd_per_hour: int
    requested_ms: int
    happened: Mapping[str, int]
    ended_ms: int | None = None
    evidence: str = ""
    reclaimed: bool = False
    served_ms: int | None = None
    """Time of the node's first finished rollout."""
    lost_steps: int | None = None
    """Denoising steps of the node that had to be repeated. None: no work of the node was put back. Of the ordered node
    only steps since the order count."""

    @property
    def ready_ms(self) -> int | None:
        return self.happened.get("ready")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A trained batch. `made_by`: rollouts finished by each node."""

    iteration: int
    lineage: int
    at_ms: int
    made_by: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A start of the engine: the first iteration that it trains, from its checkpoint."""

    iteration: int
    lineage: int
    at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint, as the engine reported it."""

    iteration: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """A billed stretch of a node's time. `is_free`: the ledger says that the cloud does not bill it."""

    node: str
    ms: int
    micro_usd_per_hour: int
    micro_usd: int
    minimum_ms: int
    is_free: bool
    is_closed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Preempted:
    """The order to preempt a node. `notice_ms`: the notice that the cloud promises; None: it promises none."""

    node: str
    at_ms: int
    means: str
    notice_ms: int | None
    state: OrderState


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that the steps are judged by. Times are milliseconds of the run's clock."""

    cloud: str
    stage: str
    reason: str
    max_total_micro_usd: int
    batch_size: int
    spent_micro_usd: int
    """Cost of the nodes, as `spotrl status` and the report say."""
    beside_micro_usd: int = 0
    """Cost of disks and addresses."""
    nodes: Sequence[NodeFacts] = ()
    batches: Sequence[Batch] = ()
    starts: Sequence[Start] = ()
    saved: Sequence[Saved] = ()
    paid: Sequence[Paid] = ()
    order: Preempted | None = None
    stored: str | None = None
    """Newest whole checkpoint in the bucket, read after the stop. None: not read, or none."""
    stopped_ms: int | None = None
    resumed_ms: int | None = None
    still_running: Sequence[str] = ()
    in_cloud: Sequence[str] | None = None
    """Machines, disks and other labelled resources that the cloud lists. None: not asked yet."""

    def node(self, name: str) -> NodeFacts | None:
        return next((node for node in self.nodes if node.name == name), None)

    @property
    def spot(self) -> NodeFacts | None:
        """Return the first spot node that became ready, which is the node to preempt."""
        return next((node for node in self.nodes if node.role == "rollout" and node.ready_ms is not None), None)
