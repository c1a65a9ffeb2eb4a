"""What the controller decides, apart from doing it: facts in, actions out. Pure.

news:   what the cloud says now - what the ledger knows = what to write down
paid:   what was really bought, and what it costs now - what the ledger knows = price events
decide: what the plan wants - what there is = what to stop, ask for, buy

Neither keeps anything. Called with the same facts they say the same again, and every action may be repeated.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from engine.events import EngineFinished, Market
from launcher.cluster import brakes
from launcher.cluster.cloud_time import Doubt
from launcher.cluster.clouds.refusals import holds_in_its_zone_alone
from launcher.cluster.provisioner import NodeFact, NodeStatus, is_quota_used_up
from launcher.ledger.billing import MINIMUM_BILLED_MS, side_micro_usd_per_hour
from launcher.money import dollars, duration, hourly
from launcher.placement.moves import (
    GIVE_BACK_AFTER_MS,
    GIVE_BACK_GAP_MS,
    Attempt,
    LaunchRate,
    Move,
    MoveRules,
    NothingLeft,
    Option,
    Outcome,
    Price,
    PriceNow,
    SiteOptions,
    Tried,
    back_to_spot,
    is_home_given_up,
    jitter,
    next_rollout,
    next_trainer,
)
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan, Slot


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

SAME_ENDS = 3
"""Nodes in a row that end with the same evidence before they did any work: the fourth would too. Three, because one
machine may be bad and two may be chance."""

STANDSTILL_ITERATIONS, SHORTEST_STANDSTILL_MS = 10, 7_200_000
"""A run is ended when its trainer answers but reaches no new iteration for 10 times as long as one is predicted to take
with the trainer alone. Predictions of models that were never run have been wrong by a factor of 5. At least 2 hours:
the first iteration loads the model and evaluates it, which no prediction counts."""

YOUNG_MS = 300_000
"""A node that ended within 5 minutes of being ready, or was never ready, did no work worth its start. One that worked
and was taken back is no sign that the next would fail: its place cools down (moves.py), its slot does not wait."""

FIRST_WAIT_MS = 10_000
LONGEST_WAIT_MS = 600_000
"""A slot whose nodes keep dying young waits 10 s, 20 s, 40 s, ... 10 minutes before the next (run's clock)."""

UNKNOWN_MS = 600_000
"""A node that the provisioner was asked for and does not know after 10 minutes is not there."""

PRICE_MOVED = 0.01
"""A spot price that moved by less than 1 % is not written down: it would be a row a minute."""


NODES_A_SLOT = 3
"""A stand-in, the spot node that is to replace it, and one that is leaving."""

PATIENT = MoveRules()

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
    wanted: Option | None = None
    """What was asked for, where the run may be in several places."""
    zone: str = ""
    instance_type: str = ""
    """What it really is; what was asked for, before the cloud said so."""

    @property
    def beside_micro_usd_per_hour(self) -> int:
        """Disk and address, on a real cloud."""
        return side_micro_usd_per_hour(self.wanted.placement.cloud, self.market) if self.wanted is not None else 0

    @property
    def ended_ms(self) -> int | None:
        for kind in self.happened.keys() & ENDS:
            return self.happened[kind]
        return None

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
        if "ready" not in self.happened:
            return True
        return not self.reclaimed and self.ended_ms - max(self.happened["ready"], self.requested_ms) < YOUNG_MS


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """What all other runs of the ledger spend: limits for all runs bind the sum."""

    metered: int = 0
    reserved: int = 0
    hourly: int = 0
    planned_hourly: int = 0
    """The most that those which are not over may run at once."""


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
    still_since_ms: int | None = None
    """Since when the trainer has answered without a break, waited for nobody and reached no new iteration."""
    trouble: str | None = None
    """What makes the engine wait for a person (a full disk), in its own words."""
    others: Others = Others()
    doubt: Doubt | None = None
    """The reason to doubt the time: nothing is bought, and what seems used up too early ends no run."""
    sites: Sequence[SiteOptions] = ()
    """Where the run may be, at the prices of now. Empty: where its slots say, and nowhere else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the run was started for. `allowance_ms`: what stopping may take; `settle_ms`: time given to a stop."""

    run: str
    slots: Sequence[Slot]
    limits: brakes.Limits
    deadline_ms: int | None
    allowance_ms: int
    settle_ms: int
    rules: MoveRules = PATIENT
    launch_rate: LaunchRate | None = None
    """None: as fast as is decided."""
    iteration_ms: int | None = None
    """The predicted time of an iteration with the trainer alone; None: nobody predicts, or it costs nothing."""
    all_runs: brakes.Limits = brakes.NO_LIMITS
    """Of the user's own configuration: they bind the sum over all runs."""


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
    """Write the intent down, then ask for the node. `option`: as what it is bought."""

    slot: Slot
    option: Option
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
        yield Note(node=node.name, kind="up", at_ms=_believed_ms(node, fact.started_ms, now_ms))
    if fact.ready_ms is not None and "ready" not in node.happened:
        yield Note(node=node.name, kind="ready", at_ms=_believed_ms(node, fact.ready_ms, now_ms))
    if fact.notice_deadline_ms is not None and "notice" not in node.happened:
        seconds = max(0, fact.notice_deadline_ms - now_ms) // 1000
        yield Note(node=node.name, kind="notice", at_ms=now_ms, evidence=f"taken back in {seconds} s (run's clock)")
    end = {NodeStatus.GONE: "gone", NodeStatus.DENIED: "denied", NodeStatus.NO_CAPACITY: "no_capacity"}.get(fact.status)
    if end is not None:
        kind = "released" if end == "gone" and "releasing" in node.happened and not fact.reclaimed else end
        ended_ms = now_ms if fact.ended_ms is None else _believed_ms(node, fact.ended_ms, now_ms)
        yield Note(node=node.name, kind=kind, at_ms=ended_ms, evidence=fact.evidence, fact=fact)


def _believed_ms(node: NodeRecord, said_ms: int, now_ms: int) -> int:
    """What a cloud or a node says of a time, kept between the node's request and now: their clocks may be wrong.

    A fact from the far future would be paid for at once, and end the run.
    """
    return min(max(said_ms, node.requested_ms), now_ms)


# --- what it really costs --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """From `at_ms` on a node is known to be of this zone and type, at this price."""

    node: str
    at_ms: int
    zone: str
    instance_type: str
    price: Price


def paid(nodes: Sequence[NodeRecord], cloud: Mapping[str, NodeFact], prices: PriceNow, now_ms: int) -> list[Paid]:
    """What was bought, where it is not what was asked for; and what a spot node costs now, where that has changed.

    A price that nobody knows is taken to be the one on demand.
    """
    notes = []
    for node in nodes:
        fact = cloud.get(node.name)
        if fact is None or node.wanted is None or not node.is_live or "up" not in node.happened:
            continue
        zone, instance_type = fact.zone or node.zone, fact.instance_type or node.instance_type
        is_as_known = (zone, instance_type) == (node.zone, node.instance_type)
        said = _said_since(node.wanted, zone, instance_type, prices)
        if is_as_known and (said is None or not _moved(node, said)):
            continue  # where nobody says anything new, what was said last goes on
        price = said or _offered(node.wanted, zone, instance_type)
        worst = Price(
            micro_usd_per_hour=node.wanted.on_demand_micro_usd_per_hour,
            source=f"unknown for {instance_type} in {zone}, so counted as on demand",
            observed_at=node.wanted.placement.price_observed_at,
        )
        at_ms = now_ms if is_as_known else node.happened["up"]
        notes.append(Paid(node=node.name, at_ms=at_ms, zone=zone, instance_type=instance_type, price=price or worst))
    return notes


def _said_since(wanted: Option, zone: str, instance_type: str, prices: PriceNow) -> Price | None:
    """What clouds say of it that is newer than the offer it was bought from."""
    placement = wanted.placement
    now = prices.of((placement.cloud, placement.region, zone, instance_type, placement.market))
    return now if now is not None and now.is_newer_than(placement.price_observed_at) else None


def _offered(wanted: Option, zone: str, instance_type: str) -> Price | None:
    """The offer's price, if this is what was offered."""
    placement = wanted.placement
    if instance_type != placement.instance_type or placement.zone_name not in ("", zone):
        return None
    return Price(
        micro_usd_per_hour=placement.micro_usd_per_hour,
        source=placement.price_source,
        observed_at=placement.price_observed_at,
    )


def _moved(node: NodeRecord, price: Price) -> bool:
    if node.market is not Market.SPOT:
        return False
    return abs(price.micro_usd_per_hour - node.micro_usd_per_hour) > PRICE_MOVED * node.micro_usd_per_hour


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
    tried = Tried((_attempt(node) for node in facts.nodes) if facts.sites else (), facts.planned_ms)
    stop = _must_stop(facts, wanted, live, tried)
    if stop is not None and not (facts.doubt is not None and facts.doubt.is_ahead):
        return [stop]
    if facts.doubt is not None:
        is_said = facts.stage is Stage.RUNNING and facts.reason == facts.doubt.text
        return [] if is_said else [Enter(stage=Stage.RUNNING, reason=facts.doubt.text)]
    return _fill(facts, wanted, live, tried)


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


def _must_stop(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], tried: Tried) -> Enter | None:
    held, others = _reserved(live, wanted.allowance_ms, facts.now_ms), facts.others
    if brakes.must_drain(metered=facts.metered, reserved=held, max_total=wanted.limits.max_total):
        return Enter(stage=Stage.DRAINING, reason="budget")
    if brakes.must_drain(
        metered=facts.metered + others.metered, reserved=held + others.reserved, max_total=wanted.all_runs.max_total
    ):
        return Enter(stage=Stage.DRAINING, reason="budget: all_runs.max_total is used up by all runs together")
    if wanted.deadline_ms is not None and facts.now_ms >= wanted.deadline_ms:
        return Enter(stage=Stage.DRAINING, reason="deadline")
    trainers = [node for node in facts.nodes if node.role == "trainer"]
    denial = _no_trainer_can_be_had(facts, wanted, trainers, tried)
    if denial is not None:
        return Enter(stage=Stage.DRAINING, reason=f"{FAILING}no trainer can be had: {denial}")
    since_ms = max(facts.advanced_ms, facts.planned_ms)
    lost = [node for node in trainers if _was_lost(node, since_ms)]
    alike = _alike(lost)
    if alike is not None:
        reason = f"the trainer was lost {SAME_ENDS} times in the same way without a new iteration: {alike.evidence}"
        return Enter(stage=Stage.DRAINING, reason=FAILING + reason, log_of=alike.name)
    if len(lost) >= TRAINER_TRIES:
        reason = f"the trainer was lost {len(lost)} times without a new iteration; the last one: {lost[-1].evidence}"
        return Enter(stage=Stage.DRAINING, reason=FAILING + reason, log_of=lost[-1].name)
    given_up = [_given_up(facts, slot) for slot in wanted.slots if slot.role == "rollout"]
    if given_up and all(given_up):
        reason = f"no rollout node works, the last {SAME_ENDS} of each slot ended in the same way: {given_up[0]}"
        return Enter(stage=Stage.DRAINING, reason=FAILING + reason)
    return _standstill(facts, wanted)


def _standstill(facts: Facts, wanted: Wanted) -> Enter | None:
    """End a run whose engine answers and gets nowhere."""
    if wanted.iteration_ms is None or facts.still_since_ms is None:
        return None
    still_ms = facts.now_ms - facts.still_since_ms
    if still_ms < max(SHORTEST_STANDSTILL_MS, STANDSTILL_ITERATIONS * wanted.iteration_ms):
        return None
    reason = (
        f"no new iteration for {duration(still_ms)} although the trainer answers; "
        f"one was predicted to take {duration(wanted.iteration_ms)} with the trainer alone"
    )
    return Enter(stage=Stage.DRAINING, reason=FAILING + reason)


def _alike(ended: Sequence[NodeRecord]) -> NodeRecord | None:
    """Return the last of these nodes if it and those before it ended in the same way."""
    last = sorted(ended, key=lambda node: node.ended_ms or 0)[-SAME_ENDS:]
    is_alike = len(last) == SAME_ENDS and len({_without_numbers(node.evidence) for node in last}) == 1
    return last[-1] if is_alike and last[-1].evidence else None


def _without_numbers(evidence: str) -> str:
    """Return the evidence without words that hold a number: machines, processes and times differ each time."""
    return re.sub(r"\w*\d\w*", "#", evidence)


def _given_up(facts: Facts, slot: Slot) -> str | None:
    """Return how the slot's last nodes ended, if they ended young and in the same way; None while it may work."""
    held = [node for node in facts.nodes if node.slot == slot.name and not _was_refused(node)]
    last = sorted(held, key=lambda node: node.generation)[-SAME_ENDS:]
    if any(not node.died_young or node.reclaimed or node.requested_ms < facts.planned_ms for node in last):
        return None
    alike = _alike(last)
    return None if alike is None else alike.evidence


def _was_refused(node: NodeRecord) -> bool:
    """A place refused it: that place cools down by itself (moves.py)."""
    return node.wanted is not None and bool({"no_capacity", "denied"} & node.happened.keys())


def _was_lost(node: NodeRecord, since_ms: int) -> bool:
    """It was there and ended by itself. A place without capacity is another matter, and so is a quota."""
    if node.ended_ms is None or node.ended_ms <= since_ms or node.reclaimed:
        return False
    return not _was_refused(node)


def _no_trainer_can_be_had(facts: Facts, wanted: Wanted, trainers: Sequence[NodeRecord], tried: Tried) -> str | None:
    """Why there never will be one."""
    if facts.sites:
        move = next_trainer(tried, facts.sites, wanted.rules, facts.now_ms)
        return move.why if isinstance(move, NothingLeft) else None
    return next((node.evidence for node in trainers if _was_denied(node, facts)), None)


def _was_denied(node: NodeRecord, facts: Facts) -> bool:
    return node.happened.get("denied", -1) >= facts.planned_ms


def _fill(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], tried: Tried) -> list[Action]:
    """Ask for what was meant to be asked for; buy a successor for every slot that is empty or about to be."""
    actions: list[Action] = [Ask(node=node.name) for node in live if "requested" not in node.happened]
    let_go = _let_go(facts, wanted, live, tried)
    if let_go:
        actions.append(_release(let_go))
    after, launches = list(live), [node.requested_ms for node in facts.nodes]
    refusals: list[str] = []
    by_slot: defaultdict[str, list[NodeRecord]] = defaultdict(list)
    for node in facts.nodes:
        by_slot[node.slot].append(node)
    for slot in wanted.slots:
        held = by_slot[slot.name]
        latest = max(held, key=lambda node: node.generation, default=None)
        if latest is not None and not _needs_successor(slot, latest, held, facts):
            continue
        if slot.role == "rollout" and (evidence := _given_up(facts, slot)) is not None:
            refusals.append(f"{slot.name} is left empty, its last {SAME_ENDS} nodes ended in the same way: {evidence}")
            continue
        works = any(_stays(node) for node in held)  # a stand-in, whose successor may be on spot
        if wanted.launch_rate is not None and wanted.launch_rate.next_ms(launches) > facts.now_ms:
            refusals.append(f"{slot.name} is not bought: {wanted.launch_rate.per_minute} launches a minute at most")
            break
        move = _where(slot, tried, after, facts, wanted)
        if not isinstance(move, Option):
            refusals += [] if works else [f"{slot.name} is not bought: {move.why}"]
            continue
        rate = move.placement.micro_usd_per_hour + _beside(move.placement, facts)
        generation = 0 if latest is None else latest.generation + 1
        reserve = brakes.worst_case(rate, MINIMUM_BILLED_MS)
        refusal = _refusal(facts, wanted, after, rate, reserve)
        if refusal is not None:
            if slot.role == "trainer" and refusal.for_good:
                return [Enter(stage=Stage.DRAINING, reason="budget")]
            refusals += [] if works else [f"{slot.name} is not bought: {refusal.text}"]
            continue
        name = f"{wanted.run}-{slot.name}-g{generation}"
        actions.append(Buy(slot=slot, option=move, generation=generation, name=name, reserved_micro_usd=reserve))
        bought = _intended(name, slot, move, generation, reserve, facts)
        after.append(bought)
        launches.append(facts.now_ms)
        if facts.sites:
            tried.add(_attempt(bought))
    waiting = [f"waits: {facts.trouble}"] if facts.trouble else []
    reason = "; ".join(waiting + [_steady(text) for text in refusals])
    if facts.stage is not Stage.RUNNING or facts.reason != reason:
        actions.append(Enter(stage=Stage.RUNNING, reason=reason))
    return actions


def refused_now(facts: Facts, wanted: Wanted, buy: Buy) -> brakes.Refusal | None:
    """The brakes once more, by facts that nobody can change meanwhile: two controllers may decide at one moment."""
    placement = buy.option.placement
    rate = placement.micro_usd_per_hour + _beside(placement, facts)
    live = [node for node in facts.nodes if node.is_live]
    return _refusal(facts, wanted, live, rate, buy.reserved_micro_usd)


def reserved_micro_usd(nodes: Sequence[NodeRecord], allowance_ms: int, now_ms: int) -> int:
    """What a run's live nodes hold against limits."""
    return _reserved([node for node in nodes if node.is_live], allowance_ms, now_ms)


def hourly_micro_usd(nodes: Sequence[NodeRecord]) -> int:
    """What a run's live nodes cost an hour, with what is beside them."""
    return _hourly([node for node in nodes if node.is_live])


def _refusal(
    facts: Facts, wanted: Wanted, after: Sequence[NodeRecord], rate: int, reserve: int
) -> brakes.Refusal | None:
    """Why a node at this rate is not bought beside those there are then: the run's own limits, then those of all."""
    held = _reserved(after, wanted.allowance_ms, facts.now_ms)
    hourly_now = _hourly(after)
    new = reserve + brakes.worst_case(rate, wanted.allowance_ms)
    own = brakes.may_buy(
        metered=facts.metered,
        reserved=held,
        worst_case_new=new,
        max_total=wanted.limits.max_total,
        hourly_now=hourly_now,
        hourly_new=rate,
        max_hourly=wanted.limits.max_hourly,
    )
    return own or brakes.may_buy(
        metered=facts.metered + facts.others.metered,
        reserved=held + facts.others.reserved,
        worst_case_new=new,
        max_total=wanted.all_runs.max_total,
        hourly_now=hourly_now + facts.others.hourly,
        hourly_new=rate,
        max_hourly=wanted.all_runs.max_hourly,
        section="all_runs",
    )


def _steady(refusal: str) -> str:
    """A refusal without its amounts, which change from pass to pass and would fill the ledger."""
    return refusal.partition(": $")[0]


def _needs_successor(slot: Slot, latest: NodeRecord, held: Sequence[NodeRecord], facts: Facts) -> bool:
    """Return whether a node is asked for in a slot that had some: it is empty, about to be, or held by a stand-in."""
    if slot.role == "trainer" and latest.wanted is not None and any(node.is_live for node in held):
        return False  # two trainers would both write the run's checkpoints: the old one must be gone
    if any(_stays(node) for node in held) and not _may_go_back(slot, held, facts):
        return False
    if latest.ended_ms is None:
        return True
    if not facts.sites and _was_denied(latest, facts):
        return False
    gap_ms = wait_ms(held, facts.planned_ms)
    if latest.wanted is not None:
        gap_ms += round(gap_ms * jitter(latest.name) / 2)
    return facts.now_ms >= latest.ended_ms + gap_ms


def _stays(node: NodeRecord) -> bool:
    """A node that is there or on its way, and is meant to remain."""
    return node.is_live and not node.is_leaving


def _is_stand_in(node: NodeRecord, slot: Slot) -> bool:
    """A node bought on demand in a slot whose plan says spot."""
    return node.market is Market.ON_DEMAND and slot.placement.market is Market.SPOT


def _may_go_back(slot: Slot, held: Sequence[NodeRecord], facts: Facts) -> bool:
    """Return whether a slot has nothing but a stand-in, and gave none back for `GIVE_BACK_GAP_MS`."""
    stand_ins = [node for node in held if _is_stand_in(node, slot)]
    if any(_stays(node) and node not in stand_ins for node in held):
        return False
    released_ms = [node.happened["releasing"] for node in stand_ins if "releasing" in node.happened]
    return not released_ms or facts.now_ms >= max(released_ms) + GIVE_BACK_GAP_MS


def wait_ms(held: Sequence[NodeRecord], planned_ms: int) -> int:
    """How long a slot stays empty after its last nodes died young. Places that refuse cool down by themselves."""
    streak = 0
    for node in sorted(held, key=lambda node: node.generation, reverse=True):
        if _was_refused(node):
            continue
        if not node.died_young or node.requested_ms < planned_ms:
            break
        streak += 1
    return min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (streak - 1)) if streak else 0


# --- where ----------------------------------------------------------------------------------------------


def _where(slot: Slot, tried: Tried, after: Sequence[NodeRecord], facts: Facts, wanted: Wanted) -> Move:
    """As what a slot's next node is bought. What the hourly limit does not bear is not looked at."""
    if not facts.sites:
        return slot.option
    limit = wanted.limits.max_hourly
    if slot.role == "trainer":
        sites = _within(facts, limit)
        return next_trainer(tried, sites, wanted.rules, facts.now_ms)
    sites = _within(facts, None if limit is None else limit - _hourly(after))
    nodes = sum(slot.role == "rollout" for slot in wanted.slots)
    replaces_stand_in = any(node.slot == slot.name and _stays(node) for node in after)
    where = back_to_spot if replaces_stand_in else next_rollout
    return where(slot.option, nodes, tried, sites, wanted.rules, facts.now_ms)


def _within(facts: Facts, micro_usd_per_hour: int | None) -> Sequence[SiteOptions]:
    """The sites without what costs more than that. What is too dear everywhere stays: its refusal says the numbers."""
    if micro_usd_per_hour is None:
        return facts.sites

    def fits(option: Option) -> bool:
        return option.placement.micro_usd_per_hour + _beside(option.placement, facts) <= micro_usd_per_hour

    def cheap(options: tuple[Option, ...]) -> tuple[Option, ...]:
        return tuple(option for option in options if fits(option)) or options

    trainers_fit = any(fits(option) for site in facts.sites for option in site.trainer)
    return [
        replace(
            site,
            trainer=tuple(option for option in site.trainer if fits(option)) if trainers_fit else site.trainer,
            rollout=cheap(site.rollout),
        )
        for site in facts.sites
    ]


def _attempt(node: NodeRecord) -> Attempt:
    assert node.wanted is not None, f"{node.name} was bought without a place"
    ends = {"no_capacity": Outcome.REFUSED, "denied": Outcome.DENIED}
    outcome = next((ends[kind] for kind in ends if kind in node.happened), Outcome.ENDED)
    if node.reclaimed:
        outcome = Outcome.RECLAIMED
    return Attempt(
        name=node.name,
        role=node.role,
        option=node.wanted,
        requested_ms=node.requested_ms,
        outcome=Outcome.LIVE if node.is_live else outcome,
        ended_ms=node.ended_ms,
        up_ms=node.happened.get("up"),
        evidence=node.evidence,
        is_quota_used_up=is_quota_used_up(node.evidence),
        holds_in_its_zone_alone=holds_in_its_zone_alone(node.evidence),
    )


def _let_go(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], tried: Tried) -> list[NodeRecord]:
    """Nodes that the run has moved away from, stand-ins that spot nodes replaced, then what the limit does not bear.

    Past the limit, stand-ins go before spot nodes, each the dearest first.
    """
    if not facts.sites:
        return []
    if is_home_given_up(tried, wanted.rules, facts.now_ms):
        return [node for node in live if "releasing" not in node.happened]
    trainer = tried.trainer
    staying = [node for node in live if "releasing" not in node.happened]
    elsewhere = [
        node
        for node in staying
        if trainer is not None
        and node.name != trainer.name
        and (node.role == "trainer" or _attempt(node).site != trainer.site)
    ]
    gone = {node.name for node in elsewhere}
    kept = [node for node in staying if node.name not in gone]
    shed = elsewhere + _given_back(facts, wanted, live, kept, tried)
    kept = [node for node in kept if node not in shed]
    slots = {slot.name: slot for slot in wanted.slots}
    sheddable = sorted(
        (node for node in kept if node.market is Market.SPOT or _is_stand_in(node, slots[node.slot])),
        key=lambda node: (node.market is Market.ON_DEMAND, node.micro_usd_per_hour, node.name),
    )
    while wanted.limits.max_hourly is not None and sheddable and _hourly(kept) > wanted.limits.max_hourly:
        dearest = sheddable.pop()
        kept.remove(dearest)
        shed.append(dearest)
    return shed


def _given_back(
    facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], kept: Sequence[NodeRecord], tried: Tried
) -> list[NodeRecord]:
    """Stand-ins beside which a spot node works in a place that has had capacity for `GIVE_BACK_AFTER_MS`.

    Where the hourly limit does not bear a spot node beside any stand-in, one stand-in goes first, when its place may
    be asked: to wait would keep it for the rest of the run. If spot is refused, a stand-in is bought again.
    """
    given_back: list[NodeRecord] = []
    alone: list[tuple[Slot, NodeRecord]] = []
    for slot in wanted.slots:
        here = [node for node in kept if node.slot == slot.name]
        stand_ins = [node for node in here if _is_stand_in(node, slot)]
        if any(_has_settled(node, facts, tried) for node in here if node.market is Market.SPOT):
            given_back += stand_ins
        elif stand_ins and len(stand_ins) == len(here):
            alone += [(slot, node) for node in stand_ins]
    makes_room = any(node.is_leaving and node.market is Market.ON_DEMAND for node in live)
    if given_back or makes_room or any(_is_starting_on_spot(node) for node in kept):
        return given_back
    for slot, stand_in in alone:
        if _has_no_room_beside(slot, kept, tried, facts, wanted):
            held = [node for node in facts.nodes if node.slot == slot.name]
            if _needs_successor(slot, max(held, key=lambda node: node.generation), held, facts):
                return [stand_in]
    return []


def _is_starting_on_spot(node: NodeRecord) -> bool:
    return node.market is Market.SPOT and "ready" not in node.happened


def _has_settled(node: NodeRecord, facts: Facts, tried: Tried) -> bool:
    if "ready" not in node.happened or node.wanted is None or node.is_leaving:
        return False
    return facts.now_ms >= node.happened["up"] + GIVE_BACK_AFTER_MS or tried.has_stayed(node.wanted, facts.now_ms)


def _has_no_room_beside(slot: Slot, kept: Sequence[NodeRecord], tried: Tried, facts: Facts, wanted: Wanted) -> bool:
    """Return whether a spot node could be asked for now, if only the hourly limit bore it beside the stand-in."""
    move = _where(slot, tried, kept, facts, wanted)
    if not isinstance(move, Option):
        return False
    rate = move.placement.micro_usd_per_hour + _beside(move.placement, facts)
    limits = ((wanted.limits.max_hourly, 0), (wanted.all_runs.max_hourly, facts.others.hourly))
    return any(limit is not None and _hourly(kept) + others + rate > limit for limit, others in limits)


def _beside(placement: Placement, facts: Facts) -> int:
    """What a node costs beside its machine, on a real cloud."""
    return side_micro_usd_per_hour(placement.cloud, placement.market) if facts.sites else 0


def _hourly(nodes: Sequence[NodeRecord]) -> int:
    return sum(node.micro_usd_per_hour + node.beside_micro_usd_per_hour for node in nodes)


def _reserved(live: Sequence[NodeRecord], allowance_ms: int, now_ms: int) -> int:
    """Return the money held for stopping what runs, and for launches under way: since their request, or a minute."""
    return brakes.reserved(
        _hourly(live),
        allowance_ms,
        [
            max(node.reserved_micro_usd, brakes.worst_case(_hourly([node]), now_ms - node.requested_ms))
            for node in live
            if "up" not in node.happened
        ],
    )


def _intended(name: str, slot: Slot, option: Option, generation: int, reserve: int, facts: Facts) -> NodeRecord:
    return NodeRecord(
        name=name,
        slot=slot.name,
        generation=generation,
        role=slot.role,
        market=option.placement.market,
        micro_usd_per_hour=option.placement.micro_usd_per_hour,
        requested_ms=facts.now_ms,
        reserved_micro_usd=reserve,
        happened={},
        wanted=option if facts.sites else None,
        zone=option.placement.zone,
        instance_type=option.placement.instance_type,
    )


def planned_hourly(facts: Facts, wanted: Wanted) -> int:
    """The most that may run at once, for the money deadline: the whole plan, or what runs now if that is more."""
    plan = sum(slot.placement.micro_usd_per_hour + _beside(slot.placement, facts) for slot in wanted.slots)
    return max(plan, _hourly([node for node in facts.nodes if node.is_live]))


def bound_micro_usd(wanted: Wanted, sites: Sequence[SiteOptions] = ()) -> int | None:
    """The most that a run can cost, whatever happens: its limit, and what runs at most while a stop is carried out."""
    if wanted.limits.max_total is None:
        return None
    return wanted.limits.max_total + brakes.overdraft(_most_hourly(wanted, sites), wanted.allowance_ms)


def bound_of_plan(plan: Plan, deadline_ms: int | None = None) -> int | None:
    """Return the most that a plan on real clouds can cost, in micro-dollars: what `launch` prints. None: no limit.

    `deadline_ms`: how long the run may take. Disks, addresses, stand-ins on demand and the time that stopping takes
    are counted; traffic and storage are not, because no cloud says their price before the bill.
    """
    wanted = Wanted(
        run="",
        slots=plan.slots,
        limits=brakes.Limits(max_total=plan.max_total_micro_usd, max_hourly=plan.max_hourly_micro_usd),
        deadline_ms=None,
        allowance_ms=brakes.RELEASE_ALLOWANCE_MS,
        settle_ms=0,
    )
    bounds = [bound_micro_usd(wanted, plan.sites)]
    if deadline_ms is not None:
        bounds.append(brakes.worst_case(_most_hourly(wanted, plan.sites), deadline_ms + wanted.allowance_ms))
    return min((bound for bound in bounds if bound is not None), default=None)


def _most_hourly(wanted: Wanted, sites: Sequence[SiteOptions]) -> int:
    """The most that can run at once, at on-demand prices: a spot price may rise so far before a node is let go.

    What `max_hourly` bears when it is bought; without one, `NODES_A_SLOT` nodes in each slot, at the dearest site.
    """
    if not sites:
        return sum(slot.placement.micro_usd_per_hour for slot in wanted.slots)

    def dearest(role: str) -> int:
        options = [option for site in sites for option in (site.trainer if role == "trainer" else site.rollout)]
        return max(map(_at_most, options), default=0)

    slots = [slot.role for slot in wanted.slots]
    once = sum(dearest(role) for role in slots)
    if wanted.limits.max_hourly is None:
        return NODES_A_SLOT * once
    least = min(
        (
            option.placement.micro_usd_per_hour / _at_most(option)
            for site in sites
            for option in (*site.trainer, *site.rollout)
        ),
        default=1.0,
    )
    return min(NODES_A_SLOT * once, ceil(wanted.limits.max_hourly / least))


def _at_most(option: Option) -> int:
    """A node's price on demand, with disk and address."""
    return option.on_demand_micro_usd_per_hour + side_micro_usd_per_hour(option.placement.cloud, Market.ON_DEMAND)


def describe_brakes(wanted: Wanted, sites: Sequence[SiteOptions] = ()) -> str:
    """The brakes of a run with its numbers, for the log and the plan."""
    total = "no total limit" if wanted.limits.max_total is None else f"at most {dollars(wanted.limits.max_total)}"
    per_hour = "no hourly limit" if wanted.limits.max_hourly is None else f"at most {hourly(wanted.limits.max_hourly)}"
    allowance = dollars(brakes.overdraft(_most_hourly(wanted, sites), wanted.allowance_ms))
    if not sites:
        return (
            f"{total}, {per_hour}; stopping is given {wanted.allowance_ms} ms of the run's clock, {allowance} at most"
        )
    bound = bound_micro_usd(wanted, sites)
    never = "" if bound is None else f"; never more than {dollars(bound)}"
    return f"{total}, {per_hour}; stopping is given {duration(wanted.allowance_ms)}, {allowance} at most{never}"
