"""The paced clock of the ladder: `python -m tests.benchmarks.ladder --json --clock paced`.

The ladder on nodes of a run, with denoising steps, training rows and training passes stretched by sleep. A pace is
several times the real work of this small model, so cores that all processes share matter little. In the setting of
verl-omni #575, two trainer GPUs and one generator, the trainer's process stands for both of its GPUs: the process
trains and samples at twice the pace of one GPU.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.algorithm_config import AlgorithmConfig
from engine.config import (
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ModelConfig,
    ProfileConfig,
    RewardConfig,
    RuntimeConfig,
    SamplerConfig,
)
from engine.early_config import EarlyConfig
from engine.events import IterationDone
from engine.exploration.rest import REST_BATCHES, SHORT
from engine.protocol.request import Kind
from engine.schedule.choose import predict
from engine.schedule.values import NOTHING, Gpus, Help, Knobs, Rates, Timeline, Work, lower_bound
from tests.benchmarks.ladder_cells import assumed
from tests.benchmarks.page import commit_now, load_now, origin, write_page
from tests.engine.fleet import Fleet
from tests.engine.nursery import NurseryFleet
from tests.sampling_stops import ALONE

GROUPS, IMAGES, STEPS = 8, 4, 8
TRAINED = STEPS - 1
OF_IMAGE, OF_GROUP = TRAINED, IMAGES * TRAINED
"""Rows of a training pass: without and with time-step packing."""

ROWS = GROUPS * OF_GROUP
PASS_SECONDS = 0.03
"""Seconds of a training pass beside its rows: what packing saves."""

WARM = 2
"""Iterations before the first that counts: the first evaluation runs beside them."""

COUNTED, COUNTED_EARLY = 3, 12
"""Repeats: iterations of a run that count. With early groups, a short iteration may follow a long one: early groups
that one iteration has no time for are missing in the next. So an even number counts, and their mean."""

WARM_WHOLE, COUNTED_WHOLE = SHORT + 1, REST_BATCHES + 2
"""With exploration: where no seed can be chosen, it rests after so many batches. A rest and its trials count, an even
number."""

AT_ONCE = 2
"""Runs beside each other: they sleep most of the time."""

UPDATES = (1, 2)
REWARD = "def brightness(images, prompts):\n    return images.float().mean(dim=(1, 2, 3)).tolist()\n"
TARGETS = {"over barrier at balance": 1.5, "rung below": 0.98, "gain": 1.05, "error median": 0.10, "error worst": 0.15}


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rollout workers of one node beside one trainer process. `trainer_gpus`: GPUs for which the process stands.

    `lease_seconds`: of a group on one GPU. `training_seconds`: of a batch on all GPUs of the trainer, without passes.
    """

    name: str
    workers: int
    lease_seconds: float
    training_seconds: float
    trainer_gpus: int = 1

    def work(self, updates: int) -> Work:
        return Work(groups=GROUPS, images=IMAGES, rows_of_image=TRAINED, lease=IMAGES, steps=STEPS, updates=updates)

    @property
    def gpus(self) -> Gpus:
        return Gpus(trainer=self.trainer_gpus, rollout=self.workers)

    def rates(self, overhead: float) -> Rates:
        """Return the rates of the paces. `overhead`: seconds of an iteration that no pace explains."""
        return Rates(
            image=assumed(self.lease_seconds / IMAGES, "the pace"),
            row=assumed(self.training_seconds * self.trainer_gpus / ROWS, "the pace"),
            launch=assumed(PASS_SECONDS, "the pace"),
            publish=assumed(overhead, "measured on the barrier") if overhead else NOTHING,
        )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A rung. `rows`: of a training pass. `whole`: with exploration and elastic sequence parallelism."""

    name: str
    unit: int
    rows: int
    help: Literal["off", "auto"] = "off"
    early: float = 0.0
    whole: bool = False

    def knobs(self, split: Split, updates: int) -> Knobs:
        played: Help = "off" if self.help == "off" else "search"
        rows = max(1, self.rows // split.trainer_gpus)  # of each GPU
        return Knobs(unit=min(self.unit, GROUPS // updates), rows=rows, help=played, early=self.early)


ARMS = (
    Arm(name="barrier", unit=GROUPS, rows=OF_IMAGE),
    Arm(name="+GAP", unit=1, rows=OF_IMAGE),
    Arm(name="+TSP", unit=1, rows=OF_GROUP),
    Arm(name="+TAG", unit=1, rows=OF_GROUP, help="auto"),
    Arm(name="+TCSS", unit=1, rows=OF_GROUP, help="auto", early=0.5),
    Arm(name="all", unit=1, rows=OF_GROUP, help="auto", early=0.5, whole=True),
)
EXPLORATION = ExplorationConfig(profiles=(ProfileConfig(shape=IMAGES, steps=STEPS // 2),), chunk=1, random_fraction=0.0)
"""Candidates of half the steps. Early groups are chosen once each prompt has one: a worker that explores for them
samples nothing else meanwhile."""

BALANCED = Split(name="2 + 1 GPUs, balanced", workers=2, lease_seconds=1.2, training_seconds=4.8)
OF_575 = Split(
    name="verl-omni #575", workers=1, lease_seconds=377.9 / 40 / GROUPS, training_seconds=250.3 / 40, trainer_gpus=2
)
"""Published: a step takes 377.9 s with one generator, which is then the bottleneck, and 250.4 s with two, of which the
trainer waits 0.1 s. Divided by 40. The group size is not published."""

SPLITS = (
    BALANCED,
    OF_575,
    Split(name="1 + 1 GPUs, slow rollouts", workers=1, lease_seconds=1.2, training_seconds=4.8),
    Split(name="2 + 1 GPUs, slow training", workers=2, lease_seconds=0.8, training_seconds=8.0),
    Split(name="3 + 1 GPUs, balanced", workers=3, lease_seconds=1.8, training_seconds=4.8),
)


def warm_and_counted(arm: Arm) -> tuple[int, int]:
    """Return the iterations before those that count, and those that count."""
    if arm.whole:
        return WARM_WHOLE, COUNTED_WHOLE
    return WARM, COUNTED_EARLY if arm.early else COUNTED


def config_of(split: Split, arm: Arm, updates: int, *, is_trainer: bool) -> EngineConfig:
    """Return the settings of a node. Without a pace (`split.lease_seconds` 0) its work takes the time that it takes."""
    step = split.lease_seconds / STEPS / (split.trainer_gpus if is_trainer else 1)
    exploration = EXPLORATION if arm.whole else ExplorationConfig(mode="none")
    return EngineConfig(
        iterations=sum(warm_and_counted(arm)),
        sampler=SamplerConfig(steps=STEPS),
        algorithm=AlgorithmConfig(
            prompts_per_batch=GROUPS,
            images_per_prompt=IMAGES,
            updates_per_batch=updates,
            rows_per_forward=arm.rows,
            unit=arm.unit,
            order="exact",
        ),
        exploration=exploration,
        early=EarlyConfig(share=arm.early, min_pool=1 if arm.whole else None),
        evaluation=EvaluationConfig(prompts=4, every=1000, steps=1),
        reward=RewardConfig(name="paced_reward:brightness"),
        runtime=RuntimeConfig(
            shape=IMAGES,
            step_seconds=step,
            row_seconds=split.training_seconds / ROWS,
            pass_seconds=PASS_SECONDS if split.lease_seconds else 0.0,
            trainer_threads=1,
            help=arm.help,
            sp_degree="auto" if arm.whole and split.workers == 2 else 1,
            lease_seconds=10.0,
            trace_steps=True,
        ),
    )


def measured(split: Split, arm: Arm, updates: int) -> dict[str, Any]:
    """Run a split and return the seconds of its iterations from one report to the next, and what was sampled twice."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "workdir").mkdir()
        (folder / "workdir" / "paced_reward.py").write_text(REWARD)
        config = config_of(split, arm, updates, is_trainer=False)
        fleet = Fleet(folder, config, workdir=folder / "workdir")
        try:
            fleet.start("spot-0", workers=split.workers)
            fleet.engine = config_of(split, arm, updates, is_trainer=True)
            fleet.start("trainer")
            fleet.wait_until_finished(every=0.5, seconds=900)
            done: Sequence[IterationDone] = fleet.events("iteration_done")[warm_and_counted(arm)[0] :]
            return {
                "seconds": statistics.fmean(event.wall_seconds for event in done),
                "all_seconds": [event.wall_seconds for event in done],
                "images_of_help": statistics.fmean(event.made_by.get("trainer", 0) for event in done),
                "stale_share": statistics.fmean(event.health.get("stale_share", 0.0) for event in done),
                "explored": statistics.fmean(event.explored for event in done),
                "all_explored": [event.explored for event in done],
                "trainer_waited": statistics.fmean(event.schedule.get("waited_seconds", 0.0) for event in done),
                "switched": statistics.fmean(event.schedule.get("switch_seconds", 0.0) for event in done),
                "step_seconds": step_seconds(folder),
                "images_regenerated": regenerated(folder),
                "steps_lost": sum(event.lost_steps for event in fleet.events("node_missed", "coordinator")),
            }
        finally:
            fleet.close()


def step_seconds(folder: Path) -> float:
    """Return the median of the seconds from one denoising step of a lease of training images to its next."""
    found: list[float] = []
    for lines in traces(folder):
        for earlier, later in itertools.pairwise(lines):
            if earlier["lease"] == later["lease"] and later["requests"][0][3] in (Kind.TRAIN, Kind.EARLY):
                found.append((later["at_ns"] - earlier["at_ns"]) / 1e9)
    return statistics.median(found)


def traces(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the finished denoising steps of each worker, oldest first."""
    for path in folder.glob("nodes/*/traces/*.jsonl"):
        yield [line for line in map(json.loads, path.read_text().splitlines()) if "requests" in line]


def regenerated(folder: Path) -> int:
    """Return the number of images of which a denoising step was made twice, by whichever processes."""
    made: Counter[tuple[Any, ...]] = Counter()
    for lines in traces(folder):
        for line in lines:
            for batch, prompt, seed, kind in line["requests"]:
                if kind in (Kind.TRAIN, Kind.EARLY):
                    made[(batch, prompt, seed, line["step"])] += 1
    if not made:
        raise RuntimeError(f"no trace of a step in {folder}")
    return len({key[:3] for key, times in made.items() if times > 1})


TWO_RANKS = Split(name="2 ranks, no rollout GPU", workers=0, lease_seconds=1.2, training_seconds=2.4)
"""`training_seconds`: of a batch on one GPU. A fifth of all GPU seconds."""


def two_ranks() -> dict[str, Any]:
    """Return the seconds of an iteration of `all` with two ranks that sample, and with rank 0 sampling alone."""
    whole = ARMS[-1]
    config = config_of(TWO_RANKS, whole, 1, is_trainer=True)
    runtime = config.runtime.model_copy(update={"trainer_ranks": 2})
    config = config.model_copy(
        update={
            "runtime": runtime,
            "model": ModelConfig(weights="lora", lora_rank=4),
            "iterations": WARM + COUNTED,
        }
    )
    seconds = {}
    for name in ("both", "rank 0"):
        if name == "rank 0":
            os.environ[ALONE] = "1"
        with tempfile.TemporaryDirectory() as folder:
            workdir = Path(folder) / "workdir"
            workdir.mkdir()
            (workdir / "paced_reward.py").write_text(REWARD)
            fleet = NurseryFleet(Path(folder), config, workdir=workdir)
            try:
                fleet.start("trainer")
                fleet.wait_until_finished(every=0.5, seconds=600)
                done = fleet.events("iteration_done")[WARM:]
                seconds[name] = [event.wall_seconds for event in done]
            finally:
                os.environ.pop(ALONE, None)
                fleet.close()
    gain = statistics.fmean(seconds["rank 0"]) / statistics.fmean(seconds["both"])
    return {"seconds": seconds, "gain": gain, "target": 1.6, "load": load_now()}


def write_two_ranks(found: Mapping[str, Any], made_on: Mapping[str, Any]) -> None:
    """Write the page `ladder_two_ranks`. `made_on`: of `origin`."""
    rows = [
        {
            "who samples": name,
            "s of an iteration": f"{statistics.fmean(each):.2f}",
            "of each": ", ".join(f"{one:.2f}" for one in each),
        }
        for name, each in found["seconds"].items()
    ]
    met = "met" if found["gain"] >= found["target"] else "**missed**"
    write_page(
        "ladder_two_ranks",
        question="what does a second sampling rank gain where no rollout GPU is?",
        command=f"python -m tests.benchmarks.ladder --json --split '{TWO_RANKS.name}'",
        whole={"two_ranks": dict(found), "seeds": [0], **made_on},
        rows=rows,
        text=f"""
A trainer's node with two ranks and LoRA, the rung `all` of the ladder, without rollout nodes. Steps, rows and passes
are stretched by sleep; a fifth of the GPU seconds are training. Load at the end: {found["load"]:.1f}.

Both ranks sampling over rank 0 sampling alone: {found["gain"]:.2f} times as quick, target {found["target"]:g}: {met}.
If no GPU ever waited it would be 1.8.
""",
    )


def measure_all(
    cells: Sequence[tuple[Split, int, Arm]], keep: Path | None, at_once: int = AT_ONCE
) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Run what `keep` does not hold yet, `at_once` runs at a time."""
    lines = keep.read_text().splitlines() if keep is not None and keep.exists() else []
    found = {(one["split"], one["updates"], one["arm"]): one for one in map(json.loads, lines)}

    def run(cell: tuple[Split, int, Arm]) -> None:
        split, updates, arm = cell
        key = (split.name, updates, arm.name)
        if key in found:
            return
        names = {"split": split.name, "updates": updates, "arm": arm.name, "commit": commit_now()}
        one = {**names, **measured(split, arm, updates)}
        found[key] = one
        if keep is not None:
            with keep.open("a") as file:
                file.write(json.dumps(one) + "\n")
        print(f"{len(found)} of {len(cells)} runs", json.dumps(one), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(at_once) as runs:
        list(runs.map(run, cells))
    return found


def forecast(split: Split, arm: Arm, updates: int, overhead: float) -> Timeline:
    return predict(split.rates(overhead), split.work(updates), split.gpus, arm.knobs(split, updates))


def with_forecasts(split: Split, updates: int, runs: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the arms of a cell with their forecasts. Only the first arm gives the overhead of an iteration."""
    first = ARMS[0]
    overhead = max(0.0, runs[first.name]["seconds"] - forecast(split, first, updates, 0.0).seconds)
    found: list[dict[str, Any]] = []
    for arm in ARMS:
        timeline, one = forecast(split, arm, updates, overhead), runs[arm.name]
        share = bubbles(split, one["seconds"], one["explored"])
        below = found[-1]["seconds"] if found else None
        found.append(
            {
                **one,
                "overhead": overhead,
                "forecast_seconds": timeline.seconds,
                "prediction_error": None if arm is first else one["seconds"] / timeline.seconds - 1,
                "over_bound": one["seconds"] / lower_bound(split.rates(0.0), split.work(updates), split.gpus),
                "bubble_share": share,
                "idle_by_cause": idle_by_cause(one, share, split.gpus),
                "ratio_to_rung_below": None if below is None else below / one["seconds"],
            }
        )
    return found


def bubbles(split: Split, seconds: float, explored: float) -> float:
    """Return the idle share of the GPUs, by the paces of rollouts, packed training and candidates."""
    training = (split.training_seconds + GROUPS * PASS_SECONDS) * split.trainer_gpus
    candidates = explored * split.lease_seconds / IMAGES / 2  # half of the steps
    return 1 - (GROUPS * split.lease_seconds + training + candidates) / (seconds * split.gpus.number)


def idle_by_cause(one: Mapping[str, Any], share: float, gpus: Gpus) -> dict[str, float]:
    """Return the idle GPU-seconds of an iteration. `share`: of all GPU-seconds. The trainer measures its own."""
    known = {"trainer waits for rollouts": one["trainer_waited"], "switch": one["switched"]}
    known = {cause: seconds * gpus.trainer for cause, seconds in known.items()}
    rest = share * one["seconds"] * gpus.number - sum(known.values())
    return {**known, "rollout GPUs wait, and what no pace explains": rest}


def row_of(one: Mapping[str, Any]) -> dict[str, Any]:
    error, ratio = one["prediction_error"], one["ratio_to_rung_below"]
    return {
        "split": one["split"],
        "updates": one["updates"],
        "rung": one["arm"],
        "s": f"{one['seconds']:.1f} ({min(one['all_seconds']):.1f} to {max(one['all_seconds']):.1f})",
        "forecast": f"{one['forecast_seconds']:.1f}",
        "error": "fitted" if error is None else f"{error:+.0%}",
        "over rung below": "" if ratio is None else f"{ratio:.2f}",
        "help": f"{one['images_of_help']:.1f}",
        "early": f"{one['stale_share']:.2f}",
        "explored": f"{one['explored']:.0f}",
        "bubbles": f"{one['bubble_share']:.2f}",
        "again": one["images_regenerated"],
    }


def summarised(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures that have a target."""
    named = [(one["arm"], abs(one["prediction_error"])) for one in found if one["prediction_error"] is not None]
    errors = [error for arm, error in named if arm != "all"]
    ratios: dict[str, list[float]] = {}
    for one in found:
        if one["ratio_to_rung_below"] is not None:
            ratios.setdefault(one["arm"], []).append(one["ratio_to_rung_below"])
    seconds = {(one["split"], one["updates"], one["arm"]): one["seconds"] for one in found}
    whole = [one for one in found if one["arm"] == "all"]
    return {
        "ratio_to_rung_below": {arm: min(values) for arm, values in ratios.items()},
        "best_gain": {arm: max(values) for arm, values in ratios.items()},
        "on_in": on_in(found),
        "all_over_barrier_at_balance": [
            seconds[BALANCED.name, updates, "barrier"] / seconds[BALANCED.name, updates, "all"]
            for updates in UPDATES
            if (BALANCED.name, updates, "all") in seconds
        ],
        "gain_of_help_575": [
            seconds[OF_575.name, updates, "+TSP"] / seconds[OF_575.name, updates, "+TAG"]
            for updates in UPDATES
            if (OF_575.name, updates, "+TAG") in seconds
        ],
        "bubble_share_at_balance": [one["bubble_share"] for one in whole if one["split"] == BALANCED.name],
        "bubble_share_worst": max(one["bubble_share"] for one in whole),
        "prediction_error": {"median": statistics.median(errors), "worst": max(errors)},
        "prediction_error_with_exploration": max(error for _, error in named),
        "images_regenerated": sum(one["images_regenerated"] for one in found),
        "steps_lost": sum(one["steps_lost"] for one in found),
    }


def on_in(found: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of cells in which each rung did something: helped, sampled early or explored.

    Units and packed rows are set by hand, so they are on in all.
    """
    did = {"+TAG": "images_of_help", "+TCSS": "stale_share", "all": "explored"}
    return {
        arm.name: sum(one["arm"] == arm.name and one.get(did.get(arm.name, "seconds"), 0) > 0 for one in found)
        for arm in ARMS[1:]
    }


def paced(*, quick: bool, only: str | None, keep: Path | None) -> dict[str, Any]:
    """Return the figures of the paced clock, and write the page `ladder_paced`.

    `quick`: the balanced split and the published setting, one optimiser step a batch. `only`: name of one split. Both
    write no page. `keep`: file that keeps finished runs, for a second start.
    """
    load1 = load_now()
    splits, updates = (SPLITS[:2], UPDATES[:1]) if quick else (SPLITS, UPDATES)
    splits = [split for split in splits if only in (None, split.name)]
    cells = [(split, count, arm) for split, count in itertools.product(splits, updates) for arm in ARMS]
    runs = measure_all(cells, keep)
    found = [
        one
        for split, count in itertools.product(splits, updates)
        for one in with_forecasts(split, count, {arm.name: runs[split.name, count, arm.name] for arm in ARMS})
    ]
    figures = {**by_cell(found), **summarised(found), "two_ranks": two_ranks(), "targets": TARGETS, "runs": found}
    if not quick and only is None:
        write_page(
            "ladder_paced",
            question="what do the rungs gain with real processes, and how far is the forecast?",
            command="python -m tests.benchmarks.ladder --json --clock paced",
            whole={"paced": figures, "seeds": [0], **origin(load1)},
            rows=[row_of(one) for one in found],
            text=text_of(figures),
            shown=lambda row: row["updates"] == UPDATES[0],
        )
    return figures


def by_cell(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the seconds of each rung by split and updates, and the figures of the highest rung."""

    def name(one: Mapping[str, Any]) -> str:
        return f"{one['split']}, updates {one['updates']}"

    seconds: dict[str, dict[str, float]] = {}
    for one in found:
        seconds.setdefault(name(one), {})[one["arm"]] = one["seconds"]
    whole = [one for one in found if one["arm"] == ARMS[-1].name]
    keys = ("over_bound", "bubble_share", "idle_by_cause")
    return {"seconds": seconds, **{key: {name(one): one[key] for one in whole} for key in keys}}


def text_of(summary: Mapping[str, Any]) -> str:
    error, gains, least = summary["prediction_error"], summary["best_gain"], summary["ratio_to_rung_below"]
    rungs = "; ".join(f"{arm} {least[arm]:.2f} to {gains[arm]:.2f}" for arm in gains)
    below = [
        f"`{one['arm']}` {one['ratio_to_rung_below']:.3f} on {one['split']}, {one['updates']} updates"
        for one in summary["runs"]
        if (one["ratio_to_rung_below"] or 1.0) < TARGETS["rung below"]
    ]
    whole = " and ".join(f"{value:.2f}" for value in summary["all_over_barrier_at_balance"])
    helped = " and ".join(f"{value:.2f}" for value in summary["gain_of_help_575"])
    idle = " and ".join(f"{value:.2f}" for value in summary["bubble_share_at_balance"])
    commits = ", ".join(sorted({one["commit"] for one in summary["runs"]}))
    return f"""
Real nodes of a run: agents, coordinator, trainer and workers, one run a rung, {AT_ONCE} runs at a time. Means of
{COUNTED} iterations after {WARM}, with early groups of {COUNTED_EARLY}. Steps, rows and passes are stretched by sleep.
`all`: with exploration, and elastic sequence parallelism where two workers are; {COUNTED_WHOLE} iterations after
{WARM_WHOLE}. The table shows one optimiser step a batch; the raw figures have two too. Runs of commit {commits}.

| figure | value | target |
| --- | --- | --- |
| over the rung below, worst and best split | {rungs} | at least .98; each at least 1.05 once |
| all over barrier at balance | {whole} | 1.5 |
| bubbles of `all` at balance, and the largest | {idle}; {summary["bubble_share_worst"]:.2f} | .12; .20 |
| help in the setting of verl-omni #575 | {helped} | 1.23 |
| images sampled twice | {summary["images_regenerated"]} | 0 |
| `all` with two sampling ranks and no rollout GPU, over one sampling rank | {summary["two_ranks"]["gain"]:.2f} | 1.6 |
| forecast error, median and worst | {error["median"]:.0%} and {error["worst"]:.0%} | 10 % and 15 % |

Below the target, over the rung below: {"; ".join(below) or "none"}.

`barrier`: the first rollout of an optimiser step trains once all rollouts of the step are there. It gives the seconds
of an iteration that no pace explains; the other rungs are forecast with them. Help is `auto`, with rates that the run
measures itself. `bubbles`: the time of the GPUs that neither rollouts nor packed training nor candidates fill. The
forecast knows no exploration, so its error leaves out `all`, where it is up to
{summary["prediction_error_with_exploration"]:.0%}. Where rollouts need all time of the workers, no prompt gets more
candidates than it trains, so no seed can be chosen: exploration then rests, and one batch of
{REST_BATCHES + 1} explores.
`again`: images of which the traces have a denoising step twice. In the setting of
verl-omni #575 one process stands for two trainer GPUs, and the published seconds are divided by 40; they published a
gain of 1.23.
"""
