"""What the controller decides, apart from doing it: facts in, actions out. Pure.

news:   what the cloud says now - what the ledger knows = what to write down
decide: what the plan wants - what there is = what to stop, ask for, buy

Neither keeps anything. Called with the same facts they say the same again, and every action may be repeated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.events import EngineFinished, Market
from launcher.cluster import brakes
from launcher.cluster.provisioner import NodeFact, NodeStatus
from launcher.money import dollars, hourly
from launcher.placement.plan import Slot


class Stage(StrEnum):
    """Where a run is in its life (`run_status.status`)."""

    PLANNED = "planned"
    RUNNING = "running"
    STOPPING = "stopping"
    DRAINING = "draining"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


OVER = frozenset({Stage.FINISHED, Stage.STOPPED, Stage.FAILED})
"""Nothing is bought any more, and nothing may be left running."""

ENDS = frozenset({"gone", "released", "denied", "no_capacity"})
"""How a node ends: one of these events, once."""

FAILING = "failed: "
"""Begins the reason of a run that drains because it cannot go on. It is `failed` once nothing of it is left."""

TRAINER_TRIES = 5
"""Trainers lost in a row without a new iteration: the sixth would fail in the same way."""

YOUNG_MS = 300_000
"""A node that ended within 5 minutes of its request, or was never ready, did no work worth its start."""

FIRST_WAIT_MS = 10_000
LONGEST_WAIT_MS = 600_000
"""A slot whose nodes keep dying young waits 10 s, 20 s, 40 s, ... 10 minutes before the next (run's clock)."""

UNKNOWN_MS = 600_000
"""A node that the provisioner was asked for and does not know after 10 minutes is not there."""

MINIMUM_BILLED_MS = 60_000
"""Held for every launch under way: both clouds bill at least a minute (research notes cost 5.1)."""


# --- facts --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """What the ledger knows of a node. `happened`: when each kind of event was first seen (run's clock)."""

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

    @property
    def ended_ms(self) -> int | None:
        return next((at_ms for kind, at_ms in self.happened.items() if kind in ENDS), None)

    @property
    def is_live(self) -> bool:
        """It runs, or may: whatever has no end on record is paid for."""
        return self.ended_ms is None

    @property
    def is_leaving(self) -> bool:
        return self.is_live and ("notice" in self.happened or "releasing" in self.happened)

    @property
    def died_young(self) -> bool:
        if self.ended_ms is None or "released" in self.happened:
            return False
        return "ready" not in self.happened or self.ended_ms - self.requested_ms < YOUNG_MS


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What there is, at one moment of the run's clock."""

    now_ms: int
    stage: Stage
    reason: str
    stage_ms: int
    """When the run entered its stage."""
    planned_ms: int
    """When the run was last planned or resumed: failures before that are forgiven."""
    nodes: Sequence[NodeRecord]
    metered: int
    finished: EngineFinished | None = None
    finished_ms: int = 0
    advanced_ms: int = 0
    """When the newest iteration was first reached."""
    trouble: str | None = None
    """What makes the engine wait for a person (a full disk), in its own words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the run was started for. `allowance_ms`: what stopping may take; `settle_ms`: time given to a stop."""

    run: str
    slots: Sequence[Slot]
    limits: brakes.Limits
    deadline_ms: int | None
    allowance_ms: int
    settle_ms: int


# --- actions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Write down that something happened to a node; `fact` is there when it was its end."""

    node: str
    kind: str
    at_ms: int
    evidence: str = ""
    fact: NodeFact | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Enter:
    """The run enters a stage. The end of `log_of`'s log goes into the reason, for whoever asks why."""

    stage: Stage
    reason: str = ""
    log_of: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Buy:
    """Write the intent down, then ask for the node."""

    slot: Slot
    generation: int
    name: str
    reserved_micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Ask again for a node whose request may not have been made."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TellStop:
    """Ask the engine to stop, so that it can finish what is durable anyway."""

    reason: str


Action = Enter | Buy | Ask | Release | TellStop


# --- what is new --------------------------------------------------------------------------------------


def news(nodes: Sequence[NodeRecord], cloud: Mapping[str, NodeFact], now_ms: int) -> list[Note]:
    """What the cloud says of our nodes that the ledger does not have yet, oldest first."""
    return [note for node in nodes if node.is_live for note in _news_of(node, cloud.get(node.name), now_ms)]


def _news_of(node: NodeRecord, fact: NodeFact | None, now_ms: int) -> Iterator[Note]:
    if fact is None:
        if "requested" in node.happened and now_ms - node.requested_ms > UNKNOWN_MS:
            yield Note(node=node.name, kind="gone", at_ms=now_ms, evidence="the provisioner does not know it")
        return
    if fact.started_ms is not None and "up" not in node.happened:
        yield Note(node=node.name, kind="up", at_ms=fact.started_ms)
    if fact.ready_ms is not None and "ready" not in node.happened:
        yield Note(node=node.name, kind="ready", at_ms=fact.ready_ms)
    if fact.notice_deadline_ms is not None and "notice" not in node.happened:
        seconds = max(0, fact.notice_deadline_ms - now_ms) // 1000
        yield Note(node=node.name, kind="notice", at_ms=now_ms, evidence=f"taken back in {seconds} s (run's clock)")
    end = {NodeStatus.GONE: "gone", NodeStatus.DENIED: "denied", NodeStatus.NO_CAPACITY: "no_capacity"}.get(fact.status)
    if end is not None:
        kind = "released" if end == "gone" and "releasing" in node.happened and not fact.reclaimed else end
        ended_ms = now_ms if fact.ended_ms is None else fact.ended_ms
        yield Note(node=node.name, kind=kind, at_ms=ended_ms, evidence=fact.evidence, fact=fact)


# --- what to do ---------------------------------------------------------------------------------------


def decide(facts: Facts, wanted: Wanted) -> list[Action]:
    """The difference between what is wanted and what there is."""
    live = [node for node in facts.nodes if node.is_live]
    if facts.stage in OVER:
        return [_release(live)] if live else []
    if facts.finished is not None:
        return _wind_up(facts, wanted, facts.finished, live)
    if facts.stage in (Stage.STOPPING, Stage.DRAINING):
        return _stop(facts, wanted, live)
    stop = _must_stop(facts, wanted, live)
    if stop is not None:
        return [stop]
    return _fill(facts, wanted, live)


def _release(nodes: Sequence[NodeRecord]) -> Release:
    return Release(nodes=tuple(node.name for node in nodes))


def _wind_up(facts: Facts, wanted: Wanted, finished: EngineFinished, live: Sequence[NodeRecord]) -> list[Action]:
    """The engine has no more work. Its trainer may exit by itself; nothing else is waited for."""
    since_ms = facts.stage_ms if facts.stage in (Stage.STOPPING, Stage.DRAINING) else facts.finished_ms
    settling = facts.now_ms < min(since_ms, facts.finished_ms) + wanted.settle_ms
    surplus = [node for node in live if not (settling and node.role == "trainer")]
    if surplus:
        return [_release(surplus)]
    if live:
        return []
    if facts.reason.startswith(FAILING):
        return [Enter(stage=Stage.FAILED, reason=facts.reason.removeprefix(FAILING))]
    match finished.reason:
        case "target" | "iterations":
            return [Enter(stage=Stage.FINISHED, reason=finished.reason)]
        case "stopped":
            return [Enter(stage=Stage.STOPPED, reason=facts.reason or finished.text or "stopped")]
        case _:
            return [Enter(stage=Stage.FAILED, reason=f"{finished.reason}: {finished.text}")]


def _stop(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord]) -> list[Action]:
    """Tell the engine, give it a moment, end every node."""
    if not live and facts.reason.startswith(FAILING):
        return [Enter(stage=Stage.FAILED, reason=facts.reason.removeprefix(FAILING))]
    if not live:
        return [Enter(stage=Stage.STOPPED, reason=facts.reason)]
    settling = facts.now_ms < facts.stage_ms + wanted.settle_ms
    if settling and any(node.role == "trainer" and "ready" in node.happened for node in live):
        return [TellStop(reason=facts.reason)]
    return [_release(live)]


def _must_stop(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord]) -> Enter | None:
    held = _reserved(live, wanted.allowance_ms)
    if brakes.must_drain(metered=facts.metered, reserved=held, max_total=wanted.limits.max_total):
        return Enter(stage=Stage.DRAINING, reason="budget")
    if wanted.deadline_ms is not None and facts.now_ms >= wanted.deadline_ms:
        return Enter(stage=Stage.DRAINING, reason="deadline")
    trainers = [node for node in facts.nodes if node.role == "trainer"]
    denied = next((node for node in trainers if _was_denied(node, facts)), None)
    if denied is not None:
        return Enter(stage=Stage.DRAINING, reason=f"{FAILING}no trainer can be had: {denied.evidence}")
    since_ms = max(facts.advanced_ms, facts.planned_ms)
    lost = [node for node in trainers if node.ended_ms is not None and node.ended_ms > since_ms and not node.reclaimed]
    if len(lost) >= TRAINER_TRIES:
        reason = f"the trainer was lost {len(lost)} times without a new iteration; the last one: {lost[-1].evidence}"
        return Enter(stage=Stage.DRAINING, reason=FAILING + reason, log_of=lost[-1].name)
    return None


def _was_denied(node: NodeRecord, facts: Facts) -> bool:
    return node.happened.get("denied", -1) >= facts.planned_ms


def _fill(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord]) -> list[Action]:
    """Ask for what was meant to be asked for; buy a successor for every slot that is empty or about to be."""
    actions: list[Action] = [Ask(node=node.name) for node in live if "requested" not in node.happened]
    after = list(live)
    refusals: list[str] = []
    for slot in wanted.slots:
        held = [node for node in facts.nodes if node.slot == slot.name]
        latest = max(held, key=lambda node: node.generation, default=None)
        if latest is not None and not _needs_successor(latest, held, facts):
            continue
        rate = slot.placement.micro_usd_per_hour
        generation = 0 if latest is None else latest.generation + 1
        reserve = brakes.worst_case(rate, MINIMUM_BILLED_MS)
        hourly_now = sum(node.micro_usd_per_hour for node in after)
        refusal = brakes.may_buy(
            metered=facts.metered,
            reserved=_reserved(after, wanted.allowance_ms),
            worst_case_new=reserve + brakes.worst_case(rate, wanted.allowance_ms),
            max_total=wanted.limits.max_total,
            hourly_now=hourly_now,
            hourly_new=rate,
            max_hourly=wanted.limits.max_hourly,
        )
        if refusal is not None:
            if slot.role == "trainer" and refusal.for_good:
                return [Enter(stage=Stage.DRAINING, reason="budget")]
            refusals.append(f"{slot.name} is not bought: {refusal.text}")
            continue
        name = f"{wanted.run}-{slot.name}-g{generation}"
        actions.append(Buy(slot=slot, generation=generation, name=name, reserved_micro_usd=reserve))
        after.append(_intended(name, slot, generation, reserve, facts.now_ms))
    waiting = [f"waits: {facts.trouble}"] if facts.trouble else []
    reason = "; ".join(waiting + [_steady(text) for text in refusals])
    if facts.stage is not Stage.RUNNING or facts.reason != reason:
        actions.append(Enter(stage=Stage.RUNNING, reason=reason))
    return actions


def _steady(refusal: str) -> str:
    """A refusal without its amounts, which change from pass to pass and would fill the ledger."""
    return refusal.partition(": $")[0]


def _needs_successor(latest: NodeRecord, held: Sequence[NodeRecord], facts: Facts) -> bool:
    if latest.ended_ms is None:
        return latest.is_leaving
    if _was_denied(latest, facts):
        return False
    return facts.now_ms >= latest.ended_ms + wait_ms(held, facts.planned_ms)


def wait_ms(held: Sequence[NodeRecord], planned_ms: int) -> int:
    """How long a slot stays empty after its last nodes died young."""
    streak = 0
    for node in sorted(held, key=lambda node: node.generation, reverse=True):
        if not node.died_young or node.requested_ms < planned_ms:
            break
        streak += 1
    return min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (streak - 1)) if streak else 0


def _reserved(live: Sequence[NodeRecord], allowance_ms: int) -> int:
    return brakes.reserved(
        sum(node.micro_usd_per_hour for node in live),
        allowance_ms,
        [node.reserved_micro_usd for node in live if "up" not in node.happened],
    )


def _intended(name: str, slot: Slot, generation: int, reserve: int, now_ms: int) -> NodeRecord:
    return NodeRecord(
        name=name,
        slot=slot.name,
        generation=generation,
        role=slot.role,
        market=slot.placement.market,
        micro_usd_per_hour=slot.placement.micro_usd_per_hour,
        requested_ms=now_ms,
        reserved_micro_usd=reserve,
        happened={},
    )


def planned_hourly(facts: Facts, wanted: Wanted) -> int:
    """The most that may run at once, for the money deadline: the whole plan, or what runs now if that is more."""
    plan = sum(slot.placement.micro_usd_per_hour for slot in wanted.slots)
    return max(plan, sum(node.micro_usd_per_hour for node in facts.nodes if node.is_live))


def describe_brakes(wanted: Wanted) -> str:
    """The brakes of a run with its numbers, for the log."""
    rate = sum(slot.placement.micro_usd_per_hour for slot in wanted.slots)
    total = "no total limit" if wanted.limits.max_total is None else f"at most {dollars(wanted.limits.max_total)}"
    per_hour = "no hourly limit" if wanted.limits.max_hourly is None else f"at most {hourly(wanted.limits.max_hourly)}"
    allowance = dollars(brakes.overdraft(rate, wanted.allowance_ms))
    return f"{total}, {per_hour}; stopping is given {wanted.allowance_ms} ms of the run's clock, {allowance} at most"
