"""A run on the fake clouds, launched with the user's `spotrl` command and observed through its ledger."""

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
from launcher.runs.event_lines import event_lines
from launcher.runs.views import NodeView, RunView, run_view
from tests.fakes.clouds.world import World

SPOTRL = (sys.executable, "-m", "launcher.cli.main")
OVER = ("finished", "failed", "stopped")
BUCKETS = {"aws": "s3://spotrl-far/faults", "gcp": "gs://spotrl-runs/faults"}
BACK_SECONDS = 800.0
"""Time limit for a successor to work (instance, setup, engine), on two cores that all hosts share."""

JOB = """\
name: {name}
infra: {infra}
store: {{{store}}}
{ssh_from}
iterations: {iterations}
evaluation: {{prompts: 16, every: {evaluate_every}}}
algorithm: {{prompts_per_batch: 8, images_per_prompt: 4}}
exploration: {{mode: stale, wait: all, budget: {{candidates: 64}}}}
model: {{name: digits-ocr{model}}}
runtime: {{device: cpu, name: local, shape: 8, step_seconds: {step}}}
recovery: {{launches_per_minute: 60{recovery}}}
resources:
  trainer: {{accelerators: L4:1{place}}}
  rollout: {{accelerators: L4:1, use_spot: true, num_nodes: 1, min_nodes: 1}}
budget: {{max_total: ${total}, max_hourly: $90{deadline}}}
secrets: [{secrets}]
{also}
"""


def job(name: str, infra: str, *, iterations: int = 1000, total: float = 40, step: float = 0.3, **more: str) -> str:
    """Return the text of a job with a trainer and one spot node.

    `more`: `deadline`, `recovery`, `secrets` and the `model`'s path as in a job file; the trainer's `region`; the lines
    of `ssh_from` and `also`; `evaluate_every`.
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
        ssh_from=more.get("ssh_from", "ssh_from: 192.0.2.1/32"),
        evaluate_every=more.get("evaluate_every", "1000"),
        also=more.get("also", ""),
    )


def node_of(instance: Mapping[str, Any]) -> str:
    return str(instance["labels"]["spotrl-node"])


def wait_for(holds: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds:.0f} s"
        time.sleep(0.5)


class Ended(Exception):
    """The run ended before the awaited condition."""


@dataclass(kw_only=True)
class Launched:
    """A run of one world.

    `home`: the ledger's folder, which runs may share. `env`: environment variables of its user.
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
        """Launch the run, and return once its controller runs."""
        path = self.world.folder / "jobs" / f"{self.name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(job)
        self.spotrl("launch", path, "-y", "--detach")

    def down(self) -> None:
        """Run `spotrl down`. Raises an error if a resource is left."""
        self.spotrl("down", self.name)

    # --- observing

    def view(self) -> RunView:
        return run_view(self.sessions, self.name)

    def ready(self, role: str = "", cloud: str = "") -> list[NodeView]:
        """Return the ready nodes of one role or of all."""
        with self.sessions() as session:
            clouds = {node.name: node.cloud for node in nodes_of(session, find_run(session, self.name))}
        return [
            node
            for node in self.view().nodes
            if node.status == "ready" and role in ("", node.role) and cloud in ("", clouds[node.name])
        ]

    def records(self) -> Mapping[str, NodeRecord]:
        """Return the records of all nodes of the run."""
        with self.sessions() as session:
            return {record.name: record for record in node_records(session, find_run(session, self.name))}

    def words(self, source: str = "") -> str:
        """Return the events as lines, of one node or of all."""
        with self.sessions() as session:
            lines = event_lines(session, find_run(session, self.name))
        return "\n".join(f"{line.source} {line.kind} {line.text}" for line in lines if source in ("", line.source))

    def made_by(self) -> Iterator[dict[str, int]]:
        """Return how many rollouts each node finished, by batch."""
        with self.sessions() as session:
            for row in progress_of(session, find_run(session, self.name), IterationDone.KIND):
                yield row.event["made_by"]

    def batch_size(self) -> int:
        with self.sessions() as session:
            algorithm = session.scalars(select(Run).where(Run.name == self.name)).one().job["algorithm"]
        return int(algorithm["prompts_per_batch"]) * int(algorithm["images_per_prompt"])

    def every_batch_is_whole(self) -> bool:
        """Return whether there is a batch and every batch has each rollout exactly once."""
        batches = list(self.made_by())
        return bool(batches) and all(sum(nodes.values()) == self.batch_size() for nodes in batches)

    def trained(self) -> int:
        """Count iterations in the trainer's own log, because the controller that records them may be frozen."""
        (trainer,) = self.ready("trainer")
        progress = self.world.on(trainer.name, ["cat", "/home/ubuntu/spotrl/node/progress/trainer.jsonl"])
        return sum('"iteration_done"' in line for line in progress.splitlines())

    def instances(self) -> list[dict[str, Any]]:
        """Return the run's instances from the clouds' inventory, independent of the ledger."""
        hosts = self.world.hosts()
        return [one for one in self.world.machines() if self._is_ours(one) and one["id"] in hosts]

    def instances_by_node(self) -> dict[str, str]:
        return {node_of(instance): str(instance["id"]) for instance in self.instances()}

    def _is_ours(self, instance: Mapping[str, object]) -> bool:
        labels = instance.get("labels") or {}
        return isinstance(labels, Mapping) and labels.get("spotrl-run") == self.name

    # --- the controller

    def controller(self) -> int:
        """Return the run's current or last controller process."""
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
        """Wait for a condition. Raises Ended if the run ends first, and TimeoutError with the last events."""
        until = time.monotonic() + seconds
        while not holds():
            view = self.view()
            if view.status in OVER:
                raise Ended(f"{self.name} is {view.status} ({view.reason}) before: {what}")
            if time.monotonic() > until:
                last = "\n".join(self.words().splitlines()[-12:])
                raise TimeoutError(f"{self.name}: not within {seconds:.0f} s: {what}; last:\n{last}")
            time.sleep(1.0)

    def trains_on(self, iterations: int = 2, seconds: float = 600) -> None:
        """Wait until the run has trained this many more iterations."""
        goal = self.view().iteration + iterations
        self.until(f"iteration {goal}", lambda: self.view().iteration >= goal, seconds)
