"""Every message to the coordinator, and every answer: frozen classes in closed unions.

    worker, trainer, node agent, Ray supervisor  --Call-->  coordinator  --Answer-->  caller

`codec.py` turns messages into JSON heads; tensors travel beside the head as named blobs. The promise: a repeated call
changes nothing, or gets the answer `fenced` or `late`. The field tagged `call` or `do` names the message; the tags and
field names are the wire format, so a renamed field breaks workers of another version.
"""

import math
from typing import TypeAlias

import msgspec

from engine.protocol.exploration_order import ExplorationOrder
from engine.protocol.request import Finished, Kind, Reply, RequestId, Score, Wait, WeightsKey, Work
from engine.protocol.task import Task

Span: TypeAlias = tuple[str, float, float]
"""A spell of one phase: (phase, start, end), in milliseconds of the run's clock."""


# --- parts of messages ------------------------------------------------------------------------------------


class HeldWeights(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The weights that a worker has loaded."""

    version: int
    average: bool
    digest: str

    @property
    def weights(self) -> WeightsKey:
        return WeightsKey(version=self.version, average=self.average)


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """The SP group of a worker.

    `epoch`: the group's number; 0 alone. `torn`: communicators that broke in the worker. `believed`: modelled seconds
    of a denoising step by degree.
    """

    epoch: int
    torn: tuple[int, ...]
    believed: dict[int, float]


class StepTime(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The measured seconds of a denoising step of a request class at an SP degree."""

    request_class: str
    degree: int
    seconds: float


class CommittedState(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The in-flight state of a request after `step` denoising steps. `blob` names the state's bytes."""

    request: RequestId
    step: int
    blob: str


FAULT_CHARACTERS = 500
"""Most characters of the reason why an image has no score."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The wire form of a `Finished`. JSON has no NaN and no infinity: a value that is not finite travels as null."""

    request: RequestId
    reward: float | None
    metrics: dict[str, float | None]
    trajectory: str | None
    node: str = ""
    fault: str = ""

    @classmethod
    def of(cls, finished: Finished) -> "Result":
        """Return the wire form of a result."""
        return cls(
            request=finished.request,
            reward=_or_none(finished.score.reward),
            metrics={name: _or_none(value) for name, value in finished.score.metrics.items()},
            trajectory=finished.trajectory,
            node=finished.node,
            fault=finished.score.fault[:FAULT_CHARACTERS],
        )

    def finished(self) -> Finished:
        """Return the result. A value that was not finite is NaN."""
        metrics = {name: _or_nan(value) for name, value in self.metrics.items()}
        score = Score(reward=_or_nan(self.reward), metrics=metrics, fault=self.fault)
        return Finished(request=self.request, score=score, trajectory=self.trajectory, node=self.node)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


class PaidCall(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A call of a paid judge. A call whose tokens are unknown has no tokens, and costs the most that it may cost."""

    input_tokens: int
    output_tokens: int
    micro_usd: int


# --- calls ------------------------------------------------------------------------------------------------


class _Call(msgspec.Struct, frozen=True, kw_only=True, tag_field="call", omit_defaults=True):
    """Fields of every call. `wait_ms`: wall milliseconds for which an answer without news may be held back."""

    wait_ms: int = 0


class _ReportsUsage(_Call, frozen=True, kw_only=True):
    """A call that reports the caller's usage since its last call. `of`: the number of workers of its node."""

    node: str = ""
    of: int = 1
    usage: tuple[Span, ...] = ()


class _WorkerCall(_ReportsUsage, frozen=True, kw_only=True):
    """A call of one process of a worker. `boot` tells the process from earlier processes of the worker."""

    worker: str
    node: str
    boot: int = 0


class Pull(_WorkerCall, frozen=True, kw_only=True, tag="pull"):
    """Ask for work. The answer is any `Reply`.

    `seq` grows with every pull: a repeated pull gets the same answer. `kinds`: the wanted kinds in any order; empty:
    all kinds. `most_images`: the most images of a forward pass that fit into memory (`room` on the wire); None: no
    limit is known. `group` is absent without sequence parallelism.
    """

    boot: int
    seq: int
    holds: HeldWeights | None = None
    kinds: tuple[Kind, ...] | None = None
    most_images: int | None = msgspec.field(default=None, name="room")
    group: GroupReport | None = None


class Heartbeat(_WorkerCall, frozen=True, kw_only=True, tag="heartbeat"):
    """Renew leases. `leases`: the current denoising step by lease number."""

    leases: dict[int, int]


class Finish(_WorkerCall, frozen=True, kw_only=True, tag="finish"):
    """Deliver the results of a lease. The trajectories are in the blobs."""

    lease: int
    results: tuple[Result, ...]
    pace: StepTime | None = None
    hangs: str = ""
    """The scorer did not return for the lease's only image, in words. Empty: the scorer returned."""


class Commit(_WorkerCall, frozen=True, kw_only=True, tag="commit"):
    """Make the in-flight state of a lease durable. `commit_ms`: the duration of the worker's last commit."""

    lease: int
    states: tuple[CommittedState, ...]
    commit_ms: float | None = None


class GiveBack(_WorkerCall, frozen=True, kw_only=True, tag="give_back"):
    """End a lease without results. The requests are requeued."""

    lease: int


class Fault(_WorkerCall, frozen=True, kw_only=True, tag="fault"):
    """Report that the work of a lease raised an error, or that its scorer did not return in time (`hangs`)."""

    lease: int
    text: str
    hangs: bool = False


class HoldMoney(_WorkerCall, frozen=True, kw_only=True, tag="hold_money"):
    """Ask for money for calls of a paid judge, before the calls. The answer is `Held`, `NoMoney`, or `Wait`.

    `seq` grows with every hold of the process: a repeated call holds the money once. `micro_usd`: the most that the
    calls may cost.
    """

    seq: int
    micro_usd: int


class BillJudge(_WorkerCall, frozen=True, kw_only=True, tag="bill_judge"):
    """Report the calls that were paid from the money held under `seq`, and give the rest back."""

    seq: int
    calls: tuple[PaidCall, ...]


class TakeTurn(_WorkerCall, frozen=True, kw_only=True, tag="take_turn"):
    """Take the next turn of a request to a judge with a rate limit. The answer is `Turn`.

    `judge`: address and model. `gap_seconds`: between two requests of all workers. A repeated call takes another turn.
    """

    judge: str
    gap_seconds: float


class FetchStates(_ReportsUsage, frozen=True, kw_only=True, tag="states"):
    """Fetch committed states by blob name."""

    names: tuple[str, ...]


class FetchWeights(_ReportsUsage, frozen=True, kw_only=True, tag="weights"):
    """Fetch the bytes of published weights."""

    weights: WeightsKey


class Notice(_Call, frozen=True, kw_only=True, tag="notice"):
    """Report that the cloud will preempt this node at the deadline. From the node agent."""

    node: str
    deadline_ms: int


class WorkerDied(_Call, frozen=True, kw_only=True, tag="died"):
    """Report the death of a worker's process. From the presence connection or the Ray supervisor."""

    worker: str
    boot: int
    reason: str
    node: str = ""


class NodeLost(_Call, frozen=True, kw_only=True, tag="node_lost"):
    """Report the loss of a node. From the Ray supervisor."""

    node: str
    reason: str


class Peek(_ReportsUsage, frozen=True, kw_only=True, tag="peek"):
    """Ask for the lineage and the newest published weights."""


class Collect(_ReportsUsage, frozen=True, kw_only=True, tag="collect"):
    """Ask for the results of a batch after the first `have`. `poisoned`: known poisoned requests."""

    kind: Kind
    batch: int
    have: int
    poisoned: int = 0


class LookAhead(_ReportsUsage, frozen=True, kw_only=True, tag="look_ahead"):
    """Ask for the rollouts of a batch that wait or are under way."""

    batch: int


class _Order(_ReportsUsage, frozen=True, kw_only=True):
    """A numbered order of the trainer. An order with a smaller (boot, seq) than an earlier order is late."""

    boot: int = 0
    seq: int = 0


class BeginLineage(_Order, frozen=True, kw_only=True, tag="hello"):
    """Begin a lineage with an empty queue. The current lineage again changes nothing."""

    lineage: int


class Submit(_Order, frozen=True, kw_only=True, tag="submit"):
    """Put requests into the queue."""

    task: Task


class Explore(_Order, frozen=True, kw_only=True, tag="explore"):
    """Explore candidates of a batch while workers would be idle."""

    order: ExplorationOrder


class WeightsFile(msgspec.Struct, frozen=True, kw_only=True):
    """A durable file of weights on the coordinator's disk. `digest`: names the bytes. `size`: in bytes."""

    path: str
    digest: str
    size: int


class Publish(_Order, frozen=True, kw_only=True, tag="publish"):
    """Make weights available to workers. The weights are in `file`; without it, they are the blob `weights`."""

    weights: WeightsKey
    file: WeightsFile | None = None


class Withdraw(_Order, frozen=True, kw_only=True, tag="withdraw"):
    """Forget batches with their results."""

    batches: tuple[tuple[Kind, int], ...]


class Stop(_Order, frozen=True, kw_only=True, tag="stop"):
    """End the run: workers exit."""

    reason: str


LeaseCall: TypeAlias = Pull | Heartbeat | Finish | Commit | GiveBack | Fault
JudgeCall: TypeAlias = HoldMoney | BillJudge | TakeTurn
NodeCall: TypeAlias = LeaseCall | JudgeCall | FetchStates | FetchWeights | Notice
"""The calls that a spot node may make (engine/coordinator/rights.py)."""
Observation: TypeAlias = WorkerDied | NodeLost
Order: TypeAlias = BeginLineage | Submit | Explore | Publish | Withdraw | Stop
TrainerCall: TypeAlias = Order | Peek | Collect | LookAhead
Call: TypeAlias = NodeCall | Observation | TrainerCall


def without_usage(call: Call) -> Call:
    """Return the call without its usage, to repeat a waiting call."""
    return msgspec.structs.replace(call, usage=()) if isinstance(call, _ReportsUsage) else call


def tag_of(message_class: type[msgspec.Struct]) -> str:
    """Return the tag that names a message class on the wire."""
    return str(message_class.__struct_config__.tag)


# --- answers ----------------------------------------------------------------------------------------------


class _Answer(msgspec.Struct, frozen=True, kw_only=True, tag_field="do"):
    pass


class Done(_Answer, frozen=True, kw_only=True, tag="done"):
    """The call took effect."""


class Held(_Answer, frozen=True, kw_only=True, tag="held"):
    """The money is held for the caller."""


class NoMoney(_Answer, frozen=True, kw_only=True, tag="no_money"):
    """The judges' budget is used up, and the run stops. No call of a paid judge may be made."""

    text: str


class Turn(_Answer, frozen=True, kw_only=True, tag="turn"):
    """The turn of a request to a judge: wall seconds from now."""

    seconds: float


class Late(_Answer, frozen=True, kw_only=True, tag="late"):
    """The order arrived after a newer order and changed nothing."""


class Known(_Answer, frozen=True, kw_only=True, tag="known"):
    """The coordinator's lineage, and the newest published version, or None."""

    lineage: int
    version: int | None


class Published(_Answer, frozen=True, kw_only=True, tag="published"):
    """The weights are available under this digest."""

    digest: str


class States(_Answer, frozen=True, kw_only=True, tag="states"):
    """The committed states are in the blobs."""


class WeightsBytes(_Answer, frozen=True, kw_only=True, tag="weights"):
    """The weights are the blob `weights`."""


class Results(_Answer, frozen=True, kw_only=True, tag="results"):
    """New results of a batch, with their trajectories in the blobs.

    `stop`: the reason to end the run, or None. `poisoned`: errors of newly poisoned requests. `poisoned_requests`:
    those requests, in the same order. `nodes`: live nodes. `to_come`: exploration results still expected; None: no
    counted budget. `exploring_seconds`: GPU-seconds explored.
    """

    results: tuple[Result, ...]
    stop: str | None
    poisoned: tuple[str, ...]
    nodes: tuple[str, ...]
    to_come: int | None
    exploring_seconds: float
    poisoned_requests: tuple[RequestId, ...] = ()


class Waiting(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An image that waits for a worker. `step`: number of committed denoising steps. `is_old`: of an early group."""

    prompt: str
    seed: int
    step: int
    is_old: bool = False


class UnderWay(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A worker's lease. `left_ms`: expected milliseconds of the run's clock until its end.

    `steps_left`: 0 if the images only wait for their score. `images`: (prompt, seed) of the asked batch; other work has
    none.
    """

    worker: str
    left_ms: float
    steps_left: int
    images: tuple[tuple[str, int], ...]


class Outlook(_Answer, frozen=True, kw_only=True, tag="outlook"):
    """The work of a batch that waits, in the order of leases, and all open leases.

    `idle`: live workers without a lease. `step_ms`: milliseconds of a denoising step of a full lease, scoring included;
    0: unknown, because no lease of this kind has finished.
    """

    waiting: tuple[Waiting, ...]
    leases: tuple[UnderWay, ...]
    idle: tuple[str, ...]
    step_ms: float


Answer: TypeAlias = (
    Reply | Done | Held | NoMoney | Turn | Late | Known | Published | States | WeightsBytes | Results | Outlook
)


def has_news(answer: Answer) -> bool:
    """Return False if the server may keep a patient caller waiting for a better answer."""
    if isinstance(answer, Results):
        return bool(answer.results or answer.stop or answer.poisoned)
    return not isinstance(answer, Wait)


# --- within an SP group -----------------------------------------------------------------------------------


class SharedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work that the first worker of an SP group shares with the other workers.

    `digest`: of the weights. `step`: the first denoising step.
    """

    work: Work
    digest: str
    step: int
