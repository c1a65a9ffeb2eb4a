"""modelled_cost: if Qwen-Image learnt as digits-ocr does, where would spot GPUs beside four on-demand ones pay?

    python -m tests.benchmarks.modelled_cost --seeds 3 --json
    python -m tests.benchmarks.modelled_cost --seeds 3 --cells-only         the learning runs it needs; which are stored
    python -m tests.benchmarks.modelled_cost --cell stale-144 --seed 1      one of them, stored

Iterations to the target are measured: real runs of digits-ocr, some of them cells of the exploration benchmark.
Seconds and dollars are modelled (tests/benchmarks/qwen_image.py); from both follows what an arm takes in a cell
(tests/benchmarks/spot_cells.py).
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from engine.config import SamplerConfig
from engine.exploration.value import candidates_that_fit
from tests.benchmarks import arms
from tests.benchmarks.arms import Arm, Cell, crossing, stored_or_run
from tests.benchmarks.exploration import ARMS, CHECKED, FIRST_SEED, PLAIN, SETTINGS
from tests.benchmarks.page import load_now, publish
from tests.benchmarks.qwen_image import (
    CONTROL_SHARE,
    LISTED,
    POOLS,
    SPOT_GPUS,
    TRAINED,
    affordable,
    all_times,
    discounted,
    offered,
    pool_of,
)
from tests.benchmarks.spot_cells import (
    BASELINES,
    Iterations,
    Learned,
    SpotCell,
    ceiling,
    cheaper_candidates,
    geometric_mean,
    product_error,
    spot_cell,
    waiting,
)

IN_PATH_POOLS = (120, 144)

HALF = 0.5
"""Cost of a candidate relative to a rollout, in one of the remedies."""

PUBLISHED_TIME, PUBLISHED_COST = 4.0, (1.4, 6.4)
"""Times as fast, times cheaper: Spotlight's abstract (arXiv 2606.19004); its baselines we do not know (papers 1.2)."""

ARMS_SHOWN = ("on-demand", "in-path on demand", "plain", "in-path", "stale")
"""Arms with hours and dollars. An arm that is all on demand has the hours of its spot arm."""

By = Mapping[str, Mapping[int, Cell]]
"""Learning cells, by run and seed."""

# --- learning: real runs ----------------------------------------------------------------------------------------


def candidate_share() -> float:
    """Return the cost of a candidate relative to a rollout: the same share of steps as in the measured runs."""
    return (ARMS["stale"].steps or SamplerConfig().steps) / SamplerConfig().steps


def run_name(mode: str, pool: int) -> str:
    """Return the name of a run. The exploration benchmark's pool keeps its name, so that both share its cells."""
    return mode if pool == (ARMS[mode].candidates or SETTINGS.candidates) else f"{mode}-{pool}"


def stale_pools() -> list[int]:
    """Return every candidate pool that some cell affords."""
    costs = [times.cost for times in all_times(candidate_share())]
    afforded = {pool_of(affordable(cost, spot)) for cost in costs for spot in SPOT_GPUS}
    return sorted(pool for pool in afforded if pool is not None)


def learning_runs() -> dict[str, Arm]:
    """Return the distinct runs that all cells need, by name."""
    runs = {name: ARMS[name] for name in PLAIN}
    for mode, pools in (("in-path", IN_PATH_POOLS), ("stale", stale_pools())):
        for pool in pools:
            name = run_name(mode, pool)
            runs[name] = ARMS[name] if name in ARMS else replace(ARMS[mode], candidates=pool)
    return runs


def is_stored(name: str, arm: Arm, seed: int) -> bool:
    """Return whether `stored_or_run` would find this cell."""
    return arms.piece_of(name, arm, SETTINGS, seed, checked=name in CHECKED).exists()


def cell_of(name: str, arm: Arm, seed: int) -> Cell:
    cell = stored_or_run(name, arm, SETTINGS, seed, checked=name in CHECKED)
    print(f"{name} seed {seed}: {cell.curve}", file=sys.stderr, flush=True)
    return cell


def iterations_of(cells: Mapping[int, Cell]) -> Iterations:
    reached = [crossing(cell, SETTINGS.target) for cell in cells.values()]
    return [float(SETTINGS.cap) if one is None else one for one in reached]


def best_plain(by: By) -> str:
    return min(PLAIN, key=lambda name: geometric_mean(iterations_of(by[name])))


def learned_from(by: By) -> Learned:
    return Learned(
        plain=iterations_of(by[best_plain(by)]),
        in_path={pool: iterations_of(by[run_name("in-path", pool)]) for pool in IN_PATH_POOLS},
        stale={pool: iterations_of(by[run_name("stale", pool)]) for pool in stale_pools()},
    )


# --- figures ----------------------------------------------------------------------------------------------------


class Figures:
    """All cells, computed once from the learning runs' cells alone."""

    def __init__(self, by: By) -> None:
        self.by = by
        self.learned = learned_from(by)
        times = all_times(candidate_share())
        layouts = [(one, spot) for one in times for spot in SPOT_GPUS]
        cells = [spot_cell(one, spot, price, self.learned) for one, spot in layouts for price in discounted()]
        self.own = [cell for cell in cells if cell.times.own]
        self.others = [cell for cell in cells if not cell.times.own]
        self.catalog = [
            spot_cell(one, spot, price, self.learned) for price in offered() for one, spot in layouts if one.own
        ]
        self.remedies: Mapping[str, Sequence[SpotCell]] = {
            "waiting": [waiting(cell, self.learned) for cell in self.own],
            "half-price candidates": [
                cheaper_candidates(cell, self.learned, candidate_share=HALF) for cell in self.own
            ],
        }

    @property
    def censored(self) -> dict[str, int]:
        return {
            name: sum(crossing(cell, SETTINGS.target) is None for cell in cells.values())
            for name, cells in self.by.items()
        }

    def range_of(self, kind: str, baseline: str) -> tuple[float, float]:
        """Return the smallest and the largest mean ratio of our cells."""
        found = [cell.mean(kind, baseline) for cell in self.own]
        return min(found), max(found)

    @property
    def product_error(self) -> float:
        """Return the largest product error of all cells."""
        cells = [*self.own, *self.others, *self.catalog]
        return max(product_error(ratio) for cell in cells for ratio in cell.over.values())

    def plain_json(self) -> dict[str, Any]:
        everywhere = [*self.own, *self.others]
        return {
            "modelled_time_ratio": {cell.gpus: over(cell, "time") for cell in self.own},
            "modelled_cost_ratio": {cell.name: over(cell, "cost") for cell in self.own},
            "ratio_is": "baseline over stale: geometric mean over seeds, 95 % interval by Student's t on its logarithm",
            "factors_over_on_demand": {cell.name: factors(cell) for cell in self.own},
            "product_error": self.product_error,
            "verdicts": {cell.name: cell.verdict for cell in self.own},
            "break_even_iterations": {cell.name: cell.break_even for cell in self.own},
            "arms": {
                gpus: {arm: spent(arm, cells) for arm in ARMS_SHOWN}
                for gpus, cells in grouped(self.own, lambda cell: cell.gpus).items()
            },
            "affordable": {cell.gpus: affordable(cell.times.cost, cell.spot) for cell in everywhere},
            "pools": {cell.gpus: cell.arms["stale"].pool for cell in everywhere},
            "other_assumptions_cost_ratio": {cell.name: cell.mean("cost") for cell in self.others},
            "catalog_cost_ratio": {cell.name: cell.mean("cost") for cell in self.catalog},
            "remedies_cost_ratio": {
                remedy: {cell.name: cell.mean("cost") for cell in cells} for remedy, cells in self.remedies.items()
            },
            "ranges": {kind: {name: self.range_of(kind, name) for name in BASELINES} for kind in ("time", "cost")},
            "published": {"time": PUBLISHED_TIME, "cost": PUBLISHED_COST},
            "plain": best_plain(self.by),
            "iterations": {name: iterations_of(cells) for name, cells in self.by.items()},
            "censored": self.censored,
            "curves": {
                name: {
                    seed: " ".join(f"{at}:{value:.4f}" for at, value in cell.curve.items())
                    for seed, cell in cells.items()
                }
                for name, cells in self.by.items()
            },
            "times": {cell.times.name: asdict(cell.times) for cell in everywhere},
            "prices": {price.name: asdict(price) for price in [*discounted(), *offered()]},
            "settings": asdict(SETTINGS),
        }


def over(cell: SpotCell, kind: str) -> dict[str, dict[str, float]]:
    return {baseline: cell.over[baseline][kind] for baseline in ("on-demand", "plain", "in-path")}


def factors(cell: SpotCell) -> dict[str, float]:
    """Return the factors of the cost ratio; their product is the ratio."""
    ratio = cell.over["on-demand"]
    return {"iterations": ratio["iterations"]["mean"], "seconds": ratio["seconds"], "rate": ratio["rate"]}


def spent(arm: str, cells: Sequence[SpotCell]) -> dict[str, Any]:
    """Return time and dollars to the target (geometric means) and their factors. `cells` differ only in price."""
    use = cells[0].arms[arm]
    return {
        "pool": use.pool,
        "iterations": geometric_mean(use.iterations),
        "seconds_an_iteration": use.seconds,
        "hours": geometric_mean(use.hours),
        "usd_an_hour": {cell.price.name: use.rate(cell.price) for cell in cells},
        "usd": {cell.price.name: geometric_mean(use.dollars(cell.price)) for cell in cells},
    }


# --- the page ---------------------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def rows(figures: Figures) -> Rows:
    found = []
    for cell in figures.own:
        ratio = cell.over["on-demand"]
        found.append(
            {
                "cell": cell.name,
                "pool": cell.arms["stale"].pool or "none",
                "iterations": interval(ratio["iterations"]),
                "x seconds": f"{ratio['seconds']:.2f}",
                "= time": interval(ratio["time"]),
                "x rate": f"{ratio['rate']:.2f}",
                "= cost": interval(ratio["cost"]),
                "cost over plain": interval(cell.over["plain"]["cost"]),
                "break-even": f"{cell.break_even:.0%}",
                "has": f"{1 / ratio['iterations']['mean']:.0%}",
                "spot": cell.verdict,
            }
        )
    return found


def learning_rows(figures: Figures) -> Rows:
    return [
        {
            "learning run": name,
            "iterations, by seed": ", ".join(f"{value:.1f}" for value in iterations_of(cells)),
            "geometric mean": f"{geometric_mean(iterations_of(cells)):.1f}",
            "never reached": f"{figures.censored[name]} of {len(cells)}",
        }
        for name, cells in figures.by.items()
    ]


def arm_rows(figures: Figures) -> Rows:
    """Return time and dollars to the target by arm; arms without spot once per resolution."""
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for cell in figures.own:
        for name in ARMS_SHOWN:
            use = cell.arms[name]
            line = found.setdefault(
                (cell.times.name, use.spot, name),
                {
                    "times, GPUs": f"{cell.times.name}, {use.on_demand}+{use.spot}",
                    "arm": name,
                    "pool": use.pool or "",
                    "iterations": f"{geometric_mean(use.iterations):.1f}",
                    "x s": f"{use.seconds:.0f}",
                    "= hours": f"{geometric_mean(use.hours):.2f}",
                },
            )
            dollars = geometric_mean(use.dollars(cell.price))
            line[f"x $/h = $ at {cell.price.name}"] = f"{use.rate(cell.price):.2f}: {dollars:.0f}"
    return list(found.values())


def budget_rows(figures: Figures) -> Rows:
    return [
        {
            "times, GPUs": cell.gpus,
            "rollout GPU-s": f"{cell.times.cost.rollout_gpu_seconds:.2f}",
            "training s": f"{cell.times.cost.train_seconds:.0f}",
            "iteration s": f"{cell.arms['plain'].seconds:.0f}",
            "candidates that fit": f"{candidates_that_fit(cell.times.cost, cell.spot):,}",
            f"for {TRAINED} trained": f"{affordable(cell.times.cost, cell.spot):.0f}",
            "pool": cell.arms["stale"].pool or "none",
        }
        for cell in one_price([*figures.own, *figures.others])
    ]


def other_rows(figures: Figures) -> Rows:
    return [
        {"times, GPUs": gpus, "pool": cells[0].arms["stale"].pool or "none", "time": f"{cells[0].mean('time'):.2f}"}
        | {f"cost, {cell.price.name}": interval(cell.over["on-demand"]["cost"]) for cell in cells}
        for gpus, cells in grouped(figures.others, lambda cell: cell.gpus).items()
    ]


def catalog_rows(figures: Figures) -> Rows:
    return [
        {
            "offer": name,
            "on demand $/h": f"{cells[0].price.on_demand:.2f}",
            "spot $/h": f"{cells[0].price.spot:.2f}",
            "off": f"{cells[0].price.discount:.0%}",
        }
        | {cell.gpus: f"{cell.mean('cost'):.2f}" for cell in cells}
        for name, cells in grouped(figures.catalog, lambda cell: cell.price.name).items()
    ]


def remedy_rows(figures: Figures) -> Rows:
    tried = {"as afforded": figures.own, **figures.remedies}
    return [
        {
            "times, GPUs": gpus,
            "remedy": remedy,
            "pool": cells[0].arms["stale"].pool or "none",
            "time": f"{cells[0].mean('time'):.2f}",
        }
        | {f"cost, {cell.price.name}": f"{cell.mean('cost'):.2f}" for cell in cells}
        for gpus in dict.fromkeys(cell.gpus for cell in figures.own)
        for remedy, found in tried.items()
        for cells in [[cell for cell in found if cell.gpus == gpus]]
    ]


def range_rows(figures: Figures) -> Rows:
    return [
        {"stale over": baseline}
        | {kind: "{:.2f} to {:.2f}".format(*figures.range_of(kind, baseline)) for kind in ("time", "cost")}
        | {"cost range is": beside_published(*figures.range_of("cost", baseline))}
        for baseline in BASELINES
    ]


def beside_published(low: float, high: float) -> str:
    """Return how a range of cost ratios compares with the published one."""
    least, most = PUBLISHED_COST
    if high < least or low > most:
        return "below the published" if high < least else "above the published"
    return "inside the published" if least <= low and high <= most else "partly inside the published"


def why(figures: Figures) -> str:
    """Return the text that explains our ratios against the published ones, factor by factor."""
    lines = []
    for name, cells in grouped(figures.own, lambda cell: cell.times.name).items():
        fast = max(cells, key=lambda cell: cell.mean("time"))
        cheap = max(cells, key=lambda cell: cell.mean("cost"))
        seconds = fast.over["on-demand"]["seconds"]
        dollars = cheap.over["on-demand"]["seconds"] * cheap.over["on-demand"]["rate"]
        least, most = (ratio / dollars for ratio in PUBLISHED_COST)
        lines += [
            bullet(
                f"{name}, time: at most {fast.mean('time'):.2f}, with {fast.spot} spot GPUs: iterations "
                f"{fast.mean('iterations'):.2f} x seconds {seconds:.2f}. Spot GPUs never train, so no number of them "
                f"makes seconds more than {ceiling(fast.times):.2f}; with this number, {PUBLISHED_TIME:g} times as "
                f"fast takes {PUBLISHED_TIME / seconds:.1f} times fewer iterations."
            ),
            bullet(
                f"{name}, cost: at most {cheap.mean('cost'):.2f}, with {cheap.spot} spot GPUs at {cheap.price.name}: "
                f"iterations {cheap.mean('iterations'):.2f} x {dollars:.2f} (seconds x rate). {PUBLISHED_COST[0]:g} "
                f"and {PUBLISHED_COST[1]:g} times cheaper take {least:.1f} and {most:.1f} times fewer iterations."
            ),
        ]
    return "\n".join(lines)


def remedies_text(figures: Figures) -> str:
    """Return the text on the effect of each remedy."""
    best = max(cell.mean("cost") for cell in figures.own)
    lines = []
    for remedy, cells in figures.remedies.items():
        pairs = [(cell.mean("cost"), before.mean("cost")) for cell, before in zip(cells, figures.own, strict=True)]
        better = sum(after > before * (1 + 1e-9) for after, before in pairs)
        worse = sum(after < before * (1 - 1e-9) for after, before in pairs)
        lines.append(
            bullet(
                f"{remedy}: cheaper than as afforded in {better} of {len(pairs)} cells, dearer in {worse}; best cost "
                f"ratio {max(after for after, _ in pairs):.2f}, as afforded {best:.2f}."
            )
        )
    return "\n".join(lines)


def cheapest(figures: Figures) -> str:
    """Return the arm and number of GPUs with the lowest modelled cost to the target, by resolution and price."""
    lines = []
    for name, cells in grouped(figures.own, lambda cell: cell.times.name).items():
        found = []
        for price, same in grouped(cells, lambda cell: cell.price.name).items():
            options = [(arm, cell.arms[arm], cell.price) for cell in same for arm in ARMS_SHOWN]
            arm, use, at = min(options, key=lambda option: geometric_mean(option[1].dollars(option[2])))
            found.append(f"{arm} on {use.on_demand}+{use.spot} at {price} (${geometric_mean(use.dollars(at)):.0f})")
        lines.append(bullet(f"{name}: {'; '.join(found)}."))
    return "\n".join(lines)


def verdicts(figures: Figures) -> str:
    lines = []
    for verdict, meaning in (
        ("pays", "Spot pays"),
        ("costs more", "Spot costs more than it brings"),
        ("open", "Open with these seeds"),
    ):
        cells = [cell for cell in figures.own if cell.verdict == verdict]
        lines.append(bullet(f"{meaning} in {len(cells)} of {len(figures.own)} cells: {places(cells)}."))
    return "\n".join(lines)


def places(cells: Iterable[SpotCell]) -> str:
    found = grouped(cells, lambda cell: cell.gpus)
    texts = [
        f"{gpus} at {', '.join(c.price.name.removesuffix(' off') for c in same)} off" for gpus, same in found.items()
    ]
    return "; ".join(texts) or "no cell"


def text(figures: Figures) -> str:
    seeds = len(next(iter(figures.by.values())))
    alone = [cell for cell in figures.own if cell.break_even > 1]
    unchosen = [cell.gpus for cell in one_price(figures.own) if cell.arms["stale"].pool is None]
    slowest, fastest = figures.range_of("time", "on-demand")
    discounts = [price.discount for price in offered()]
    bases = "\n".join(bullet(f"{times.name}: {times.basis}.") for times in all_times(candidate_share()))
    return f"""
**Iterations are measured; seconds and dollars are modelled.** Measured: iterations to exact match {SETTINGS.target:g}
of digits-ocr (1.4 M parameters), real runs of two nodes, {seeds} seeds, paired. Modelled: what such an iteration would
take and cost with Qwen-Image (20 B) on H100. Qwen-Image was not run, and nothing says that it learns as digits-ocr
does. Ratios are baseline over `stale`, above 1 is better: geometric mean over seeds, 95 % interval by Student's t on
the logarithms. Intervals are of learning alone; what the model assumes is varied under "Other assumptions".

The table is over four on-demand GPUs without spot, but for `cost over plain`: the same spot GPUs, idle while the
trainer trains. `break-even`: spot pays if iterations fall to less than this share of the on-demand run's; `has`: to
what they fell. `spot`: pays (the whole interval of the cost ratio is above 1), costs more (below 1), open (neither).

{verdicts(figures)}
{bullet(f"Spot pays by its rollouts alone, `break-even` above 100 %, in {places(alone)}.")}
- Too few candidates to choose from, so that `stale` is `plain`, in {"; ".join(unchosen) or "no cell"}.

## Learning

{table(learning_rows(figures))}

`{best_plain(figures.by)}` stands for all plain arms: the better of {" and ".join(PLAIN)} on these seeds, which favours
it. A run that never reached the target counts as the cap of {SETTINGS.cap} iterations, so that a ratio over it is at
least what is shown, and one of it at most.

## Time and dollars to the target, by arm

{table(arm_rows(figures))}

Geometric means over seeds; dollars an hour, then dollars. In-path has no budget, because everybody waits: each cell
has the faster of the pools {" and ".join(map(str, IN_PATH_POOLS))} on the reported seeds, which favours it. Of ratios,
iterations x seconds x rate is the cost to within {figures.product_error:.0e}, both computed from their own figures.

## What the idle seconds afford

{table(budget_rows(figures))}

{bases}

Candidates for {TRAINED} trained pictures are rounded down to a pool of {", ".join(map(str, POOLS))}, so that no arm has
more than it affords; the last is a cap. A candidate costs {candidate_share():.0%} of a rollout, as many steps as in the
measured runs, and {CONTROL_SHARE:.1%} for the control slice. Judging is free unless it says otherwise: the published
360 s leave it to a fifth GPU, which is charged to no arm and would have the candidates to judge, too.

## Other assumptions

Over on-demand. None of these is a result; they say how much hangs on the times.

{table(other_rows(figures))}

## Prices

Discounts are off ${discounted()[0].on_demand:.2f} a GPU-hour: {" ".join(LISTED)},
{discounted()[0].source}.
Spot H100 of the catalog are {min(discounts):.0%} to {max(discounts):.0%} off. Cost over on-demand at its prices:

{table(catalog_rows(figures))}

Not a quotation: refresh the catalog before use. A GPU is charged as its share of an instance of eight, which cannot be
bought by the half. Charged to no arm: reclaims, boots, waiting for capacity, disks, traffic, evaluation; what
reclaims cost is measured by reclaim_learning.

## Beside the published figures

Published: {PUBLISHED_TIME:g} times as fast, {PUBLISHED_COST[0]:g} to {PUBLISHED_COST[1]:g} times cheaper (Spotlight's
abstract), learnt by Qwen-Image itself, against baselines that we do not know. Ours, over the cells of the first table:

{table(range_rows(figures))}

Over on-demand, time is {slowest:.2f} to {fastest:.2f}; the published {PUBLISHED_TIME:g} is
{PUBLISHED_TIME / fastest:.1f} times the largest. Why:

{why(figures)}
- The baseline decides as much as the arm: the table has the same runs over six. `all on demand` is the same layout at
  the on-demand price; GPUs that are all on demand could train as well and, if that scaled, cost what four do.
- Ours rather than the paper's: task, model, student scorer, planner, groups (6 x 8 for 32 x 16; carried over are the
  candidates for each trained picture), no sequence parallelism in rollouts, no reclaims.

## Remedies

{table(remedy_rows(figures))}

{remedies_text(figures)}

`waiting`: the trainer waits for a pool that may be more than fits, the fastest of those that were run.
`half-price candidates`: a candidate costs {HALF:.0%} of a rollout and ranks as well, which is an upper bound, because
fewer steps or bits rank worse; pools that were run.

What it changes: what to buy, by the lowest modelled cost to the target, of all arms and sizes:

{cheapest(figures)}
"""


def bullet(line: str) -> str:
    """Return one list item; no line break inside a percentage."""
    unbroken = line.replace(" %", "\N{NO-BREAK SPACE}%")
    return textwrap.fill(unbroken, 120, initial_indent="- ", subsequent_indent="  ")


def interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    names = list(lines[0])
    head = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return "\n".join(head + [f"| {' | '.join(str(line[name]) for name in names)} |" for line in lines])


def grouped(cells: Iterable[SpotCell], key: Callable[[SpotCell], str]) -> dict[str, list[SpotCell]]:
    found: dict[str, list[SpotCell]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def one_price(cells: Sequence[SpotCell]) -> list[SpotCell]:
    """Return the cells of one price, for figures that do not depend on the price."""
    return [cell for cell in cells if cell.price == cells[0].price]


# --- the command ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="2 or more")
    parser.add_argument("--cells-only", action="store_true", help="list the learning runs, and which are stored")
    parser.add_argument("--cell", choices=list(learning_runs()), help="run and store one learning run")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of --cell")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds is {options.seeds}; use 2 or more, because an interval needs them")
    runs = learning_runs()
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    if options.cells_only:
        stored = {name: {seed: is_stored(name, arm, seed) for seed in seeds} for name, arm in runs.items()}
        for name, by_seed in stored.items():
            print(f"{name:<14}" + "  ".join(f"seed {seed} {'stored' if by_seed[seed] else '-':<6}" for seed in seeds))
        print(json.dumps({name: {"arm": asdict(arm), "stored": stored[name]} for name, arm in runs.items()}))
        return
    if options.cell:
        print(json.dumps(asdict(cell_of(options.cell, runs[options.cell], options.seed))))
        return
    load1 = load_now()
    by: dict[str, dict[int, Cell]] = {name: {} for name in runs}
    for seed in seeds:
        for name, arm in runs.items():
            by[name][seed] = cell_of(name, arm, seed)
    figures = Figures(by)
    publish(
        "modelled_cost",
        question="if Qwen-Image learnt as digits-ocr does, where would spot GPUs beside four on-demand ones pay?",
        command=f"python -m tests.benchmarks.modelled_cost --seeds {options.seeds} --json",
        result=figures.plain_json(),
        runs=sum(len(cells) for cells in by.values()),
        seeds=list(seeds),
        load1=load1,
        rows=rows(figures),
        text=text(figures),
    )


if __name__ == "__main__":
    main()
