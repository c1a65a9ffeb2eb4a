"""ladder_paced: what do the rungs gain with real processes, and how far is the schedule's forecast from them?

    python -m tests.benchmarks.ladder_paced --json [--quick]

The ladder on nodes of a run, with denoising steps and training rows stretched by sleep.
A pace is several times the real work of this small model, so cores that all processes share matter little. In the
setting of verl-omni #575, two trainer GPUs and one generator, the trainer's process stands for both of its GPUs: the
process trains and samples at twice the pace of one GPU.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, EvaluationConfig, ExplorationConfig, RewardConfig, RuntimeConfig, SamplerConfig
from engine.events import IterationDone
from engine.schedule.choose import predict
from engine.schedule.values import NOTHING, Gpus, Help, Knobs, Rates, Timeline, Work
from tests.benchmarks.ladder_cells import assumed
from tests.benchmarks.page import load_now, publish
from tests.engine.fleet import Fleet

GROUPS, IMAGES, STEPS = 8, 4, 8
TRAINED = STEPS - 1
WARM = 2
"""Iterations before the first that counts: the first evaluation runs beside them."""

COUNTED = 3
REWARD = "def brightness(images, prompts):\n    return images.float().mean(dim=(1, 2, 3)).tolist()\n"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rollout workers beside one trainer process. `trainer_gpus`: GPUs for which the process stands.

    `lease_seconds`: of a group on one GPU. `training_seconds`: of a batch on all GPUs of the trainer.
    """

    name: str
    workers: int
    lease_seconds: float
    training_seconds: float
    trainer_gpus: int = 1

    @property
    def work(self) -> Work:
        return Work(groups=GROUPS, images=IMAGES, rows_of_image=TRAINED, lease=IMAGES, steps=STEPS)

    @property
    def gpus(self) -> Gpus:
        return Gpus(trainer=self.trainer_gpus, rollout=self.workers)

    def rates(self, overhead: float) -> Rates:
        """Return the rates of the paces. `overhead`: seconds of an iteration that no pace explains."""
        row = self.training_seconds * self.trainer_gpus / (GROUPS * IMAGES * TRAINED)
        return Rates(
            image=assumed(self.lease_seconds / IMAGES, "the pace"),
            row=assumed(row, "the pace"),
            publish=assumed(overhead, "measured on the barrier") if overhead else NOTHING,
        )


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    unit: int
    help: Literal["off", "auto"]

    @property
    def played(self) -> Help:
        return "off" if self.help == "off" else "search"


ARMS = (
    Arm(name="barrier", unit=GROUPS, help="off"),
    Arm(name="+GAP", unit=1, help="off"),
    Arm(name="+TAG", unit=1, help="auto"),
)
BALANCED = Split(name="2 + 1 GPUs, balanced", workers=2, lease_seconds=2.4, training_seconds=9.6)
SLOW_ROLLOUTS = Split(name="1 + 1 GPUs, slow rollouts", workers=1, lease_seconds=2.4, training_seconds=4.8)
SLOW_TRAINING = Split(name="2 + 1 GPUs, slow training", workers=2, lease_seconds=1.6, training_seconds=16.0)
OF_575 = Split(
    name="verl-omni #575", workers=1, lease_seconds=377.9 / 20 / GROUPS, training_seconds=250.3 / 20, trainer_gpus=2
)
"""Published: a step takes 377.9 s with one generator, which is then the bottleneck, and 250.4 s with two, of which the
trainer waits 0.1 s. Divided by 20. The group size is not published."""


def config_of(split: Split, arm: Arm, *, is_trainer: bool, counted: int) -> EngineConfig:
    step = split.lease_seconds / STEPS / (split.trainer_gpus if is_trainer else 1)
    return EngineConfig(
        iterations=WARM + counted,
        sampler=SamplerConfig(steps=STEPS),
        algorithm=AlgorithmConfig(
            prompts_per_batch=GROUPS,
            images_per_prompt=IMAGES,
            updates_per_batch=1,
            rows_per_forward=GROUPS * IMAGES * TRAINED,
            unit=arm.unit,
            order="exact",
        ),
        exploration=ExplorationConfig(mode="none"),
        evaluation=EvaluationConfig(prompts=4, every=1000, steps=1),
        reward=RewardConfig(name="paced_reward:brightness"),
        runtime=RuntimeConfig(
            shape=IMAGES,
            step_seconds=step,
            row_seconds=split.training_seconds / (GROUPS * IMAGES * TRAINED),
            trainer_threads=1,
            help=arm.help,
            lease_seconds=10.0,
        ),
    )


def measured(split: Split, arm: Arm, *, counted: int = COUNTED) -> dict[str, Any]:
    """Run a split and return the seconds of its iterations from one report to the next, and the images of help."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "workdir").mkdir()
        (folder / "workdir" / "paced_reward.py").write_text(REWARD)
        config = config_of(split, arm, is_trainer=False, counted=counted)
        fleet = Fleet(folder, config, workdir=folder / "workdir")
        try:
            for worker in range(split.workers):
                fleet.start(f"spot-{worker}")
            fleet.engine = config_of(split, arm, is_trainer=True, counted=counted)
            fleet.start("trainer")
            fleet.wait_until_finished(every=0.5, seconds=900)
            done: Sequence[IterationDone] = fleet.events("iteration_done")[WARM:]
            lost = sum(event.lost_steps for event in fleet.events("node_missed", "coordinator"))
            return {
                "seconds": statistics.median(event.wall_seconds for event in done),
                "all_seconds": [event.wall_seconds for event in done],
                "images_of_help": statistics.fmean(event.made_by.get("trainer", 0) for event in done),
                "steps_lost": lost,
            }
        finally:
            fleet.close()


def forecast(split: Split, arm: Arm, overhead: float) -> Timeline:
    knobs = Knobs(unit=arm.unit, rows=GROUPS * IMAGES * TRAINED, help=arm.played)
    return predict(split.rates(overhead), split.work, split.gpus, knobs)


def of_split(split: Split, arms: Sequence[Arm] = ARMS) -> dict[str, dict[str, Any]]:
    """Return the measured and forecast seconds of each arm. Only the first arm gives the overhead of an iteration."""
    found: dict[str, dict[str, Any]] = {}
    overhead = 0.0
    for place, arm in enumerate(arms):
        one = measured(split, arm)
        if place == 0:
            overhead = max(0.0, one["seconds"] - forecast(split, arm, 0.0).seconds)
        timeline = forecast(split, arm, overhead)
        found[arm.name] = {
            **one,
            "forecast_seconds": timeline.seconds,
            "prediction_error": None if place == 0 else one["seconds"] / timeline.seconds - 1,
            "forecast_bubbles": timeline.bubble_share,
        }
        print(split.name, arm.name, found[arm.name], flush=True)
    return found


def row_of(split: str, arm: str, one: Mapping[str, Any], below: Mapping[str, Any] | None) -> dict[str, Any]:
    error = one["prediction_error"]
    return {
        "split": split,
        "rung": arm,
        "s": f"{one['seconds']:.1f} ({min(one['all_seconds']):.1f} to {max(one['all_seconds']):.1f})",
        "forecast": f"{one['forecast_seconds']:.1f}",
        "error": "fitted" if error is None else f"{error:+.0%}",
        "gain over the rung below": "" if below is None else f"{below['seconds'] / one['seconds']:.2f}",
        "images of help": f"{one['images_of_help']:.1f}",
        "steps lost": one["steps_lost"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.add_argument("--quick", action="store_true", help="the balanced split and the published setting only")
    quick = parser.parse_args().quick
    load1 = load_now()
    splits = [(OF_575, ARMS[1:]), (BALANCED, ARMS)]
    if not quick:
        splits += [(SLOW_ROLLOUTS, ARMS), (SLOW_TRAINING, ARMS)]
    found = {split.name: of_split(split, arms) for split, arms in splits}
    errors = [
        abs(one["prediction_error"])
        for arms in found.values()
        for one in arms.values()
        if one["prediction_error"] is not None
    ]
    rows = []
    for split, arms in found.items():
        for below, name in itertools.pairwise([None, *arms]):
            assert name is not None
            rows.append(row_of(split, name, arms[name], None if below is None else arms[below]))
    summary = {"median": statistics.median(errors), "worst": max(errors)}
    publish(
        "ladder_paced",
        question="what do the rungs gain with real processes, and how far is the forecast?",
        command=f"python -m tests.benchmarks.ladder_paced --json{' --quick' if quick else ''}",
        result={
            "paced": found,
            "prediction_error": summary,
            "regenerated_steps": sum(row["steps lost"] for row in rows),
        },
        runs=len(rows),
        seeds=[0],
        load1=load1,
        rows=rows,
        text=f"""
Real nodes of a run: agents, coordinator, trainer and workers, one run a rung, medians of {COUNTED} iterations after
{WARM}. Steps and rows are stretched by sleep. The first rung of a split gives the seconds that no pace explains; the
others are forecast with them: median error {summary["median"]:.0%}, worst {summary["worst"]:.0%} (targets 10 % and
15 %). Help is `auto`, with rates that the run measures itself. In the setting of verl-omni #575 one process stands for
two trainer GPUs, and the published seconds are divided by 20; they published a gain of 1.23.
""",
    )


if __name__ == "__main__":
    main()
