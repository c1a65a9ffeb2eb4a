"""learning: does Flow-GRPO learn the quickstart's task, whatever its seed?

    python -m tests.benchmarks.learning --json

Runs `learning.yaml` (Flow-GRPO on the quickstart's task) through `spotrl launch`, with preemptions, once per seed. The
gain is exact match on 512 held-out strings after the run minus before it, with the same ODE sampler, the same noise and
averaged weights both times.
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

from tests.benchmarks.page import load_now, publish


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """One quickstart; its result.json."""
    result = folder / f"result-{seed}.json"
    command = [
        *(sys.executable, "-m", "launcher.cli.main", "launch", str(Path(__file__).with_suffix(".yaml")), "--yes"),
        *("--name", f"learning-{seed}", "--set", f"seed={seed}", "--on-exit", "down", "--result", str(result)),
        # All held-out strings each time, as the results on record: fewer on the way end a run at another iteration.
        *("--set", "evaluation.on_the_way=512"),
    ]
    environment = {**os.environ, "SPOTRL_HOME": str(folder / "state")}
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return dict(json.loads(result.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    seeds = range(options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        results = {seed: run_seed(seed, Path(folder)) for seed in seeds}
    gains = {seed: r["exact_match"]["after"] - r["exact_match"]["before"] for seed, r in results.items()}
    rows = [
        {
            "seed": seed,
            "before": f"{r['exact_match']['before']:.3f}",
            "after": f"{r['exact_match']['after']:.3f}",
            "gain": f"{gains[seed]:+.3f}",
            "iterations": r["iterations"],
            "target reached": r["target"]["reached"],
            "wall s": round(r["wall_seconds"]),
            "preemptions": len(r["preemptions"]),
            "$ (assumed)": f"{r['micro_usd']['total'] / 1e6:.2f}",
        }
        for seed, r in results.items()
    ]
    values = list(gains.values())
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    publish(
        "learning",
        question="does Flow-GRPO learn the quickstart's task, whatever its seed?",
        command="python -m tests.benchmarks.learning --json",
        result={
            "gain_mean": statistics.mean(values),
            "gain_min": min(values),
            "gain_stdev": deviation,
            "by_seed": {str(seed): gain for seed, gain in gains.items()},
        },
        runs=len(values),
        seeds=list(seeds),
        load1=load1,
        rows=rows,
        text=f"""
Measured: exact match on 512 held-out strings, ODE 8 steps, fixed noise, averaged weights, read by the recogniser that
gives the reward. Mean gain {statistics.mean(values):+.3f}, standard deviation {deviation:.3f} over {len(values)} seeds.
Dollars are assumed (priced as named offers), wall time is of two shared cores with three nodes on them.
A run stops when its smoothed score held the target for three evaluations, so gains are cut off there.
""",
    )


if __name__ == "__main__":
    main()
