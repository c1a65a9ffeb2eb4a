"""iteration: what does an iteration cost on the local cluster, against one plain process on all cores?

    python -m tests.benchmarks.iteration --json

`ours`: a trainer node and spot nodes as real processes, queue, HTTP, journal and checkpoints included.
`plain`: the same batch in one process whose torch uses all cores: sample everything in one batch, read it with the
batched recogniser, train, no queue, no checkpoint. Both are synchronous and without exploration; they take turns.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from engine.algorithm.advantages import group_advantages
from engine.algorithm.flow_grpo import clipped_loss
from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, EvaluationConfig, ExplorationConfig, RuntimeConfig
from engine.diffusion.sampler import advance, initial, log_prob, policy, rollout_plan
from engine.models.load import load_adapter, trainable
from engine.prompts import prompt_source
from engine.protocol.request import Stream, seed_of
from engine.rewards.load import load_reward
from tests.benchmarks.page import load_now, publish, spread
from tests.engine.fleet import Fleet

WARM_UP = 3
"""Iterations that are not counted: they warm up caches and allocators."""

BUSY = ("rollout", "training", "checkpoint", "exploration", "evaluation", "sync")


def engine_config(iterations: int, shape: int) -> EngineConfig:
    return EngineConfig(
        iterations=iterations,
        algorithm=AlgorithmConfig(prompts_per_batch=12, images_per_prompt=4, updates_per_batch=2),
        exploration=ExplorationConfig(mode="none"),
        evaluation=EvaluationConfig(prompts=16, every=1000),
        runtime=RuntimeConfig(shape=shape),
    )


def ours(folder: Path, iterations: int, *, spot_nodes: int, shape: int) -> tuple[list[float], Counter[str]]:
    """Return the seconds of each counted iteration, and node-milliseconds by phase of the whole run."""
    fleet = Fleet(folder, engine_config(iterations + WARM_UP, shape))
    try:
        for number in range(spot_nodes):
            fleet.start(f"spot-{number}")
        time.sleep(8.0)  # workers are up before the trainer begins, so that every iteration has the whole cluster
        fleet.start("trainer")
        fleet.wait_until_finished(every=0.5)
        time.sleep(1.5)  # the coordinator reports usage once a second
        seconds = [event.wall_seconds for event in fleet.events("iteration_done")][WARM_UP:]
        phases: Counter[str] = Counter()
        for event in fleet.events("node_usage", "coordinator"):
            phases.update(event.phase_ms)
        phases.pop("evaluation", None)
        return seconds, phases
    finally:
        fleet.close()


class Plain:
    """The same iteration in the simplest form: one process, one big batch, all cores."""

    def __init__(self) -> None:
        self.config = engine_config(1, 12)
        self.adapter = load_adapter(self.config.model)
        self.parameters = list(trainable(self.adapter).values())
        self.reward = load_reward(self.config.reward, None)
        self.prompts = prompt_source(self.config, None)
        algorithm = self.config.algorithm
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=algorithm.learning_rate,
            betas=algorithm.adam_betas,
            weight_decay=algorithm.weight_decay,
            fused=True,
        )

    def iterate(self, batch: int) -> tuple[float, dict[str, float]]:
        """Do one iteration. Return its seconds and those of its phases."""
        algorithm = self.config.algorithm
        begun = time.perf_counter()
        plan = rollout_plan(self.config.sampler, 0, batch)
        prompts = [p for p in self.prompts.batch(batch) for _ in range(algorithm.images_per_prompt)]
        seeds = [seed_of(0, Stream.TRAIN, batch, p, i % algorithm.images_per_prompt) for i, p in enumerate(prompts)]
        conditioning = self.adapter.encode(prompts)
        x = initial(seeds, self.adapter.latent_shape())
        path, old = [x], []
        for step in range(plan.steps):
            x, probability = advance(self.adapter, plan, conditioning, seeds, x, step)
            path.append(x)
            old.append(probability)
        sampled = time.perf_counter()
        scores = self.reward(self.adapter.decode(x), prompts)
        rewards = torch.tensor([score.reward for score in scores]).view(algorithm.prompts_per_batch, -1)
        advantages = group_advantages(rewards).flatten()
        scored = time.perf_counter()
        for part in torch.arange(len(prompts)).chunk(algorithm.updates_per_batch):
            self.optimizer.zero_grad(set_to_none=True)
            some = {name: value[part] for name, value in conditioning.items()}
            for step in plan.trained_steps:
                at = torch.full((len(part),), step)
                mean, std = policy(self.adapter, plan, some, path[step][part], at)
                new = log_prob(path[step + 1][part], mean, std)
                ratio = (new - old[step][part]).exp()
                loss = clipped_loss(ratio, advantages[part], algorithm.clip_range)
                (loss.mean() / len(plan.trained_steps)).backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, algorithm.gradient_clip)
            self.optimizer.step()
        ended = time.perf_counter()
        phases = {"rollout": sampled - begun, "score": scored - sampled, "training": ended - scored}
        return ended - begun, phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spot-nodes", type=int, default=1, help="with the trainer: one node per core on two cores")
    parser.add_argument("--shape", type=int, default=24)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    torch.set_num_threads(os.cpu_count() or 1)
    plain = Plain()
    our_rounds, plain_rounds, phases, plain_phases = [], [], Counter[str](), Counter[str]()
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds, spent = ours(Path(folder), options.iterations, spot_nodes=options.spot_nodes, shape=options.shape)
        our_rounds.append(statistics.median(seconds))
        phases.update(spent)
        measured = [plain.iterate(100 * number + i) for i in range(options.iterations + WARM_UP)][WARM_UP:]
        plain_rounds.append(statistics.median(second for second, _ in measured))
        for _, parts in measured:
            plain_phases.update({name: round(1000 * value) for name, value in parts.items()})
    count = options.rounds * options.iterations
    whole = options.rounds * (options.iterations + WARM_UP)
    ratios = [theirs / mine for mine, theirs in zip(our_rounds, plain_rounds, strict=True)]
    seconds_per_iteration = statistics.median(our_rounds)
    busy = sum(phases[name] for name in BUSY)
    result: dict[str, Any] = {
        "seconds_per_iteration": seconds_per_iteration,
        "plain_seconds_per_iteration": statistics.median(plain_rounds),
        "speedup_vs_plain": statistics.median(ratios),
        "overhead_share": phases["sync"] / busy,
        "phase_seconds": {name: phases[name] / 1000 / whole for name in BUSY if phases[name]},
        "plain_phase_seconds": {name: value / 1000 / count for name, value in plain_phases.items()},
        "pictures_per_s": 48 / seconds_per_iteration,
        "spot_nodes": options.spot_nodes,
        "shape": options.shape,
    }
    publish(
        "iteration",
        question="what does an iteration cost on the local cluster, against one plain process on all cores?",
        command="python -m tests.benchmarks.iteration --json",
        result=result,
        runs=options.rounds,
        seeds=[0],
        load1=load1,
        rows=[
            {"arm": "ours", "s per iteration, median (range) of rounds": spread(our_rounds)},
            {"arm": "plain", "s per iteration, median (range) of rounds": spread(plain_rounds)},
            {"arm": "plain / ours", "s per iteration, median (range) of rounds": spread(ratios)},
        ],
        text=f"""
Measured: 48 pictures and 2 optimiser steps an iteration, {options.iterations} counted iterations a round, the arms
taking turns. `ours` = trainer + {options.spot_nodes} spot node(s) with {options.shape} pictures to a forward pass, with
journal, checkpoint and publication of weights in every iteration, which `plain` does not do. Rollout is split over the
nodes, one thread each; the trainer trains with all cores, as nobody explores beside it. The reward's recogniser runs on
one thread in both arms, as it ships: giving `plain` a recogniser on all cores would shorten its `score` phase and
shrink the ratio, which is not measured here.
`overhead_share` is the time that workers and trainer spend talking to the coordinator, loading and publishing weights,
of all their busy time (phase `sync`); a spot node that has nothing to do while the trainer trains is not in it: that
time is what exploration is for.
`phase_seconds` are node-seconds an iteration, warm-up included.
""",
    )


if __name__ == "__main__":
    main()
