"""The raw clock of the ladder: `python -m tests.benchmarks.ladder --json --clock raw`.

The nodes of the paced ladder without its paces: all processes of a run compute on the cores of this computer, so a GPU
that would be idle leaves its core to another process. No target holds for these figures. A model of this size spends
most of an iteration on work that no mechanism shortens.
"""

from collections.abc import Mapping
from typing import Any

from engine.schedule.values import Gpus
from tests.benchmarks.ladder_paced import ARMS, GROUPS, IMAGES, STEPS, Split, by_cell, measure_all, on_in
from tests.benchmarks.page import load_now, origin, write_page

TEXT = """
One run a rung, one run at a time; the settings of the paced ladder, one optimiser step a batch, no pace. All processes
compute on the cores of this computer, so a process that waits leaves its core to another, and no rung has to gain. A
step's seconds are their median. Bubbles: the seconds in which a worker makes no step and the trainer waits; the
trainer's own steps and passes are busy.
"""

SPLITS = tuple(
    Split(name=f"{workers} + 1 processes", workers=workers, lease_seconds=0.0, training_seconds=0.0)
    for workers in (1, 2)
)


def raw(*, quick: bool) -> dict[str, Any]:
    """Return the figures of the raw clock, and write the page `ladder_raw`. `quick`: one split, and no page."""
    load1 = load_now()
    splits = SPLITS[:1] if quick else SPLITS
    runs = measure_all([(split, 1, arm) for split in splits for arm in ARMS], None, at_once=1)
    found: list[dict[str, Any]] = []
    for split in splits:
        below: float | None = None
        for arm in ARMS:
            one = runs[split.name, 1, arm.name]
            ratio = None if below is None else below / one["seconds"]
            found.append({**one, **idleness(one, split.gpus), "ratio_to_rung_below": ratio})
            below = one["seconds"]
    ratios = {arm.name: min(one["ratio_to_rung_below"] for one in found if one["arm"] == arm.name) for arm in ARMS[1:]}
    figures = {
        **by_cell(found),
        "ratio_to_rung_below": ratios,
        "on_in": on_in(found),
        "images_regenerated": sum(one["images_regenerated"] for one in found),
        "runs": found,
    }
    if not quick:
        write_page(
            "ladder_raw",
            question="what do the rungs gain on two cores, without paces?",
            command="python -m tests.benchmarks.ladder --json --clock raw",
            whole={"raw": figures, "seeds": [0], **origin(load1)},
            rows=[row_of(one) for one in found],
            text=TEXT,
        )
    return figures


def idleness(one: Mapping[str, Any], gpus: Gpus) -> dict[str, Any]:
    """Return the idle GPU-seconds of an iteration, and its seconds over those with no GPU idle.

    A worker is busy for the median seconds of a denoising step, once for each step that its rollouts need.
    """
    images = GROUPS * IMAGES - one["images_of_help"] + one["explored"] / 2  # candidates take half of the steps
    steps = images / IMAGES * STEPS
    idle = {
        "trainer waits for rollouts": one["trainer_waited"] * gpus.trainer,
        "switch": one["switched"] * gpus.trainer,
        "rollout GPUs wait": max(0.0, one["seconds"] * gpus.rollout - steps * one["step_seconds"]),
    }
    share = sum(idle.values()) / (one["seconds"] * gpus.number)
    return {"idle_by_cause": idle, "bubble_share": share, "over_bound": 1 / (1 - share)}


def row_of(one: Mapping[str, Any]) -> dict[str, Any]:
    ratio = one["ratio_to_rung_below"]
    return {
        "processes": one["split"],
        "rung": one["arm"],
        "s": f"{one['seconds']:.2f} ({min(one['all_seconds']):.2f} to {max(one['all_seconds']):.2f})",
        "over rung below": "" if ratio is None else f"{ratio:.2f}",
        "a step, s": f"{one['step_seconds']:.3f}",
        "help": f"{one['images_of_help']:.1f}",
        "early": f"{one['stale_share']:.2f}",
        "explored": f"{one['explored']:.0f}",
        "bubbles": f"{one['bubble_share']:.2f}",
        "again": one["images_regenerated"],
    }
