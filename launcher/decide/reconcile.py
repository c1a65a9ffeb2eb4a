"""Decide the controller's actions from facts. Pure: no I/O and no clock.

news:   the cloud's state now - the ledger's records = events to write down
paid:   the real purchases and current prices - the ledger's records = price events
decide: the plan - the existing nodes = stops, requests and purchases

The functions keep no state. Equal facts give equal answers, and every action may be repeated.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from engine.events import EngineFinished, Market
from launcher.controller.cloud_time import Doubt
from launcher.decide import budget_guard
from launcher.decide.failover import (
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
from launcher.ledger.billing import MINIMUM_BILLED_MS, side_micro_usd_per_hour
from launcher.market.refusals import holds_in_its_zone_alone
from launcher.money import dollars, duration, hourly
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan, Slot
from launcher.provision.provisioner import NodeFact, NodeStatus, is_quota_used_up


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

FAILING = "failed: "
"""Prefix of the reason of a run that drains after a failure. The run becomes `failed` once all its nodes are gone."""

TRAINER_TRIES = 5
"""Trainers lost in a row without a new iteration before the run fails. A sixth trainer would fail in the same way."""

SAME_ENDS = 3
"""Nodes in a row that end young with the same evidence before the controller gives up. A fourth node would end alike.
The limit is three because one node may be faulty and two failures may be chance."""

STANDSTILL_ITERATIONS, SHORTEST_STANDSTILL_MS = 10, 7_200_000
"""The limits after which a run without progress is ended, although its trainer answers. The run may stand still for 10
times the predicted time of an iteration with the trainer alone, because predictions for models never run before have
been wrong by a factor of 5. The minimum is 2 hours: the first iteration loads and evaluates the model, and no
prediction counts either."""

YOUNG_MS = 300_000
"""Age in ms below which an ended node counts as died young. A node that ended within 5 minutes of being ready, or was
never ready, did no work worth its start. A node preempted after real work does not predict the next failure: its
zone and instance type cool down (failover.py), and its slot does not wait."""

FIRST_WAIT_MS = 10_000
LONGEST_WAIT_MS = 600_000
"""The wait of a slot whose nodes keep dying young: 10 s, 20 s, 40 s, ... 10 minutes (ms on the run's clock)."""

UNKNOWN_MS = 600_000
"""Time after which a requested node counts as gone if the provisioner does not know the node (10 minutes)."""

PRICE_MOVED = 0.01
"""Smallest relative change of a spot price that is recorded (1 %). Without a threshold the ledger would gain a row a
minute."""


NODES_A_SLOT = 3
"""Most nodes in a slot at once: a stand-in, the spot node meant to replace the stand-in, and a leaving node."""

PATIENT = MoveRules()

# --- facts --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """The ledger's record of a node. `happened` maps each event kind to its first time (run's clock)."""

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

    @property
    def beside_micro_usd_per_hour(self) -> int:
        """Return the hourly price of the disk and address on a real cloud."""
        return side_micro_usd_per_hour(self.wanted.placement.cloud, self.market) if self.wanted is not None else 0

    @property
    def ended_ms(self) -> int | None:
        for kind in self.happened.keys() & ENDS:
            return self.happened[kind]
        return None

    @property
    def is_live(self) -> bool:
        """Return True until an end is recorded.

        A node without a recorded end is billed, so the node counts as running.
        """
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
    """The spending of all other runs in the ledger. The limits across all runs bind the sum."""

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
    """The time at which the run was last planned or resumed. Earlier failures are forgiven."""
    nodes: Sequence[NodeRecord]
    metered: int
    finished: EngineFinished | None = None
    finished_ms: int = 0
    advanced_ms: int = 0
    """The time at which the newest iteration was first reached."""
    still_since_ms: int | None = None
    """Start of the current standstill: since then the trainer has answered without a break, has not waited for a
    person and has reached no new iteration."""
    trouble: str | None = None
    """The engine's own description of a problem that waits for a person (a full disk)."""
    others: Others = Others()
    doubt: Doubt | None = None
    """The reason to doubt the clock. While set, the controller buys nothing, and a limit that seems reached too
    early ends no run."""
    sites: Sequence[SiteOptions] = ()
    """The candidate sites with their current prices. Empty: each slot is bought as the plan says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The plan and limits of the run.

    `allowance_ms`: longest time of a stop; `settle_ms`: time the engine gets to stop.
    """

    run: str
    slots: Sequence[Slot]
    limits: budget_guard.Limits
    deadline_ms: int | None
    allowance_ms: int
    settle_ms: int
    rules: MoveRules = PATIENT
    launch_rate: LaunchRate | None = None
    """The launch rate limit. None: no limit."""
    iteration_ms: int | None = None
    """The predicted time of an iteration with the trainer alone. None: no prediction exists, or time costs nothing."""
    all_runs: budget_guard.Limits = budget_guard.NO_LIMITS
    """The limits from the user's own configuration, which bind the sum over all runs."""


# --- actions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Record an event of a node. `fact` is set if the event is the node's end."""

    node: str
    kind: str
    at_ms: int
    evidence: str = ""
    fact: NodeFact | None = None


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

    `option`: the offer (zone, instance type, market) to buy.
    """

    slot: Slot
    option: Option
    generation: int
    name: str
    reserved_micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Repeat the request for a node whose first request may not have reached the provisioner."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TellStop:
    """Ask the engine to stop, so that the engine can finish its durable work."""

    reason: str


Action = Enter | Buy | Ask | Release | TellStop


# --- new events ---------------------------------------------------------------------------------------


def news(nodes: Sequence[NodeRecord], cloud: Mapping[str, NodeFact], now_ms: int) -> list[Note]:
    """Return the events of our nodes that the cloud reports and the ledger lacks, in the order of `nodes`."""
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
    """Limit a reported time to the interval between the node's request and now.

    The reporter's clock may be wrong.
    A fact from the far future would be paid for at once, and would end the run.
    """
    return min(max(said_ms, node.requested_ms), now_ms)


# --- prices ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """The known zone, type and price of a node from `at_ms` on."""

    node: str
    at_ms: int
    zone: str
    instance_type: str
    price: Price


def paid(nodes: Sequence[NodeRecord], cloud: Mapping[str, NodeFact], prices: PriceNow, now_ms: int) -> list[Paid]:
    """Return price events: purchases that differ from the request, and changed spot prices.

    An unknown price counts as the on-demand price.
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
            continue  # without newer information, the last known price continues
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
    """Return the clouds' current price if newer than the offer behind the purchase, else None."""
    placement = wanted.placement
    now = prices.of((placement.cloud, placement.region, zone, instance_type, placement.market))
    return now if now is not None and now.is_newer_than(placement.price_observed_at) else None


def _offered(wanted: Option, zone: str, instance_type: str) -> Price | None:
    """Return the offer's price if the zone and instance type match the offer, else None."""
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


# --- decisions ---------------------------------------------------------------------------------------


def decide(facts: Facts, wanted: Wanted) -> list[Action]:
    """Return the actions that turn the existing nodes into the wanted nodes."""
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
    """Release the nodes of an engine without further work, then enter the final stage.

    Only the trainer gets `settle_ms` to exit by itself.
    """
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
    """Ask the engine to stop, wait `settle_ms`, then release every node."""
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
    if budget_guard.must_drain(metered=facts.metered, reserved=held, max_total=wanted.limits.max_total):
        return Enter(stage=Stage.DRAINING, reason="budget")
    if budget_guard.must_drain(
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
    """Return the end of a run whose engine answers but makes no progress, else None."""
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
    """Return the last of the nodes if the last `SAME_ENDS` ended in the same way, else None."""
    last = sorted(ended, key=lambda node: node.ended_ms or 0)[-SAME_ENDS:]
    is_alike = len(last) == SAME_ENDS and len({_without_numbers(node.evidence) for node in last}) == 1
    return last[-1] if is_alike and last[-1].evidence else None


def _without_numbers(evidence: str) -> str:
    """Return the evidence without words that hold a number: node names, processes and times differ each time."""
    return re.sub(r"\w*\d\w*", "#", evidence)


def _given_up(facts: Facts, slot: Slot) -> str | None:
    """Return the common evidence of the slot's last nodes if all of them ended young and alike.

    None: the slot may still work.
    """
    held = [node for node in facts.nodes if node.slot == slot.name and not _was_refused(node)]
    last = sorted(held, key=lambda node: node.generation)[-SAME_ENDS:]
    if any(not node.died_young or node.reclaimed or node.requested_ms < facts.planned_ms for node in last):
        return None
    alike = _alike(last)
    return None if alike is None else alike.evidence


def _was_refused(node: NodeRecord) -> bool:
    """Return True if the cloud refused the request. The refused zone and type cool down by themselves (failover.py)."""
    return node.wanted is not None and bool({"no_capacity", "denied"} & node.happened.keys())


def _was_lost(node: NodeRecord, since_ms: int) -> bool:
    """Return True if the node ended by itself after `since_ms`.

    A preemption, missing capacity or a quota does not count.
    """
    if node.ended_ms is None or node.ended_ms <= since_ms or node.reclaimed:
        return False
    return not _was_refused(node)


def _no_trainer_can_be_had(facts: Facts, wanted: Wanted, trainers: Sequence[NodeRecord], tried: Tried) -> str | None:
    """Return the reason why no trainer can ever be bought, or None."""
    if facts.sites:
        move = next_trainer(tried, facts.sites, wanted.rules, facts.now_ms)
        return move.why if isinstance(move, NothingLeft) else None
    return next((node.evidence for node in trainers if _was_denied(node, facts)), None)


def _was_denied(node: NodeRecord, facts: Facts) -> bool:
    return node.happened.get("denied", -1) >= facts.planned_ms


def _fill(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], tried: Tried) -> list[Action]:
    """Repeat unsent requests, release surplus nodes, and buy a successor for every empty or soon empty slot."""
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
        works = any(_stays(node) for node in held)  # a stand-in counts as working; the slot's next node may be on spot
        if wanted.launch_rate is not None and wanted.launch_rate.next_ms(launches) > facts.now_ms:
            refusals.append(f"{slot.name} is not bought: {wanted.launch_rate.per_minute} launches a minute at most")
            break
        move = _where(slot, tried, after, facts, wanted)
        if not isinstance(move, Option):
            refusals += [] if works else [f"{slot.name} is not bought: {move.why}"]
            continue
        rate = move.placement.micro_usd_per_hour + _beside(move.placement, facts)
        generation = 0 if latest is None else latest.generation + 1
        reserve = budget_guard.worst_case(rate, MINIMUM_BILLED_MS)
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


def refused_now(facts: Facts, wanted: Wanted, buy: Buy) -> budget_guard.Refusal | None:
    """Check the budget guard again inside the write transaction. Two controllers may decide at the same moment."""
    placement = buy.option.placement
    rate = placement.micro_usd_per_hour + _beside(placement, facts)
    live = [node for node in facts.nodes if node.is_live]
    return _refusal(facts, wanted, live, rate, buy.reserved_micro_usd)


def reserved_micro_usd(nodes: Sequence[NodeRecord], allowance_ms: int, now_ms: int) -> int:
    """Return the money in micro-dollars that a run's live nodes reserve against the limits."""
    return _reserved([node for node in nodes if node.is_live], allowance_ms, now_ms)


def hourly_micro_usd(nodes: Sequence[NodeRecord]) -> int:
    """Return the hourly cost in micro-dollars of a run's live nodes, with disks and addresses."""
    return _hourly([node for node in nodes if node.is_live])


def _refusal(
    facts: Facts, wanted: Wanted, after: Sequence[NodeRecord], rate: int, reserve: int
) -> budget_guard.Refusal | None:
    """Return the budget limit that buying a node at this rate would break, or None.

    The run's own limits are checked first, then the limits across all runs. `after`: the nodes after all earlier
    actions.
    """
    held = _reserved(after, wanted.allowance_ms, facts.now_ms)
    hourly_now = _hourly(after)
    new = reserve + budget_guard.worst_case(rate, wanted.allowance_ms)
    own = budget_guard.may_buy(
        metered=facts.metered,
        reserved=held,
        worst_case_new=new,
        max_total=wanted.limits.max_total,
        hourly_now=hourly_now,
        hourly_new=rate,
        max_hourly=wanted.limits.max_hourly,
    )
    return own or budget_guard.may_buy(
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
    """Return the refusal without its amounts. Amounts change from pass to pass and would fill the ledger."""
    return refusal.partition(": $")[0]


def _needs_successor(slot: Slot, latest: NodeRecord, held: Sequence[NodeRecord], facts: Facts) -> bool:
    """Return whether a used slot needs a new node: the slot is empty, soon empty, or held by a stand-in."""
    if slot.role == "trainer" and latest.wanted is not None and any(node.is_live for node in held):
        return False  # two trainers would both write the run's checkpoints, so the old trainer must be gone
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
    """Return True if the node is running or starting, and is meant to stay."""
    return node.is_live and not node.is_leaving


def _is_stand_in(node: NodeRecord, slot: Slot) -> bool:
    """Return True if the node is on-demand in a slot with a spot plan."""
    return node.market is Market.ON_DEMAND and slot.placement.market is Market.SPOT


def _may_go_back(slot: Slot, held: Sequence[NodeRecord], facts: Facts) -> bool:
    """Return whether a slot holds only a stand-in, and had no give-back for `GIVE_BACK_GAP_MS`."""
    stand_ins = [node for node in held if _is_stand_in(node, slot)]
    if any(_stays(node) and node not in stand_ins for node in held):
        return False
    released_ms = [node.happened["releasing"] for node in stand_ins if "releasing" in node.happened]
    return not released_ms or facts.now_ms >= max(released_ms) + GIVE_BACK_GAP_MS


def wait_ms(held: Sequence[NodeRecord], planned_ms: int) -> int:
    """Return the wait in ms of a slot whose last nodes died young.

    Refused zones cool down by themselves and are skipped.
    """
    streak = 0
    for node in sorted(held, key=lambda node: node.generation, reverse=True):
        if _was_refused(node):
            continue
        if not node.died_young or node.requested_ms < planned_ms:
            break
        streak += 1
    return min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (streak - 1)) if streak else 0


# --- offers -----------------------------------------------------------------------------------------------


def _where(slot: Slot, tried: Tried, after: Sequence[NodeRecord], facts: Facts, wanted: Wanted) -> Move:
    """Return the offer to buy for a slot's next node. Offers above the hourly limit are not considered."""
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
    """Return the sites without offers above the price limit.

    A list with only too expensive offers is kept: the refusal then names the amounts.
    """
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
    """Return the nodes to release.

    First come nodes left behind by a failover, then replaced stand-ins, then nodes above the hourly limit.
    Above the limit, stand-ins go before spot nodes, and the most expensive first.
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
    """Return the stand-ins to give back. A settled spot node of the slot replaces each of them.

    A spot node is settled once its zone and type have had capacity for `GIVE_BACK_AFTER_MS`.
    If the hourly limit does not allow a spot node beside any stand-in, one stand-in is released first, as soon as the
    spot offer may be requested. Waiting would keep the stand-in for the rest of the run. If spot is then refused, a
    stand-in is bought again.
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
    """Return whether the hourly limit alone prevents a request for a spot node beside the stand-in."""
    move = _where(slot, tried, kept, facts, wanted)
    if not isinstance(move, Option):
        return False
    rate = move.placement.micro_usd_per_hour + _beside(move.placement, facts)
    limits = ((wanted.limits.max_hourly, 0), (wanted.all_runs.max_hourly, facts.others.hourly))
    return any(limit is not None and _hourly(kept) + others + rate > limit for limit, others in limits)


def _beside(placement: Placement, facts: Facts) -> int:
    """Return the hourly price of a node's disk and address on a real cloud."""
    return side_micro_usd_per_hour(placement.cloud, placement.market) if facts.sites else 0


def _hourly(nodes: Sequence[NodeRecord]) -> int:
    return sum(node.micro_usd_per_hour + node.beside_micro_usd_per_hour for node in nodes)


def _reserved(live: Sequence[NodeRecord], allowance_ms: int, now_ms: int) -> int:
    """Return the money held for stopping the live nodes and for pending launches.

    A pending launch holds the cost since the request, or its reserved minimum billing if larger.
    """
    return budget_guard.reserved(
        _hourly(live),
        allowance_ms,
        [
            max(node.reserved_micro_usd, budget_guard.worst_case(_hourly([node]), now_ms - node.requested_ms))
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
    """Return the highest hourly cost for the spend deadline: the whole plan, or the live nodes if more expensive."""
    plan = sum(slot.placement.micro_usd_per_hour + _beside(slot.placement, facts) for slot in wanted.slots)
    return max(plan, _hourly([node for node in facts.nodes if node.is_live]))


def bound_micro_usd(wanted: Wanted, sites: Sequence[SiteOptions] = ()) -> int | None:
    """Return the most that a run can cost: its limit, plus the highest running cost during a stop. None: no limit."""
    if wanted.limits.max_total is None:
        return None
    return wanted.limits.max_total + budget_guard.overdraft(_most_hourly(wanted, sites), wanted.allowance_ms)


def bound_of_plan(plan: Plan, deadline_ms: int | None = None) -> int | None:
    """Return the most that a plan on real clouds can cost, in micro-dollars. `launch` prints the bound. None: no limit.

    `deadline_ms`: longest run time. Disks, addresses, on-demand stand-ins and the time of stopping are counted. Traffic
    and storage are not counted, because no cloud states their price before the bill.
    """
    wanted = Wanted(
        run="",
        slots=plan.slots,
        limits=budget_guard.Limits(max_total=plan.max_total_micro_usd, max_hourly=plan.max_hourly_micro_usd),
        deadline_ms=None,
        allowance_ms=budget_guard.RELEASE_ALLOWANCE_MS,
        settle_ms=0,
    )
    bounds = [bound_micro_usd(wanted, plan.sites)]
    if deadline_ms is not None:
        bounds.append(budget_guard.worst_case(_most_hourly(wanted, plan.sites), deadline_ms + wanted.allowance_ms))
    return min((bound for bound in bounds if bound is not None), default=None)


def _most_hourly(wanted: Wanted, sites: Sequence[SiteOptions]) -> int:
    """Return the most that can run at once, at on-demand prices.

    A spot price may rise to the on-demand price before a release.
    The bound follows from `max_hourly` at purchase. Without `max_hourly`, the bound is `NODES_A_SLOT` nodes in each
    slot at the most expensive site.
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
    """Return a node's on-demand price per hour, with disk and address."""
    return option.on_demand_micro_usd_per_hour + side_micro_usd_per_hour(option.placement.cloud, Market.ON_DEMAND)


def describe_brakes(wanted: Wanted, sites: Sequence[SiteOptions] = ()) -> str:
    """Return the budget guard of a run as text with amounts, for the log and the plan."""
    total = "no total limit" if wanted.limits.max_total is None else f"at most {dollars(wanted.limits.max_total)}"
    per_hour = "no hourly limit" if wanted.limits.max_hourly is None else f"at most {hourly(wanted.limits.max_hourly)}"
    allowance = dollars(budget_guard.overdraft(_most_hourly(wanted, sites), wanted.allowance_ms))
    if not sites:
        return (
            f"{total}, {per_hour}; stopping is given {wanted.allowance_ms} ms of the run's clock, {allowance} at most"
        )
    bound = bound_micro_usd(wanted, sites)
    never = "" if bound is None else f"; never more than {dollars(bound)}"
    return f"{total}, {per_hour}; stopping is given {duration(wanted.allowance_ms)}, {allowance} at most{never}"
