"""recovery: how long is a lost spot node missed, and what does each part of replacing it take?

    python -m tests.benchmarks.recovery --json                                      (about 15 minutes)
    python -m tests.benchmarks.recovery --make trainer --places aws --number 2      (raw figures of lost trainers)
    python -m tests.benchmarks.recovery --make nodes --runs 5                       (of lost rollout nodes, an hour)

A real run loses one spot node after the other, with and without notice of the cloud. Each time is measured until the
successor has finished its first request. Another run, all on spot, loses its trainer: `promotion_s` is the time from
its end on record until the trainer has started again on a node that was up and a worker has asked it for work, and
`cold_s` the same where all nodes were lost at once. `local`: nodes are processes here. `aws`, `gcp`: fake clouds with
real hosts (tests/fakes/clouds), through SkyPilot; they boot in a tenth of a second, where a real one takes a minute.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, Protocol

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.config import CheckpointConfig, EngineConfig, ModelConfig
from engine.events import EngineStarted, IterationDone, NodeSeen, NodeServed, NodeUsage, Phase
from engine.trainer.cadence import Cadence
from launcher.decide.facts import ENDS
from launcher.ledger.models import Node, NodeEvent, ProgressRow
from launcher.ledger.node_history import metered_micro_usd, node_records
from launcher.ledger.store import find_run, open_ledger, progress_of
from launcher.provision.local import processes
from launcher.provision.local.provisioner import node_folder
from launcher.runs.views import NodeView, run_view
from tests.benchmarks.page import RESULTS, commit_now, load_now, origin, publish, spread
from tests.clouds.planted import holds_token
from tests.end_to_end.test_rank_survival import three_nodes
from tests.fakes.clouds.world import World, why_not

RUN = "recovery"
PARTS = (
    "detect_s",
    "decide_s",
    "create_to_ssh_s",
    "wait_s",
    "environment_s",
    "agent_s",
    "imports_s",
    "weights_s",
    "first_work_s",
)
"""Consecutive parts of a loss: notice or end -> noticed -> successor requested -> bundle on the node -> set-up begun ->
environment whole -> agent started -> processes ready -> weights there -> first request finished."""

SETUP = ("wait_s", "environment_s", "agent_s")
"""Parts of `setup_s`, from the bundle on the node to its agent."""

LIMITS = {"notice": 2.0, "silent": 30.0}
"""Limit of the p90 of detection and decision together."""

RAW = RESULTS / "recovery"
"""Raw figures: nodes.json of lost spot nodes, and trainer-PLACE-N.json of lost trainers."""

BEFORE = RAW / "before.json"
"""Figures of this benchmark on 2026-11-22 (commit 16a1a7c), when every node built its environment."""

NOTICE_SECONDS = {"local": 10.0, "aws": 120.0, "gcp": 25.0}
PATIENCE_SECONDS = 600.0

JOB = """\
name: {run}
infra: {infra}
clock_factor: 1
iterations: 5000
evaluation: {{prompts: 16, every: 1000}}
algorithm: {{prompts_per_batch: 8, images_per_prompt: 4}}
exploration: {{mode: stale, wait: all, budget: {{candidates: 64}}}}
runtime: {{device: cpu, name: {runtime}, shape: 8, step_seconds: 0.2}}
preemptions: {{trace: none}}
resources:
  trainer: {{accelerators: {gpu}}}
  rollout: {{accelerators: {gpu}, use_spot: true, num_nodes: 1, min_nodes: 1}}
recovery: {{launches_per_minute: 60}}
budget: {{max_total: $500, max_hourly: $50}}
{more}
"""


class Place(Protocol):
    """The place of a run's nodes: this computer or a fake cloud."""

    name: str
    sessions: sessionmaker[Session]
    folder: Path
    """The run's."""

    def lose(self, node: str, notice: bool) -> tuple[float, float]:
        """Preempt the node. Return the times of the notice (or loss) and of its end, in seconds since the epoch."""

    def set_up(self, node: str) -> tuple[float, float, float]:
        """Return the times at which files were on the node, its set-up began and its environment was whole."""

    def has_token(self, node: str) -> bool:
        """Return whether the node has the run's own token."""


@dataclass(kw_only=True)
class Here:
    """Nodes are process sessions of this computer; this benchmark preempts them like a cloud."""

    sessions: sessionmaker[Session]
    folder: Path
    name: str = "local"

    def lose(self, node: str, notice: bool) -> tuple[float, float]:
        folder, noticed = node_folder(self.folder, node), time.time()
        if notice:
            deadline = noticed + NOTICE_SECONDS["local"]
            part = folder / ".notice"
            part.write_text(json.dumps({"deadline_ms": round(deadline * 1000)}))
            part.replace(folder / "notice.json")
            time.sleep(NOTICE_SECONDS["local"])
        ended = time.time()
        request, ready = (json.loads((folder / f"{name}.json").read_text()) for name in ("request", "ready"))
        record = {
            "evidence": "reclaimed by the benchmark",
            "started_ms": request["requested_ms"],
            "ended_ms": round(ended * 1000),
            "ready_ms": ready["at_ms"],
            "reclaimed": True,
            "signal": "SIGKILL",
            "with_notice": notice,
        }
        part = folder / ".ended"
        part.write_text(json.dumps(record))
        part.replace(folder / "ended.json")  # the report of a cloud; a node that only died is replaced later
        processes.send(processes.processes_of(folder), signal.SIGKILL)
        return noticed, ended

    def set_up(self, node: str) -> tuple[float, float, float]:
        spawned = float(json.loads((node_folder(self.folder, node) / "spawned.json").read_text())["at_ms"]) / 1000
        return spawned, spawned, spawned  # nodes share this computer's environment

    def has_token(self, node: str) -> bool:
        return _token(self) in (node_folder(self.folder, node) / "node.json").read_text()


@dataclass(kw_only=True)
class There:
    """Hosts of the fake clouds."""

    world: World
    sessions: sessionmaker[Session]
    folder: Path
    name: str

    def lose(self, node: str, notice: bool) -> tuple[float, float]:
        noticed = time.time()
        host = self.world.reclaim(node, seconds=NOTICE_SECONDS[self.name] if notice else 0.0, notice=notice)
        while host in self.world.hosts():
            time.sleep(0.1)
        return noticed, time.time()

    def set_up(self, node: str) -> tuple[float, float, float]:
        files = ("bundle/digest", "set-up.lock", "env/.digest")
        found = self.world.on(node, ["stat", "-c", "%.3Z", *(f"/home/ubuntu/spotrl/{file}" for file in files)])
        sent, begun, whole = map(float, found.split())
        print(self.world.on(node, ["cat", "/home/ubuntu/spotrl/set-up.log"]), file=sys.stderr, flush=True)
        return sent, begun, whole

    def has_token(self, node: str) -> bool:
        return holds_token(self.world, node, _token(self))


def _token(place: "Place") -> str:
    with place.sessions() as session:
        return find_run(session, RUN).token


# --- measuring ----------------------------------------------------------------------------------------


def measure(place: Place, notice: bool) -> dict[str, float]:
    """Measure one loss in consecutive parts, and `uncovered_s`."""
    old = _wait(place, lambda: _serving(place, but=None), "a spot node serves")
    noticed, ended = place.lose(old, notice)
    new = _wait(place, lambda: _serving(place, but=old), f"{old} is replaced")
    with place.sessions() as session:
        run = find_run(session, RUN)
        node = session.scalars(select(Node).where(Node.name == new)).one()
        kinds = [NodeServed.KIND, NodeUsage.KIND]
        rows = session.scalars(select(ProgressRow).where(ProgressRow.run_id == run.id, ProgressRow.kind.in_(kinds)))
        events = [row for row in rows if row.event["node"] == new]
        requested = session.scalars(
            select(NodeEvent.at_ms).where(NodeEvent.node_id == node.id, NodeEvent.kind == "requested")
        ).one()
    served = min(row.at_ms for row in events if row.kind == NodeServed.KIND) / 1000
    loads = [
        end
        for row in events
        if row.kind == NodeUsage.KIND
        for _, phase, _, end in row.event["spans"]
        if phase == Phase.SYNC
    ]
    agent = json.loads((node_folder(place.folder, new) / "agent.json").read_text())["create_time"]
    ready = json.loads((node_folder(place.folder, new) / "ready.json").read_text())["at_ms"] / 1000
    moments = [
        noticed if notice else ended,
        _noticed(place.folder, old, "notice" if notice else "gone"),
        requested / 1000,
        *place.set_up(new),
        agent,
        ready,
        min([min(loads, default=0) / 1000, served]) if loads else ready,
        served,
    ]
    moments = [max(moments[: n + 1]) for n in range(len(moments))]  # a part that ended before its report counts as 0
    found = {part: moments[n + 1] - moments[n] for n, part in enumerate(PARTS)}
    return found | {
        "setup_s": sum(found[part] for part in SETUP),
        "total_s": moments[-1] - moments[0],
        "uncovered_s": max(0.0, served - ended),
    }


def _serving(place: Place, but: str | None) -> str | None:
    """Return a spot node that is up and has finished a request, other than `but` and its predecessors."""
    view = run_view(place.sessions, RUN)
    if view.status in ("failed", "stopped", "finished"):
        raise RuntimeError(f"the run is {view.status}: {view.reason}")
    with place.sessions() as session:
        run = find_run(session, RUN)
        rows = session.scalars(
            select(ProgressRow).where(ProgressRow.run_id == run.id, ProgressRow.kind == NodeServed.KIND)
        )
        served = {row.event["node"] for row in rows}
    ready = [node.name for node in view.nodes if node.role == "rollout" and node.status == "ready"]
    return next((name for name in ready if name in served and name != but), None)


def _noticed(folder: Path, node: str, kind: str) -> float:
    """Return the time at which the controller recorded the loss, from its log."""
    line = re.compile(rf"^(\S+ \S+) INFO launcher.controller.recorder: {node}: {kind}\b", re.MULTILINE)
    found = line.search((folder / "controller.log").read_text())
    assert found is not None, f"the controller's log does not tell of {node}: {kind}"
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def _wait(place: Place, look: Callable[[], str | None], what: str, every: float = 0.2) -> str:
    until = time.monotonic() + PATIENCE_SECONDS
    while (found := look()) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"{place.name}: not within {PATIENCE_SECONDS:.0f} s: {what}")
        time.sleep(every)
    return found


# --- places -------------------------------------------------------------------------------------------

SPOTRL = (sys.executable, "-m", "launcher.cli.main")


@contextmanager
def here(job_text: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = folder / "job.yaml"
        job.write_text(job_text)
        environment = {**_environment(), "SPOTRL_HOME": str(folder / "state")}
        subprocess.run([*SPOTRL, "launch", job, "-y", "--detach"], env=environment, check=True, stdout=sys.stderr)
        try:
            sessions = open_ledger(folder / "state/ledger.sqlite")
            yield Here(sessions=sessions, folder=folder / "state/runs" / RUN)
        finally:
            subprocess.run([*SPOTRL, "down", RUN], env=environment, check=True, stdout=sys.stderr)


@contextmanager
def there(cloud: str, job_text: str, cache: Path | None) -> Iterator[Place]:
    with World(cache=cache).up() as world:
        job, state = world.folder / "job" / "job.yaml", world.folder / "home/state"
        job.parent.mkdir()
        job.write_text(job_text)
        environment = {"SPOTRL_HOME": str(state)}
        world.run([*SPOTRL, "catalog", "refresh"], env=environment)
        world.run([*SPOTRL, "launch", job, "-y", "--detach"], env=environment)
        try:
            yield There(
                world=world, sessions=open_ledger(state / "ledger.sqlite"), folder=state / "runs" / RUN, name=cloud
            )
        finally:
            world.run([*SPOTRL, "down", RUN], env=environment)


def cloud_lines(cloud: str) -> str:
    """Return the lines of a job that a cloud needs."""
    return f"store: {'s3' if cloud == 'aws' else 'gs'}://spotrl-runs/recovery\nssh_from: 192.0.2.1/32\n"


def _environment() -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1"}


# --- the role of the trainer --------------------------------------------------------------------------

SPOT_TRAINER = """\
resources:
  trainer: {{accelerators: {gpu}, use_spot: true}}
  rollout: {{accelerators: {gpu}, use_spot: true, num_nodes: 2, min_nodes: 2}}
"""


def trainer_losses(place: Place, promotions: int, cold: int) -> dict[str, Any]:
    """Return the seconds of each loss of a spot trainer from its end on record until work goes on, and what must be 0.

    `promotions`: losses of the trainer alone, so that a node that is up takes its role. `cold`: losses of all nodes at
    once, so that a new node has to.
    """
    tokens, seconds = 0, []
    for number in range(promotions + cold):
        trainer, others = _at_work(place)
        tokens += sum(place.has_token(node) for node in others)
        seconds.append(_lost(place, trainer, others if number >= promotions else []))
        print(place.name, number, f"{seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    _at_work(place)
    return {
        "place": place.name,
        "promotion_s": seconds[:promotions],
        "cold_s": seconds[promotions:],
        "iterations_doubled": _doubled(place),
        "usd_over_limit": _over_limit(place),
        "spot_token_before_promotion": tokens,
        "commit": commit_now(),
    }


def spot_trainer_job(infra: str, gpu: str, more: str) -> str:
    """Return the text of a job with all nodes on spot and alike, and an hourly limit that bears three on demand."""
    text = JOB.format(run=RUN, infra=infra, runtime="local", gpu=gpu, more=more)
    head, _, tail = text.replace("max_hourly: $50", "max_hourly: $6").partition("resources:")
    return head + SPOT_TRAINER.format(gpu=gpu) + "recovery:" + tail.partition("recovery:")[2]


def _lost(place: Place, trainer: str, others: Sequence[str]) -> float:
    """Preempt the trainer's node and these others. Return the seconds from the trainer's end on record to new work.

    Work goes on when a trainer has started again and a worker has asked it for work.
    """
    starts = len(_rows(place, EngineStarted.KIND))
    with ThreadPoolExecutor(max_workers=1 + len(others)) as pool:
        list(pool.map(lambda node: place.lose(node, notice=False), [trainer, *others]))
    ended = float(_wait(place, lambda: _end_of(place, trainer), f"the end of {trainer} is on record"))

    def back() -> str | None:
        if len(_rows(place, EngineStarted.KIND)) == starts:
            return None
        reports = place.folder.glob("nodes/*/progress/coordinator.jsonl")
        newest = max(reports, key=lambda file: (file.parents[1] / "agent.json").stat().st_mtime)
        return "yes" if NodeSeen.KIND in newest.read_text() else None

    _wait(place, back, "the trainer has started and a worker has called", every=0.05)
    return time.time() - ended


def _at_work(place: Place) -> tuple[str, list[str]]:
    """Wait until three nodes are ready and the trainer has trained. Return the trainer's node and the others."""
    trainer = _wait(place, lambda: _trains(place), "the trainer and both rollout nodes work")
    return trainer, [node.name for node in _ready(place) if node.name != trainer]


def _ready(place: Place) -> list[NodeView]:
    return [node for node in run_view(place.sessions, RUN).nodes if node.status == "ready"]


def _trains(place: Place) -> str | None:
    """Return the trainer's node once it and two rollout nodes are ready, and a batch was trained since its start."""
    ready = _ready(place)
    started, done = _rows(place, EngineStarted.KIND), _rows(place, IterationDone.KIND)
    if len(ready) < 3 or not started or not done or done[-1].id < started[-1].id:
        return None
    return next((node.name for node in ready if node.role == "trainer"), None)


def _rows(place: Place, kind: str) -> list[ProgressRow]:
    with place.sessions() as session:
        rows = select(ProgressRow).where(ProgressRow.kind == kind).order_by(ProgressRow.id)
        return list(session.scalars(rows))


def _end_of(place: Place, node: str) -> str | None:
    with place.sessions() as session:
        ends = select(NodeEvent).join(Node).where(Node.name == node, NodeEvent.kind.in_(ENDS))
        event = session.scalar(ends.order_by(NodeEvent.id.desc()).limit(1))
        return None if event is None or event.wall_ms is None else str(event.wall_ms / 1000)


def _doubled(place: Place) -> int:
    """Return the iterations that count twice, in what the run was in the end."""
    with place.sessions() as session:
        done = progress_of(session, find_run(session, RUN), IterationDone.KIND)
    numbers = [row.event["iteration"] for row in done]
    return len(numbers) - len(set(numbers))


def _over_limit(place: Place) -> float:
    """Return the dollars above a limit: of the whole run, or in the hour of its dearest moment."""
    with place.sessions() as session:
        run = find_run(session, RUN)
        spent, nodes = metered_micro_usd(session, run, run.clock.now_ms()), node_records(session, run)
    billed = [node for node in nodes if "up" in node.happened]
    hourly = max(
        sum(
            other.micro_usd_per_hour + other.beside_micro_usd_per_hour
            for other in billed
            if other.happened["up"] <= node.happened["up"]
            if other.ended_ms is None or other.ended_ms > node.happened["up"]
        )
        for node in billed
    )
    assert run.max_total_micro_usd is not None
    assert run.max_hourly_micro_usd is not None
    return max(0, spent - run.max_total_micro_usd, hourly - run.max_hourly_micro_usd) / 1e6


def trainer_at(name: str, promotions: int, cold: int, cache: Path | None) -> dict[str, Any]:
    """Measure the losses of a spot trainer at one place, with what the measurement was made on."""
    load = load_now()
    with (
        here(spot_trainer_job("local", "L40S:1", ""))
        if name == "local"
        else there(name, spot_trainer_job(name, "L4:1", cloud_lines(name)), cache) as place
    ):
        return trainer_losses(place, promotions, cold) | origin(load)


CADENCE_RUNS, CADENCE_BATCHES, BATCH_S, WRITE_S, RESTART_S = 400, 222, 233.0, 110.0, 300.0
"""Assumed: full weights of 20 B on eight ranks, which write together. A batch, a checkpoint and a restart, seconds."""


def cadence_over_closed_form() -> dict[str, float]:
    """Return the lost share of time with `checkpoint.every: auto` over the least by the closed form, for three hazards.

    Simulated: the shipped class decides, losses come at random, each a restart and the work since the checkpoint.
    Closed form: the least over n of (1/h + R) (exp(h (n T + d)) - 1) / (n T) - 1. h: losses a second, R: restart, T: a
    batch, d: a checkpoint (J. T. Daly, A higher order estimate of the optimum checkpoint interval, 2006).
    """
    config = EngineConfig(
        iterations=CADENCE_BATCHES, model=ModelConfig(weights="full"), checkpoint=CheckpointConfig(every="auto")
    )
    over = {}
    for an_hour in (0.1, 0.3, 1.0):
        random, hazard = Random(round(1000 * an_hour)), an_hour / 3600
        seconds = 0.0
        for _ in range(CADENCE_RUNS):
            saved, batch, cadence = 0, 0, Cadence(config, life_hours=1 / an_hour)
            until_loss = random.expovariate(hazard)
            while saved < CADENCE_BATCHES:
                is_due = cadence.is_due(batch + 1)
                lasts = BATCH_S + (WRITE_S if is_due else 0.0)
                if lasts > until_loss:
                    seconds += until_loss + RESTART_S
                    batch, cadence, until_loss = (
                        saved,
                        Cadence(config, life_hours=1 / an_hour),
                        random.expovariate(hazard),
                    )
                    continue
                seconds, until_loss, batch = seconds + lasts, until_loss - lasts, batch + 1
                cadence.trained(batch, 1000 * BATCH_S, 1000 * WRITE_S if is_due else None)
                saved = batch if is_due else saved
        lost = seconds / (CADENCE_RUNS * CADENCE_BATCHES * BATCH_S) - 1
        least = min(
            (1 / hazard + RESTART_S) * math.expm1(hazard * (n * BATCH_S + WRITE_S)) / (n * BATCH_S) - 1
            for n in range(1, 200)
        )
        over[f"{an_hour:g} an hour"] = lost / least
    return over


def ranks_back() -> dict[str, float]:
    """Return the seconds from the loss of one of three nodes of a trainer until the other two have trained a batch.

    `ranks_gradient_difference`: largest relative difference of the gradient's norm in that batch from a run without a
    loss. Nodes are processes of this machine.
    """
    with tempfile.TemporaryDirectory() as name:
        undisturbed, _ = three_nodes(Path(name) / "undisturbed", None)
        back = {}
        differences = []
        for lost in (signal.SIGKILL, signal.SIGSTOP):
            done, back[lost.name] = three_nodes(Path(name) / lost.name, lost)
            first = next(event for event in done if event.ranks == 2)
            norms = [event.health["gradient_norm"] for event in (first, undisturbed[first.iteration])]
            differences.append(abs(norms[0] - norms[1]) / norms[1])
    return {
        "ranks_back_s": max(back.values()),
        **{f"ranks_back_s_{how}": seconds for how, seconds in back.items()},
        "ranks_gradient_difference": max(differences),
    }


def trainer_figures(raw: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of the result from the raw figures of all places.

    `promotion_s` and `cold_s`: local the median, on clouds the 95th percentile.
    """
    figures: dict[str, Any] = {"promotion_s": {}, "cold_s": {}, "promotion_s_each": {}, "cold_s_each": {}}
    for place in ("local", "aws", "gcp"):
        for key in ("promotion_s", "cold_s"):
            each = [seconds for one in raw if one["place"] == place for seconds in one[key]]
            if each:
                figures[f"{key}_each"][place] = each
                figures[key][place] = statistics.median(each) if place == "local" else p95(each)
    for key in ("iterations_doubled", "usd_over_limit", "spot_token_before_promotion"):
        figures[key] = sum(one[key] for one in raw)
    return figures


# --- the page -----------------------------------------------------------------------------------------


def p90(values: list[float]) -> float:
    return sorted(values)[max(0, -(-9 * len(values) // 10) - 1)]


def p95(values: Sequence[float]) -> float:
    """Return the smallest value that at least 95 % of the values do not exceed."""
    return sorted(values)[max(0, -(-95 * len(values) // 100) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line always is")
    parser.add_argument(
        "--make", choices=["nodes", "trainer", "page"], help="only raw files of --places, or only the page"
    )
    parser.add_argument("--places", default="local,aws,gcp")
    parser.add_argument("--runs", type=int, default=3, help="losses of each kind at each place")
    parser.add_argument("--number", type=int, default=2, help="of the raw files that --make trainer writes")
    parser.add_argument("--runtime", choices=["local", "ray"], default="ray", help="of --make nodes")
    parser.add_argument("--cache", type=Path, help="where the hosts' image is kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its nodes end too
    load, places = load_now(), []
    for name in options.places.split(","):
        if name != "local" and (reason := why_not()) is not None:
            print(f"{name} is left out: {reason}", file=sys.stderr)
        else:
            places.append(name)
    if options.make == "nodes":
        write_raw("nodes", nodes_lost(places, options) | origin(load) | {"runs": options.runs, "commit": commit_now()})
        return
    for name in places if options.make != "page" else ():
        # Each cloud takes about seven minutes, so of its figures one file is made again.
        is_whole = name == "local" or options.make is not None
        promotions, cold = (options.runs, options.runs) if is_whole else (2, 1)
        number = options.number if options.make else 1
        write_raw(f"trainer-{name}-{number}", trainer_at(name, promotions, cold, options.cache))
    if options.make in (None, "page"):
        page(options, load)


def write_raw(name: str, figures: Mapping[str, Any]) -> None:
    RAW.mkdir(exist_ok=True)
    (RAW / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def nodes_lost(places: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure the losses of spot nodes that roll out."""
    result: dict[str, Any] = {}
    rows = []
    for name in places:
        gpu, more = ("L40S:1", "") if name == "local" else ("L4:1", cloud_lines(name))
        text = JOB.format(run=RUN, infra=name, runtime=options.runtime, gpu=gpu, more=more)
        with here(text) if name == "local" else there(name, text, options.cache) as place:
            for notice in (True, False):
                manner = "notice" if notice else "silent"
                found = []
                for _ in range(options.runs):
                    found.append(measure(place, notice))
                    print(name, manner, json.dumps(found[-1]), file=sys.stderr, flush=True)
                result[f"{name} {manner}"] = _summary(found, manner)
                whole = [*PARTS, "setup_s", "uncovered_s"]
                rows.append(
                    {"where": f"{name}, {manner}"} | {part: spread([one[part] for one in found]) for part in whole}
                )
    return result | {"table": rows}


def page(options: argparse.Namespace, load: float) -> None:
    """Publish the stored figures and those made now."""
    nodes = json.loads((RAW / "nodes.json").read_text())
    files = [RAW / "nodes.json", *sorted(RAW.glob("trainer-*.json"))]
    trainer = trainer_figures([json.loads(file.read_text()) for file in files[1:]])
    rows = [
        {
            "where": f"{place}, the trainer, {words}",
            **dict.fromkeys((*PARTS, "setup_s"), ""),
            "uncovered_s": spread(each),
        }
        for key, words in (("promotion_s", "a node that is up takes its role"), ("cold_s", "a new node does"))
        for place, each in trainer[f"{key}_each"].items()
    ]
    cadence, ranks = cadence_over_closed_form(), ranks_back()
    of_nodes = {key: value for key, value in nodes.items() if key.startswith(("local", "aws", "gcp"))}
    publish(
        "recovery",
        question="how long is a lost spot node missed, and what does each part of replacing it take?",
        command="python -m tests.benchmarks.recovery --json",
        result=of_nodes
        | trainer
        | {"cadence_over_closed_form": cadence}
        | ranks
        | {"made_at": {file.stem: json.loads(file.read_text())["commit"] for file in files}},
        runs=options.runs,
        seeds=[0],
        load1=load,
        rows=[*nodes["table"], *rows],
        text=(
            "Measured: seconds, median (range). All hosts of a fake cloud share the cores of one machine, so what "
            "computes (set-up, imports) takes longer than on machines of their own; what waits for a cloud (boot, API) "
            "takes next to nothing here and a minute or more there. `uncovered_s`: from the old node's end to its "
            "successor's first finished request; of the trainer, from its end on record until a worker has asked the "
            "next trainer for work. Where a new node becomes the trainer, all nodes were lost at once. `setup_s` = "
            "wait_s + environment_s + agent_s, from the bundle on the node to its agent. On fake hosts uv links from a "
            "cache that all hosts share; an estimate for CUDA's libraries on real disks is in docs/clouds.md.\n\n"
            "Made again in each run: all losses of the trainer on this machine, and of each fake cloud the first file. "
            f"Other figures are from [recovery/](recovery/); spot nodes that roll out: commit {nodes['commit']}.\n\n"
            "`checkpoint.every: auto` with full weights, simulated with the shipped class: the share of time lost to "
            f"checkpoints of {WRITE_S:.0f} s, restarts of {RESTART_S:.0f} s and batches made again, over the least of "
            "Daly's closed form: "
            + ", ".join(f"{over:.2f} at {hazard}" for hazard, over in cadence.items())
            + " (target 1.3). A batch takes "
            f"{BATCH_S:.0f} s; these seconds are assumed.\n\n"
            f"A trainer of three nodes with LoRA trains on without a lost one: {ranks['ranks_back_s_SIGKILL']:.0f} s "
            f"after the node was killed, and {ranks['ranks_back_s_SIGSTOP']:.0f} s after it was frozen, the other two "
            "had trained a batch (target 70), with a gradient that differs by "
            f"{ranks['ranks_gradient_difference']:.0e} from that of three.\n\n"
            f"{before_text(json.loads(BEFORE.read_text('utf-8')))}"
        ),
    )


def before_text(before: Mapping[str, Any]) -> str:
    """Return earlier medians in words. `before`: the result of an earlier run, whose parts of the set-up were one."""
    setup = ", ".join(
        f"{case} {before[case]['setup_s']['median']:.1f} s" for case in before if case.startswith(("aws", "gcp"))
    )
    imports = before["local notice"]["imports_s"]["median"]
    return (
        f"Before the run's bucket kept the environment (commit 16a1a7c, 2026-11-22, three losses each), `setup_s` was: "
        f"{setup}. The speed of that computer: the imports of `local, notice` took {imports:.1f} s."
    )


def _summary(found: list[dict[str, float]], manner: str) -> dict[str, object]:
    both = [one["detect_s"] + one["decide_s"] for one in found]
    figures = {
        part: {"median": statistics.median(one[part] for one in found), "p90": p90([one[part] for one in found])}
        for part in (*PARTS, "setup_s", "total_s", "uncovered_s")
    }
    off = max(abs(sum(one[part] for part in PARTS) - one["total_s"]) for one in found)
    return {
        **figures,
        "runs": len(found),
        "detect_and_decide_p90_s": p90(both),
        "limit_s": LIMITS[manner],
        "kept": p90(both) <= LIMITS[manner],
        "parts_off_by_s": off,
    }


if __name__ == "__main__":
    main()
