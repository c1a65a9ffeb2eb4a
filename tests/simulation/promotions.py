"""Random schedules of losses, notices, late news, frozen trainers and one bucket: nothing that was saved is lost.

    python -m tests.simulation.promotions --schedules 20000 [--first SEED]

The decisions, the checkpoints and the look at newer lineages are the product's. Nodes, the cloud's news, and a
controller that dies between an event and its order are simulated. Each trainer runs in a thread that stops before each
call to the bucket: there a schedule kills it, or freezes it while its node is given up and its successor trains.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import obstore
from obstore.store import MemoryStore
from sqlalchemy.orm import Session, sessionmaker

from engine.events import EngineFinished, EngineStarted, Market
from engine.storage import checkpoint as checkpoint_module
from engine.storage.checkpoint import Checkpoint, CheckpointStore, Superseded
from engine.storage.tensor_files import Stored
from launcher.controller import facts_reader, node_specs
from launcher.decide import reconcile
from launcher.decide.actions import Buy, Promote, Release, RepeatPromotion, RepeatRequest
from launcher.decide.facts import PROMOTED, Facts, NodeRecord, Stage
from launcher.decide.known_nodes import KnownNodes
from launcher.decide.promotion import SAVED_MS
from launcher.job.schema import Job
from launcher.ledger.models import Node, ProgressRow, Run
from tests.engine.test_checkpoint import FIRST
from tests.launcher.cluster.stage import CLOUD_SITES, TRAINER_RATE, cloud_slots, ledger, made_run
from tests.launcher.cluster.test_promotion import wanted

STEP_MS, STEPS = 14_000, 100
START_MS = 1_000_000
ITERATIONS = 24
"""Iterations of a run. Each one changes the weights in a way of its own."""

SITES = [replace(site, trainer=(*site.rollout[:-1], *site.trainer)) for site in CLOUD_SITES]
SLOTS = [
    replace(slot, placement=SITES[0].trainer[0].placement) if slot.role == "trainer" else slot
    for slot in cloud_slots(2, SITES)
]
"""A trainer and two rollout nodes, all on spot."""

CALM_STEPS = 400
"""Steps within which a run ends once nothing goes wrong any more."""


class Broken(AssertionError):
    """A promise does not hold."""


class Killed(BaseException):
    """The trainer's process was killed."""


class Bucket:
    """obstore as the checkpoint store calls it. A trainer waits for its turn before each call."""

    def __init__(self) -> None:
        self.threads = threading.local()

    def __getattr__(self, name: str) -> Any:
        real = getattr(obstore, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if trainer := getattr(self.threads, "trainer", None):
                trainer.wait_for_turn()
            return real(*args, **kwargs)

        return call


BUCKET = Bucket()


@contextmanager
def bucket_in_memory() -> Iterator[None]:
    """Within the block, checkpoint stores of the address `memory:NUMBER` are in memory."""
    stores: dict[str, MemoryStore] = {}
    module: Any = checkpoint_module
    before = module.obstore, module.open_store, module.folder_of
    module.obstore = BUCKET
    module.open_store = lambda url: stores.setdefault(url, MemoryStore())
    module.folder_of = lambda url: None
    try:
        yield
    finally:
        module.obstore, module.open_store, module.folder_of = before


def weights_after(iteration: int) -> bytes:
    """Return the weights of a run that was never disturbed: a chain, so a lost or doubled iteration shows for ever."""
    weights = b""
    for number in range(iteration):
        weights = sha256(weights + bytes([number])).digest()
    return weights


class Trainer:
    """The process of a trainer: it claims a lineage, restores the newest checkpoint, and trains, as trainer/loop.py."""

    def __init__(self, schedule: "Schedule", node: str) -> None:
        self.schedule, self.node = schedule, node
        self.lineage = 0
        self.is_frozen = self.is_killed = self.is_over = self.has_exited = False
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take_turn(self) -> None:
        """Run up to the next call to the bucket."""
        if not self.is_over:
            self._go.release()
            self._back.acquire()

    def kill(self) -> None:
        self.is_killed = True
        self.take_turn()

    def wait_for_turn(self) -> None:
        self._back.release()
        self._go.acquire()
        if self.is_killed:
            raise Killed

    def _run(self) -> None:
        self._go.acquire()
        BUCKET.threads.trainer = self
        try:
            if not self.is_killed:
                self._train()
        except Killed:
            pass
        except Superseded:
            self.has_exited = True
        except BaseException as error:
            # One that was given up while it read may find its checkpoint deleted by its successors.
            if self.schedule.claimed <= self.lineage:
                self.schedule.errors.append(f"the trainer on {self.node} ended: {error!r}")
        finally:
            self.is_over = True
            self._back.release()

    def _train(self) -> None:
        schedule, store = self.schedule, CheckpointStore(self.schedule.url, node=self.node)
        self.lineage = store.claim_lineage()
        schedule.claimed = max(schedule.claimed, self.lineage)
        saved_before = max(schedule.saved, default=(0, 0))
        newest = store.newest()
        place, weights, done = (0, 0), b"", 0
        if newest is not None:
            place, done = (newest.lineage, newest.iteration), newest.iteration
            file = newest.files["weights"]
            file.read_into(0, target := memoryview(bytearray(file.size)))
            weights = bytes(target)
        if place < saved_before:
            schedule.errors.append(f"lineage {self.lineage} begins at {place}, and {saved_before} was saved")
        if weights != weights_after(done):
            schedule.errors.append(f"lineage {self.lineage} begins with other weights than those of iteration {done}")
        schedule.tell(self, EngineStarted(iteration=done, config_digest="", devices="", versions={}))
        too_late = 0
        while done < ITERATIONS:
            store.check_lineage(self.lineage)
            self.wait_for_turn()
            too_late += schedule.claimed > self.lineage
            if too_late > 1:
                schedule.errors.append(f"lineage {self.lineage} trains beside its successor")
            weights = sha256(weights + bytes([done])).digest()
            done += 1
            store.save(self._checkpoint(done, weights), keep=schedule.keep)
            schedule.saved.append((self.lineage, done))
            schedule.saved_ms = schedule.now_ms
        schedule.tell(self, EngineFinished(reason="iterations", iteration=done))
        self.has_exited = True  # the run may go on: a trainer that was given up may have claimed a newer lineage

    def _checkpoint(self, iteration: int, weights: bytes) -> Checkpoint:
        return replace(
            FIRST, iteration=iteration, lineage=self.lineage, files={"weights": Stored.of_bytes(weights or b"0")}
        )


NOBODY = SimpleNamespace(has_exited=False)


@dataclass
class Schedule:
    """A run with a spot trainer and two rollout nodes under one random schedule."""

    seed: int
    ledger: "Ledger"
    now_ms: int = START_MS
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    really: dict[str, tuple[str, int]] = field(default_factory=dict)
    """What each running node's agent does: its role and generation, as its last order said."""
    known: KnownNodes = field(default_factory=KnownNodes)
    trainers: dict[tuple[str, int], Trainer] = field(default_factory=dict)
    """By node and generation. One of a node that was given up may go on for a while."""
    has_token: set[str] = field(default_factory=set)
    """Nodes that were sent the run's own token, which may do all that the trainer may."""
    saved: list[tuple[int, int]] = field(default_factory=list)
    saved_ms: int | None = None
    claimed: int = 0
    rows: list[ProgressRow] = field(default_factory=list)
    finished: EngineFinished | None = None
    errors: list[str] = field(default_factory=list)
    promotions: int = 0
    given_back: int = 0
    woken: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.keep = self.dice.choice((1, 1, 3))
        self.hazard = self.dice.choice((0.01, 0.06))
        self.url = f"memory:{self.seed}"
        self.wanted = wanted(*SLOTS)

    def change(self, name: str, **happened: int) -> None:
        node = self.nodes[name]
        self.nodes[name] = replace(node, happened={**node.happened, **happened})

    def live(self) -> list[NodeRecord]:
        return [node for node in self.nodes.values() if node.is_live]

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def news(self, is_calm: bool) -> None:
        """Nodes come up, call in and, unless the schedule is calm, get notices and are lost."""
        for node in self.live():
            if "up" not in node.happened:
                self.change(node.name, up=self.now_ms)
                self.order(node.name, is_up=True)
            elif "ready" not in node.happened:
                if self.really.get(node.name) == (node.role, node.generation) and self.chance(0.6):
                    self.change(node.name, ready=self.now_ms)
            elif not is_calm and "notice" not in node.happened and self.chance(self.hazard):
                self.change(node.name, notice=self.now_ms)
        for node in self.live():
            if "releasing" in node.happened:
                if self.chance(0.5):
                    self.end(node, "released")
            elif self.trainers.get((node.name, node.generation), NOBODY).has_exited:
                self.end(node, "gone")  # its agent gives the node up
            elif ("notice" in node.happened and self.chance(0.5)) or (not is_calm and self.chance(self.hazard)):
                self.end(node, "gone")

    def end(self, node: NodeRecord, kind: str) -> None:
        """Put a node's end on record. Its processes end, or, if the cloud was wrong, are frozen for a while."""
        self.really.pop(node.name, None)
        for (name, _), trainer in self.trainers.items():
            if name == node.name:
                trainer.is_frozen = self.chance(0.5)
                if not trainer.is_frozen:
                    trainer.kill()
        ended = {**node.happened, kind: self.now_ms}
        self.nodes[node.name] = replace(node, happened=ended, reclaimed=kind == "gone", evidence="preempted")

    def work(self, is_calm: bool) -> None:
        """Each trainer runs for some calls. One that is frozen may wake, though its node was given up."""
        for (name, generation), trainer in list(self.trainers.items()):
            was_given_up = self.really.get(name) != ("trainer", generation)
            if trainer.is_over:
                continue
            if trainer.is_frozen:
                if not (is_calm or self.chance(0.15)):
                    continue
                trainer.is_frozen = False
                self.woken += 1
                if was_given_up and self.chance(0.2):  # what it finds after a pause makes it fail
                    self.tell(trainer, EngineFinished(reason="failed", iteration=0))
                    trainer.kill()
                    continue
            elif not is_calm and self.chance(0.05):
                trainer.is_frozen = True
                continue
            elif was_given_up and is_calm:
                trainer.kill()
                continue
            for _ in range(self.dice.randrange(7)):
                trainer.take_turn()

    def tell(self, trainer: Trainer, event: EngineStarted | EngineFinished) -> None:
        """The engine reports an event. After the report of an end, ask the product whether the run is over."""
        self.rows.append(
            ProgressRow(
                run_id=self.ledger.run.id,
                source=trainer.node,
                lineage=trainer.lineage,
                seq=len(self.rows),
                kind=event.KIND,
                at_ms=self.now_ms,
                event={"reason": event.reason} if isinstance(event, EngineFinished) else {},
            )
        )
        if (
            isinstance(event, EngineFinished)
            and (end := self.ledger.newest_end(self.rows, self.nodes.values())) is not None
        ):
            started = max((row.lineage for row in self.rows if row.kind == EngineStarted.KIND), default=0)
            if end.lineage < started or end.event["reason"] == "failed":
                self.errors.append(f"the end of lineage {end.lineage} ends the run, and lineage {started} began")
            self.finished = EngineFinished(reason=end.event["reason"], iteration=0)

    def one_pass(self, dies: bool) -> None:
        facts = Facts(
            now_ms=self.now_ms,
            stage=Stage.RUNNING,
            reason="",
            stage_ms=0,
            planned_ms=0,
            nodes=self.known.update(self.nodes.values()),
            metered=0,
            advances_ms=(self.now_ms,),
            saved_ms=self.saved_ms,
            sites=SITES,
        )
        for action in reconcile.decide(facts, self.wanted):
            match action:
                case Buy():
                    if action.name in self.nodes:
                        raise Broken(f"{action.name} was bought twice")
                    bought = reconcile._intended(action.name, action.slot, action.option, action.generation, 0, facts)
                    if bought.role == "trainer" and self.chance(0.4):  # as if no spot node could be had
                        bought = replace(bought, market=Market.ON_DEMAND, micro_usd_per_hour=TRAINER_RATE)
                    self.nodes[action.name] = bought
                    self.change(action.name, requested=self.now_ms)
                case RepeatRequest():
                    self.change(action.node, requested=self.now_ms)
                case Release():
                    self.release(action)
                case Promote():
                    self.promote(action)
                    if not dies:
                        self.order(action.node)
                case RepeatPromotion():
                    self.order(action.node)

    def release(self, action: Release) -> None:
        for name in action.nodes:
            node = self.nodes[name]
            if node.role == "trainer" and not node.is_leaving:
                if self.saved_ms is None or self.now_ms - self.saved_ms > SAVED_MS:
                    raise Broken(f"{name} was given back without a checkpoint of just now")
                self.given_back += 1
            self.change(name, releasing=self.now_ms)

    def promote(self, action: Promote) -> None:
        node = self.nodes[action.node]
        if not {"up", "ready"} <= node.happened.keys() or {"notice", "gone"} & node.happened.keys():
            raise Broken(f"{node.name} cannot take the role: {dict(node.happened)}")
        happened = {kind: at_ms for kind, at_ms in node.happened.items() if kind != "ready"}
        self.nodes[node.name] = replace(
            node,
            slot=action.slot,
            generation=action.generation,
            role="trainer",
            happened={**happened, PROMOTED: self.now_ms},
        )
        self.promotions += 1

    def order(self, name: str, *, is_up: bool = False) -> None:
        """Send a node its spec, as the product writes it. `is_up`: the first, which its agent starts with."""
        if not is_up and name not in self.really:
            return
        node = self.nodes[name]
        if self.ledger.token_of(node) == self.ledger.run.token:
            self.has_token.add(name)
        self.really[name] = (node.role, node.generation)
        if node.role == "trainer" and (name, node.generation) not in self.trainers:
            self.trainers[name, node.generation] = Trainer(self, name)

    def check(self) -> None:
        trainers = [node.name for node in self.live() if node.slot == "trainer"]
        training = [name for name, (role, _) in self.really.items() if role == "trainer"]
        if len(trainers) > 1 or len(training) > 1:
            raise Broken(f"two trainers: {trainers}, {training}")
        if set(training) - set(trainers):
            raise Broken(f"{training} trains without the role")
        if early := [name for name in self.has_token if self.nodes[name].role != "trainer"]:
            raise Broken(f"{early} had the run's token before the role")
        if self.errors:
            raise Broken("; ".join(self.errors))

    def run(self) -> None:
        """Run the schedule. Raises Broken if a promise does not hold."""
        try:
            for step in range(STEPS + CALM_STEPS):
                self.now_ms += STEP_MS
                self.news(is_calm=step >= STEPS)
                self.one_pass(dies=step < STEPS and self.chance(0.2))
                self.work(is_calm=step >= STEPS)
                self.check()
                if self.finished is not None:
                    break
            self._check_end()
        finally:
            for trainer in self.trainers.values():
                trainer.kill()

    def _check_end(self) -> None:
        if self.finished is None:
            ready = sorted(node.slot for node in self.live() if node.is_ready)
            raise Broken(f"after {CALM_STEPS} calm steps the run goes on, and {ready} work")
        newest = CheckpointStore(self.url).newest()
        if newest is None or newest.iteration != ITERATIONS:
            raise Broken(f"the run is over, and its newest checkpoint is {newest and newest.name}")


class Ledger:
    """A ledger with one run: what the product reads from it, and the tokens that it gives to nodes."""

    def __init__(self, folder: Path) -> None:
        self.sessions: sessionmaker[Session] = ledger(folder)
        self.run: Run = made_run(self.sessions)
        self.job = Job(name="demo", iterations=3)

    def newest_end(self, rows: list[ProgressRow], nodes: Iterable[NodeRecord]) -> ProgressRow | None:
        with self.sessions() as session:
            session.add_all([_copy(row) for row in rows])
            session.flush()
            end = facts_reader.newest_end(session, self.run, 0, nodes)
            if end is not None:
                session.expunge(end)
            session.rollback()
        return end

    def token_of(self, node: NodeRecord) -> str:
        bought = Node(name=node.name, slot=node.slot, generation=0, role="rollout", market=node.market.value, gpus=1)
        spec = node_specs.node_spec(
            self.run, self.job, bought, now=node, is_cloud=False, money_deadline_ms=None, money_longest_ms=None
        )
        return spec.token


def _copy(row: ProgressRow) -> ProgressRow:
    names = ("run_id", "source", "lineage", "seq", "kind", "at_ms", "event")
    return ProgressRow(**{name: getattr(row, name) for name in names})


@dataclass
class Totals:
    """What happened in all schedules together."""

    schedules: int = 0
    promotions: int = 0
    given_back: int = 0
    woken: int = 0
    lineages: int = 0


def run_schedules(seeds: range, progress: Callable[[Totals], None] | None = None) -> Totals:
    """Run a schedule for each seed. Raises Broken with its seed."""
    totals = Totals()
    with TemporaryDirectory() as folder, bucket_in_memory():
        home = Ledger(Path(folder))
        for seed in seeds:
            schedule = Schedule(seed, home)
            try:
                schedule.run()
            except Broken as broken:
                raise Broken(f"seed {seed}: {broken}") from None
            totals.schedules += 1
            totals.promotions += schedule.promotions
            totals.given_back += schedule.given_back
            totals.woken += schedule.woken
            totals.lineages += schedule.claimed
            if progress is not None:
                progress(totals)
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    began = time.monotonic()

    def progress(totals: Totals) -> None:
        if totals.schedules % 500 == 0:
            print(f"{totals.schedules} schedules, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    try:
        totals = run_schedules(range(options.first, options.first + options.schedules), progress)
    except Broken as broken:
        print(json.dumps({"broken": str(broken)}))
        return 1
    print(json.dumps({**vars(totals), "broken": None, "seconds": round(time.monotonic() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
