"""A market on paper: answers the actions of a policy as a cloud would, from a trace.

A launch is answered after one to two minutes, by the capacity of that moment. A node works `COLD_START_MS` after it
came up. Capacity that falls preempts nodes of the zone at random, with the cloud's notice. A release takes half a
minute. On demand is always there. A node is billed from `up` to its end, at the price of the moment.

Progress is the planner's own model of an iteration: with n slots at work, and all nodes of the trainer, an iteration
takes `WorkLeft.iteration_ms[n]`. A preemption loses `LOST_WORK_MS` of the node's work. After each
`WorkLeft.saved_every` iterations there is a checkpoint. The end of the trainer's node loses the work since then, and
the node that takes its role trains after `RESTART_MS`. The world alone knows the future of the trace: it hands out
facts of the past and answers actions.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from random import Random

from engine.events import Market
from launcher.decide.actions import Buy, Promote
from launcher.decide.facts import PROMOTED, STEADY_ITERATIONS, NodeRecord
from launcher.decide.known_nodes import KnownNodes
from launcher.decide.launch_history import jitter
from launcher.decide.work_left import WorkLeft
from launcher.market.hazard import COLD_START_MS
from launcher.money import HOUR_MS
from launcher.placement.plan import Plan, Slot
from launcher.placement.price_of_waiting import RESTART_MS
from launcher.placement.requirements import LOST_WORK_MS
from launcher.replay.trace import PoolTrace, Trace

ANSWER_MS = 60_000
"""Shortest time to the answer of a launch; the longest is twice that. Milliseconds."""

RELEASE_MS = 30_000
"""Time from a release to the end of the instance, in milliseconds."""

ROUNDING = 1e-6
"""Part of an iteration that a sum of times may miss."""

NOTICE_MS = {"aws": 120_000, "gcp": 30_000}
"""Notice before a preemption, in milliseconds."""


@dataclass(kw_only=True, slots=True)
class Instance:
    """A node of the world. Times are of the run's clock; None: not yet."""

    record: NodeRecord
    pool: PoolTrace | None
    """None: on demand."""
    answered_ms: int
    up_ms: int | None = None
    releasing_ms: int | None = None
    notice_ms: int | None = None
    gone_ms: int | None = None
    """Time of an announced preemption."""
    promoted_ms: int | None = None
    """Time at which the node took the role of the trainer."""
    ended_ms: int | None = None
    billed_to_ms: int = 0

    @property
    def ready_ms(self) -> int | None:
        if self.up_ms is None:
            return None
        return self.up_ms + COLD_START_MS if self.promoted_ms is None else self.promoted_ms + RESTART_MS

    def works_at(self, at_ms: int) -> bool:
        return self.ended_ms is None and self.ready_ms is not None and self.ready_ms <= at_ms

    def stays_at(self, at_ms: int) -> bool:
        """Return whether the node works, and neither a notice nor a release ends it."""
        return self.works_at(at_ms) and self.notice_ms is None and self.releasing_ms is None


@dataclass(kw_only=True)
class World:
    """The clouds and the engine of one run. `now_ms` is the run's clock; the trace is at `start_ms + now_ms`."""

    trace: Trace
    start_ms: int
    work: WorkLeft
    random: Random
    trainer_nodes: int = 1
    """Nodes of the trainer. It trains only while all of them work."""
    is_trainer_on_spot: bool = False
    """True if the plan has its trainer on spot: a trainer on demand may be given back when a checkpoint was saved."""
    gpus_a_place: int | None = None
    """GPUs of the nodes that the trace counts; a larger node takes several places. None: a node takes one."""
    now_ms: int = 0
    done: float = 0.0
    advances_ms: list[int] = field(default_factory=list)
    """The times at which the last new iterations were reached."""
    saved_ms: int | None = None
    """The time of the newest checkpoint."""
    lost_iterations: float = 0.0
    """Iterations in progress that were lost with a trainer's node."""
    losses_ms: list[int] = field(default_factory=list)
    """The times at which a trainer's node ended before the work was done."""
    without_trainer_ms: int = 0
    """Time in which nodes were paid and no trainer worked, after the first one did."""
    without_trainer_micro_usd: float = 0.0
    """Cost of the nodes in that time."""
    finished_ms: int | None = None
    instances: dict[str, Instance] = field(default_factory=dict)
    bill: Counter[str] = field(default_factory=Counter)
    """Dollars by capacity type of rollout nodes, and of the trainer, in micro-dollars; fractions are kept."""
    counts: Counter[str] = field(default_factory=Counter)
    fleet: list[tuple[int, int, int]] = field(default_factory=list)
    """(time, spot nodes at work, on-demand rollout nodes at work), at each change."""
    _furthest: int = 0
    _live: dict[str, Instance] = field(default_factory=dict)
    _known: KnownNodes = field(default_factory=KnownNodes)
    _just_ended: list[Instance] = field(default_factory=list)

    @property
    def micro_usd(self) -> int:
        return round(sum(self.bill.values()))

    def advance(self, until_ms: int, *, to_next_event: bool = False) -> bool:
        """Let the world run until a time, or until the work is done. Return whether anything happened to a node.

        `to_next_event`: stop as soon as something has happened.
        """
        happened = False
        while self.now_ms < until_ms and self.finished_ms is None and not (to_next_event and happened):
            at_ms = min([until_ms, *self._next_events(until_ms)])
            self._work(at_ms)
            self.now_ms = at_ms if self.finished_ms is None else self.finished_ms
            self._charge()
            happened |= self._events()
            if self.is_trainer_on_spot and self._calls_for_a_pass(happened):
                return True
        return happened

    def _calls_for_a_pass(self, happened: bool) -> bool:
        """Return whether a pass is due: right after a checkpoint of a stand-in, or after an event without a trainer.

        A live run makes a pass every two seconds; the end of the trainer, or a node that may take its role, is not left
        for minutes.
        """
        if self.saved_ms == self.now_ms and self._stands_in():
            return True
        return happened and not any(instance.record.role == "trainer" for instance in self._live.values())

    def buy(self, action: Buy) -> None:
        place = action.option.placement
        pool = None
        if place.market is Market.SPOT:
            pool = self.trace.pool_of(place.cloud, place.region, place.zone)
        record = NodeRecord(
            name=action.name,
            slot=action.slot.name,
            generation=action.generation,
            role=action.slot.role,
            market=place.market,
            micro_usd_per_hour=place.micro_usd_per_hour,
            requested_ms=self.now_ms,
            reserved_micro_usd=action.reserved_micro_usd,
            happened={"requested": self.now_ms},
            wanted=action.option,
            zone=place.zone,
            instance_type=place.instance_type,
        )
        answered_ms = self.now_ms + ANSWER_MS + round(jitter(action.name) * ANSWER_MS)
        self.instances[action.name] = self._live[action.name] = Instance(
            record=record, pool=pool, answered_ms=answered_ms
        )
        self.counts[f"requests {place.market}"] += 1

    def promote(self, action: Promote) -> None:
        """Give a node the role of the trainer. Its processes start again."""
        instance = self._live[action.node]
        if any(other.record.slot == action.slot for other in self._live.values()):
            raise AssertionError(f"{action.node} is promoted to {action.slot}, whose node still runs")
        instance.promoted_ms = self.now_ms
        instance.record = replace(instance.record, slot=action.slot, generation=action.generation, role="trainer")
        self.counts["promotions"] += 1

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            instance = self._live.get(name)
            if instance is not None and instance.releasing_ms is None:
                instance.releasing_ms = self.now_ms

    def records(self) -> KnownNodes:
        """Return the nodes as the ledger would record them, until the next call."""
        for instance in self._live.values():
            instance.record = _recorded(instance, self.now_ms)
        self._known.update(instance.record for instance in (*self._just_ended, *self._live.values()))
        self._just_ended.clear()
        return self._known

    def _next_events(self, until_ms: int) -> list[int]:
        times = []
        for instance in self._live.values():
            times += [
                at_ms
                for at_ms in (
                    instance.answered_ms if instance.up_ms is None else instance.ready_ms,
                    None if instance.releasing_ms is None else instance.releasing_ms + RELEASE_MS,
                    instance.gone_ms,
                )
                if at_ms is not None and at_ms > self.now_ms
            ]
        if (saved_ms := self._next_save_ms()) is not None:
            times.append(saved_ms)
        for pool in {id(i.pool): i.pool for i in self._live.values() if i.pool is not None}.values():
            notice_ms = NOTICE_MS[pool.cloud]
            for drop_ms in pool.drops_between(self.start_ms + self.now_ms, self.start_ms + until_ms + notice_ms):
                times += [drop_ms - self.start_ms - notice_ms, drop_ms - self.start_ms]
        return [at_ms for at_ms in times if at_ms > self.now_ms]

    def at_work(self) -> tuple[int, int, int]:
        """Return the slots at work, and the spot and on-demand rollout nodes at work. A slot counts once."""
        nodes = [i for i in self._live.values() if i.record.role == "rollout" and i.works_at(self.now_ms)]
        spot = sum(i.record.market is Market.SPOT for i in nodes)
        return len({i.record.slot for i in nodes}), spot, len(nodes) - spot

    def is_whole(self, plan: Plan) -> bool:
        """Return whether each slot has one node that works, of the planned capacity type, and that stays.

        A run that moved its trainer to a region without rollout nodes on offer leaves their slots empty.
        """
        markets = {i.record.slot: i.record.market for i in self._live.values() if i.stays_at(self.now_ms)}
        slots: Sequence[Slot] = plan.slots
        if len(self._live) == len(markets) < len(slots):
            trainer = {i.record.site for i in self._live.values() if i.record.role == "trainer"}
            if not any(site.rollout for site in plan.sites if site.place in trainer):
                slots = [slot for slot in slots if slot.role != "rollout"]
        return len(self._live) == len(slots) and all(markets.get(s.name) is s.placement.market for s in slots)

    def _next_save_ms(self) -> int | None:
        """Return the time of the next checkpoint of a trainer on demand: a spot node may take its role then."""
        if len(self._trainers_at_work()) < self.trainer_nodes or not self._stands_in():
            return None
        iteration_ms = self.work.iteration_ms[min(self.at_work()[0], self.work.nodes)]
        return self.now_ms + ceil((self._saved(self.done) + self.work.saved_every - self.done) * iteration_ms)

    def _saved(self, done: float) -> int:
        """Return the iterations that are in a checkpoint."""
        return floor((done + ROUNDING) / self.work.saved_every) * self.work.saved_every

    def _stands_in(self) -> bool:
        return self.is_trainer_on_spot and any(i.record.market is Market.ON_DEMAND for i in self._trainers_at_work())

    def _trainers_at_work(self) -> list[Instance]:
        return [i for i in self._live.values() if i.record.role != "rollout" and i.works_at(self.now_ms)]

    def _work(self, until_ms: int) -> None:
        trainer = {i.record.slot for i in self._trainers_at_work()}
        slots, spot, steady = self.at_work()
        if not self.fleet or self.fleet[-1][1:] != (spot, steady):
            self.fleet.append((self.now_ms, spot, steady))
        if len(trainer) < self.trainer_nodes:
            if self.done or self.losses_ms:
                self._wait_for_trainer(until_ms)
            return
        iteration_ms = self.work.iteration_ms[min(slots, self.work.nodes)]
        self.counts["slot ms"] += slots * (until_ms - self.now_ms)
        before = self.done
        self.done += (until_ms - self.now_ms) / iteration_ms
        reached, saved = floor(self.done + ROUNDING), self._saved(self.done)
        if reached > self._furthest:
            self._furthest = reached
            at_ms = min(until_ms, self.now_ms + ceil(max(0.0, reached - before) * iteration_ms))
            self.advances_ms = [*self.advances_ms, at_ms][-STEADY_ITERATIONS:]
        if saved > self._saved(before):
            self.saved_ms = min(until_ms, self.now_ms + ceil(max(0.0, saved - before) * iteration_ms))
        if self.done >= self.work.iterations:
            self.finished_ms = until_ms - int((self.done - self.work.iterations) * iteration_ms)
            self.done = self.work.iterations

    def _wait_for_trainer(self, until_ms: int) -> None:
        paid = [i for i in self._live.values() if i.up_ms is not None]
        if paid:
            ms = until_ms - self.now_ms
            self.without_trainer_ms += ms
            self.without_trainer_micro_usd += sum(ms * self._hourly(i) for i in paid) / HOUR_MS

    def _hourly(self, instance: Instance) -> float:
        record = instance.record
        price: float | None = None
        if instance.pool is not None:
            price = instance.pool.price_at(self.start_ms + instance.billed_to_ms)
        price = record.micro_usd_per_hour if price is None else price * self._places(instance)
        return price + record.beside_micro_usd_per_hour

    def _places(self, instance: Instance) -> int:
        """Return the places of the trace's pool that a node takes."""
        wanted = instance.record.wanted
        if self.gpus_a_place is None or wanted is None:
            return 1
        return -(-wanted.placement.gpus // self.gpus_a_place)

    def _charge(self) -> None:
        for instance in self._live.values():
            if instance.up_ms is None:
                continue
            record = instance.record
            ms = self.now_ms - max(instance.billed_to_ms, instance.up_ms)
            whose = record.market.value if record.role == "rollout" else "trainer"
            self.bill[whose] += ms * self._hourly(instance) / HOUR_MS  # type: ignore[assignment]
            instance.billed_to_ms = self.now_ms

    def _events(self) -> bool:
        before = self.counts.total() - self.counts["slot ms"]
        for instance in list(self._live.values()):
            if instance.up_ms is None and instance.answered_ms <= self.now_ms and instance.ended_ms is None:
                self._answer(instance)
            if instance.gone_ms is not None and instance.gone_ms <= self.now_ms:
                self._preempt(instance)
            elif instance.releasing_ms is not None and instance.releasing_ms + RELEASE_MS <= self.now_ms:
                self._end(instance, "released")
            elif instance.ready_ms == self.now_ms:
                self.counts["ready"] += 1
        self._take_back()
        return before != self.counts.total() - self.counts["slot ms"]

    def _answer(self, instance: Instance) -> None:
        if instance.pool is not None:
            up = [i for i in self._live.values() if i.pool is instance.pool and i.up_ms is not None]
            free = instance.pool.capacity_at(self.start_ms + self.now_ms) - sum(map(self._places, up))
            if free < self._places(instance):
                self._end(instance, "refusals")
                return
        instance.up_ms = instance.billed_to_ms = self.now_ms
        wanted = instance.record.wanted
        if self.trainer_nodes > 1 and wanted is not None and not wanted.placement.zone_name:
            # A cloud names the zone of a node that came up. Further nodes of a trainer are bought in the first one's.
            instance.record = replace(instance.record, zone=f"one zone of {wanted.placement.region}")
        self.counts["up"] += 1

    def _take_back(self) -> None:
        """Announce preemptions of capacity that ends within the notice, and end nodes that the zone has no room for."""
        pools: dict[int, list[Instance]] = {}
        for instance in self._live.values():
            if instance.pool is not None and instance.up_ms is not None:
                pools.setdefault(id(instance.pool), []).append(instance)
        for held in pools.values():
            pool = held[0].pool
            assert pool is not None
            trace_ms = self.start_ms + self.now_ms
            self._shrink(held, pool.capacity_at(trace_ms), self.now_ms)
            staying = [i for i in held if i.ended_ms is None]
            for drop_ms in pool.drops_between(trace_ms, trace_ms + NOTICE_MS[pool.cloud]):
                self._shrink(staying, pool.capacity_at(drop_ms), drop_ms - self.start_ms)

    def _shrink(self, held: list[Instance], capacity: int, gone_ms: int) -> None:
        staying = [i for i in held if i.gone_ms is None and i.ended_ms is None]
        going = [i for i in held if i.gone_ms is not None and i.ended_ms is None and i.gone_ms > gone_ms]
        places = [self._places(i) for i in staying]
        excess = sum(places) + sum(map(self._places, going)) - capacity
        if max(places, default=1) == 1:
            taken = self.random.sample(staying, max(0, min(len(staying), excess)))
        else:
            taken = []
            for instance in self.random.sample(staying, len(staying)):
                if excess > 0:
                    taken.append(instance)
                    excess -= self._places(instance)
        for instance in taken:
            instance.notice_ms, instance.gone_ms = self.now_ms, gone_ms
            self.counts["notices"] += 1
            if gone_ms <= self.now_ms:
                self._preempt(instance)

    def _preempt(self, instance: Instance) -> None:
        if instance.works_at(self.now_ms):
            slots = self.at_work()[0]
            lost = self.work.per_hour(slots) - self.work.per_hour(max(0, slots - 1))
            self.done = max(0.0, self.done - lost * LOST_WORK_MS / HOUR_MS)
        self._end(instance, "preemptions")

    def _end(self, instance: Instance, how: str) -> None:
        if instance.ended_ms is not None:
            return
        if instance.record.role != "rollout" and instance.works_at(self.now_ms):
            self.losses_ms.append(self.now_ms)
            self.lost_iterations += max(0.0, self.done - self._saved(self.done))
            self.done = min(self.done, float(self._saved(self.done)))
        instance.ended_ms = self.now_ms
        self.counts[how] += 1
        kinds = {"refusals": "no_capacity", "preemptions": "gone", "released": "released"}
        happened = {**_recorded(instance, self.now_ms).happened, kinds[how]: self.now_ms}
        instance.record = replace(instance.record, happened=happened, reclaimed=how == "preemptions")
        del self._live[instance.record.name]
        self._just_ended.append(instance)


def _recorded(instance: Instance, now_ms: int) -> NodeRecord:
    happened = {"requested": instance.record.requested_ms}
    if instance.up_ms is not None:
        happened["up"] = instance.up_ms
        if instance.ready_ms is not None and instance.ready_ms <= now_ms:
            happened["ready"] = instance.ready_ms
    if instance.promoted_ms is not None:
        happened[PROMOTED] = instance.promoted_ms
    if instance.notice_ms is not None:
        happened["notice"] = instance.notice_ms
    if instance.releasing_ms is not None:
        happened["releasing"] = instance.releasing_ms
    return instance.record if happened == instance.record.happened else replace(instance.record, happened=happened)
