"""A hostile world around one real coordinator: all events follow from one integer seed.

    coordinator   the real `Coordinator` with the real `Queue`, on a disk in memory, behind a front that lets answers
                  leave only when they are durable; it crashes, freezes, and its disk fills up
    network       delays, repeats, reorders and cuts calls and answers; a caller without an answer calls again
    nodes         spot nodes with a few workers each; under notice, preempted, unseen, flapping, coming back
    processes     workers and the trainer (actors.py), killed, frozen, thawed; true and false reports of their death
    launcher      capacity snapshots, in order and out of order

After `quota` events the world calms down, and everything must come to its end within `PATIENCE` more.
"""

import heapq
import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.coordinator.coordinator import Coordinator
from engine.events import Capacity, Market, NodeCapacity, NodeState
from engine.protocol.codec import decode_call, encode
from engine.queue.pace import Rules
from tests.simulation.actors import Trainer, Worker
from tests.simulation.disk import Disk, MemoryBook, MemoryJournal
from tests.simulation.oracle import Broken, Key, Oracle, key_of

MOST_DEATHS_OF_POISON = 20
LEASE_MS = 1000
FIRST_LEASE_MS = 2000
TICK_MS = 130
STEPS = 6
PATIENCE = 2500
"""Events within which a calm world must finish, whatever happened before."""

Head = dict[str, Any]
Body = Generator[Any, Any, None]
TRAINER_NODE = "t"


@dataclass(slots=True, eq=False)
class Lane:
    """One thread of a process. It yields a call to make, or milliseconds to wait."""

    process: "Process"
    body: Body | None
    turn: int = 0
    """Grows with every answer; answers to earlier calls are ignored."""
    head: Head = field(default_factory=dict)
    blobs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Process:
    """One process of a node. `boot` distinguishes it from earlier ones of the same name."""

    name: str
    node: "Node"
    boot: int
    actor: Any = None
    alive: bool = True
    frozen: bool = False
    stalled: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Node:
    name: str
    market: Market
    workers: int
    alive: bool = True
    deadline_ms: int | None = None
    is_reported: bool = False
    """Whether the node's own agent knows of the notice."""
    seen_lost: bool = False
    """The state that the launcher believes."""
    processes: dict[str, Process] = field(default_factory=dict)
    zombies: list[Process] = field(default_factory=list)


class Clock:
    """The world's time as the coordinator's clock."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def now_ms(self) -> int:
        return self._world.now_ms

    def wall_seconds(self, duration_ms: int) -> float:
        return duration_ms / 1000


class World:
    """One schedule. `run()` plays it; `Broken` names the coordinator's mistake."""

    def __init__(self, seed: int, *, quota: int = 200, chaos: bool = True, log: Any = None) -> None:
        self.random = random.Random(seed).random
        self.seed, self.quota, self.chaos, self.log = seed, quota, chaos, log
        self.now_ms = 0
        self.events = 0
        self.calm = False
        self.calm_at = 0
        self.done = False
        self.later: list[tuple[int, int, Any, tuple[Any, ...]]] = []
        self._tie = 0
        self._boot = 0
        self.oracle = Oracle(LEASE_MS, STEPS)
        self.disk = Disk(self.oracle.wrote, self.oracle.wrote_anew)
        self.stored = {"iteration": 0, "lineage": 0, "claimed": 0}
        """The checkpoint store, which survives the loss of every node."""
        self.drafts: dict[tuple[int, int], list[Any]] = {}
        """Early requests of a lineage's batch, in the checkpoint store."""
        self.poison: dict[Key, tuple[int, bool]] = {}
        """Request -> (step at which it crashes its worker, by a fault or by death)."""
        self.deaths_of_poison: dict[Key, int] = {}
        self.coordinator: Coordinator | None = None
        self.epoch = 0
        self.asleep_from: int | None = None
        self.backlog: list[tuple[Any, ...]] = []
        self.held: list[tuple[Any, ...]] = []
        self.syncing = False
        self.durable = 0
        self.generation = 0
        self.old_snapshots: list[tuple[int, dict[str, str]]] = []
        self.nodes: dict[str, Node] = {}
        self.trainer: Process | None = None
        self._calls = 0
        # Every world has its own fault rates.
        self.loss = 0.06 * self.random() ** 2
        self.repeat = 0.10 * self.random() ** 2
        self.slow = 0.10 * self.random() ** 2
        self.violence = [0.05 + self.random() ** 2 for _ in FATES]
        self.fate_every_ms = 60 + int(500 * self.random())
        self.poison_share = 0.25 if self.random() < 0.3 else 0.0
        self.zero_spot_at_the_end = self.random() < 0.4
        self.rules = Rules(
            lease_ms=LEASE_MS,
            first_lease_ms=FIRST_LEASE_MS,
            commit_every=None if self.random() < 0.3 else 1 + int(3 * self.random()),
            preemption_ms=20_000,
        )
        self._start_coordinator()
        self.add_node(TRAINER_NODE, Market.ON_DEMAND, 0)
        self.start_trainer()
        for _ in range(int(3 * self.random())):
            self.buy()
        self.at(TICK_MS, self._tick)
        if chaos:
            self.at(self.fate_every_ms, self._fate)

    # --- time ---------------------------------------------------------------------------------------------

    def at(self, delay_ms: float, what: Any, *arguments: Any) -> None:
        self._tie += 1
        heapq.heappush(self.later, (self.now_ms + int(delay_ms), self._tie, what, arguments))

    def happen(self) -> None:
        """Run the next event."""
        self.now_ms, _, what, arguments = heapq.heappop(self.later)
        self.oracle.now_ms = self.now_ms
        what(*arguments)

    def run(self) -> None:
        while not self.done:
            self.happen()
            if not self.calm and self.events >= self.quota:
                self.calm_down()
            if self.calm and self.events > self.calm_at + PATIENCE:
                raise Broken(f"{PATIENCE} events after the world calmed down it is not done")
        if self.coordinator is not None:
            self.coordinator.queue.check()

    def note(self, text: str) -> None:
        if self.log is not None:
            self.log(f"{self.now_ms:7d} {text}")

    # --- the coordinator and its front ----------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        try:
            self.coordinator = Coordinator(
                MemoryJournal(self.disk),  # type: ignore[arg-type]
                MemoryBook(self.disk),  # type: ignore[arg-type]
                clock=Clock(self),
                rules=self.rules,
            )
        except OSError:
            self.at(200, self._start_coordinator)
            return
        self.durable = self.coordinator.journal.position()
        self.note(f"coordinator: starts, {len(self.disk.records)} records")

    def crash_coordinator(self, *, wiped: bool = False) -> None:
        """Kill the coordinator, and restart it a little later with the data that its disk kept."""
        if self.coordinator is None:
            return
        self.epoch += 1
        self.coordinator, self.syncing = None, False
        if self.asleep_from is not None:
            self.asleep_from = None
            for lane, turn, _, _ in self.backlog:
                self._again(lane, turn)
            self.backlog.clear()
        for _, lane, turn, *_ in self.held:
            self._again(lane, turn)
        self.held.clear()
        if wiped:
            self.disk.records, self.disk.synced = [], 0
            self.disk.weights.clear()
            self.oracle.wiped()
        self.disk.crash(self.random())
        self.note(f"coordinator: dies, {len(self.disk.records)} records left{' (its disk is gone)' if wiped else ''}")
        self.oracle.crashed(self.disk.records)
        self.at(30 + 500 * self.random() ** 2, self._start_coordinator)

    def freeze_coordinator(self, duration_ms: float) -> None:
        if self.coordinator is not None and self.asleep_from is None:
            self.note(f"coordinator: stands still for {duration_ms:.0f} ms")
            self.asleep_from = self.now_ms
            self.at(duration_ms, self._wake_coordinator, self.epoch)

    def _wake_coordinator(self, epoch: int) -> None:
        if self.asleep_from is None or epoch != self.epoch:
            return
        self.oracle.slept(self.now_ms - self.asleep_from)
        self.asleep_from = None
        backlog, self.backlog = self.backlog, []
        if self.random() < 0.5:
            self._tick_once()
        for call in backlog:
            self.at(3 * self.random(), self._deliver, *call)
        if self.held:
            self._sync()

    def _tick(self) -> None:
        if self.asleep_from is None:
            self._tick_once()
        self.at(TICK_MS, self._tick)

    def _tick_once(self) -> None:
        if self.coordinator is not None:
            self.coordinator.tick()

    def _deliver(self, lane: Lane | None, turn: int, head: Head, blobs: Mapping[str, Any]) -> None:
        """Deliver a call to the coordinator, or drop it if the coordinator is down."""
        self.events += 1
        coordinator = self.coordinator
        if coordinator is None:
            return self._again(lane, turn)
        if self.asleep_from is not None:
            self.backlog.append((lane, turn, head, blobs))
            if self.random() < 0.3:
                self._again(lane, turn, 600)
            return None
        self.oracle.before_call(head)
        try:
            given, answer_blobs = coordinator.handle(decode_call(head), blobs)
            answer = encode(given)
        except OSError:
            self.oracle.refused(head)
            self.note(f"{head['call']} of {head.get('worker', 'trainer')}: no room on the disk")
            return self._again(lane, turn, 150)
        except (KeyError, ValueError) as error:
            if head["call"] not in ("states", "weights"):
                raise Broken(f"{head} was refused: {error!r}") from error
            answer, answer_blobs = {"do": "refused"}, {}
        if self.log is not None:
            self.note(f"{head.get('worker', '-')} {_short(head)} -> {_short(answer)}")
        promised = self.oracle.after_answer(head, answer)
        self._calls += 1
        queue = coordinator.queue
        if queue.poisoned or self.oracle.reported:
            self.oracle.poisoned({r.lineage * 1_000_000 + r.seed for r in queue.poisoned})
        if not self._calls % 8:
            queue.check()
        if answer["do"] == "wait" and head["call"] == "pull" and self.random() < 0.2:  # a patient call
            self.at(50 + 200 * self.random(), self._deliver, lane, turn, head, blobs)
            return None
        wanted = coordinator.journal.position()
        if wanted <= self.durable:
            self._leave(lane, turn, head, promised, answer, answer_blobs)
            return None
        self.held.append((wanted, lane, turn, head, promised, answer, answer_blobs))
        if not self.syncing:
            self._sync()
        return None

    def _sync(self) -> None:
        assert self.coordinator is not None
        self.syncing = True
        reached, count, rewrites = self.coordinator.journal.position(), len(self.disk.records), self.disk.rewrites
        self.at(1 + 25 * self.random() ** 2, self._synced, self.epoch, reached, count, rewrites)

    def _synced(self, epoch: int, reached: int, count: int, rewrites: int) -> None:
        if epoch != self.epoch:
            return
        if rewrites == self.disk.rewrites:
            self.disk.synced = max(self.disk.synced, count)
        self.durable, self.syncing = reached, False
        if self.asleep_from is not None:
            return
        held, self.held = self.held, []
        for wanted, *answer in held:
            if wanted <= reached:
                self._leave(*answer)
            else:
                self.held.append((wanted, *answer))
        if self.held:
            self._sync()

    def _leave(
        self, lane: Lane | None, turn: int, head: Head, promised: Any, answer: Head, blobs: Mapping[str, Any]
    ) -> None:
        """Send a durable answer."""
        self.oracle.left(head, promised)
        if lane is None:
            return
        if not self.calm and self.random() < self.loss:
            self._again(lane, turn)
        else:
            self.at(self._delay_ms(lane, turn), self.resume, lane, turn, (answer, blobs))

    # --- the network ----------------------------------------------------------------------------------------

    def send(self, lane: Lane | None, turn: int, head: Head, blobs: Mapping[str, Any]) -> None:
        if self.calm:
            self.at(1 + 9 * self.random(), self._deliver, lane, turn, head, blobs)
            return
        if self.random() < self.repeat:
            self.at(20 + 3000 * self.random() ** 2, self._deliver, None, 0, head, blobs)
        if self.random() < self.loss:
            self._again(lane, turn)
            return
        self.at(self._delay_ms(lane, turn), self._deliver, lane, turn, head, blobs)

    def _delay_ms(self, lane: Lane | None, turn: int) -> float:
        if self.calm or self.random() >= self.slow:
            return 1 + 12 * self.random()
        delay_ms = 50 + 2500 * self.random() ** 2
        if delay_ms > 600:
            self._again(lane, turn, 600)
        return delay_ms

    def _again(self, lane: Lane | None, turn: int, delay_ms: float = 250) -> None:
        """Repeat the call if no answer has come."""
        if lane is not None:
            self.at(delay_ms, self._call_again, lane, turn)

    def _call_again(self, lane: Lane, turn: int) -> None:
        process = lane.process
        if not process.alive or lane.turn != turn:
            return
        if process.frozen:
            process.stalled.append((self._call_again, lane, turn))
        else:
            self.send(lane, turn, lane.head, lane.blobs)

    # --- processes --------------------------------------------------------------------------------------------

    def resume(self, lane: Lane, turn: int, value: Any) -> None:
        process = lane.process
        if not process.alive or lane.turn != turn or lane.body is None:
            return
        if process.frozen:
            process.stalled.append((self.resume, lane, turn, value))
            return
        self.events += 1
        lane.turn += 1
        try:
            wanted = lane.body.send(value)
        except StopIteration:
            lane.body = None
            return
        if isinstance(wanted, int):
            self.at(wanted, self.resume, lane, lane.turn, None)
            return
        lane.head, lane.blobs = wanted
        self.send(lane, lane.turn, lane.head, lane.blobs)

    def thread(self, process: Process, body: Body) -> Lane:
        lane = Lane(process, body)
        self.at(0, self.resume, lane, 0, None)
        return lane

    def start_worker(self, node: Node, name: str) -> Process:
        self._boot += 1
        process = node.processes[name] = Process(name, node, self._boot)
        self.oracle.born[name] = self._boot
        process.actor = Worker(self, process)
        self.thread(process, process.actor.serve())
        self.note(f"{name}: starts, boot {process.boot}")
        return process

    def start_trainer(self) -> None:
        node = self.nodes[TRAINER_NODE]
        self._boot += 1
        self.trainer = node.processes["t/trainer"] = Process("t/trainer", node, self._boot)
        self.oracle.born["t/trainer"] = self._boot
        self.trainer.actor = Trainer(self, self.trainer)
        self.thread(self.trainer, self.trainer.actor.run())
        self.thread(self.trainer, self.trainer.actor.worker.serve())
        self.note(f"trainer: starts, boot {self.trainer.boot}")

    def kill(self, process: Process, *, report_odds: float = 0.6, back: bool = True) -> None:
        """Kill this process; its death may be reported, and its node's agent restarts it."""
        if not process.alive:
            return
        self.note(f"{process.name}: dies, boot {process.boot}")
        process.alive = False
        self.oracle.process_died(process.name, process.boot)
        if self.random() < report_odds:
            self.rumour(process)
        if back and process.node.alive:
            self.at(100 + 500 * self.random(), self._start_again, process)

    def _start_again(self, process: Process) -> None:
        if not process.node.alive or process.node.processes[process.name] is not process or self.done:
            return
        if process.name == "t/trainer":
            self.start_trainer()
        else:
            self.start_worker(process.node, process.name)

    def rumour(self, process: Process) -> None:
        """Report the death of this process; the report may be wrong or late."""
        head = {"call": "died", "worker": process.name, "node": process.node.name, "boot": process.boot}
        self.send(None, 0, head | {"reason": "its connection was closed"}, {})

    def freeze(self, process: Process, duration_ms: float) -> None:
        if process.alive and not process.frozen:
            self.note(f"{process.name}: stands still for {duration_ms:.0f} ms")
            process.frozen = True
            self.at(duration_ms, self.thaw, process)

    def thaw(self, process: Process) -> None:
        if process.frozen:
            process.frozen = False
            stalled, process.stalled = process.stalled, []
            for what, *arguments in stalled:
                self.at(3 * self.random(), what, *arguments)

    def hang_ms(self, keys: list[Key], step: int) -> int:
        """Return how long a crashing request first freezes its worker, mostly less than a lease."""
        found = (self.poison.get(key) for key in keys)
        return int(1.2 * LEASE_MS * self.random()) if any(one is not None and one[0] == step for one in found) else 0

    def comes_down(self, process: Process, keys: list[Key], step: int) -> bool | None:
        """Return how one of these requests crashes its worker at this step: True for death, False for a fault."""
        for key in keys:
            found = self.poison.get(key)
            if found is not None and found[0] == step:
                self.deaths_of_poison[key] = self.deaths_of_poison.get(key, 0) + self.calm
                # A death counts once its worker is back; until then the request may crash every other worker too.
                if self.deaths_of_poison[key] > MOST_DEATHS_OF_POISON:
                    text = f"brought down {MOST_DEATHS_OF_POISON} workers of a calm world and is not reported"
                    raise Broken(f"{key} {text}")
                if found[1]:
                    self.kill(process)
                else:
                    self.oracle.faulted(keys)
                return found[1]
        return None

    def requested(self, key: Key) -> None:
        """Decide at the first submit of this request whether it crashes workers."""
        if key not in self.poison and self.random() < self.poison_share * 0.4:
            self.poison[key] = (int(self.random() * 4), self.random() < 0.5)
            self.oracle.poisonous.add(key)

    # --- nodes ------------------------------------------------------------------------------------------------

    def add_node(self, name: str, market: Market, workers: int) -> Node:
        node = self.nodes[name] = Node(name, market, workers)
        for number in range(workers):
            self.start_worker(node, f"{name}/{number}")
        return node

    def buy(self) -> None:
        if sum(n.alive for n in self.nodes.values()) < 5:
            self.add_node(f"n{len(self.nodes)}", Market.SPOT, 1 + int(2 * self.random()))

    def notice(self, node: Node, left_ms: float) -> None:
        if node.deadline_ms is not None:
            return
        node.deadline_ms = self.now_ms + int(left_ms)
        self.note(f"{node.name}: gone in {left_ms:.0f} ms, says the cloud")
        self.at(left_ms, self.preempt, node)
        if self.random() < 0.7:
            node.is_reported = True
            call = {"call": "notice", "node": node.name, "deadline_ms": node.deadline_ms}
            self.send(None, 0, call, {})

    def preempt(self, node: Node) -> None:
        """Preempt a node: its processes send nothing more; perhaps a closed connection is noticed."""
        if not node.alive or node.market is not Market.SPOT:
            return
        self.note(f"{node.name}: taken")
        node.alive = False
        for process in [*node.processes.values(), *node.zombies]:
            self.kill(process, report_odds=0.3, back=False)
        if self.random() < 0.3:
            self.send(None, 0, {"call": "node_lost", "node": node.name, "reason": "no answer"}, {})

    def snapshot(self, *, right: bool = False) -> None:
        """Send a snapshot of the launcher: complete (`right`), or with its usual delay and errors."""
        self.generation += 1
        facts = {}
        for node in self.nodes.values():
            if not node.alive and (right or self.random() < 0.7):
                node.seen_lost = True
            if right and node.alive:
                node.seen_lost = False
            draining = node.deadline_ms is not None and (right or self.random() < 0.8)
            facts[node.name] = "lost" if node.seen_lost else "draining" if draining else "ready"
        for node in self.nodes.values():
            node.seen_lost = node.seen_lost and not node.alive
        self.old_snapshots.append((self.generation, facts))
        self.at(1 + (0 if right else 400 * self.random() ** 3), self._capacity, self.generation, facts)

    def _capacity(self, generation: int, facts: dict[str, str]) -> None:
        self.events += 1
        if self.coordinator is None or self.asleep_from is not None:
            if self.calm:  # the snapshot is repeated until it arrives
                self.at(200, self._capacity, generation, facts)
            return
        nodes = tuple(
            NodeCapacity(
                node=name,
                market=self.nodes[name].market,
                state=NodeState(state),
                workers=1,
                deadline_ms=self.nodes[name].deadline_ms,
            )
            for name, state in facts.items()
        )
        self.note(f"capacity {generation}: {facts}")
        self.coordinator.set_capacity(Capacity(generation=generation, nodes=nodes))
        self.oracle.capacity_received(generation, facts)

    # --- fate -------------------------------------------------------------------------------------------------

    def _fate(self) -> None:
        if self.calm:
            return
        self.events += 1
        point = self.random() * sum(self.violence)
        for weight, fate in zip(self.violence, FATES, strict=True):
            point -= weight
            if point <= 0:
                fate(self)
                break
        self.at(self.fate_every_ms * (0.3 + 1.4 * self.random()), self._fate)

    def _any(self, things: list[Any]) -> Any:
        return things[int(self.random() * len(things))] if things else None

    def spot(self) -> list[Node]:
        return [n for n in self.nodes.values() if n.alive and n.market is Market.SPOT]

    def workers(self) -> list[Process]:
        return [p for n in self.nodes.values() for p in n.processes.values() if p.alive]

    def fate_kill(self) -> None:
        if process := self._any(self.workers()):
            self.kill(process)

    def fate_freeze(self) -> None:
        if process := self._any(self.workers()):
            self.freeze(process, 200 + 5000 * self.random() ** 2)

    def fate_zombie(self) -> None:
        """Replace a frozen process as dead, and then wake the old one."""
        process = self._any([p for p in self.workers() if p.name != "t/trainer"])
        if process is None:
            return
        self.freeze(process, 800 + 3000 * self.random())
        self.oracle.process_died(process.name, process.boot)
        process.node.zombies.append(process)
        self.start_worker(process.node, process.name)

    def fate_rumour(self) -> None:
        if process := self._any([p for p in self.workers() if p.node.market is Market.SPOT]):
            self.note(f"{process.name}: is said to have died")
            self.rumour(process)

    def fate_notice(self) -> None:
        if node := self._any(self.spot()):
            self.notice(node, 30 + 2500 * self.random() ** 2)

    def fate_take(self) -> None:
        if node := self._any(self.spot()):
            self.preempt(node)

    def fate_take_all(self) -> None:
        if self.random() < 0.3:
            for node in self.spot():
                self.preempt(node)

    def fate_buy(self) -> None:
        self.buy()
        if self.random() < 0.5:
            self.buy()

    def fate_snapshot(self) -> None:
        if self.random() < 0.15 and (node := self._any(self.spot())):
            node.seen_lost = True  # a flapping node: it lives and is reported lost
        self.snapshot()

    def fate_old_snapshot(self) -> None:
        if found := self._any(self.old_snapshots):
            self.at(0, self._capacity, *found)

    def fate_node_unseen(self) -> None:
        if node := self._any(self.spot()):
            self.send(None, 0, {"call": "node_lost", "node": node.name, "reason": "no answer"}, {})

    def fate_coordinator_dies(self) -> None:
        self.crash_coordinator()

    def fate_coordinator_sleeps(self) -> None:
        self.freeze_coordinator(100 + 5000 * self.random() ** 2)

    def fate_disk_full(self) -> None:
        if not self.disk.full:
            self.note("the disk is full")
            self.disk.full = True
            self.at(200 + 1500 * self.random(), self._free_disk)

    def _free_disk(self) -> None:
        self.disk.full = False

    def fate_trainer_dies(self) -> None:
        if self.trainer is not None:
            self.kill(self.trainer)

    def fate_trainer_node_lost(self) -> None:
        """Lose the on-demand node with its disk; another one replaces it."""
        if self.random() < 0.2 and self.trainer is not None:
            self.crash_coordinator(wiped=True)
            self.kill(self.trainer)

    def fate_next_version(self) -> None:
        if self.trainer is not None:
            self.trainer.actor.hurry = True

    def calm_down(self) -> None:
        """Stop all faults, and make sure that a worker lives."""
        self.note("--- the world calms down")
        self.calm, self.calm_at = True, self.events
        self.disk.full = False
        if self.zero_spot_at_the_end:
            for node in self.spot():
                self.preempt(node)
        for node in self.nodes.values():
            for process in [*node.processes.values(), *node.zombies]:
                self.thaw(process)
        self._wake_coordinator(self.epoch)
        self.snapshot(right=True)


FATES = [getattr(World, name) for name in vars(World) if name.startswith("fate_")]


def _short(head: Mapping[str, Any]) -> str:
    """Return a short text for a call or an answer."""
    skip = ("call", "do", "worker", "node", "of", "usage", "sampler", "scorer", "dtype", "pictures", "kinds")
    after_answer = {name: value for name, value in head.items() if name not in skip}
    for name in ("states", "attempts", "results"):
        if name in after_answer:
            after_answer[name] = [
                (key_of(x["request"]), x["reward"]) if isinstance(x, dict) else (key_of(x[0]), *x[1:])
                for x in after_answer[name]
                if not isinstance(x, str)
            ]
    if "task" in after_answer:
        task = after_answer["task"]
        after_answer["task"] = [key_of(raw) for raw in task["requests"]], task["weights"]
    return f"{head.get('call') or head.get('do')} {after_answer}"
