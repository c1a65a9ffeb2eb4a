"""plan_search: how far is the plan from the best fleet that a brute force finds, both priced by replay?

    python -m tests.benchmarks.plan_search --json      reads the stored replays, and makes two jobs again
    python -m tests.benchmarks.plan_search --all       makes all jobs and writes the page
    python -m tests.benchmarks.plan_search --plans     makes the plans again and keeps the brute force, for a new search

12 jobs (four models, three deadlines) x two price sets. The brute force is every_fleet.py: it ranks a grid of fleets by
a closed form and replays the best of each job. A fleet costs what its replays cost on average, on generated markets of
every spot zone on offer, driven by the shipped `decide()`. The same starts and seeds are replayed for every fleet.

Two plans are compared with the best: `chosen`, by the product's search of fleets, and `fixed`, by the planner with the
nodes that the example names.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.events import Market
from launcher.decide.launch_history import MoveRules
from launcher.exit_codes import BudgetError
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from launcher.job.schema import Job
from launcher.job.sections import Resources
from launcher.market.hazard import prior_of, usual_odds
from launcher.market.offers import Offer, Prices, shipped_catalog
from launcher.market.spells import Spells, ZoneSpells
from launcher.money import HOUR_MS
from launcher.placement.cloud_plan import CloudPlan
from launcher.placement.memory import check_memory
from launcher.placement.plan import PlacementError, Plan
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import cloud_requirements, market_view
from launcher.replay.generator import generate
from launcher.replay.replay import Replayed, replay
from launcher.replay.simulate import generated_markets, simulate, work_of
from launcher.services.fleets import choose_fleet
from launcher.services.on_offer import on_offer
from launcher.services.planning import CurrentMarket, with_replays
from tests.benchmarks.every_fleet import GPUS, Estimated, Shop, Work, best, plan_of
from tests.benchmarks.page import RESULTS, ROOT, load_now, origin, publish

ROUNDS = (4, 12, 36, 108)
"""Starts of a fleet, round by round. The dollars of single starts have a standard deviation of .65 of their mean, and
the cheapest of many means is too cheap."""
STARTS, HOPELESS = ROUNDS[-1], (1.25, 1.25, 1.1, 0.0)
"""A fleet that costs more than this many times the cheapest after a round is not replayed further. The starts are the
same for all, so 36 of them tell fleets apart that differ by a tenth."""

PIECES = Path(__file__).parent / "pieces" / "plan_search"
"""Cells of an unfinished `--all` or `--plans`. Delete the folder after a change of the product."""

REPLAYED = 24
"""Fleets of each job that are replayed."""

ROOM = 2
"""A replay goes on for this many times the deadline, or the time with every node at work if that is longer."""

NOW_MS = 1_795_996_800_000
"""2026-11-30: prices are as old as on this day."""

AGAIN = (("wan_video, 8h", "recorded"), ("wan_video, 8h", "newest"))
"""Cells that `--json` makes again: their replays take the least time."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job of the benchmark: an example file with a deadline."""

    file: str
    deadline: str

    @property
    def name(self) -> str:
        return f"{self.file}, {self.deadline}"

    def job(self, more: Mapping[str, Any] | None = None) -> Job:
        limits = {"budget.max_total": 20_000, "budget.max_hourly": 500, "budget.deadline": self.deadline}
        # Ray's cluster ends with the trainer's node, so a job on Ray has its trainer on demand.
        bears_losses = {"runtime.name": "local", "recovery.controller_stays_up": True}
        overrides = {"infra": "aws,gcp", **bears_losses, **limits, **(more or {})}
        return load_job(ROOT / "sky_yamls" / f"{self.file}.yaml", overrides).job


CASES = tuple(
    Case(file=file, deadline=deadline)
    for file, deadlines in (
        ("qwen_image_ocr", ("3d", "1d", "12h")),
        ("flux", ("3d", "2d", "1d")),
        ("sd3_5", ("5d", "1d", "6h")),
        ("wan_video", ("5d", "1d", "8h")),
    )
    for deadline in deadlines
)

EXAMPLE = "qwen_image_ocr, 3d"


# --- prices ----------------------------------------------------------------------------------------------------------


def price_sets() -> dict[str, tuple[Offer, ...]]:
    """Return the offers of each price set by name: the recorded prices, and the newest published ones."""
    return {each.value: on_offer(shipped_catalog(each).all_offers(), (), NOW_MS) for each in Prices}


# --- replays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Priced:
    """The replays of a plan."""

    usd: float
    hours: float
    late: int
    """Starts that were not done at the deadline."""
    starts: int
    is_in_time: bool
    """Whether as many starts were in time as the job asks for."""

    def as_json(self) -> dict[str, Any]:
        return {
            "usd": round(self.usd, 2),
            "hours": round(self.hours, 2),
            "late": self.late,
            "starts": self.starts,
            "in_time": self.is_in_time,
        }


def zones_of(plan: Plan, shop: Shop) -> list[ZoneSpells]:
    """Return the spells of every spot zone on offer, by the priors.

    A zone has one kind of spell in a replay: of the kinds of node that the plan may buy there, the one for which it has
    capacity less often. Zones that a plan does not use are there too, so that every plan meets the same market. Zones
    of GPUs beyond the brute force's grid come last, because the draws of a market follow the order of its zones.
    """
    kinds: dict[tuple[str, str, str], set[tuple[str, int]]] = {}
    for site in plan.sites:
        for option in (*site.trainer, *site.rollout):
            place = option.placement
            if place.market is Market.SPOT:
                of_zone = kinds.setdefault((place.cloud, place.region, place.zone), set())
                of_zone.add((place.accelerator, place.gpus))
    spells = []
    for cloud, region, zone in (*shop.spot_zones, *sorted(set(kinds) - set(shop.spot_zones))):
        of_kinds = [
            Spells(hazards=prior_of(gpu, gpus).curve, uptime=usual_odds(gpu, gpus, cloud, region).mean)
            for gpu, gpus in sorted(kinds.get((cloud, region, zone), {("V100", 1)}))
        ]
        least = min(of_kinds, key=lambda each: (each.uptime, each.up_hours))
        spells.append(ZoneSpells(cloud=cloud, region=region, zone=zone, instance_type="", spells=least))
    return spells


class Replays:
    """The replays of a plan, made start by start."""

    def __init__(self, plan: Plan, job: Job, shop: Shop) -> None:
        self.plan, self.job, self.zones, self.work = plan, job, zones_of(plan, shop), work_of(plan)
        self.rules = MoveRules.of(job)
        self.results: list[Replayed] = []

    def priced(self, starts: int) -> Priced:
        """Return the price of the plan over this many starts."""
        deadline_ms = self.job.budget.deadline
        ends_ms = ROOM * max(deadline_ms or 0, round(self.work.left_ms(self.work.nodes)))
        capacity = len(self.plan.slots)
        for start in range(len(self.results), starts):
            trace = generate(self.zones, 1 + ends_ms / HOUR_MS, capacity, start)
            self.results.append(
                replay(
                    self.plan,
                    self.rules,
                    self.work,
                    trace,
                    0,
                    start,
                    deadline_ms=deadline_ms,
                    ends_ms=ends_ms,
                    longest_ms=ends_ms,
                )
            )
        made = self.results[:starts]
        late = sum(not result.reached or result.ms > (deadline_ms or math.inf) for result in made)
        return Priced(
            usd=statistics.fmean(result.micro_usd for result in made) / 1e6,
            hours=statistics.fmean(result.ms for result in made) / HOUR_MS,
            late=late,
            starts=starts,
            is_in_time=starts - late >= self.job.budget.deadline_confidence * starts,
        )


def brute_force(job: Job, offers: Iterable[Offer]) -> dict[str, Any]:
    """Return the fleets of a job that were replayed, cheapest first; those in time before the others."""
    work, shop = Work.of(job), Shop(offers)
    begun = time.process_time()
    ranked, compared = best(work, shop, REPLAYED)
    seconds = time.process_time() - begun
    priced: list[tuple[Estimated, Priced]] = []
    going = [(estimated, Replays(plan_of(work, shop, estimated.fleet), job, shop)) for estimated in ranked]
    for starts, hopeless in zip(ROUNDS, HOPELESS, strict=True):
        found = [each.priced(starts) for _, each in going]
        limit = hopeless * min((one.usd for one in found if one.is_in_time), default=math.inf)
        ends = [starts == STARTS or one.usd > limit for one in found]
        priced += [(estimated, one) for (estimated, _), one, is_end in zip(going, found, ends, strict=True) if is_end]
        going = [one for one, is_end in zip(going, ends, strict=True) if not is_end]
    priced.sort(key=lambda pair: (pair[1].starts < STARTS, not pair[1].is_in_time, pair[1].usd))
    return {
        "compared": compared,
        "ranking_seconds": round(seconds, 2),
        "fleets": [
            {"fleet": str(each.fleet), "closed_form_usd": round(each.usd, 2), **found.as_json()}
            for each, found in priced
        ],
    }


# --- the product -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan that the product shows, at the dollars that it prints."""

    name: str
    usd: float
    plan: CloudPlan


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The plan that the product chooses for a job."""

    plan: CloudPlan
    seconds: float
    """Processor time of the search."""
    rows: tuple[Row, ...]
    """The plans that it shows to choose from, the chosen one among them."""


Search = Callable[[Job, Sequence[Offer]], Chosen]
"""Raises PlacementError or BudgetError if the product has no plan."""


def with_named_nodes(job: Job, offers: Sequence[Offer]) -> Chosen:
    """Return the plan with the nodes that the job names: GPU, size and capacity type of the trainer are given."""
    begun = time.process_time()
    plan = plan_cloud(cloud_requirements(resolve(job)), market_view(offers, now_ms=NOW_MS))
    plan = with_replays(plan, job)
    return Chosen(plan=plan, seconds=time.process_time() - begun, rows=(_row("plan", plan),))


def with_any_fleet(job: Job, offers: Sequence[Offer]) -> Chosen:
    """Return the plan that the product's search of fleets chooses for the job without its resources."""
    runtime = job.runtime.model_copy(update={"trainer_ranks": "auto"})
    opened = job.model_copy(update={"resources": Resources(), "runtime": runtime})
    market = CurrentMarket(view=market_view(offers, now_ms=NOW_MS), unknown=(), closed={})
    fleets = choose_fleet(opened, market)
    rows = tuple(Row(name=row.text, usd=row.replays.usd, plan=row.plan) for row in fleets.front)
    return Chosen(plan=fleets.chosen.plan, seconds=fleets.seconds, rows=rows)


def _row(name: str, plan: CloudPlan) -> Row:
    return Row(name=name, usd=plan.quoted_cost.expected / 1e6, plan=plan)


def own_replay_usd(row: Row, job: Job) -> float | None:
    """Return the dollars of a row's plan, replayed as the product does. None: the row was not replayed."""
    replays = row.plan.replays
    if replays is None:
        return None
    bought, deadline_ms = row.plan.as_plan(), row.plan.deadline_ms
    ends_ms = ROOM * max(deadline_ms or 0, round(work_of(bought).left_ms(len(bought.pace_ms) - 1)))
    made = simulate(
        bought,
        MoveRules.of(job),
        generated_markets(bought, row.plan.zones, deadline_ms),
        starts=replays.starts,
        deadline_ms=deadline_ms,
        ends_ms=ends_ms,
        longest_ms=ends_ms,
    )
    return made.policies[0].dollars.mean


def product(search: Search, job: Job, offers: Sequence[Offer], starts: int) -> dict[str, Any]:
    """Return the product's plan of a job and its price on the same markets as the brute force's."""
    try:
        chosen = search(job, offers)
    except (PlacementError, BudgetError) as error:
        return {"refused": str(error)}
    bought = chosen.plan.as_plan()
    rows = []
    for row in chosen.rows:
        own = own_replay_usd(row, job)
        rows.append({"name": row.name, "usd": round(row.usd, 2), "replayed": None if own is None else round(own, 2)})
    return {
        "fleet": text_of(bought),
        **Replays(bought, job, Shop(offers)).priced(starts).as_json(),
        "printed_usd": round(chosen.plan.quoted_cost.expected / 1e6, 2),
        "seconds": round(chosen.seconds, 2),
        "rows": rows,
    }


def text_of(plan: Plan) -> str:
    """Return the nodes of a plan in words."""
    trainer, *rollouts = [slot.placement for slot in plan.slots]
    words = [f"{trainer.accelerator}:{trainer.gpus} {_market(trainer.market)}"]
    kinds = [f"{place.accelerator}:{place.gpus} {_market(place.market)}" for place in rollouts]
    words += [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    return f"{' + '.join(words)}; {trainer.cloud} {trainer.region}"


def _market(market: Market) -> str:
    return "spot" if market is Market.SPOT else "on demand"


def trainer_alone(offers: Sequence[Offer]) -> dict[str, dict[str, float]]:
    """Return the printed price of "the trainer alone" by model and rollout GPU, the trainer being the same H100."""
    found: dict[str, dict[str, float]] = {}
    for file in dict.fromkeys(case.file for case in CASES):
        for gpu in GPUS:
            changed = {
                "budget.deadline": "90d",
                "resources.trainer.accelerators": "H100:1",
                "resources.trainer.use_spot": False,
                "resources.rollout.accelerators": f"{gpu}:{4 if gpu == 'L40S' else 8}",
                "resources.rollout.num_nodes": 1,
                "resources.rollout.min_nodes": 1,
            }
            resolved = resolve(Case(file=file, deadline="90d").job(changed))
            try:
                check_memory(resolved)
                plan = plan_cloud(cloud_requirements(resolved), market_view(offers, now_ms=NOW_MS))
            except (PlacementError, BudgetError):
                continue
            for factors in plan.factors:
                if factors.against == "the trainer alone":
                    found.setdefault(file, {})[gpu] = round(factors.their_micro_usd / 1e6, 2)
    return found


# --- cells -----------------------------------------------------------------------------------------------------------


def cell(case: Case, prices: str, offers: Sequence[Offer], kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the brute force's fleets of a job, and the product's plans.

    `kept`: an older cell, whose fleets are kept, with the starts that they were replayed for.
    """
    begun, starts = time.process_time(), STARTS if kept is None else starts_of(kept)
    job = case.job()
    fleets = brute_force(job, offers) if kept is None else kept["brute_force"]
    made = {
        "job": case.name,
        "prices": prices,
        "starts": starts,
        "brute_force": fleets,
        "fixed": product(with_named_nodes, job, offers, starts),
        "chosen": product(with_any_fleet, job, offers, starts),
    }
    print(f"{_line(made)}; {time.process_time() - begun:.0f} s", file=sys.stderr, flush=True)
    return made


def starts_of(made: Mapping[str, Any]) -> int:
    """Return the starts of the fleets of a cell that were replayed to the end. Cells of before 2026-11-30 say none."""
    return int(made.get("starts", ROUNDS[2]))


def best_of(made: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the cheapest fleet in time that was replayed, a plan of the product included. None: none is in time."""
    found: list[dict[str, Any]] = [each for each in made["brute_force"]["fleets"] if each["starts"] == starts_of(made)]
    found += [made[name] for name in ("fixed", "chosen") if "refused" not in made[name]]
    return min((each for each in found if each["in_time"]), key=lambda each: each["usd"], default=None)


def over_best(made: Mapping[str, Any], plan: str) -> float | None:
    """Return the dollars of a plan over the best fleet's. None: the product has no plan, or it is late."""
    cheapest, ours = best_of(made), made[plan]
    if cheapest is None or "refused" in ours or not ours["in_time"]:
        return None
    return float(ours["usd"] / cheapest["usd"])


def _line(made: Mapping[str, Any]) -> str:
    cheapest = best_of(made)
    words = "nothing is in time" if cheapest is None else f"${cheapest['usd']:.0f} {cheapest['hours']:.1f} h"
    fleet = "" if cheapest is None else cheapest["fleet"]
    return f"{made['job']}, {made['prices']}: best {words}, {fleet}; chosen {_of(made, 'chosen')}"


def _of(made: Mapping[str, Any], name: str) -> str:
    plan = made[name]
    if "refused" in plan:
        return "no plan"
    over = over_best(made, name)
    return f"${plan['usd']:.0f}, {plan['hours']:.1f} h, " + (
        f"late in {plan['late']} of {plan['starts']}" if over is None else f"x {over:.2f}"
    )


def keys(cells: Sequence[Mapping[str, Any]], alone: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the fixed keys of the result."""
    over = [ratio for made in cells if (ratio := over_best(made, "chosen")) is not None]
    planned = [made["chosen"] for made in cells if "refused" not in made["chosen"]]
    rows = [row for plan in planned for row in plan["rows"] if row["replayed"]]
    example = next(made for made in cells if (made["job"], made["prices"]) == (EXAMPLE, "recorded"))
    return {
        "over_best_mean": round(statistics.fmean(over), 3),
        "over_best_worst": round(max(over), 3),
        "seconds": max(plan["seconds"] for plan in planned),
        "same_basis": round(max((abs(row["usd"] / row["replayed"] - 1) for row in rows), default=math.nan), 3),
        "trainer_alone_spread": round(max(max(usd.values()) / min(usd.values()) - 1 for usd in alone.values()), 3),
        "over_best_of_8ff64c3": over_best(example, "fixed"),
        "no_plan": sum("refused" in made["chosen"] for made in cells),
        "late": sum(not plan["in_time"] for plan in planned),
        "cells": len(cells),
    }


def _table(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for made in cells:
        cheapest = best_of(made)
        rows.append(
            {
                "job": made["job"] + ("" if starts_of(made) == STARTS else f" ({starts_of(made)} starts)"),
                "prices": made["prices"],
                "best": "nothing in time" if cheapest is None else cheapest["fleet"].replace("; ", ", "),
                "costs": "" if cheapest is None else f"${cheapest['usd']:.0f}, {cheapest['hours']:.1f} h",
                "chosen": _of(made, "chosen"),
                "named nodes": _of(made, "fixed"),
            }
        )
    return rows


TEXT = f"""
Replayed: generated markets by the priors of spot capacity, the shipped decisions, {STARTS} starts of fixed seeds that
are the same for every fleet; {ROUNDS[2]} in rows that say so. Capacity is assumed, not recorded: nothing here says what
a cloud will have. `best`: the cheapest fleet that is in time in nine of ten starts, of {REPLAYED} that a closed form
ranked first and of the product's own plans; a fleet that costs {HOPELESS[0]} times the cheapest after {ROUNDS[0]} or
{ROUNDS[1]} starts, or {HOPELESS[2]} times after {ROUNDS[2]}, is not replayed further.
`chosen`: the product's search of fleets. `named nodes`: the planner with the GPUs and capacity types that the example
file names.

The grid: {", ".join(GPUS)}; 1, 2, 4 or 8 GPUs in a node; a rank on each GPU of the trainer, up to the groups of
a step; the trainer and the rollout nodes each on spot or on demand; 0 to 4 rollout nodes; 1 to 4 regions; exploration
on or off. The budget does not bind. Prices: `recorded` are those of the time of the recorded markets (October 2025 to
2026), `newest` the newest published ones, each with its date (catalogs/README.md). The product may also choose GPUs
that are not in the grid.

The best of {REPLAYED} means is chosen by what it cost, so it is a little too cheap, and `over` a
little too high.
"""


def make(cases: Sequence[Case], stored: Mapping[tuple[str, str], Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the cells of these jobs at both price sets. `stored`: older cells whose brute force is kept.

    Each cell is written to `PIECES` when it is made, and a cell that is there is not made again.
    """
    made = []
    for prices, offers in price_sets().items():
        for case in cases:
            piece = PIECES / f"{case.name.replace(', ', '-')}-{prices}.json"
            if not piece.exists():
                kept = None if stored is None else stored[case.name, prices]
                PIECES.mkdir(parents=True, exist_ok=True)
                piece.write_text(json.dumps(cell(case, prices, offers, kept)))
            made.append(json.loads(piece.read_text()))
    return made


def read_stored() -> dict[str, Any]:
    file = RESULTS / "plan_search.json"
    if not file.exists():
        raise SystemExit(f"{file} is missing; make it with `python -m tests.benchmarks.plan_search --all`")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="make all jobs and write the page")
    parser.add_argument("--plans", action="store_true", help="make the plans again and keep the brute force")
    parser.add_argument("--case", action="append", help="one job, like 'flux, 2d', without a page; may be repeated")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    if options.case:
        for case in (case for case in CASES if case.name in options.case):
            for prices, offers in price_sets().items():
                print(json.dumps(cell(case, prices, offers)))
        return
    if options.all or options.plans:
        cells = make(CASES, None if options.all else _by_name(read_stored()["raw"]))
        alone = trainer_alone(price_sets()["recorded"])
        publish(
            "plan_search",
            question="how far is the plan from the best fleet of a brute force, both priced by replay?",
            command="python -m tests.benchmarks.plan_search --all",
            result={**keys(cells, alone), "trainer_alone_usd": alone, "raw": cells},
            runs=sum(each["starts"] for made in cells for each in made["brute_force"]["fleets"]),
            seeds=list(range(STARTS)),
            load1=load1,
            rows=_table(cells),
            text=TEXT,
        )
        shutil.rmtree(PIECES)
        return
    stored = read_stored()
    known, sets = _by_name(stored["raw"]), price_sets()
    again = {}
    for name, prices in AGAIN:
        before = dict(known[name, prices])
        case = next(case for case in CASES if case.name == name)
        known[name, prices] = cell(case, prices, sets[prices])
        again[f"{name}, {prices}"] = {
            "stored": over_best(before, "chosen"),
            "made_again": over_best(known[name, prices], "chosen"),
            "best_usd_stored": (best_of(before) or {}).get("usd"),
            "best_usd_made_again": (best_of(known[name, prices]) or {}).get("usd"),
        }
    alone = trainer_alone(sets["recorded"])
    result = keys(list(known.values()), alone)
    print(json.dumps({**result, "made_again": again, "stored": len(known) - len(again), **origin(load1)}))


def _by_name(raw: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(made["job"], made["prices"]): made for made in raw}


if __name__ == "__main__":
    main()
