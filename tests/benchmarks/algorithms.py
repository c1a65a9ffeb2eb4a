"""algorithms: which algorithm reaches the target first, and with what image quality?

    python -m tests.benchmarks.algorithms --run ARM --seed N    one run; its raw file is kept and never made twice
    python -m tests.benchmarks.algorithms --run ARM --seed N --again   the same on this computer, beside the first
    python -m tests.benchmarks.algorithms --seconds             seconds of an iteration, in real processes
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

from engine.events import Market
from launcher.market.offers import read_catalog
from launcher.market.quality import USABLE
from tests.benchmarks.algorithm_runs import (
    BUDGET,
    CANDIDATES,
    CAP,
    EVERY,
    PROMPTS,
    SEEDS,
    TARGET,
    TUNING_SEEDS,
    Arm,
    Run,
    crossing,
    from_json,
    run_arm,
    this_computer,
    to_json,
)
from tests.benchmarks.algorithms_page import Tried, draw, text
from tests.benchmarks.arms import Arm as PacedArm
from tests.benchmarks.arms import Settings as PacedSettings
from tests.benchmarks.arms import iteration_seconds
from tests.benchmarks.arms import run as run_paced
from tests.benchmarks.page import RESULTS, load_now, publish

RAW = RESULTS / "algorithms"
"""Raw files of the runs, by arm and seed."""

ALL_LEVELS: Mapping[str, Any] = {"levels": {"from": "all"}}
"""The noise levels of the stored runs of DiffusionNFT. The default is now the noisier half."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "flow-grpo": {"name": "flow-grpo", "learning_rate": 2e-4, "clip_range": 1e-3},
    "grpo-guard": {"name": "grpo-guard", "learning_rate": 2e-4, "grpo_guard": {"clip_range": 2.5e-4}},
    "diffusion-nft": {"name": "diffusion-nft", "learning_rate": 4e-4, "diffusion_nft": {"beta": 0.1, **ALL_LEVELS}},
}
"""Settings of each algorithm, chosen by `--tune`."""

RATES = (2e-4, 4e-4, 8e-4)

TRIED: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "flow-grpo": [{"learning_rate": rate, "clip_range": clip} for rate in RATES for clip in (3e-4, 1e-3)],
    "grpo-guard": [
        {"learning_rate": rate, "grpo_guard": {"clip_range": clip}} for rate in RATES for clip in (1e-4, 2.5e-4)
    ],
    "diffusion-nft": [
        {"learning_rate": rate, "diffusion_nft": {"beta": beta, **ALL_LEVELS}}
        for rate in (1e-4, 2e-4, 4e-4)
        for beta in (0.1, 0.3)
    ],
}
"""Settings tried for each algorithm: the same number, on the same tuning seeds, for the same iterations."""

ARMS: Mapping[str, Arm] = {
    **{name: Arm(algorithm=settings) for name, settings in SETTINGS.items()},
    **{f"{name}+stale": Arm(algorithm=settings, mode="stale") for name, settings in SETTINGS.items()},
    "diffusion-nft+extremes": Arm(algorithm=SETTINGS["diffusion-nft"], mode="stale", keep="extremes"),
    "diffusion-nft+in-path": Arm(algorithm=SETTINGS["diffusion-nft"], mode="in-path"),
}

SHAPES: Mapping[str, Arm] = {f"shapes-{name}": Arm(algorithm=one, task="shapes") for name, one in SETTINGS.items()}
"""Arms of the second task, with the settings of the first. They end after BUDGET iterations."""

PACED: Mapping[str, PacedArm] = {
    "plain on demand": PacedArm(prompts=PROMPTS, spot=False, most=6, algorithm=SETTINGS["flow-grpo"]),
    "whole": PacedArm(
        prompts=PROMPTS,
        mode="stale",
        candidates=CANDIDATES,
        most=6,
        dtype="float32",
        algorithm=SETTINGS["diffusion-nft"],
    ),
}
"""Real runs for the seconds of an iteration: Flow-GRPO on the on-demand node alone, and DiffusionNFT with stale
exploration on the same node and a spot node. A node is one core."""
REPEATS = 3

SPREAD, EXPLORING_SPREAD = 0.02, 0.13
"""Limits on the difference in exact match between the same run on two computers, without and with exploration. Rounding
differs, training amplifies it, and candidates computed in bfloat16 can change places. Each limit is at least twice the
largest difference of the page's section Made again."""


def raw_file(arm: str, seed: int, *, again: bool = False) -> Path:
    return (RAW / "again" if again else RAW) / f"{arm}-{seed}.json"


def stored(arm: str, *, again: bool = False) -> list[Run]:
    """Return the stored runs of an arm, in the order of the seeds."""
    files = [raw_file(arm, seed, again=again) for seed in SEEDS]
    return [from_json(file.read_text()) for file in files if file.exists()]


def tuned_score(name: str, number: int) -> float:
    """Return a tried setting's exact match: the mean of the last two evaluations and of all tuning seeds."""
    files = [RAW / "tuning" / f"{name}-{number}-{seed}.json" for seed in TUNING_SEEDS]
    curves = [from_json(file.read_text()).curve for file in files]
    return statistics.mean(curve[iteration] for curve in curves for iteration in (BUDGET - EVERY, BUDGET))


def chosen(name: str) -> Mapping[str, Any]:
    """Return the best setting that was tried."""
    best = max(range(len(TRIED[name])), key=lambda number: tuned_score(name, number))
    return {"name": name, **TRIED[name][best]}


def tried() -> list[Tried]:
    """Return every setting that was tried, with its score."""
    return [
        Tried(algorithm=name, setting=json.dumps(setting), exact_match=tuned_score(name, number))
        for name in SETTINGS
        for number, setting in enumerate(TRIED[name])
    ]


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
    readers = sorted({name for run in runs for name in run.quality["readers"]})
    by_reader = {name: [run.quality["readers"][name] for run in runs] for name in readers}
    return {
        "seeds": [run.seed for run in runs],
        "iterations_to_target": [iterations_to_target(run) for run in runs],
        "network_passes_to_target": [passes_to_target(run) for run in runs],
        "exact_after_budget": by_reader,
        **{name: [run.quality[name] for run in runs] for name in ("drift", "border", "diversity")},
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


def guard(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return the quality of the first evaluated weights that reach the target, by arm, and whether readers agree.

    `runs`: with `Run.at_target`. Drift and diversity are over those of flow-grpo, as ratios of means.
    """
    at = {name: [run.at_target for run in found if run.at_target is not None] for name, found in runs.items()}
    means = {
        name: {
            "seeds": len(some),
            **{
                key: statistics.mean(one[key] for one in some)
                for key in ("exact_match", "drift", "border", "diversity")
            },
        }
        for name, some in at.items()
        if some
    }
    base = means["flow-grpo"]
    return {
        name: {**values, **{f"{key}_ratio": values[key] / base[key] for key in ("drift", "border", "diversity")}}
        for name, values in means.items()
    }


def orders(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[str]]:
    """Return the algorithms without exploration by exact match after the budget, best first, by reader."""
    readers = {name for found in runs.values() for run in found for name in run.quality["readers"]}

    def exact(name: str, reader: str) -> float:
        return statistics.mean(run.quality["readers"][reader] for run in runs[name])

    return {reader: sorted(SETTINGS, key=lambda name: exact(name, reader), reverse=True) for reader in sorted(readers)}


def largest_difference(old: Run, new: Run) -> float:
    """Return the largest difference in exact match at an iteration that both runs evaluated."""
    return max(abs(old.curve[iteration] - new.curve[iteration]) for iteration in old.curve.keys() & new.curve.keys())


def made_again(runs: Mapping[str, Sequence[Run]], again: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Return how far the runs that were made again on another computer differ."""
    pairs = [(old, new) for name in again for new in again[name] for old in runs[name] if old.seed == new.seed]
    return [
        {
            "arm": new.arm,
            "seed": new.seed,
            "exact_match": largest_difference(old, new),
            "iterations_to_target": [iterations_to_target(old), iterations_to_target(new)],
        }
        for old, new in pairs
    ]


def differences(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Make one drawn seed of two arms again, and return what differs by more than the run-to-run spread.

    On the computer and torch of the stored run, nothing may differ.
    """
    wrong = []
    for name in random.Random("algorithms").sample(sorted(runs), 2):
        old = random.Random(name).choice(list(runs[name]))
        new = run_arm(name, ARMS[name], old.seed, cap=BUDGET, until_target=False)
        elsewhere = SPREAD if ARMS[name].mode == "none" else EXPLORING_SPREAD
        limit = 0.0 if new.where == old.where else elsewhere
        found = largest_difference(old, new)
        print(f"made again: {name}, seed {old.seed}: differs by {found:.3f}, at most {limit:g}", file=sys.stderr)
        if found > limit:
            wrong.append(f"{name}, seed {old.seed}: by {found:.3f}, and at most {limit:g} was expected")
    return wrong


def measure_seconds() -> None:
    """Run the paced arms and keep the seconds of their iterations."""
    settings = PacedSettings(candidates=CANDIDATES, explored_together=72, budget=6, cap=6)
    found = {
        name: [iteration_seconds(run_paced(name, arm, settings, 300 + n, checked=False)) for n in range(REPEATS)]
        for name, arm in PACED.items()
    }
    (RAW / "seconds.json").write_text(json.dumps({"seconds": found, "where": this_computer()}, indent=1) + "\n")
    print(json.dumps(found))


def whole_over_plain(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return the ratio of the seconds to the target: plain Flow-GRPO on demand over the whole system.

    The interval covers the seeds. Seconds of an iteration are medians of the paced repeats.
    """
    seconds = json.loads((RAW / "seconds.json").read_text())["seconds"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    iterations = ratio(runs["flow-grpo"], runs["diffusion-nft+stale"])
    factor = medians["plain on demand"] / medians["whole"]
    return {
        **{key: iterations[key] * factor for key in ("mean", "low", "high")},
        "iterations_ratio": iterations["mean"],
        "seconds_per_iteration": medians,
        "seconds_by_repeat": seconds,
    }


def cheapest_dollars(market: Market) -> float:
    """Return the dollars per hour of the cheapest node with one L40S, by the shipped catalog."""
    prices = [
        offer.micro_usd_per_hour
        for offer in read_catalog()
        if (offer.accelerator, offer.gpus, offer.market) == ("L40S", 1, market) and offer.quality in USABLE
    ]
    return min(prices) / 1e6


def dollars(whole: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return seconds and dollars to the target on the nodes of the quickstart, priced by the catalog."""
    on_demand, spot = (cheapest_dollars(market) for market in (Market.ON_DEMAND, Market.SPOT))
    arms = {
        "plain on demand": ("flow-grpo", on_demand),
        "whole": ("diffusion-nft+stale", on_demand + spot),
    }
    found = {}
    for name, (arm, rate) in arms.items():
        iterations = statistics.mean(map(iterations_to_target, runs[arm]))
        seconds = iterations * whole["seconds_per_iteration"][name]
        found[name] = {
            "iterations": iterations,
            "seconds_per_iteration": whole["seconds_per_iteration"][name],
            "seconds_to_target": seconds,
            "dollars_to_target": seconds / 3600 * rate,
        }
    return found


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


def make(arm: str, seed: int, *, again: bool = False) -> None:
    """Make one run and keep its raw file, unless the file exists."""
    file = raw_file(arm, seed, again=again)
    if file.exists():
        print(f"{file.name} exists already", file=sys.stderr)
        return
    if arm in SHAPES:
        made = run_arm(arm, SHAPES[arm], seed, cap=BUDGET, until_target=False)
    else:
        made = run_arm(arm, ARMS[arm], seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_json(made))
    print(f"{file.name}: {made.curve}, {made.seconds:.0f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=sorted([*ARMS, *SHAPES]), help="the arm of a run to make")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="the seed of the run to make")
    parser.add_argument("--again", action="store_true", help="make a run beside the first one, on another computer")
    parser.add_argument("--seconds", action="store_true", help="measure the seconds of an iteration")
    parser.add_argument("--tune", choices=sorted(TRIED), help="try the settings of an algorithm")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    if options.tune:
        tune(options.tune)
    elif options.seconds:
        measure_seconds()
    elif options.run:
        if options.seed is None:
            parser.error("--run needs --seed")
        make(options.run, options.seed, again=options.again)
    else:
        report()


def report() -> None:
    load1 = load_now()
    runs = {name: stored(name) for name in ARMS}
    missing = [name for name, found in runs.items() if not found]
    if missing:
        sys.exit(f"no raw file in {RAW.name}/ of {', '.join(missing)}; make them with --run ARM --seed N")
    again = {name: stored(name, again=True) for name in ARMS}
    wrong = differences(runs)
    if wrong:
        sys.exit("runs that were made again differ: " + "; ".join(wrong))
    nft, flow = runs["diffusion-nft"], runs["flow-grpo"]
    whole = whole_over_plain(runs)
    draw(runs)
    shapes = {name: [run.quality["exact_match"] for run in stored(name)] for name in SHAPES}
    result = {
        "arms": {name: figures(found) for name, found in runs.items()},
        "nft_over_flow_grpo": ratio(flow, nft),
        "guard_over_flow_grpo": ratio(flow, runs["grpo-guard"]),
        "explored_over_nft": ratio(nft, runs["diffusion-nft+stale"]),
        "in_path_over_nft": ratio(nft, runs["diffusion-nft+in-path"]),
        "extremes_over_nft": ratio(nft, runs["diffusion-nft+extremes"]),
        "explored_over_flow_grpo": ratio(flow, runs["flow-grpo+stale"]),
        "whole_over_plain_on_demand": whole,
        "to_target": dollars(whole, runs),
        "quality_at_target": guard(again),
        "order_by_reader": orders(runs),
        "shapes_exact_after_budget": shapes,
        "made_again": made_again(runs, again),
        "target": TARGET,
    }
    publish(
        "algorithms",
        question="which algorithm reaches the target first?",
        command="python -m tests.benchmarks.algorithms --json",
        result=result,
        runs=sum(map(len, runs.values())),
        seeds=SEEDS,
        load1=load1,
        rows=[row(name, found) for name, found in runs.items()],
        text=text(result, tried(), sorted({run.where["processor"] for run in flow})),
    )


if __name__ == "__main__":
    main()
