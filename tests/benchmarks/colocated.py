"""colocated: is the whole pipeline quicker than a fair run whose GPUs all sample, then all train?

    python -m tests.benchmarks.colocated --json

The fair baseline scores while it samples and packs the rows of a training pass, like the pipeline. Both are played or
calculated with the same assumed rates; no process is started. The pipeline's seconds are those of the ladder's results,
so run the ladder first.
"""

import argparse
import json
from math import ceil
from typing import Any

from engine.schedule.choose import Allowed, best, units_of
from engine.schedule.values import Gpus, train_seconds
from tests.benchmarks.ladder_cells import Setting, cells
from tests.benchmarks.ladder_simulated import EARLY, shares
from tests.benchmarks.page import RESULTS, load_now, publish

PUBLISHED = {
    "QwenImage-20B 512": "1.56 to 2.21",
    "FLUX-12B 720": "1.06 to 1.21",
    "Wan2.1-14B 480p": "1.13 to 1.45",
    "Hunyuan-13B 480p": "1.04 to 1.49",
}
"""Speed over a colocated run claimed for the models of the DigenRL preprint, which was withdrawn, in a digest:
QwenImage over veRL-Omni, the videos with TCSS."""

TEXT = """\
Simulated with the assumed rates of [ladder](ladder.md): nothing was run. `plain`: every GPU samples, then every
GPU trains, image after image, and rewards are waited for. `fair`: the same with packed rows, and with rewards scored
while images are sampled. `pipeline`: all rungs of the ladder on the quickest of six splits. `without help`: fair over
the same with a trainer that never samples, so every GPU has one task. `published`: claims of a withdrawn preprint,
against baselines that are not described; only their order of magnitude can be compared.

## What it says

{says}

A fair baseline takes most of what is claimed against a plain one, because packed rows help both. Compute-bound video
gains nothing from a split: a GPU that waits is lost, and only help brings the split back to where the fair run is. An
earlier prototype of the schedule, whose splits had fewer trainer GPUs, put the four videos at .91 to .98 with help too.
A split also allows GPUs of another kind, and spot, for rollouts: no figure of this page counts that.

## What it changed

[Pipeline](../../../docs/pipeline.md) says where a split loses. A plan prints the schedule before anything is bought.
"""


def colocated_seconds(setting: Setting, *, is_fair: bool) -> float:
    """Return the seconds of an iteration in which all GPUs sample, switch, train and switch back."""
    rates, work, gpus = setting.rates, setting.work, setting.number
    images_each = ceil(work.groups * work.images / gpus)
    scores = 1 if is_fair else images_each
    training = train_seconds(rates, work, gpus, work.groups, setting.rows if is_fair else 1)
    sampling = images_each * rates.image.value + scores * rates.score.value
    return sampling + training + 2 * rates.switch.value + rates.publish.value


def without_help(setting: Setting, gpus: Gpus) -> float:
    """Return the seconds of an iteration whose trainer never samples: GAP, TSP and TCSS."""
    allowed = Allowed(units=units_of(setting.work), rows=(setting.rows,), early=(0.0, *EARLY))
    choice = best(setting.rates, setting.work, gpus, allowed)
    assert choice.timeline is not None
    return choice.timeline.seconds


def row(setting: Setting, ladder: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the page. `ladder`: the simulated figures of the ladder."""
    pipeline = ladder["cells"][setting.name]["seconds"]["+TCSS"]
    apart = min(without_help(setting, setting.split(trainer)) for trainer in shares(setting.number))
    fair, plain = (colocated_seconds(setting, is_fair=is_fair) for is_fair in (True, False))
    return {
        "cell": setting.name,
        "plain s": plain,
        "fair s": fair,
        "pipeline s": pipeline,
        "over plain": plain / pipeline,
        "over fair": fair / pipeline,
        "without help": fair / apart,
        "published": PUBLISHED[setting.name.rsplit(" on ", 1)[0]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="ignored: the JSON line is always printed")
    parser.parse_args()
    load1 = load_now()
    ladder = json.loads((RESULTS / "ladder.json").read_text())["simulated"]
    rows = [row(setting, ladder) for setting in cells()]
    publish(
        "colocated",
        question="is the whole pipeline quicker than a fair run on the same GPUs?",
        command="python -m tests.benchmarks.colocated --json",
        result={"simulated": {one["cell"]: one for one in rows}},
        runs=len(rows),
        seeds=[0],
        load1=load1,
        rows=[
            {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in one.items()} for one in rows
        ],
        text=TEXT.format(says=says(rows)),
    )


def says(rows: list[dict[str, Any]]) -> str:
    """Return where the pipeline wins and where it loses, in words."""

    def listed(name: str, *, slower: bool) -> str:
        some = [one for one in rows if (one[name] < 1) == slower]
        return "; ".join(f"{one['cell']} {one[name]:.2f}" for one in some) or "none"

    return "\n".join(
        (
            f"- Slower than fair without help: {listed('without help', slower=True)}.",
            f"- Quicker than fair without help: {listed('without help', slower=False)}.",
            f"- Slower than fair with the whole pipeline: {listed('over fair', slower=True)}.",
            f"- Quicker than fair with the whole pipeline: {listed('over fair', slower=False)}.",
        )
    )


if __name__ == "__main__":
    main()
