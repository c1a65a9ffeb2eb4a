"""Journal records: the orders of the trainer and the facts that the coordinator decided.

The promise: a journal of an earlier version stays readable (tests/data/released). The field `op` names the record on
disk. Orders are stored as the messages themselves, so recovery applies the same messages as live calls. A worker's call
is stored as the accepted fact instead: the decision depended on the clock and on leases of that moment.
"""

from typing import TypeAlias

import msgspec

from engine.protocol.messages import BeginLineage, CommittedState, Explore, Result, Submit, Withdraw
from engine.protocol.request import RequestId, WeightsKey


class _Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="call"):
    pass


class CoordinatorStarted(_Fact, frozen=True, kw_only=True, tag="start"):
    """A coordinator started and issues lease numbers from `first_lease` on."""

    first_lease: int


class WeightsPublished(_Fact, frozen=True, kw_only=True, tag="publish", omit_defaults=True):
    """Weights are durable in the weight book. `boot` and `seq` are those of the trainer's order."""

    weights: WeightsKey
    digest: str
    boot: int = 0
    seq: int = 0


class ResultsAccepted(_Fact, frozen=True, kw_only=True, tag="finish"):
    """Results of requests for which the worker held a lease."""

    results: tuple[Result, ...]


class StatesCommitted(_Fact, frozen=True, kw_only=True, tag="commit"):
    """In-flight states of requests for which the worker held a lease."""

    states: tuple[CommittedState, ...]


class RequestPoisoned(_Fact, frozen=True, kw_only=True, tag="poison"):
    """A request crashed every worker that sampled the request, and is not retried."""

    request: RequestId
    text: str


class LeaseRecord(_Fact, frozen=True, kw_only=True, tag="lease"):
    """The facts to restore a lease after a coordinator restart, so the worker still holds the lease."""

    number: int
    worker: str
    node: str
    boot: int
    seq: int
    weights: WeightsKey
    requests: tuple[RequestId, ...]
    lease_ms: int
    copy: bool


class JudgesFunded(_Fact, frozen=True, kw_only=True, tag="fund_judges"):
    """Money of the judges' budget that this coordinator may spend, taken from the run's store."""

    micro_usd: int


class MoneyHeld(_Fact, frozen=True, kw_only=True, tag="hold_money"):
    """Money held for the calls that a worker makes under `seq`."""

    worker: str
    boot: int = 0
    seq: int = 0
    micro_usd: int


class JudgeBilled(_Fact, frozen=True, kw_only=True, tag="bill_judge"):
    """Money spent from a hold. The rest of the hold is free again."""

    worker: str
    boot: int = 0
    seq: int = 0
    micro_usd: int


StoredOrder: TypeAlias = BeginLineage | Submit | Explore | Withdraw
MoneyFact: TypeAlias = JudgesFunded | MoneyHeld | JudgeBilled
Fact: TypeAlias = (
    CoordinatorStarted
    | WeightsPublished
    | ResultsAccepted
    | StatesCommitted
    | RequestPoisoned
    | LeaseRecord
    | MoneyFact
)
Record: TypeAlias = StoredOrder | Fact


def stored(order: StoredOrder) -> StoredOrder:
    """Return the order as the journal keeps the order: without the trainer's usage."""
    return msgspec.structs.replace(order, wait_ms=0, node="", of=1, usage=())
