"""staleness: what does it cost if rollouts come from the weights of one batch before?

    python -m tests.benchmarks.staleness --run ARM --seed N    one run; its raw file is kept and never made twice
    python -m tests.benchmarks.staleness --json                the page, from the raw files

A run is one process on one thread (algorithm_runs.py). Before the trainer publishes new weights, a share of the next
batch's groups is rolled out with the weights from before. Spotlight and DigenRL call such rollouts asynchronous: they
save the wait for new weights.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.algorithm.diffusion_nft import DiffusionNft
from engine.algorithm.objective import FinishedGroup, Rows
from engine.clock import ScaledClock
from engine.config import EngineConfig
from engine.diffusion.sampler import Plan, batch_plan
from engine.entrypoints.inproc import build_inproc
from engine.models.adapter import DiTAdapter
from engine.models.weights import exchanged, read_tensors
from engine.protocol.request import Kind, WeightsKey
from engine.rewards.load import load_reward
from engine.storage.tensor_files import TensorFile
from engine.trainer.loop import Loop
from tests.benchmarks.algorithm_runs import Arm as AlgorithmArm
from tests.benchmarks.algorithm_runs import commit_now, config_of, this_computer
from tests.benchmarks.algorithms import SETTINGS
from tests.benchmarks.page import RESULTS, load_now, publish

RAW = RESULTS / "staleness"
SEEDS = tuple(range(201, 206))
"""Seeds, fixed before the first run."""
ITERATIONS, EVERY, HELD_OUT = 12, 4, 512
JUDGED = (8, 12)
"""Iterations whose evaluations are averaged: 512 held-out strings each."""
SHARES = (0.0, 0.25, 0.5, 1.0)
REMEDIED = 0.5
"""Share of stale groups for which remedies are tried."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An algorithm, the share of stale groups, and DiffusionNFT's remedy.

    `old`: the old policy of a stale group in DiffusionNFT's loss. `current`: the weights before the batch, as for every
    other group. `generating`: the weights that made the rollout.
    """

    algorithm: Mapping[str, Any]
    share: float
    old: str = "current"


def _remedies() -> dict[str, Arm]:
    nft = dict(SETTINGS["diffusion-nft"])
    larger = {**nft, "diffusion_nft": {**nft["diffusion_nft"], "beta": 0.3}}
    slower = {**nft, "learning_rate": nft["learning_rate"] / 2}
    return {
        "old policy of the rollout": Arm(algorithm=nft, share=REMEDIED, old="generating"),
        "beta 0.3": Arm(algorithm=larger, share=REMEDIED),
        "half the learning rate": Arm(algorithm=slower, share=REMEDIED),
    }


REMEDIES = _remedies()
ARMS: Mapping[str, Arm] = {
    **{f"{name} {share:g}": Arm(algorithm=SETTINGS[name], share=share) for name in SETTINGS for share in SHARES},
    **REMEDIES,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run did. `curve`: exact match by iteration. The first runs also evaluated iterations 0 and 4."""

    arm: str
    seed: int
    commit: str
    curve: Mapping[int, float]
    stale: int
    """Number of stale rollouts."""
    seconds: float
    where: Mapping[str, str]


class StaleRollouts:
    """Rolls out part of each batch too early: with the weights that the batch before was rolled out with."""

    def __init__(self, loop: Loop, config: EngineConfig, arm: Arm) -> None:
        self._loop, self._config, self._arm = loop, config, arm
        self._publish = loop._publish
        self.previous: Mapping[str, Tensor] = {}
        """Weights of the batch before. Empty in the first batch."""
        self._published: Mapping[str, Tensor] = {}
        self.prompts: frozenset[str] = frozenset()
        """Prompts of the stale groups of the open batch."""
        self.rollouts = 0
        loop._publish = self.publish  # type: ignore[method-assign]
        if arm.old == "generating":
            assert isinstance(loop.model.trainer.objective, DiffusionNft)
            loop.model.trainer.objective = OldByGroup(loop.model.trainer.objective, self, loop.model.parameters)

    def publish(self, file: TensorFile) -> None:
        iteration = self._loop.state.iteration
        if iteration > 0:
            self._roll_out(iteration)
        stored = file.open()
        self._publish(file)
        self.previous, self._published = self._published, read_tensors(stored)

    def _roll_out(self, batch: int) -> None:
        groups = self._loop.state.next_batch.groups
        stale = groups[: round(self._arm.share * len(groups))]
        self.prompts = frozenset(group.prompt for group in stale)
        requests = [one for one in self._loop.state.next_batch.requests() if one.prompt in self.prompts]
        self.rollouts += len(requests)
        self._loop.coordinator.submit(
            requests,
            batch_plan(self._config, batch),
            weights=WeightsKey(version=batch - 1),
            shape=self._config.runtime.shape,
        )
        have = 0
        while have < len(requests):
            have += len(self._loop.coordinator.collect(Kind.TRAIN, batch, have, wait=True).results)


class OldByGroup:
    """DiffusionNFT's objective, with the velocity of a stale group's own weights as its old velocity."""

    def __init__(self, inner: DiffusionNft, stale: StaleRollouts, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._inner, self._stale, self._parameters = inner, stale, parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def rows(self, group: FinishedGroup, advantages: Tensor, plan: Plan) -> Mapping[str, Tensor]:
        found = self._inner.rows(group, advantages, plan)
        is_stale = group.prompt in self._stale.prompts and bool(self._stale.previous)
        return {**found, "stale": torch.full_like(found["sigma"], float(is_stale))}

    def constants(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> Mapping[str, Tensor]:
        found = dict(self._inner.constants(adapter, plan, rows))
        stale = rows["stale"].bool()
        if stale.any():
            some = rows.at(stale.nonzero()[:, 0])
            with exchanged(self._parameters, dict(self._stale.previous)):
                own = adapter.velocity(some["x"], some["sigma"], some.conditioning, plan.guidance)
            found["old"] = found["old"].clone()
            found["old"][stale] = own
        return found


def run_arm(name: str, seed: int) -> Run:
    torch.set_num_threads(1)
    begun, arm = time.perf_counter(), ARMS[name]
    config = config_of(AlgorithmArm(algorithm=arm.algorithm), seed, ITERATIONS, every=EVERY, prompts=HELD_OUT)
    with tempfile.TemporaryDirectory() as folder:
        clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
        reward = load_reward(config.reward, None)
        loop = build_inproc(config, Path(folder), run="staleness", clock=clock, reward=reward, workers=1).loop
        stale = StaleRollouts(loop, config, arm)
        # The loop evaluates no iteration that has an entry. Only the judged evaluations are needed; each takes 20 s.
        skipped = [iteration for iteration in range(0, ITERATIONS, EVERY) if iteration not in JUDGED]
        loop.state.evaluations.extend((iteration, {}) for iteration in skipped)
        loop.run()
        curve = {iteration: metrics["exact_match"] for iteration, metrics in loop.state.evaluations if metrics}
    return Run(
        arm=name,
        seed=seed,
        commit=commit_now(),
        curve=curve,
        stale=stale.rollouts,
        seconds=time.perf_counter() - begun,
        where=this_computer(),
    )


def raw_file(arm: str, seed: int) -> Path:
    return RAW / f"{arm.replace(' ', '_')}-{seed}.json"


def exact(arm: str) -> dict[int, float]:
    """Return the mean exact match of the judged evaluations, by seed."""
    found = {}
    for seed in SEEDS:
        if raw_file(arm, seed).exists():
            curve = json.loads(raw_file(arm, seed).read_text())["curve"]
            found[seed] = statistics.mean(curve[str(iteration)] for iteration in JUDGED)
    return found


def loss(fresh: Mapping[int, float], stale: Mapping[int, float]) -> dict[str, float]:
    """Return fresh minus stale, paired by seed, with a 95 % bootstrap interval over seeds."""
    differences = [fresh[seed] - stale[seed] for seed in fresh if seed in stale]
    means = np.random.default_rng(0).choice(differences, size=(10_000, len(differences))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {"mean": statistics.mean(differences), "low": float(low), "high": float(high), "pairs": len(differences)}


def best_remedy(losses: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the remedy with the smallest mean loss."""
    name = min(losses, key=lambda one: losses[one]["mean"])
    return {"arm": name, **losses[name]}


def report() -> None:
    load1 = load_now()
    found = {name: exact(name) for name in ARMS}
    missing = [name for name, values in found.items() if len(values) < len(SEEDS)]
    if missing:
        sys.exit(f"runs are missing for {', '.join(missing)}; make them with --run ARM --seed N")
    algorithms = {
        name: {
            f"{share:g}": {
                "exact_match": list(found[f"{name} {share:g}"].values()),
                "loss": loss(found[f"{name} 0"], found[f"{name} {share:g}"]),
            }
            for share in SHARES
        }
        for name in SETTINGS
    }
    fresh = found["diffusion-nft 0"]
    remedies = {name: loss(fresh, found[name]) for name in REMEDIES}
    remedies["none"] = loss(fresh, found[f"diffusion-nft {REMEDIED:g}"])
    rows = [
        {
            "arm": name,
            "exact match": f"{statistics.mean(values.values()):.3f}",
            "loss against fresh": _shown(name, found),
        }
        for name, values in found.items()
    ]
    publish(
        "staleness",
        question="what does it cost if rollouts come from the weights of one batch before?",
        command="python -m tests.benchmarks.staleness --json",
        result={"algorithms": algorithms, "remedies": remedies, "best_stale_remedy": best_remedy(remedies)},
        runs=sum(map(len, found.values())),
        seeds=SEEDS,
        load1=load1,
        rows=rows,
        text=TEXT,
    )


def _shown(name: str, found: Mapping[str, Mapping[int, float]]) -> str:
    fresh = "diffusion-nft 0" if name in REMEDIES else f"{name.rsplit(' ', 1)[0]} 0"
    value = loss(found[fresh], found[name])
    return f"{value['mean']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"


TEXT = f"""
Measured on digits-ocr: exact match on 512 held-out strings, mean of the evaluations at iterations {JUDGED[0]} and
{JUDGED[1]}. An arm is an algorithm and the share of groups that were rolled out with the weights of one batch before.
Remedies are tried with DiffusionNFT at a share of {REMEDIED:g}. Losses are paired by seed, with a 95 % interval from a
bootstrap over the {len(SEEDS)} seeds: above 0 = stale is worse.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=list(ARMS), help="the arm of a run to make")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="the seed of the run to make")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args(argv)
    if not options.run:
        report()
        return
    if options.seed is None:
        parser.error("--run needs --seed")
    file = raw_file(options.run, options.seed)
    if file.exists():
        sys.exit(f"{file.name} exists already")
    made = run_arm(options.run, options.seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(made), indent=1) + "\n")
    print(f"{file.name}: {made.curve}, {made.seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
