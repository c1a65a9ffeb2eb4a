"""The demonstration's story: a run on the fake clouds, the faults it meets, and the expected end.

    three spot nodes on one cloud -> a rollout node is preempted with notice, then one without
    -> the trainer's node is preempted with notice, then without: each time a node that is up takes its role
    -> no capacity there, and all nodes are gone -> the other cloud -> the target is opened -> target

`spot: only`, because a run that may buy a trainer on demand waits for spot while that costs nothing. With Ray the
trainer is on demand, so no node takes its role, and it alone is gone at the end.

No step depends on the speed of setup or training: each waits for its own evidence and prints it, the run may train as
long as the story takes, and its target cannot be reached before the last step opens it (demo_reward.py).

Everything uses the user's `spotrl launch` with unmodified SkyPilot; only the behaviour of the clouds is simulated.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from launcher.market.offers import CLOUDS
from launcher.runs.views import NodeView
from tests.clouds.demo_reward import GATE
from tests.clouds.launched import Launched
from tests.clouds.planted import on_host
from tests.fakes.clouds.world import World

RUN = "demo"
LOSSES = (("with notice", True), ("without notice", False))
NOTICE_SECONDS = 25.0
"""Google Cloud gives 30 s."""

JOB = """\
name: {run}
infra: aws,gcp
store: {{aws: s3://spotrl-runs/demo, gcp: gs://spotrl-runs/demo}}
ssh_from: 192.0.2.1/32
seed: 0
iterations: 1000
model: digits-ocr
prompts: digits
reward: demo_reward:score
sampler: {{name: flow-sde, steps: 8, noise_level: 0.7}}
algorithm: {{name: flow-grpo, prompts_per_batch: 12, images_per_prompt: 4}}
exploration: {{mode: stale, wait: all, budget: {{candidates: 96}}}}
evaluation: {{prompts: 192, every: 3}}
target: {{metric: after_story, value: {target}, evaluations: 1}}
runtime: {{device: cpu, name: {runtime}, shape: 12, step_seconds: {step_seconds}}}
spot: {spot}
recovery: {{trainer_wait: 30s}}
resources:
  trainer: {{accelerators: L4:1, use_spot: {use_spot}}}
  rollout: {{accelerators: L4:1, use_spot: true, num_nodes: 2, min_nodes: 2}}
budget: {{max_total: $40, max_hourly: $3, deadline: 24h}}
"""
"""The digits-ocr job; the budget and the deadline end it if nothing else does. Ray's trainer is on demand.

A denoising step takes at least `step_seconds`, so that the run lasts long enough.
"""


@dataclass
class StoryLog:
    """The events of the story with their times: printed at once and kept for result.json."""

    out: TextIO
    began: float = field(default_factory=time.monotonic)
    moments: dict[str, float] = field(default_factory=dict)

    def __call__(self, moment: str, text: str = "") -> None:
        seconds = time.monotonic() - self.began
        self.moments[moment] = round(seconds, 1)
        print(f"[{seconds:6.1f} s] {moment}{': ' if text else ''}{text}", file=self.out, flush=True)

    def waits(self, moment: str) -> None:
        """Print what the story waits for now."""
        print(f"[{time.monotonic() - self.began:6.1f} s] waits until: {moment}", file=self.out, flush=True)


@dataclass
class Story:
    """The faults of the clouds in order; each step waits until the run has recovered from the previous one."""

    run: Launched
    log: StoryLog
    until: float
    planted: Collection[str] = ()
    """Secrets of the client that no host may have."""
    found: list[str] = field(default_factory=list)
    """Places on hosts where a secret was found."""
    opened: set[str] = field(default_factory=set)
    """Nodes that count matches for the target."""
    is_on_spot: bool = True
    """The trainer is on spot."""

    def play(self) -> None:
        run = self.run
        self._when("three nodes are at work on one cloud", lambda: 3 in (len(run.ready(cloud=one)) for one in CLOUDS))
        (here,) = (one for one in CLOUDS if run.ready("trainer", cloud=one))
        (there,) = (one for one in CLOUDS if one != here)
        self._look_for_secrets()
        self._when("two batches are trained", lambda: run.view().iteration >= 2)
        for moment, notice in LOSSES:
            lost = run.ready("rollout", cloud=here)[0]
            self._reclaim(lost, notice, f"a rollout node, {moment}")
            self._when(f"its successor serves ({moment})", partial(self._is_replaced, lost))
        for moment, notice in LOSSES if self.is_on_spot else ():
            self._when(f"the trainer is at work ({moment})", lambda: run.ready("trainer", cloud=here))
            (trainer,), before = run.ready("trainer", cloud=here), run.view().iteration
            self._reclaim(trainer, notice, f"the trainer's node, {moment}")
            self._when(f"another node trains ({moment})", partial(self._trains, trainer, before))
            self._when(f"three nodes are at work again ({moment})", lambda: len(run.ready(cloud=here)) == 3)
        run.world.fault("capacity", here, market="" if self.is_on_spot else "on_demand")
        self._when("the trainer is at work before it loses its cloud", lambda: run.ready("trainer", cloud=here))
        before = run.view().iteration
        for node in run.ready("" if self.is_on_spot else "trainer", cloud=here):
            run.world.reclaim(node.name)
            self.log(f"{here} has no machine for the trainer, and a node is gone", f"{node.name}, at {before}")
        self._when(f"the trainer is at work on {there}", lambda: run.ready("trainer", cloud=there))
        self._when("it trains there", lambda: run.view().iteration > before)
        self._when("two spot nodes serve there", lambda: len(run.ready(cloud=there)) == 3)
        self._look_for_secrets()
        self.open_target()

    def _reclaim(self, node: NodeView, notice: bool, moment: str) -> None:
        self.run.world.reclaim(node.name, seconds=NOTICE_SECONDS if notice else 0, notice=notice)
        self.log(f"preempted: {moment}", node.name)

    def _trains(self, lost: NodeView, before: int) -> bool:
        """Return whether another node is the trainer and the run has gone on since `before`."""
        names = {node.name for node in self.run.ready("trainer")} - {lost.name}
        return bool(names) and self.run.view().iteration > before

    def open_target(self) -> None:
        """Let every node at work count matches for the target from now on. May be repeated, for nodes that are new."""
        for node in self.run.ready():
            if node.name not in self.opened:
                self.run.world.on(node.name, ["touch", str(GATE)])
                self.opened.add(node.name)
                self.log(f"the target is open on {node.name}")

    def _look_for_secrets(self) -> None:
        """Search every current host for secrets."""
        world = self.run.world
        for host in world.hosts():
            self.found += [f"{host}: {place}" for place in on_host(world, host, self.planted)]

    def _is_replaced(self, lost: NodeView) -> bool:
        return any(node.slot == lost.slot and node.name != lost.name for node in self.run.ready())

    def _when(self, moment: str, holds: Callable[[], object]) -> None:
        self.log.waits(moment)
        self.run.until(moment, holds, self.until - time.monotonic())
        view = self.run.view()
        self.log(moment, f"iteration {view.iteration}, {view.metric} {view.score or 0:.3f}")


DYING_SECONDS = 10.0
"""The fakes drop a host from their list shortly before its last process, the metadata service, ends."""

SHARED_ROLE = "spotrlNode"
"""Shared by all runs of a Google project. The name of a deleted role stays taken for weeks, so the role stays."""


def left_in_the_clouds(world: World) -> dict[str, Any]:
    """Return the resources that are left, by the fakes' own inventory."""
    things = [thing for thing in world.inventory() if thing["id"] != SHARED_ROLE]
    kinds, hosts, until = (
        Counter(thing["kind"] for thing in things),
        world.leftovers(),
        time.monotonic() + DYING_SECONDS,
    )
    while hosts["processes"] and time.monotonic() < until:
        time.sleep(0.2)
        hosts = world.leftovers()
    return {
        "instances": kinds.pop("instance", 0),
        "disks": kinds.pop("disk", 0),
        "processes": hosts["processes"],
        "namespaces": hosts["namespaces"],
        "others": dict(kinds),
    }
