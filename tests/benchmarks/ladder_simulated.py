"""The simulated clock of the ladder: `python -m tests.benchmarks.ladder --json --clock simulated`.

Plays the schedule of engine/schedule/ forward; no process is started. Each rung adds one mechanism to the choice of the
rung below, and keeps the choice of the rung below where the mechanism gains less than 2 %.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.schedule.choose import Allowed, Best, best, units_of
from engine.schedule.simulate import World, play, start
from engine.schedule.values import Gpus, Help, lower_bound, train_seconds
from tests.benchmarks.ladder_cells import Setting, Wrong, cells, drawn, of_verl_omni_575, rollout_bound
from tests.benchmarks.page import load_now, origin, write_page

RUNGS = ("barrier", "+GAP", "+TSP", "+TAG", "+TCSS")
HELPS: tuple[Help, ...] = ("greedy", "feedback", "search")
EARLY = (0.25, 0.5)
DRAWN, HELPED = 60, 30


@dataclass(frozen=True, kw_only=True)
class Rung:
    choice: Best
    is_on: bool
    seconds: float


def climb(setting: Setting, gpus: Gpus) -> dict[str, Rung]:
    """Return the rungs of a setting on a split of its GPUs, from the barrier up."""
    work, units = setting.work, units_of(setting.work)
    found: dict[str, Rung] = {}
    below: Best | None = None
    for name in RUNGS:
        allowed = _allowed(name, below, units, setting)
        choice = best(setting.rates, work, gpus, allowed, below)
        assert choice.timeline is not None
        is_on = below is not None and choice.knobs != below.knobs
        found[name] = Rung(choice=choice, is_on=is_on, seconds=choice.timeline.seconds)
        below = choice
    return found


def _allowed(rung: str, below: Best | None, units: tuple[int, ...], setting: Setting) -> Allowed:
    if below is None:
        return Allowed(units=(setting.work.groups,), rows=(1,))
    knobs = below.knobs
    match rung:
        case "+GAP":
            return Allowed(units=units, rows=(1,))
        case "+TSP":
            return Allowed(units=(setting.work.groups, *units), rows=(setting.rows,))
        case "+TAG":
            return Allowed(units=(knobs.unit, *units), rows=(knobs.rows,), helps=HELPS)
        case _:
            helps: tuple[Help, ...] = tuple(dict.fromkeys((knobs.help, "off")))
            return Allowed(units=(knobs.unit, *units), rows=(knobs.rows,), helps=helps, early=EARLY)


def shares(number: int) -> list[int]:
    """Return the numbers of trainer GPUs to try: 2 to 12 sixteenths."""
    return sorted({max(1, round(number * sixteenths / 16)) for sixteenths in (2, 4, 6, 8, 10, 12)})


def summary(ladders: Sequence[Mapping[str, Rung]]) -> dict[str, Any]:
    """Return for each rung the smallest and largest gain over the rung below, and the number of ladders it is on in."""
    found = {}
    for below, name in itertools.pairwise(RUNGS):
        ratios = [ladder[below].seconds / ladder[name].seconds for ladder in ladders]
        found[name] = {
            "ratio_to_rung_below": min(ratios),
            "largest": max(ratios),
            "median": statistics.median(ratios),
            "on_in": sum(ladder[name].is_on for ladder in ladders),
        }
    return found


def of_cell(setting: Setting) -> dict[str, Any]:
    """Return the ladder of a cell on an even split and on the quickest split."""
    even = climb(setting, setting.split(setting.number // 2))
    splits = {trainer: climb(setting, setting.split(trainer)) for trainer in shares(setting.number)}
    trainer = min(splits, key=lambda one: splits[one]["+TCSS"].seconds)
    ladder = splits[trainer]
    top = ladder["+TCSS"].choice.timeline
    assert top is not None
    bound = lower_bound(setting.rates, setting.work, setting.split(trainer))
    return {
        "cell": setting.name,
        "even": even,
        "best": ladder,
        "trainer": trainer,
        "bubble_share": top.bubble_share,
        "idle_by_cause": dict(top.idle),
        "over_bound": top.seconds / bound,
        "collectives": top.collectives,
        "knobs": ladder["+TCSS"].choice.knobs,
    }


def of_help(splits: Sequence[tuple[Setting, Gpus]]) -> dict[str, Any]:
    """Return the gain of each kind of help over none, with wrong rates and noise, on some splits."""
    gains: dict[str, list[float]] = {name: [] for name in HELPS}
    possible, regenerated = [], 0
    for place, (setting, gpus) in enumerate(splits):
        seconds = {}
        for name, choice in chosen_help(setting, gpus).items():
            world = World(setting.rates, start(setting.work, gpus), choice.knobs, Wrong(place))
            seconds[name] = play(world, batches=6, warm=2).seconds
            trained = {key: count for key, count in world.sampled.items() if key[0] < world.batch}
            regenerated += sum(count - setting.work.images for count in trained.values())
            if name == "off":
                assert choice.timeline is not None
                possible.append(choice.timeline.seconds / without_waiting(setting, gpus))
        for name in HELPS:
            gains[name].append(seconds["off"] / seconds[name])
    return {
        "splits": len(splits),
        "images_regenerated": regenerated,
        "possible_median": statistics.median(possible),
        **{
            name: {
                "worst": min(each),
                "median": statistics.median(each),
                "best": max(each),
                "slower_than_none": sum(gain < 0.98 for gain in each),
            }
            for name, each in gains.items()
        },
    }


def chosen_help(setting: Setting, gpus: Gpus) -> dict[str, Best]:
    """Return the quickest knobs without help, with each kind of help, and for `search` the quicker of both."""
    units, rates, work = units_of(setting.work), setting.rates, setting.work
    off = best(rates, work, gpus, Allowed(units=units, rows=(setting.rows,)))
    found = {"off": off}
    for name in HELPS:
        if name == "search":
            allowed = Allowed(units=(off.knobs.unit, *units), rows=(setting.rows,), helps=("off", name))
            found[name] = best(rates, work, gpus, allowed, off)
        else:
            found[name] = best(rates, work, gpus, Allowed(units=units, rows=(setting.rows,), helps=(name,)))
    return found


def without_waiting(setting: Setting, gpus: Gpus) -> float:
    """Return the seconds of an iteration if no GPU ever waited. Collectives count as work."""
    work = setting.work
    training = train_seconds(setting.rates, work, gpus.trainer, work.groups, setting.rows)
    rollouts = work.groups * work.images * setting.rates.image.value
    return max(training, (rollouts + training * gpus.trainer) / gpus.number)


def of_575() -> dict[str, Any]:
    """Return the gain of help in the setting of verl-omni #575, which published 377.9 s without and 307.8 s with it."""
    setting = of_verl_omni_575()
    choices = chosen_help(setting, setting.split(2))
    seconds = {}
    for name in ("off", "search"):
        timeline = choices[name].timeline
        assert timeline is not None
        seconds[name] = timeline.seconds
    return {
        "seconds": seconds,
        "gain": seconds["off"] / seconds["search"],
        "published_gain": 377.9 / 307.8,
        "if_no_gpu_waited": without_waiting(setting, setting.split(2)),
    }


def targets(
    found: Sequence[Mapping[str, Any]],
    helped: Mapping[str, Any],
    bound: Mapping[str, Any],
    rungs: Mapping[str, Any],
    gain_575: float,
) -> dict[str, Any]:
    """Return each target with the figure and whether it is met. `bound`: help on splits bound by rollouts."""
    bubbles = sorted(one["bubble_share"] for one in found)
    best_rungs = summary([one["best"] for one in found])
    rows = {
        "no rung below the rung below it (1.0)": min(one["ratio_to_rung_below"] for one in rungs.values()),
        "each rung gains 1.05 in a cell": min(one["largest"] for one in best_rungs.values()),
        "cells of 10 with bubbles of .12 or less (8)": sum(share <= 0.12 for share in bubbles),
        "largest bubbles (.20)": bubbles[-1],
        "worst help with wrong rates (.97)": min(one["search"]["worst"] for one in (helped, bound)),
        "median help with wrong rates where rollouts take longer than training (1.4)": bound["search"]["median"],
        "images sampled twice (0)": helped["images_regenerated"] + bound["images_regenerated"],
        "help in the setting of verl-omni #575 (1.23)": gain_575,
    }
    first, gain, cells_met, largest, worst, median, twice, of_setting = rows.values()
    met = (
        first >= 1,
        gain >= 1.05,
        cells_met >= 8,
        largest <= 0.2,
        worst >= 0.97,
        median >= 1.4,
        twice == 0,
        of_setting >= 1.23,
    )
    return {name: {"figure": value, "met": is_met} for (name, value), is_met in zip(rows.items(), met, strict=True)}


def row_of(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell's line of the table."""

    def gains(ladder: Mapping[str, Rung]) -> str:
        pairs = itertools.pairwise(RUNGS)
        return " ".join(f"{ladder[below].seconds / ladder[name].seconds:.2f}" for below, name in pairs)

    knobs, even = one["knobs"], one["even"]
    return {
        "cell": one["cell"],
        "trainer GPUs": one["trainer"],
        "s": f"{one['best']['+TCSS'].seconds:.0f}",
        "over bound": f"{one['over_bound']:.2f}",
        "bubbles": f"{one['bubble_share']:.3f}",
        "GAP TSP TAG TCSS": gains(one["best"]),
        "at the even split": gains(even),
        "all over barrier": f"{one['best']['barrier'].seconds / one['best']['+TCSS'].seconds:.2f}",
        "knobs": f"unit {knobs.unit}, rows {knobs.rows}, help {knobs.help}, early {knobs.early:g}",
    }


def simulated(*, quick: bool = False) -> dict[str, Any]:
    """Return the figures of the simulated clock, and write the page `ladder`. `quick`: two cells, and no page."""
    load1 = load_now()
    settings, splits, helping = (cells()[:2], 10, 5) if quick else (cells(), DRAWN, HELPED)
    found = [of_cell(setting) for setting in settings]
    rungs = summary([climb(setting, gpus) for setting, gpus in drawn(splits)])
    helped, bound = of_help(drawn(helping)), of_help(rollout_bound(helping))
    setting_575 = of_575()
    met = targets(found, helped, bound, rungs, setting_575["gain"])
    of_cells = summary([one["best"] for one in found])
    figures = {
        "seconds": {one["cell"]: {name: rung.seconds for name, rung in one["best"].items()} for one in found},
        **{key: {one["cell"]: one[key] for one in found} for key in ("over_bound", "bubble_share", "idle_by_cause")},
        "ratio_to_rung_below": {
            name: min(rungs[name]["ratio_to_rung_below"], of_cells[name]["ratio_to_rung_below"]) for name in rungs
        },
        "best_gain": {name: one["largest"] for name, one in of_cells.items()},
        "on_in": {name: one["on_in"] for name, one in of_cells.items()},
        "images_regenerated": helped["images_regenerated"] + bound["images_regenerated"],
        "trainer_gpus": {one["cell"]: one["trainer"] for one in found},
        "collectives": {one["cell"]: one["collectives"] for one in found},
        "seconds_at_even_split": {
            one["cell"]: {name: rung.seconds for name, rung in one["even"].items()} for one in found
        },
        "rungs_in_cells": of_cells,
        "rungs_in_drawn_splits": rungs,
        "help_with_wrong_rates": helped,
        "help_where_rollouts_take_longer": bound,
        "verl_omni_575": setting_575,
        "targets": met,
    }
    if not quick:
        missed = "; ".join(f"{name}: {one['figure']:.3g}" for name, one in met.items() if not one["met"])
        write_page(
            "ladder",
            question="what does each part of the pipeline gain, and how much of the GPUs' time is idle?",
            command="python -m tests.benchmarks.ladder --json --clock simulated",
            whole={"simulated": figures, "seeds": [0, helping - 1], **origin(load1)},
            rows=[row_of(one) for one in found],
            text=page_text(rungs, helped, bound, setting_575, missed),
        )
    return figures


def page_text(
    rungs: Mapping[str, Any],
    helped: Mapping[str, Any],
    bound: Mapping[str, Any],
    setting_575: Mapping[str, Any],
    missed: str,
) -> str:
    drawn_text = "\n".join(
        f"| {name} | {one['on_in']} | {one['ratio_to_rung_below']:.3f} | {one['median']:.3f} | {one['largest']:.2f} |"
        for name, one in rungs.items()
    )
    help_text = "\n".join(
        f"| {splits} | {name} | {one[name]['worst']:.3f} | {one[name]['median']:.3f} | {one[name]['best']:.2f} | "
        f"{one[name]['slower_than_none']} |"
        for splits, one in (("drawn", helped), ("rollouts longer", bound))
        for name in HELPS
    )
    return f"""
Simulated with assumed rates: nothing was run, and no rate was measured. Each gain is over the rung before: GAP trains
units of groups on arrival, TSP packs rows, TAG lets a waiting trainer sample, TCSS samples early. A rung that gains
less than 2 % stays off. The split is the quickest of six. A bubble is an idle GPU-second, counted from one publish to
the next, publishing included; collectives are busy. Elastic SP and exploration are not in the figures.

Missed targets: {missed or "none"}.

## {DRAWN} drawn splits

| rung | on in | smallest gain | median | largest |
| --- | --- | --- | --- | --- |
{drawn_text}

## Help with wrong rates

Rates 20 % wrong either way, 15 % noise; gain over the quickest unit without help. `drawn`: {helped["splits"]} of the
drawn splits. Most of them are bound by the trainer, so help gains nothing there, and `search` stays off.
`rollouts longer`: the first {bound["splits"]} drawn splits whose rollouts take longer than their training. If no GPU
ever waited there, the median gain would be {bound["possible_median"]:.2f}.

| splits | help | worst | median | best | slower than .98 in |
| --- | --- | --- | --- | --- | --- |
{help_text}

## The setting of verl-omni #575

Two trainer GPUs and one generator, the published seconds as rates: {setting_575["seconds"]["off"]:.0f} s an
iteration without help, {setting_575["seconds"]["search"]:.0f} s with it, {setting_575["gain"]:.2f} times quicker.
There: 377.9 and 307.8 s, {setting_575["published_gain"]:.2f} times, with 1,838 requests aborted and begun anew.
Here none is. If no GPU ever waited: {setting_575["if_no_gpu_waited"]:.0f} s.

## What it changed

A plan on clouds prints an iteration played forward, and the `algorithm.unit` that makes it shorter. A run decides
about help by the same schedule (`runtime.help: auto`), with rates that it measures.
"""
