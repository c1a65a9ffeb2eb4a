"""A trainer of two nodes, lost in turn in every way: the batches and weights of two ranks on one node."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from engine.events import CheckpointSaved, IterationDone
from launcher.decide.facts import OVER
from launcher.ledger.accounting import run_costs
from launcher.ledger.store import find_run, nodes_of, progress_of
from launcher.provision.local.processes import processes_of
from launcher.runs.views import RunView
from tests.end_to_end.test_launch import Bench
from tests.end_to_end.test_rank_survival import replace, trained_by
from tests.engine.fleet import newest_pid

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NAME = "ranks"
KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP
JOB = """
name: {name}
infra: local
clock_factor: 60
preemptions: {{trace: none}}
iterations: {iterations}
prompts: digits
reward: ocr
model: {{name: digits-ocr, weights: {weights}, lora_rank: 4}}
algorithm: {{name: diffusion-nft, prompts_per_batch: 4, images_per_prompt: 4, updates_per_batch: 2, order: fixed}}
exploration: {{mode: none}}
evaluation: {{prompts: 16, every: 100}}
runtime: {{shape: 8, lease_seconds: 2, heartbeat_seconds: 0.5, trainer_threads: 1, trainer_ranks: 2}}
resources:
  trainer: {{accelerators: "L40S:1", num_nodes: {trainers}}}
  rollout: {{accelerators: "L40S:1", use_spot: true, num_nodes: 1}}
budget: {{max_total: $1000, max_hourly: $20}}
"""

BETWEEN = 2
"""New iterations before the next loss. The first of them may have been trained before the loss took effect."""

Hit = tuple[str, str, signal.Signals]
"""A loss: node, process (empty: every process of the node), signal."""

HITS: tuple[Hit, ...] = (
    ("trainer-1-g0", "trainer-rank-1", KILL),
    ("trainer-1-g0", "trainer-rank-1", FREEZE),
    ("trainer-g0", "trainer", KILL),
    ("trainer-g0", "trainer", FREEZE),
    ("trainer-1-g0", "agent", KILL),
    ("trainer-1-g1", "", FREEZE),
    ("trainer-1-g2", "agent", FREEZE),
    ("trainer-g0", "", KILL),
)
ITERATIONS = BETWEEN * (len(HITS) + 1)


@pytest.fixture
def benches(tmp_path: Path) -> Iterator[tuple[Bench, Bench]]:
    """Two users, because the same run name gives the same noise."""
    both = []
    for name in ("calm", "lossy"):
        (tmp_path / name).mkdir()
        both.append(Bench(tmp_path / name))
    yield both[0], both[1]
    for bench in both:
        for process in bench.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def launched(bench: Bench, weights: str, trainers: int, hits: Sequence[Hit] = ()) -> tuple[dict[int, str], str, bytes]:
    """Launch a run, and lose nodes and ranks in turn.

    Returns the manifests by batch, the digest of the last checkpoint, and the weights that a user pulls.
    """
    job = JOB.format(name=NAME, weights=weights, trainers=trainers, iterations=ITERATIONS)
    (bench.folder / "job.yaml").write_text(job)
    bench.spotrl("launch", "job.yaml", "--yes", "--detach")
    nodes, reached = bench.folder / "state" / "runs" / NAME / "nodes", 0
    for node, process, number in hits:
        reached = bench.wait_for(NAME, after(reached + BETWEEN)).iteration
        for pid in pids_of(nodes / f"{NAME}-{node}", process):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    ended = bench.wait_for(NAME, lambda run: run.status in OVER)
    assert (ended.status, ended.iteration) == ("finished", ITERATIONS), ended
    bench.spotrl_here("pull", NAME, "--to", str(bench.folder / "pulled"))
    with bench._sessions() as session:
        run = find_run(session, NAME)
        done = [(row.lineage, row.seq, row.event) for row in progress_of(session, run, IterationDone.KIND)]
        saved = [(row.lineage, row.seq, row.event) for row in progress_of(session, run, CheckpointSaved.KIND)]
    manifests = {event["iteration"]: event["manifest_digest"] for *_, event in sorted(done, key=lambda one: one[:2])}
    pulled = (bench.folder / "pulled" / "weights.safetensors").read_bytes()
    return manifests, max(saved, key=lambda one: one[:2])[2]["digest"], pulled


def after(iteration: int) -> Callable[[RunView], bool]:
    return lambda run: run.iteration >= iteration or run.status in OVER


def pids_of(folder: Path, process: str) -> Sequence[int]:
    agent = json.loads((folder / "agent.json").read_text())
    match process:
        case "":
            return processes_of(folder, agent)
        case "agent":
            return [agent["pid"]]
        case _:
            return [newest_pid(folder / "logs" / f"{process}.log")]


def test_a_frozen_node_is_noticed_by_its_silence_and_ends_when_it_wakes_up_too_late(tmp_path: Path) -> None:
    calm = trained_by(tmp_path / "calm", [])
    in_turn = [
        lambda fleet: os.kill(fleet.pid_of("ranks-1", "trainer-rank-1"), KILL),
        replace("ranks-1", FREEZE, "ranks-1-g1", after="nodes [1] are silent"),
        lambda fleet: fleet.signal_node("ranks-1", signal.SIGCONT),
        replace("trainer", KILL, "trainer-g1"),
    ]
    assert trained_by(tmp_path / "lost", in_turn, trainer_nodes=2, ends=["ranks-1", "ranks-1-g1"]) == calm


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_launch_that_loses_ranks_and_nodes_of_its_trainer_trains_the_same(
    benches: tuple[Bench, Bench], weights: str
) -> None:
    """Ranks of both nodes die and freeze; then each node is lost, and bought again, also if only its agent is lost."""
    calm, lossy = benches
    assert launched(lossy, weights, 2, HITS) == launched(calm, weights, 1)
    assert lossy.processes() == []
    with lossy._sessions() as session:
        run = find_run(session, NAME)
        bought = nodes_of(session, run)
        costs = run_costs(session, run, run.clock.now_ms())
    lives = [(node.slot, node.generation) for node in bought if node.role != "rollout"]
    assert sorted(lives) == [("trainer", 0), ("trainer", 1), *(("trainer-1", n) for n in range(4))]
    assert len({node.zone for node in bought if node.role != "rollout"}) == 1
    assert set(costs.by_node) == {node.name for node in bought}, "every node is billed"
    assert sum(costs.by_role.values()) == sum(costs.by_node.values()) == costs.total
    assert costs.by_role["ranks"] > 0
    last = next(node for node in costs.nodes if (node.slot, node.generation) == ("trainer-1", 3))
    assert last.phase_ms["training"] > 0
