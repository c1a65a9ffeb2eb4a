"""A run on the fake clouds, launched by the `spotrl` that users have, and watched through its ledger."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.events import IterationDone
from launcher.decide.facts import NodeRecord
from launcher.ledger.models import ControllerLease, Run
from launcher.ledger.node_history import node_records
from launcher.ledger.store import find_run, nodes_of, open_ledger, progress_of
from launcher.runs.views import NodeView, RunView, event_lines, run_view
from tests.fakes.clouds.world import World

SPOTRL = (sys.executable, "-m", "launcher.cli.main")
OVER = ("finished", "failed", "stopped")
BUCKETS = {"aws": "s3://spotrl-far/faults", "gcp": "gs://spotrl-runs/faults"}
BACK_SECONDS = 800.0
"""For a successor to be at work: a machine, its set-up, its engine; on two cores that all hosts share."""

JOB = """\
name: {name}
infra: {infra}
store: {{{store}}}
ssh_from: 192.0.2.1/32
iterations: {iterations}
evaluation: {{prompts: 16, every: 1000}}
algorithm: {{prompts_per_batch: 8, images_per_prompt: 4}}
exploration: {{mode: stale, wait: all, budget: {{candidates: 64}}}}
model: {{name: digits-ocr{model}}}
runtime: {{device: cpu, name: local, shape: 8, step_seconds: {step}}}
recovery: {{launches_per_minute: 60{recovery}}}
resources:
  trainer: {{accelerators: L4:1{place}}}
  rollout: {{accelerators: L4:1, use_spot: true, num_nodes: 1}}
budget: {{max_total: ${total}, max_hourly: $90{deadline}}}
secrets: [{secrets}]
"""


def job(name: str, infra: str, *, iterations: int = 1000, total: float = 40, step: float = 0.3, **more: str) -> str:
    """Return the text of a job with a trainer and one spot node.

    `more`: `deadline`, `recovery`, `secrets` and the `model`'s path as a job has them; the trainer's `region`.
    """
    return JOB.format(
        name=name,
        infra=infra,
        store=", ".join(f"{cloud}: {BUCKETS[cloud]}" for cloud in infra.split(",")),
        iterations=iterations,
        place=f", infra: {infra}{more['region']}" if "region" in more else "",
        total=total,
        step=step,
        deadline=f", deadline: {more['deadline']}" if "deadline" in more else "",
        secrets=more.get("secrets", ""),
        model=f", path: {more['model']}" if "model" in more else "",
        recovery=f", {more['recovery']}" if "recovery" in more else "",
    )


def node_of(machine: Mapping[str, Any]) -> str:
    return str(machine["labels"]["spotrl-node"])


def wait_for(holds: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds:.0f} s"
        time.sleep(0.5)


class Ended(Exception):
    """The run ended before what was waited for."""


@dataclass(kw_only=True)
class Launched:
    """A run of one world.

    `home`: the ledger's folder; as many runs may share it as like. `env`: environment variables of its user.
    """

    world: World
    name: str
    home: Path
    env: Mapping[str, str] = field(default_factory=dict)
    sessions: sessionmaker[Session] = field(init=False)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.sessions = open_ledger(self.home / "ledger.sqlite")

    # --- commands

    @property
    def environment(self) -> dict[str, str]:
        return {"SPOTRL_HOME": str(self.home), "NO_COLOR": "1", "COLUMNS": "140", **self.env}

    def spotrl(self, *words: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        return self.world.run([*SPOTRL, *words], env=self.environment | env, check=check)

    def launch(self, job: str) -> None:
        """Launch it, and come back once its controller runs."""
        path = self.world.folder / "jobs" / f"{self.name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(job)
        self.spotrl("launch", path, "-y", "--detach")

    def down(self) -> None:
        """Raises when something is left."""
        self.spotrl("down", self.name)

    # --- looking

    def view(self) -> RunView:
        return run_view(self.sessions, self.name)

    def ready(self, role: str = "", cloud: str = "") -> list[NodeView]:
        """Nodes at work, of one role or of all."""
        with self.sessions() as session:
            clouds = {node.name: node.cloud for node in nodes_of(session, find_run(session, self.name))}
        return [
            node
            for node in self.view().nodes
            if node.status == "ready" and role in ("", node.role) and cloud in ("", clouds[node.name])
        ]

    def records(self) -> Mapping[str, NodeRecord]:
        """Everything on record of each node that there ever was."""
        with self.sessions() as session:
            return {record.name: record for record in node_records(session, find_run(session, self.name))}

    def words(self, source: str = "") -> str:
        """What happened, a line each; of one node or of everything."""
        with self.sessions() as session:
            lines = event_lines(session, find_run(session, self.name))
        return "\n".join(f"{line.source} {line.kind} {line.text}" for line in lines if source in ("", line.source))

    def made_by(self) -> Iterator[dict[str, int]]:
        """Of every batch, how many of its rollouts each node finished."""
        with self.sessions() as session:
            for row in progress_of(session, find_run(session, self.name), IterationDone.KIND):
                yield row.event["made_by"]

    def batch_size(self) -> int:
        with self.sessions() as session:
            algorithm = session.scalars(select(Run).where(Run.name == self.name)).one().job["algorithm"]
        return int(algorithm["prompts_per_batch"]) * int(algorithm["images_per_prompt"])

    def every_batch_is_whole(self) -> bool:
        """Return whether no batch lacks a rollout or has one twice, and whether there is a batch."""
        batches = list(self.made_by())
        return bool(batches) and all(sum(nodes.values()) == self.batch_size() for nodes in batches)

    def trained(self) -> int:
        """Count iterations in the trainer's own log: the controller that would write them down may be frozen."""
        (trainer,) = self.ready("trainer")
        said = self.world.on(trainer.name, ["cat", "/home/ubuntu/spotrl/node/progress/trainer.jsonl"])
        return sum('"iteration_done"' in line for line in said.splitlines())

    def machines(self) -> list[dict[str, Any]]:
        """What the clouds have of it now, whatever its ledger says."""
        hosts = self.world.hosts()
        return [one for one in self.world.machines() if self._is_ours(one) and one["id"] in hosts]

    def machines_by_node(self) -> dict[str, str]:
        return {node_of(machine): str(machine["id"]) for machine in self.machines()}

    def _is_ours(self, machine: Mapping[str, object]) -> bool:
        labels = machine.get("labels") or {}
        return isinstance(labels, Mapping) and labels.get("spotrl-run") == self.name

    # --- its controller

    def controller(self) -> int:
        """The process that looks after it, or did last."""
        with self.sessions() as session:
            lease = session.get(ControllerLease, find_run(session, self.name).id)
        assert lease is not None
        return lease.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.controller(), number)

    def log(self) -> str:
        return (self.home / "runs" / self.name / "controller.log").read_text()

    # --- waiting

    def until(self, what: str, holds: Callable[[], object], seconds: float) -> None:
        """Raises Ended when the run ends first, TimeoutError with what happened last when it does not come."""
        until = time.monotonic() + seconds
        while not holds():
            view = self.view()
            if view.status in OVER:
                raise Ended(f"{self.name} is {view.status} ({view.reason}) before: {what}")
            if time.monotonic() > until:
                last = "\n".join(self.words().splitlines()[-12:])
                raise TimeoutError(f"{self.name}: not within {seconds:.0f} s: {what}; last:\n{last}")
            time.sleep(1.0)

    def trains_on(self, iterations: int = 2, seconds: float = 120) -> None:
        """It gets so many iterations further."""
        goal = self.view().iteration + iterations
        self.until(f"iteration {goal}", lambda: self.view().iteration >= goal, seconds)
