"""Write the page of the algorithms benchmark, and draw its curves."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair

from tests.benchmarks.algorithm_runs import BUDGET, CAP, EVERY, SEEDS, TARGET, TUNING_SEEDS, Run
from tests.benchmarks.page import ROOT

CURVES = ROOT / "docs" / "images" / "algorithms.svg"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A setting that was tried, and its exact match."""

    algorithm: str
    setting: str
    exact_match: float


def draw(runs: Mapping[str, Sequence[Run]]) -> None:
    """Draw the mean exact match by iteration of every arm with at least two seeds, up to its shortest run."""
    points = []
    for name, found in runs.items():
        common = set.intersection(*(set(run.curve) for run in found))
        points += [
            {"iteration": iteration, "arm": name, "exact match": run.curve[iteration]}
            for run in found
            for iteration in sorted(common)
            if len(found) > 1
        ]
    base = altair.Chart(altair.Data(values=points)).encode(
        x=altair.X("iteration:Q", title="iteration"), color=altair.Color("arm:N", sort=list(runs), title=None)
    )
    scale = altair.Scale(domain=[0.4, 1.0])
    line = base.mark_line(point=True).encode(
        y=altair.Y("mean(exact match):Q", title="exact match, 512 held-out strings", scale=scale)
    )
    band = base.mark_errorband(extent="ci").encode(y=altair.Y("exact match:Q", title=""))
    goal = altair.Chart(altair.Data(values=[{"target": TARGET}])).mark_rule(strokeDash=[4, 4]).encode(y="target:Q")
    (band + line + goal).properties(width=560, height=320, background="white").save(str(CURVES))


RATIOS = {
    "nft_over_flow_grpo": "DiffusionNFT over Flow-GRPO, without exploration",
    "guard_over_flow_grpo": "GRPO-Guard over Flow-GRPO, without exploration",
    "explored_over_flow_grpo": "stale exploration over none, Flow-GRPO",
    "explored_over_nft": "stale exploration over none, DiffusionNFT",
    "extremes_over_nft": "the same, as many best as worst seeds kept",
    "in_path_over_nft": "the same, in-path: candidates of the newest weights, for which the trainer waits",
}


def text(result: Mapping[str, Any], tried: Sequence[Tried], processors: Sequence[str]) -> str:
    """Return the page's text below the table. `result`: the JSON figures. `processors`: of the table's runs."""

    def shown(found: Mapping[str, float]) -> str:
        if found.get("pairs") == 1:
            return f"{found['mean']:.2f}, 1 seed"
        return f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})" + seeds(found.get("pairs"))

    def seeds(count: float | None) -> str:
        return "" if count is None else f", {count:g} seed{'s' if count > 1 else ''}"

    ratios = "\n".join(f"- {label}: {shown(result[key])}" for key, label in RATIOS.items())
    whole, paid, quality = (result[key] for key in ("whole_over_plain_on_demand", "to_target", "quality_at_target"))
    costs = "\n".join(
        f"- {name}: {one['iterations']:.1f} iterations x {one['seconds_per_iteration']:.2f} s = "
        f"{one['seconds_to_target']:.1f} s, ${one['dollars_to_target']:.4f}"
        for name, one in paid.items()
    )
    guards = "\n".join(
        f"- {name}: exact match {one['exact_match']:.3f}, drift {one['drift']:.3f} ({one['drift_ratio']:.2f} of "
        f"flow-grpo's), dark border {one['border']:.3f} ({one['border_ratio']:.2f}), diversity {one['diversity']:.3f} "
        f"({one['diversity_ratio']:.2f}){seeds(one['seeds'])}"
        for name, one in quality.items()
    )
    agree = "; ".join(f"{reader}: {' > '.join(order)}" for reader, order in result["order_by_reader"].items())
    second = "; ".join(
        f"{name.removeprefix('shapes-')} {statistics.mean(values):.3f} ({len(values)} seeds)"
        for name, values in result["shapes_exact_after_budget"].items()
    )
    repeats = len(next(iter(whole["seconds_by_repeat"].values())))
    again = "\n".join(
        f"- {name}: {len(found)} run{'s' if len(found) > 1 else ''}, at most {max(found):.3f}"
        for name in dict.fromkeys(one["arm"] for one in result["made_again"])
        if (found := [one["exact_match"] for one in result["made_again"] if one["arm"] == name])
    )
    settings = "\n".join(f"- {one.algorithm} {one.setting}: {one.exact_match:.3f}" for one in tried)
    return f"""
Measured on digits-ocr: exact match on 512 held-out strings (ODE, 8 steps, averaged weights), evaluated every {EVERY}
iterations. The target is {TARGET:g}; its iteration lies on a straight line between two evaluations. A run ends at {CAP}
iterations, and then counts as {CAP}. Seeds {SEEDS[0]} to {SEEDS[-1]}; settings were chosen on other seeds
({TUNING_SEEDS[0]}, {TUNING_SEEDS[1]}) and other strings. A network pass is the forward pass of one image at one step; a
gradient counts as three. Tesseract and the templates gave no reward. Runs of the table: {", ".join(processors)}.

## Iterations to the target: ratios above 1 = better

{ratios}

## Time and dollars to the target

Whole system over plain Flow-GRPO on the on-demand node alone: {shown(whole)} times sooner. Iterations are those above.
Seconds of an iteration are medians of {repeats} real runs on two pinned cores (a node is a core, without evaluation).
The interval covers the iterations of the seeds, not the seconds.
Dollars: the cheapest L40S nodes of the shipped catalog; nothing was bought.

{costs}

## Quality at the target

The first evaluated weights that reach the target, in runs made again on another computer.
Order of the algorithms after {BUDGET} iterations in the table, by reader: {agree}.

{guards}

## The second task

shapes, exact match after {BUDGET} iterations with the settings of digits-ocr; the base has .408: {second}.

## Made again

{len(result["made_again"])} runs were made again on another processor and version of torch. Largest difference in exact
match at any evaluation, by arm (two runs on the same processor and torch are equal bit for bit):

{again}

## Settings that were tried

Exact match, mean of iterations {BUDGET - EVERY} and {BUDGET} and of {len(TUNING_SEEDS)} seeds. Every algorithm's best
setting lies at the edge of what was tried.

{settings}
"""
