"""The demonstration's story: a run on the fake clouds, what is done to it, and what must be true in the end.

    three nodes on Google Cloud -> a reclaim with notice -> one without -> no trainer there any more -> on AWS -> target

Everything goes through the `spotrl launch` that users get, with unmodified SkyPilot; only what the clouds do is played.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.events import IterationDone
from launcher.cluster.runs import NodeView, RunView, run_view
from launcher.ledger.models import Node, Run
from launcher.ledger.store import find_run, open_ledger, progress_of
from tests.clouds.planted import on_host
from tests.fakes.clouds.world import World

RUN = "demo"
NOTICE_SECONDS = 25.0
"""Google Cloud gives 30 s."""

JOB = """\
name: {run}
infra: aws,gcp
store: {{aws: s3://spotrl-runs/demo, gcp: gs://spotrl-runs/demo}}
ssh_from: 192.0.2.1/32
seed: 0
iterations: 60
model: digits-ocr
prompts: digits
reward: ocr
sampler: {{name: flow-sde, steps: 8, noise_level: 0.7}}
algorithm: {{name: flow-grpo, prompts_per_batch: 12, images_per_prompt: 4}}
exploration: {{mode: stale, budget: {{candidates: 96}}}}
evaluation: {{prompts: 192, every: 3}}
target: {{metric: exact_match, value: {target}, evaluations: 2}}
runtime: {{name: {runtime}, shape: 12, step_seconds: {step_seconds}}}
recovery: {{trainer_wait: 30s}}
resources:
  trainer: {{accelerators: L4:1}}
  rollout: {{accelerators: L4:1, use_spot: true, num_nodes: 2}}
budget: {{max_total: $40, max_hourly: $3, deadline: 1h}}
"""
"""The digits-ocr job. A denoising step takes at least `step_seconds`, so that there is a run to do something to."""


@dataclass
class Told:
    """What happened, when, since the beginning: said at once and kept for result.json."""

    out: TextIO
    began: float = field(default_factory=time.monotonic)
    moments: dict[str, float] = field(default_factory=dict)

    def __call__(self, moment: str, text: str = "") -> None:
        seconds = time.monotonic() - self.began
        self.moments[moment] = round(seconds, 1)
        print(f"[{seconds:6.1f} s] {moment}{': ' if text else ''}{text}", file=self.out, flush=True)


class Ended(Exception):
    """The run ended before its story did."""


@dataclass
class Story:
    """What the clouds do to the run, in order; each step waits until the run has got over the one before."""

    world: World
    sessions: sessionmaker[Session]
    told: Told
    until: float
    planted: Collection[str] = ()
    """Secrets of the client that no host may have."""
    found: list[str] = field(default_factory=list)
    """Where on hosts one of them was found all the same."""

    def play(self) -> None:
        self._when("three nodes at work on Google Cloud", lambda view: len(self._ready(view, "gcp")) == 3)
        self._look_for_secrets()
        self._when("two batches are trained", lambda view: view.iteration >= 2)
        for moment, notice in (("a reclaim with notice", True), ("a reclaim without a word", False)):
            lost = next(node for node in self._ready(self._view(), "gcp") if node.market == "spot")
            self.world.reclaim(lost.name, seconds=NOTICE_SECONDS if notice else 0, notice=notice)
            self.told(moment, lost.name)
            self._when(f"its successor serves ({moment})", self._is_replaced(lost))
        self.world.fault("capacity", "gcp", market="on_demand")
        trainer = next(node for node in self._ready(self._view(), "gcp") if node.role == "trainer")
        before = self._view().iteration
        self.world.reclaim(trainer.name)
        self.told("Google Cloud has no on-demand machine, and the trainer is gone", f"{trainer.name}, at {before}")
        self._when(
            "the trainer is at work on AWS", lambda view: any(n.role == "trainer" for n in self._ready(view, "aws"))
        )
        self._when("it trains there", lambda view: view.iteration > before)
        self._when("two spot nodes serve there", lambda view: len(self._ready(view, "aws")) == 3)
        self._look_for_secrets()

    def _look_for_secrets(self) -> None:
        """On every host there is now."""
        for host in self.world.hosts():
            self.found += [f"{host}: {place}" for place in on_host(self.world, host, self.planted)]

    def _is_replaced(self, lost: NodeView) -> Callable[[RunView], bool]:
        def holds(view: RunView) -> bool:
            return any(node.slot == lost.slot and node.name != lost.name for node in self._ready(view, "gcp"))

        return holds

    def _ready(self, view: RunView, cloud: str) -> list[NodeView]:
        with self.sessions() as session:
            clouds = {node.name: node.cloud for node in session.scalars(select(Node))}
        return [node for node in view.nodes if node.status == "ready" and clouds.get(node.name) == cloud]

    def _view(self) -> RunView:
        return run_view(self.sessions, RUN)

    def _when(self, moment: str, holds: Callable[[RunView], bool]) -> None:
        while True:
            try:
                view = self._view()
            except LookupError:  # launch is still checking
                view = None
            if view is not None and holds(view):
                self.told(moment, f"iteration {view.iteration}, {view.metric} {view.score or 0:.3f}")
                return
            if view is not None and view.status in ("finished", "failed", "stopped"):
                raise Ended(f"the run is {view.status} ({view.reason}) before: {moment}")
            if time.monotonic() > self.until:
                raise TimeoutError(f"time is up, and this has not happened: {moment}")
            time.sleep(0.5)


def made_by(session: Session) -> Iterator[dict[str, int]]:
    """Of every batch, how many of its rollouts each node finished."""
    for row in progress_of(session, find_run(session, RUN), IterationDone.KIND):
        yield row.event["made_by"]


def batch_size(session: Session) -> int:
    algorithm = session.scalars(select(Run).where(Run.name == RUN)).one().job["algorithm"]
    return int(algorithm["prompts_per_batch"]) * int(algorithm["images_per_prompt"])


def ledger_of(home: Path) -> sessionmaker[Session]:
    return open_ledger(home / "ledger.sqlite")


SHARED_ROLE = "spotrlNode"
"""What all runs of a Google project share; the name of a deleted role is taken for weeks, so it stays."""


def left_in_the_clouds(world: World) -> dict[str, Any]:
    """By the fakes' own inventory, not by what we believe to have released."""
    things = [thing for thing in world.inventory() if thing["id"] != SHARED_ROLE]
    kinds, hosts = Counter(thing["kind"] for thing in things), world.leftovers()
    return {
        "instances": kinds.pop("instance", 0),
        "disks": kinds.pop("disk", 0),
        "processes": hosts["processes"],
        "namespaces": hosts["namespaces"],
        "others": dict(kinds),
    }
