"""preemption: what does it cost to lose a node in the middle of a rollout, and how soon does its work go on?

    python -m tests.benchmarks.preemption --json

Rollouts on three spot nodes that are lost one after the other: killed or frozen, with and without notice, each in the
middle of a lease. Then, with one idle node, the time from the signal to the next finished step of a lost request.
Nodes are real agents and processes, on the local runtime and on a Ray cluster.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.config import EngineConfig, RewardConfig, RuntimeConfig, SamplerConfig
from engine.diffusion.trajectory import Trajectory
from tests.benchmarks.page import load_now, publish
from tests.conformance.cluster import ClusterStage
from tests.conformance.drill import Batch, Drill
from tests.conformance.stage import Step
from tests.conformance.undisturbed import equal

STEPS = 20
SHAPE = 2
NODES = 3
STEP_SECONDS = 0.2
COMMIT_EVERY = 3

NOTICE_SECONDS = 1.0
ZOMBIE_SECONDS = 5.0
"""Seconds after its loss at which a frozen node wakes up; it is ended soon after."""

LIMITS = {
    "local worker SIGKILL": 0.3,
    "local node SIGKILL": 0.3,
    "local node SIGSTOP": max(2.0, 4 * STEP_SECONDS) + 0.5,
    "ray actor SIGKILL": 0.5,
    "ray node SIGKILL": 3.0,
    "ray node SIGSTOP": 4.0,
}
"""Promised limit: seconds from the signal to the next finished step of a lost request."""


def config(runtime: Literal["local", "ray"], heartbeat_seconds: float) -> EngineConfig:
    return EngineConfig(
        sampler=SamplerConfig(steps=STEPS),
        reward=RewardConfig(name="brightness:brightness"),
        runtime=RuntimeConfig(
            name=runtime,
            shape=SHAPE,
            step_seconds=STEP_SECONDS,
            commit_every=COMMIT_EVERY,
            heartbeat_seconds=heartbeat_seconds,
            trace_steps=True,
        ),
    )


@contextmanager
def drill_of(runtime: Literal["local", "ray"], *, heartbeat_seconds: float = 0.5) -> Iterator[Drill]:
    """Start three nodes of a runtime, and wait until they have weights."""
    with tempfile.TemporaryDirectory() as folder:
        stage = ClusterStage(Path(folder), config(runtime, heartbeat_seconds))
        try:
            drill = Drill(stage)
            drill.need(NODES, spare=0)
            yield drill
        finally:
            stage.close()


# --- losses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One lost node and its work at the loss."""

    how: Literal["kill", "freeze"]
    is_noticed: bool
    hit: Step

    def __str__(self) -> str:
        return f"{self.how}, {'with' if self.is_noticed else 'without'} notice"


def lose_nodes(drill: Drill, batch: Batch, losses: int, seed: int) -> list[Loss]:
    """Kill or freeze nodes in the middle of their work and replace each at once; frozen ones wake up as zombies."""
    dice = random.Random(seed)
    lost: list[Loss] = []
    zombies: list[tuple[float, str]] = []
    for number in range(losses):
        loss = Loss(
            how="freeze" if number % 2 else "kill",
            is_noticed=number % 4 >= 2,
            hit=drill.in_the_middle(batch, dice.randint(1, STEPS - 4)),
        )
        lost.append(loss)
        if loss.is_noticed:
            drill.stage.notice(loss.hit.node, NOTICE_SECONDS)
            time.sleep(NOTICE_SECONDS)
        if loss.how == "kill":
            drill.stage.kill(loss.hit.node)
            drill.lose(loss.hit.node)
        else:
            drill.stage.freeze(loss.hit.node)
            drill.replace(loss.hit.node)
            zombies.append((time.monotonic() + ZOMBIE_SECONDS, loss.hit.node))
        drill.need(NODES, spare=0)
        time.sleep(dice.uniform(0.0, 4.0))
        for zombie in [zombie for zombie in zombies if time.monotonic() > zombie[0]]:
            zombies.remove(zombie)
            drill.stage.thaw(zombie[1])
            time.sleep(4 * STEP_SECONDS)
            drill.stage.forget(zombie[1])
    return lost


def measure_losses(rollouts: int, losses: int, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with drill_of("local") as drill:
        batch = drill.submit(rollouts)
        lost = lose_nodes(drill, batch, losses, seed)
        finished = len(drill.collect(batch)[0])
        if finished == rollouts:
            raise RuntimeError(f"all {rollouts} rollouts were finished before {losses} losses; use more --rollouts")
        found, blobs = drill.collect_all(batch, seconds=600.0)
        steps = drill.steps(batch)
        expected = drill.undisturbed.results(batch.requests, drill.version)
        same = [
            equal(Trajectory.from_bytes(blobs[str(result.trajectory)]), expected[result.request][0])
            and result.score.reward == expected[result.request][1]
            for result in found
        ]
    unique = {result.request for result in found}
    taken_over = {loss: repeated(steps, loss.hit.lease) for loss in lost}
    rows = []
    for name in dict.fromkeys(map(str, lost)):
        mine = [loss for loss in lost if str(loss) == name]
        counts = [max(taken_over[loss]) for loss in mine if taken_over[loss]]
        rows.append(
            {
                "loss": name,
                "losses": len(mine),
                "whose work another node went on with": len(counts),
                "steps repeated, a picture: median (most)": f"{statistics.median(counts):g} ({max(counts)})",
            }
        )
    result = {
        "rollouts": len(batch.requests),
        "losses": len(lost),
        "losses_above_step_0": dict(Counter(str(loss) for loss in lost if taken_over[loss])),
        "lost": len(set(batch.requests) - unique),
        "duplicated": len(found) - len(unique),
        "bit_identical": all(same),
        "steps_repeated_with_notice": max(c for loss in lost if loss.is_noticed for c in taken_over[loss]),
        "steps_repeated_without_notice": max(c for loss in lost if not loss.is_noticed for c in taken_over[loss]),
        "commits_resumed_from": resumed_from_commits(steps),
        "padded_share": sum(SHAPE - len(step.seeds) for step in steps) / (SHAPE * len(steps)),
    }
    return result, rows


def repeated(steps: list[Step], lease: int) -> list[int]:
    """Return the repeated steps of each image of a lost lease; empty if the lease was finished."""
    mine = [step for step in steps if step.lease == lease]
    reached = max(step.step for step in mine)
    counts = []
    for seed in mine[0].seeds:
        later = [step for step in steps if seed in step.seeds and step.lease > lease]
        if later:
            counts.append(max(0, reached - min(later, key=lambda step: (step.lease, step.step)).step + 1))
    return counts


def resumed_from_commits(steps: list[Step]) -> int:
    """Return the number of leases that did not begin with an image's first step."""
    first: dict[int, int] = {}
    for step in steps:
        first.setdefault(step.lease, step.step)
    return sum(1 for step in first.values() if step > 1)


# --- time until work continues ----------------------------------------------------------------------------


def measure_resumes(runtime: Literal["local", "ray"], runs: int) -> dict[str, list[float]]:
    """Return the seconds from the signal to the next finished step of a lost request, by the lost process."""
    seconds: dict[str, list[float]] = defaultdict(list)
    kinds = ("worker SIGKILL" if runtime == "local" else "actor SIGKILL", "node SIGKILL", "node SIGSTOP")
    # Workers call after every step. Otherwise a silent lease looks slow, and the idle node copies it.
    with drill_of(runtime, heartbeat_seconds=0.75 * STEP_SECONDS) as drill:
        drill.assert_whole(drill.submit(NODES * SHAPE))  # everything is warmed up
        for what in kinds:
            tries = 0
            while len(seconds[f"{runtime} {what}"]) < runs:
                tries += 1
                if tries > 3 * runs:
                    raise RuntimeError(f"{what}: the work was nearly always copied before it was lost")
                found = measure_resume(drill, what)
                if found is not None:
                    seconds[f"{runtime} {what}"].append(found)
    return seconds


def measure_resume(drill: Drill, what: str) -> float | None:
    """Measure one loss. Return None if the idle node already made the same images as a speculative copy."""
    drill.need(NODES, spare=0)
    time.sleep(1.0)
    batch = drill.submit((NODES - 1) * SHAPE)
    hit = drill.in_the_middle(batch, COMMIT_EVERY + 1)
    others = [step for step in drill.steps(batch) if step.lease != hit.lease and step.seeds == hit.seeds]
    signalled = time.time_ns()
    if what == "node SIGSTOP":
        drill.stage.freeze(hit.node)
    elif what == "node SIGKILL":
        drill.stage.kill(hit.node)
    else:
        drill.stage.kill(f"{hit.node}/worker-0")
    drill.collect_all(batch)
    later = [s for s in drill.steps(batch) if s.lease > hit.lease and set(s.seeds) & set(hit.seeds)]
    drill.assert_whole(batch)
    if what.startswith("node"):
        drill.lose(hit.node)
    else:
        drill.works(hit.node)
    seconds = (later[0].at_ns - signalled) / 1e9 if later else 0.0
    return None if others or seconds < STEP_SECONDS else seconds


# --- the page -----------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line (always done)")
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--losses", type=int, default=32)
    parser.add_argument("--resumes", type=int, default=5, help="measured resumes of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    load1 = load_now()
    result, rows = measure_losses(options.rollouts, options.losses, options.seed)
    resumes = measure_resumes("local", options.resumes) | measure_resumes("ray", options.resumes)
    result["resume_s"] = {
        name: {"median": statistics.median(values), "worst": max(values), "n": len(values), "limit": LIMITS[name]}
        for name, values in resumes.items()
    }
    resume_rows = "\n".join(
        f"| {name} | {v['median']:.2f} ({v['worst']:.2f}) | {v['n']} | {v['limit']:g} |"
        for name, v in result["resume_s"].items()
    )
    publish(
        "preemption",
        question="what does it cost to lose a node in the middle of a rollout, and how soon does its work go on?",
        command="python -m tests.benchmarks.preemption --json",
        result=result,
        runs=1,
        seeds=[options.seed],
        load1=load1,
        rows=rows,
        text=f"""
Measured: {options.rollouts} rollouts of {STEPS} steps on {NODES} local spot nodes, {SHAPE} pictures a forward pass, a
step paced to take {STEP_SECONDS} s (the digits model alone takes 6 ms), a commit every {COMMIT_EVERY} steps. A loss is
a signal to every process of a node, with a notice {NOTICE_SECONDS:g} s before it or none; a replacement was up at
once, because here agents are forked from a process that has imported everything. A frozen node wakes up after
{ZOMBIE_SECONDS:g} s and is fenced. `bit_identical`: latents, log-probs and rewards of every rollout against one process
that makes them one after the other. Steps come from the workers' own traces (`runtime.trace_steps`).

From the signal to the next finished step of a lost request, seconds:

| lost | median (worst) | n | limit |
| --- | --- | --- | --- |
{resume_rows}

For these, two of three nodes work and one stands by with nothing to do; workers call in after every step; and the step
itself takes {STEP_SECONDS} s of each figure. The node that stands by makes the work of a frozen node again as soon as
that is slower than usual (tail duplication), before its lease has ended. When every node is busy, lost work waits for
the first lease that ends, which is what the queue is for.
""",
    )


if __name__ == "__main__":
    main()
