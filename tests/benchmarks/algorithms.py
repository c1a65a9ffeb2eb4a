"""algorithms: which algorithm reaches the target first, and with what image quality?

    python -m tests.benchmarks.algorithms --run ARM --seed N    one run; its raw file is kept and never made twice
    python -m tests.benchmarks.algorithms --tune ALGORITHM      settings tried, on seeds that are not reported
    python -m tests.benchmarks.algorithms --json                the page, from the raw files; two runs are made again

Seeds, target, evaluation interval and interpolation were fixed before the first reported run (algorithm_runs.py).
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.algorithm_runs import (
    BUDGET,
    CAP,
    EVERY,
    SEEDS,
    TARGET,
    TUNING_SEEDS,
    Arm,
    Run,
    crossing,
    from_json,
    run_arm,
    to_json,
)
from tests.benchmarks.page import RESULTS, load_now, publish

RAW = RESULTS / "algorithms"
"""Raw files of the runs, by arm and seed."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "flow-grpo": {"name": "flow-grpo", "learning_rate": 4e-4, "clip_range": 1e-3},
    "grpo-guard": {"name": "grpo-guard", "learning_rate": 4e-4, "grpo_guard": {"clip_range": 2.5e-4}},
    "diffusion-nft": {"name": "diffusion-nft", "learning_rate": 2e-4, "diffusion_nft": {"beta": 0.1}},
}
"""Settings of each algorithm, chosen by `--tune`."""

RATES = (2e-4, 4e-4, 8e-4)

TRIED: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "flow-grpo": [{"learning_rate": rate, "clip_range": clip} for rate in RATES for clip in (3e-4, 1e-3)],
    "grpo-guard": [
        {"learning_rate": rate, "grpo_guard": {"clip_range": clip}} for rate in RATES for clip in (1e-4, 2.5e-4)
    ],
    "diffusion-nft": [
        {"learning_rate": rate, "diffusion_nft": {"beta": beta}} for rate in (1e-4, 2e-4, 4e-4) for beta in (0.1, 0.3)
    ],
}
"""Settings tried for each algorithm: the same number, on the same tuning seeds, for the same iterations."""

ARMS: Mapping[str, Arm] = {
    **{name: Arm(algorithm=settings) for name, settings in SETTINGS.items()},
    **{f"{name}+stale": Arm(algorithm=settings, mode="stale") for name, settings in SETTINGS.items()},
    "diffusion-nft+extremes": Arm(algorithm=SETTINGS["diffusion-nft"], mode="stale", keep="extremes"),
    "diffusion-nft+in-path": Arm(algorithm=SETTINGS["diffusion-nft"], mode="in-path"),
}

SPREAD = 0.0
"""Run-to-run spread: none, because a run is one process on one thread."""


def raw_file(arm: str, seed: int) -> Path:
    return RAW / f"{arm}-{seed}.json"


def stored(arm: str) -> list[Run]:
    """Return the stored runs of an arm, in the order of the seeds."""
    return [from_json(raw_file(arm, seed).read_text()) for seed in SEEDS if raw_file(arm, seed).exists()]


def iterations_to_target(run: Run) -> float:
    """Return the iterations to the target. A run that misses it counts as the cap."""
    found = crossing(run.curve)
    return CAP if found is None else found


def passes_to_target(run: Run) -> float:
    """Return the network passes up to the target's iteration, the last one in part."""
    needed = iterations_to_target(run)
    whole = int(needed)
    per_iteration = [*run.passes, *[run.passes[-1]] * CAP]
    return sum(per_iteration[:whole]) + (needed - whole) * per_iteration[whole]


def ratio(slower: Sequence[Run], faster: Sequence[Run]) -> dict[str, float]:
    """Return the geometric mean of the paired ratios of iterations, with a 95 % bootstrap interval over seeds.

    Above 1: the runs of `faster` need fewer iterations.
    """
    by_seed = {run.seed: iterations_to_target(run) for run in faster}
    logs = [math.log(iterations_to_target(run) / by_seed[run.seed]) for run in slower if run.seed in by_seed]
    if not logs:
        return {}
    generator = np.random.default_rng(0)
    means = generator.choice(logs, size=(10_000, len(logs))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {
        "mean": math.exp(statistics.mean(logs)),
        "low": math.exp(float(low)),
        "high": math.exp(float(high)),
        "pairs": len(logs),
    }


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of an arm for the JSON file."""
    readers = sorted({name for run in runs for name in run.readers})
    return {
        "seeds": [run.seed for run in runs],
        "iterations_to_target": [iterations_to_target(run) for run in runs],
        "network_passes_to_target": [passes_to_target(run) for run in runs],
        "exact_after_budget": {name: [run.readers[name] for run in runs if name in run.readers] for name in readers},
        "drift": [run.drift for run in runs],
        "border": [run.border for run in runs],
        "diversity": [run.diversity for run in runs],
        "censored": sum(crossing(run.curve) is None for run in runs),
    }


def row(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the table's row of an arm."""
    found = figures(runs)
    exact = found["exact_after_budget"]
    return {
        "arm": name,
        "seeds": len(runs),
        "iterations to target": f"{statistics.mean(found['iterations_to_target']):.1f}",
        "missed": found["censored"],
        "passes to target": f"{statistics.mean(found['network_passes_to_target']):,.0f}",
        **{f"exact at {BUDGET} ({reader})": f"{statistics.mean(values):.3f}" for reader, values in exact.items()},
        "drift": f"{statistics.mean(found['drift']):.3f}",
        "diversity": f"{statistics.mean(found['diversity']):.3f}",
    }


def differences(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Make one drawn seed of two arms again, and return what differs."""
    wrong = []
    for name in random.Random("algorithms").sample(sorted(runs), 2):
        old = random.Random(name).choice(list(runs[name]))
        new = run_arm(name, ARMS[name], old.seed, cap=BUDGET, until_target=False)
        for iteration, value in new.curve.items():
            if abs(old.curve[iteration] - value) > SPREAD:
                wrong.append(f"{name}, seed {old.seed}, iteration {iteration}: {old.curve[iteration]} and {value}")
    return wrong


def tune(name: str) -> None:
    """Run every setting of an algorithm on the tuning seeds, and print a line for each."""
    for number, setting in enumerate(TRIED[name]):
        for seed in TUNING_SEEDS:
            file = RAW / "tuning" / f"{name}-{number}-{seed}.json"
            if not file.exists():
                arm = Arm(algorithm={"name": name, **setting})
                made = run_arm(name, arm, seed, cap=BUDGET, tuning=True, until_target=False)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(to_json(made))
            found = from_json(file.read_text())
            print(json.dumps({"algorithm": name, **setting, "seed": seed, "curve": found.curve}), flush=True)


def make(arm: str, seed: int) -> None:
    """Make one run and keep its raw file, unless the file exists."""
    file = raw_file(arm, seed)
    if file.exists():
        print(f"{file.name} exists already", file=sys.stderr)
        return
    made = run_arm(arm, ARMS[arm], seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_json(made))
    print(f"{file.name}: {made.curve}, {made.seconds:.0f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=sorted(ARMS), help="the arm of a run to make")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="the seed of the run to make")
    parser.add_argument("--tune", choices=sorted(TRIED), help="try the settings of an algorithm")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    if options.tune:
        tune(options.tune)
    elif options.run:
        if options.seed is None:
            parser.error("--run needs --seed")
        make(options.run, options.seed)
    else:
        report()


def report() -> None:
    load1 = load_now()
    runs = {name: stored(name) for name in ARMS}
    present = {name: found for name, found in runs.items() if found}
    if len(present) < 2:
        sys.exit(f"{len(present)} arms have raw files in {RAW.name}/; make them with --run ARM --seed N")
    wrong = differences(present)
    if wrong:
        sys.exit("runs that were made again differ: " + "; ".join(wrong))
    publish(
        "algorithms",
        question="which algorithm reaches the target first?",
        command="python -m tests.benchmarks.algorithms --json",
        result={
            "arms": {name: figures(found) for name, found in present.items()},
            "nft_over_flow_grpo": ratio(runs["flow-grpo"], runs["diffusion-nft"]),
            "guard_over_flow_grpo": ratio(runs["flow-grpo"], runs["grpo-guard"]),
            "explored_over_nft": ratio(runs["diffusion-nft"], runs["diffusion-nft+stale"]),
            "explored_nft_over_flow_grpo": ratio(runs["flow-grpo"], runs["diffusion-nft+stale"]),
            "target": TARGET,
        },
        runs=sum(map(len, present.values())),
        seeds=SEEDS,
        load1=load1,
        rows=[row(name, found) for name, found in present.items()],
        text=TEXT,
    )


TEXT = f"""
Measured on digits-ocr: exact match on 512 held-out strings (ODE, 8 steps, averaged weights), evaluated every {EVERY}
iterations. The target is {TARGET:g}; its iteration lies on a straight line between two evaluations. A run ends at {CAP}
iterations, and then counts as {CAP}. Seeds {SEEDS[0]} to {SEEDS[-1]}; settings were chosen on other seeds
({TUNING_SEEDS[0]}, {TUNING_SEEDS[1]}) and other strings. A network pass is the forward pass of one image at one step; a
gradient counts as three. Tesseract and the templates gave no reward.
"""


if __name__ == "__main__":
    main()
