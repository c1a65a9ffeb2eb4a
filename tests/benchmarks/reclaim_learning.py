"""reclaim_learning: what do reclaims cost, in reward and in dollars?

    python -m tests.benchmarks.reclaim_learning --json

Runs the job of `learning` for a fixed number of batches without a target, once per seed with the preemptions of the
bundled trace and once without. Rewards are compared at equal iterations; dollars come from the ledger.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.events import Evaluated
from launcher.ledger.store import find_run, open_ledger, progress_of
from tests.benchmarks.page import load_now, publish

METRIC = "exact_match"

JOB = Path(__file__).with_name("learning.yaml")


def run_once(name: str, seed: int, trace: str, iterations: int, folder: Path) -> dict[str, Any]:
    """Run once. Return result.json with `curve`: exact match by iteration."""
    result = folder / f"{name}.json"
    changed = [f"seed={seed}", f"iterations={iterations}", f"preemptions.trace={trace}", "target=null"]
    changed.append("evaluation.on_the_way=512")  # a curve of all held-out strings
    command = [
        *(sys.executable, "-m", "launcher.cli.main", "launch", str(JOB), "--yes"),
        *("--name", name, "--on-exit", "down", "--result", str(result)),
        *(word for change in changed for word in ("--set", change)),
    ]
    environment = {**os.environ, "SPOTRL_HOME": str(folder / "state")}
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    with open_ledger(folder / "state" / "ledger.sqlite")() as session:
        rows = progress_of(session, find_run(session, name), Evaluated.KIND)
        curve = {row.event["iteration"]: row.event["metrics"][METRIC] for row in rows}
    return dict(json.loads(result.read_text())) | {"curve": curve}


def dollars(run: dict[str, Any]) -> float:
    return float(run["micro_usd"]["total"]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    seeds = range(options.seeds)
    pairs: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            # Both arms of a seed run one after the other, because other load of the computer changes slowly.
            reclaimed = run_once(f"reclaimed-{seed}", seed, "bamboo-p3", options.iterations, Path(folder))
            calm = run_once(f"calm-{seed}", seed, "none", options.iterations, Path(folder))
            pairs[seed] = reclaimed, calm
    common = sorted(set.intersection(*(set(run["curve"]) for pair in pairs.values() for run in pair)))
    gaps = {
        iteration: statistics.mean(a["curve"][iteration] - b["curve"][iteration] for a, b in pairs.values())
        for iteration in common
    }
    spreads = {
        iteration: statistics.stdev(b["curve"][iteration] for _, b in pairs.values()) if len(pairs) > 1 else 0.0
        for iteration in common
    }
    worst = max(common[1:], key=lambda iteration: abs(gaps[iteration]))
    ratios = [dollars(a) / dollars(b) for a, b in pairs.values()]
    hours = [a["wall_seconds"] / b["wall_seconds"] for a, b in pairs.values()]
    losses = [len(a["preemptions"]) for a, _ in pairs.values()]
    equal = all(run["sums_equal"] for pair in pairs.values() for run in pair)
    same = sum(a["curve"] == b["curve"] for a, b in pairs.values())
    extra = {
        phase: statistics.mean(
            (a["micro_usd"]["by_phase"].get(phase, 0) - b["micro_usd"]["by_phase"].get(phase, 0)) / 1e6
            for a, b in pairs.values()
        )
        for phase in sorted(
            {phase for pair in pairs.values() for run in pair for phase in run["micro_usd"]["by_phase"]}
        )
    }
    publish(
        "reclaim_learning",
        question="what do reclaims cost, in reward and in dollars?",
        command="python -m tests.benchmarks.reclaim_learning --json",
        result={
            "reward_gap": abs(gaps[worst]),
            "spread": spreads[worst],
            "cost_ratio": statistics.mean(ratios),
            "cost_ratio_range": [min(ratios), max(ratios)],
            "wall_ratio": statistics.mean(hours),
            "preemptions": losses,
            "equal_curves": same,
            "sums_equal": equal,
            "extra_usd_by_phase": extra,
        },
        runs=2 * len(pairs),
        seeds=list(seeds),
        load1=load1,
        rows=[
            {
                "seed": seed,
                "exact match, reclaimed": f"{a['curve'][common[-1]]:.4f}",
                "calm": f"{b['curve'][common[-1]]:.4f}",
                "preemptions": len(a["preemptions"]),
                "$ reclaimed": f"{dollars(a):.2f}",
                "$ calm": f"{dollars(b):.2f}",
                "wall s reclaimed": round(a["wall_seconds"]),
                "wall s calm": round(b["wall_seconds"]),
            }
            for seed, (a, b) in pairs.items()
        ],
        text=f"""
Measured: exact match on 512 held-out strings after {common[-1]} iterations. `reward_gap` is the largest mean difference
over the iterations {", ".join(map(str, common[1:]))}, at iteration {worst}; `spread` the standard deviation of the calm
runs over {len(pairs)} seeds there. {same} of {len(pairs)} pairs of curves are equal to the last digit: with a counted
exploration budget a reclaim changes what a batch costs, not what it trains.
Dollars are assumed (priced as named offers). `extra_usd_by_phase` says where the difference went, mean over seeds; in
every run the splits add up to the total: {equal}. Wall time is of two shared cores with three nodes on them.
""",
    )


if __name__ == "__main__":
    main()
