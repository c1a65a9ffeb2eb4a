"""modelled_cost: if Qwen-Image learnt as digits-ocr does, what would spot save on recorded markets?

    python -m tests.benchmarks.modelled_cost --json
    python -m tests.benchmarks.modelled_cost --traces FOLDER --json    traces as launcher/replay/readers.py knows them

cost = iterations x seconds of an iteration x dollars of a second, each a ratio of a baseline to spotrl.

- Iterations: of digits-ocr with the recommended algorithm, with and without stale exploration, paired by seed; measured
  by the algorithms benchmark. As many times fewer as the algorithm took there, of the recipe's 300 with Flow-GRPO.
- Seconds: the planner's, of Qwen-Image on H100 with the ranks of the trainer (engine/timing/).
- Dollars: replays of the shipped decisions on recorded markets that no parameter was fitted on. Each seed of learning
  has a start of its own. Prices are those of the catalog.

Baselines: the same nodes all on demand, which explore too; and the trainer alone, which does not explore.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from engine.events import Market
from launcher.decide.launch_history import MoveRules
from launcher.decide.reconcile import decide
from launcher.decide.work_left import WorkLeft
from launcher.job.recipe import Recipe
from launcher.job.resolved import resolve
from launcher.job.schema import Job
from launcher.market.offers import Offer
from launcher.money import HOUR_MS
from launcher.placement.options import Option, SiteOptions
from launcher.placement.plan import Plan, placement_of, slot_of
from launcher.replay.baselines import all_on_demand
from launcher.replay.readers import read_folder
from launcher.replay.replay import Policy, Replayed, replay
from launcher.replay.trace import PoolTrace, Trace
from tests.benchmarks.algorithms import ALL_LEVELS
from tests.benchmarks.page import RESULTS, ROOT, load_now, publish
from tests.benchmarks.replay import FITTED_ON, ON_DEMAND, spot_price

TRACES = ROOT / "catalogs" / "traces"
SEEDS = tuple(range(101, 111))
TARGET = 0.75
RECIPE_ITERATIONS = 300
"""Iterations of the published recipe, with Flow-GRPO."""

CANDIDATES_OF_TRAINED = 144 / 48
"""Candidates for each trained image in the measured runs. A node that affords fewer adds no exploration."""

LONGEST_MS = 85 * HOUR_MS
GPUS = 8
"""GPUs of an on-demand node whose price is known. A GPU is charged as its share, though none sells a part of it."""

MARKETS = ("us-central1", "us-east4", "us-west1")
"""Regions with several zones: spot most of the time, often, and seldom."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A job and its nodes."""

    px: int
    ranks: int
    spot: int
    """One-GPU spot nodes."""

    @property
    def name(self) -> str:
        return f"{self.px} px, {self.ranks} rank{'s' if self.ranks > 1 else ''} + {self.spot}"

    def recipe(self) -> Recipe:
        """Return the recipe of Qwen-Image with DiffusionNFT: guidance, all noise levels, and a second rollout."""
        nodes = {
            "trainer": {"accelerators": f"H100:{self.ranks}"},
            "rollout": {"accelerators": "H100:1", "use_spot": True, "num_nodes": self.spot},
        }
        job = Job(
            infra="gcp",
            model={
                "name": "qwen-image",
                "path": "there",
                "weights": "lora",
                "lora_rank": 64,
                "max_text_tokens": 256,
                "height": self.px,
                "width": self.px,
            },
            algorithm={
                "name": "diffusion-nft",
                "prompts_per_batch": 32,
                "images_per_prompt": 16,
                "diffusion_nft": ALL_LEVELS,  # as the runs whose iterations count
            },
            sampler={"steps": 10, "guidance": 4},
            exploration={
                "mode": "stale",
                "trains": "rollouts",
                "budget": {"seconds": "auto", "max_candidates": 4096},
            },
            runtime={"trainer_ranks": self.ranks},
            resources=nodes,
            budget={"max_total": "$4,000"},
        )
        return resolve(job).recipe.on(self.ranks)


LAYOUTS = (
    Layout(px=512, ranks=2, spot=1),
    Layout(px=512, ranks=8, spot=2),
    Layout(px=512, ranks=8, spot=4),
    Layout(px=1024, ranks=8, spot=4),
)


# --- learning: measured ----------------------------------------------------------------------------------------------


def iterations_of(arm: str) -> list[float]:
    """Return the iterations to the target of each seed, on a straight line between two evaluations."""
    found = []
    for seed in SEEDS:
        kept = json.loads((RESULTS / "algorithms" / f"{arm}-{seed}.json").read_text())
        points = sorted((int(at), value) for at, value in kept["curve"].items())
        after = next((pair for pair in pairwise(points) if pair[1][1] >= TARGET), None)
        if after is None:
            raise ValueError(f"{arm} seed {seed} never reached {TARGET}")
        (before, low), (at, high) = after
        found.append(before + (at - before) * (TARGET - low) / (high - low))
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean of ratios, and its 95 % interval by Student's t on the logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = float(student.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"mean": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


# --- markets: replayed -----------------------------------------------------------------------------------------------


def plan_for(layout: Layout, pools: Sequence[PoolTrace]) -> Plan:
    """Return a plan in the region of these zones: a trainer on demand, and the spot nodes over the zones in turn."""
    steady = option_of(pools[0], Market.ON_DEMAND, 1)
    trainer = option_of(pools[0], Market.ON_DEMAND, layout.ranks)
    spot = [option_of(pool, Market.SPOT, 1) for pool in pools]
    first = slot_of("trainer", "trainer", offer_of(pools[0], Market.ON_DEMAND, layout.ranks), ON_DEMAND["gcp"])
    slots = [
        replace(
            first,
            name=f"spot-{n}",
            role="rollout",
            placement=spot[n % len(spot)].placement,
            on_demand_micro_usd_per_hour=ON_DEMAND["gcp"] // GPUS,
        )
        for n in range(layout.spot)
    ]
    site = SiteOptions(cloud="gcp", region=pools[0].region, trainer=(trainer,), rollout=(*spot, steady))
    return Plan(
        region=pools[0].region,
        slots=(first, *slots),
        max_total_micro_usd=None,
        max_hourly_micro_usd=None,
        sites=(site,),
    )


def offer_of(pool: PoolTrace, market: Market, gpus: int) -> Offer:
    whole = spot_price(pool) if market is Market.SPOT else ON_DEMAND["gcp"]
    return Offer(
        cloud=pool.cloud,
        region=pool.region,
        zone=pool.zone if market is Market.SPOT else "",
        instance_type=f"a3-highgpu-{gpus}g",
        accelerator="H100",
        gpus=gpus,
        market=market,
        micro_usd_per_hour=whole * gpus // GPUS,
        source="catalog",
        observed_at="",
    )


def option_of(pool: PoolTrace, market: Market, gpus: int) -> Option:
    offer = offer_of(pool, market, gpus)
    return Option(placement=placement_of(offer), on_demand_micro_usd_per_hour=ON_DEMAND["gcp"] * gpus // GPUS)


def work_of(recipe: Recipe, nodes: int, plain: float, explored: float) -> WorkLeft:
    """Return the work of an explored run. With too few nodes to explore, an iteration counts for `explored` / `plain`.

    `plain`, `explored`: iterations to the target without and with exploration.
    """
    trained = recipe.images_per_prompt
    pace: list[float] = []
    for n in range(nodes + 1):
        explores = recipe.candidates_per_prompt(n) >= CANDIDATES_OF_TRAINED * trained
        ms = 1000 * recipe.seconds(n) * (1.0 if explores else plain / explored)
        pace.append(min([ms, *pace[-1:]]))
    return WorkLeft(iterations=explored, done=0.0, iteration_ms=pace)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """One run: iterations, and the hours and dollars of its replay."""

    iterations: float
    hours: float
    usd: float

    @property
    def seconds(self) -> float:
        return self.hours * 3600 / self.iterations

    @property
    def usd_per_hour(self) -> float:
        return self.usd / self.hours


def spent(plan: Plan, work: WorkLeft, trace: Trace, start_ms: int, seed: int, policy: Policy) -> Spent | None:
    found: Replayed = replay(plan, MoveRules(), work, trace, start_ms, seed, longest_ms=LONGEST_MS, policy=policy)
    if not found.reached:
        return None
    return Spent(iterations=work.iterations, hours=found.ms / HOUR_MS, usd=found.micro_usd / 1e6)


def cell(
    layout: Layout, trace: Trace, region: str, plain: Sequence[float], explored: Sequence[float]
) -> dict[str, Any]:
    """Return the ratios of both baselines to spotrl, over the seeds of which all three runs end in the recording."""
    recipe = layout.recipe()
    pools = [
        replace(pool, micro_usd_per_hour=(None,) * len(pool.t_ms)) for pool in trace.pools if pool.region == region
    ]
    own, plan = replace(trace, pools=tuple(pools)), plan_for(layout, pools)
    alone = replace(plan, slots=plan.slots[:1])
    ours: list[Spent] = []
    others: dict[str, list[Spent]] = {"all on demand": [], "trainer alone": []}
    for number, (without, with_it) in enumerate(zip(plain, explored, strict=True)):
        work = work_of(recipe, layout.spot, without, with_it)
        single = WorkLeft(iterations=without, done=0.0, iteration_ms=(1000 * recipe.seconds(0),))
        room_ms = max(0, trace.end_ms - round(1.2 * single.left_ms(0)))
        start_ms = room_ms * number // (len(plain) - 1)
        results = (
            spent(plan, work, own, start_ms, number, decide),
            spent(plan, work, own, start_ms, number, all_on_demand),
            spent(alone, single, own, start_ms, number, all_on_demand),
        )
        if all(result is not None for result in results):
            first, *rest = (result for result in results if result is not None)
            ours.append(first)
            for name, result in zip(others, rest, strict=True):
                others[name].append(result)
    return {
        "cell": f"{layout.name}, {region}",
        "runs": len(ours),
        "usd": statistics.fmean(one.usd for one in ours),
        "hours": statistics.fmean(one.hours for one in ours),
        "over": {name: ratios(theirs, ours) for name, theirs in others.items()},
    }


def ratios(theirs: Sequence[Spent], ours: Sequence[Spent]) -> dict[str, dict[str, float]]:
    """Return each factor of the cost ratio; iterations x seconds x rate = cost."""
    pairs = list(zip(theirs, ours, strict=True))
    return {
        "iterations": interval([a.iterations / b.iterations for a, b in pairs]),
        "seconds": interval([a.seconds / b.seconds for a, b in pairs]),
        "rate": interval([a.usd_per_hour / b.usd_per_hour for a, b in pairs]),
        "time": interval([a.hours / b.hours for a, b in pairs]),
        "cost": interval([a.usd / b.usd for a, b in pairs]),
    }


# --- the page --------------------------------------------------------------------------------------------------------


def verdict(ratio: Mapping[str, float]) -> str:
    if ratio["low"] > 1:
        return "cheaper"
    return "dearer" if ratio["high"] < 1 else "open"


def shown(ratio: Mapping[str, float]) -> str:
    return f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for each in cells:
        for name, over in each["over"].items():
            found.append(
                {
                    "cell": each["cell"],
                    "over": name,
                    "iterations": shown(over["iterations"]),
                    "x seconds": shown(over["seconds"]),
                    "x $/h": shown(over["rate"]),
                    "= cost": shown(over["cost"]),
                    "spotrl is": verdict(over["cost"]),
                    "hours": f"{each['hours']:.1f}",
                    "$": f"{each['usd']:.0f}",
                }
            )
    return found


def text(cells: Sequence[Mapping[str, Any]], trace: str, left_out: Sequence[str]) -> str:
    counted = {
        name: {
            word: sum(verdict(each["over"][name]["cost"]) == word for each in cells)
            for word in ("cheaper", "open", "dearer")
        }
        for name in ("all on demand", "trainer alone")
    }
    said = "; ".join(
        f"against {name}: cheaper in {found['cheaper']} of {len(cells)} cells, open in {found['open']}, dearer in "
        f"{found['dearer']}"
        for name, found in counted.items()
    )
    return f"""
**Iterations are measured on digits-ocr, seconds are modelled, dollars are replayed.** Qwen-Image was not run, and
nothing says that it learns as digits-ocr does. Ratios are baseline over spotrl, above 1 is better: geometric mean over
{len(SEEDS)} pairs of a learning seed and a start, 95 % interval by Student's t on the logarithms. The product of the
factors is the cost ratio. Intervals hold learning and the market, not the model of the seconds.

{said[0].upper()}{said[1:]}.

- A cell: pixels, ranks of the trainer (one H100 each, on demand) + spot nodes of one H100, region. Recommended
  algorithm: diffusion-nft. Starts are at equal distances of {trace}, which no parameter was fitted on.
- All on demand: the same nodes, which explore too, so iterations are equal. Trainer alone: no rollout nodes and no
  exploration; all of its ranks sample while they have no group to train, as they do beside rollout nodes.
- Starts of long runs overlap in a recording of 90 h, so the market's part of an interval is too narrow.
- Iterations: {RECIPE_ITERATIONS} of the published recipe with Flow-GRPO, over what each run took on digits-ocr.
  Exploration counts while enough nodes are at work for {CANDIDATES_OF_TRAINED:g} candidates of each trained image.
- Assumed: ranks of the trainer ran on CPUs only, and their efficiency is modelled; a GPU of an instance of eight costs
  an eighth; on demand is always there; a cold start takes 8 minutes; no disks beyond 100 GB, no traffic.
- Left out, because not all runs end within the recording: {", ".join(left_out) or "none"}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of readable traces")
    parser.add_argument("--print-only", action="store_true", help="do not write the page")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    traces, _ = read_folder(options.traces, time.time())
    trace = max((t for t in traces if t.name not in FITTED_ON and len(t.pools) > 1), key=lambda t: t.end_ms)
    scale = RECIPE_ITERATIONS / geometric_mean(iterations_of("flow-grpo"))
    plain = [scale * count for count in iterations_of("diffusion-nft")]
    explored = [scale * count for count in iterations_of("diffusion-nft+stale")]
    cells = [cell(layout, trace, region, plain, explored) for layout in LAYOUTS for region in MARKETS]
    left_out = [each["cell"] for each in cells if each["runs"] < len(SEEDS)]
    cells = [each for each in cells if each["runs"] == len(SEEDS)]
    result = {
        "modelled_cost_ratio": {
            each["cell"]: {name: over["cost"] for name, over in each["over"].items()} for each in cells
        },
        "factors": {each["cell"]: each["over"] for each in cells},
        "ratio_is": "baseline over spotrl: geometric mean, 95 % interval by Student's t on the logarithms",
        "iterations": {"plain": plain, "explored": explored},
        "trace": trace.name,
        "left_out": left_out,
    }
    if options.print_only:
        print(json.dumps(result))
        return
    publish(
        "modelled_cost",
        question="if Qwen-Image learnt as digits-ocr does, what would spot save on recorded markets?",
        command="python -m tests.benchmarks.modelled_cost --json",
        result=result,
        runs=3 * len(SEEDS) * len(cells),
        seeds=list(SEEDS),
        load1=load1,
        rows=rows(cells),
        text=text(cells, trace.name, left_out),
    )


if __name__ == "__main__":
    main()
