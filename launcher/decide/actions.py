"""The actions that a decision may order. Every action may be repeated."""

from dataclasses import dataclass

from launcher.decide.facts import Stage
from launcher.placement.options import Option
from launcher.placement.plan import Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Enter:
    """Move the run to a stage.

    The last lines of the log of node `log_of` are appended to the reason, to explain a failure.
    """

    stage: Stage
    reason: str = ""
    log_of: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Buy:
    """Record the intent in the ledger, then request the node.

    `option`: the offer (zone, instance type, market) to buy. `stand_in`: why the node stands in for missing spot;
    `move`: why the run goes to the node's region; each empty for every other node.
    """

    slot: Slot
    option: Option
    generation: int
    name: str
    reserved_micro_usd: int
    stand_in: str = ""
    move: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatRequest:
    """Repeat the request for a node whose first request may not have reached the provisioner."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Promote:
    """Record that a node takes the role of the trainer, then order its agent to start again as one.

    `slot`, `generation`: the node's from now on.
    """

    node: str
    slot: str
    generation: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatPromotion:
    """Repeat the order to a promoted node, which may not have reached it."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Terminate nodes.

    `why`: the reason, for the ledger; empty if the plan or the end of the run says it. `never_whole`: true if the
    trainer of these nodes never was whole, which counts as a refusal (further_nodes.py).
    """

    nodes: tuple[str, ...]
    why: str = ""
    never_whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StopEngine:
    """Ask the engine to stop, so that the engine can finish its durable work."""

    reason: str


Action = Enter | Buy | RepeatRequest | Promote | RepeatPromotion | Release | StopEngine
