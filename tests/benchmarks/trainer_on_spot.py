"""On recorded markets: what does a run with its trainer on spot cost, against one with its trainer on demand?

    python -m tests.benchmarks.trainer_on_spot              the key `trainer_on_spot` of tests.benchmarks.replay alone

Both run the shipped `decide()` on the same traces, starts and seeds, and every GPU of the trainer samples in both. The
work takes 24 h with every node at work, the deadline is 36 h.

    1+1   a trainer and a rollout node, of one GPU each
    8+4   a trainer of eight GPUs in one machine, and four rollout nodes of one GPU; none of them can take its role
    1+6   a trainer and six rollout nodes, of eight GPUs each; a place of the trace counts as a machine of eight
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.events import Market
from launcher.decide.launch_history import MoveRules
from launcher.decide.reconcile import decide
from launcher.decide.work_left import WorkLeft
from launcher.market.offers import Offer
from launcher.money import HOUR_MS
from launcher.placement.options import Option, SiteOptions
from launcher.placement.plan import Plan, placement_of, slot_of
from launcher.replay.readers import read_folder
from launcher.replay.replay import Replayed, replay
from launcher.replay.trace import PoolTrace, Trace
from tests.benchmarks.page import ROOT

TRACES = ROOT / "catalogs" / "traces" / "skynomad"
ON_DEMAND = 87_830_000
"""On-demand price of eight H100: a3-highgpu-8g (catalogs/). Micro-dollars."""

IDEAL_MS, DEADLINE_MS, TIGHT_MS = 24 * HOUR_MS, 36 * HOUR_MS, 30 * HOUR_MS
STARTS = 4
"""Starts of each region in each unbroken part of the recording, at equal distances."""

TIGHT_STARTS = 100
US = ("us-central1", "us-east4", "us-east5", "us-west1")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """GPUs of a run: a trainer of one machine, and equal rollout nodes."""

    name: str
    trainer_gpus: int
    nodes: int
    node_gpus: int
    rollout_gpu_s: float
    train_gpu_s: float
    gpus_a_place: int | None = None

    def pace_ms(self, nodes: int) -> float:
        """Return an iteration with so many rollout nodes. Eight ranks train 7.6 times as fast as one: assumed."""
        speed_up = 1.0 if self.trainer_gpus == 1 else 0.95 * self.trainer_gpus
        rollout_s = self.rollout_gpu_s / (self.trainer_gpus + nodes * self.node_gpus)
        return 1000 * (rollout_s + self.train_gpu_s / speed_up)

    @property
    def work(self) -> WorkLeft:
        pace = [self.pace_ms(nodes) for nodes in range(self.nodes + 1)]
        return WorkLeft(iterations=float(round(IDEAL_MS / pace[-1])), done=0.0, iteration_ms=pace)


SHAPES = (
    Shape(name="1+1", trainer_gpus=1, nodes=1, node_gpus=1, rollout_gpu_s=360, train_gpu_s=240, gpus_a_place=1),
    Shape(name="8+4", trainer_gpus=8, nodes=4, node_gpus=1, rollout_gpu_s=1344, train_gpu_s=921, gpus_a_place=1),
    Shape(name="1+6", trainer_gpus=8, nodes=6, node_gpus=8, rollout_gpu_s=540 * 56, train_gpu_s=60 * 7.6),
)


@dataclass(frozen=True, kw_only=True)
class Market1:
    """A region of a recording."""

    region: str
    trace: Trace

    def starts(self, number: int, longest_ms: int) -> list[int]:
        room = self.trace.end_ms - longest_ms - HOUR_MS
        return sorted({int(room * n / max(1, number - 1)) // 600_000 * 600_000 for n in range(number)})


def markets(traces: Sequence[Trace]) -> Iterator[Market1]:
    """Yield each region of each part of a recording, and the four regions of the US as one market."""
    for trace in traces:
        by_region: defaultdict[str, list[PoolTrace]] = defaultdict(list)
        for pool in trace.pools:
            by_region[pool.region].append(pool)
            if pool.region in US:
                by_region["us"].append(replace(pool, region="us"))
        for region, pools in by_region.items():
            yield Market1(region=region, trace=replace(trace, pools=tuple(pools)))


def plan_of(shape: Shape, market: Market1, trainer: Market) -> tuple[Plan, Trace]:
    """Return the plan of a shape, its trainer of one market, and the trace with the price of one place."""
    places = shape.gpus_a_place or 8
    pools = [
        replace(pool, micro_usd_per_hour=tuple(round((price or 0) * places / 8) for price in pool.micro_usd_per_hour))
        for pool in market.trace.pools
    ]
    offered = {
        (gpus, kind): [
            _option(pool, kind, gpus)
            for pool in (market.trace.pools if kind is Market.SPOT else market.trace.pools[:1])
        ]
        for gpus in {shape.trainer_gpus, shape.node_gpus}
        for kind in Market
    }
    cheapest = min(offered[shape.trainer_gpus, trainer], key=lambda option: option.placement.micro_usd_per_hour)
    trainers = offered[shape.trainer_gpus, Market.SPOT] if trainer is Market.SPOT else []
    spot = offered[shape.node_gpus, Market.SPOT]
    site = SiteOptions(
        cloud="gcp",
        region=market.region,
        trainer=(*trainers, *offered[shape.trainer_gpus, Market.ON_DEMAND]),
        rollout=(*spot, *offered[shape.node_gpus, Market.ON_DEMAND]),
    )
    first = slot_of("trainer", "trainer", _offer(market.trace.pools[0], trainer, 1), ON_DEMAND)
    slots = [
        replace(
            first,
            placement=cheapest.placement,
            on_demand_micro_usd_per_hour=cheapest.on_demand_micro_usd_per_hour,
        ),
        *(
            replace(
                first,
                name=f"spot-{n}",
                role="rollout",
                placement=spot[n % len(spot)].placement,
                on_demand_micro_usd_per_hour=spot[0].on_demand_micro_usd_per_hour,
            )
            for n in range(shape.nodes)
        ),
    ]
    plan = Plan(
        region=market.region,
        slots=tuple(slots),
        max_total_micro_usd=None,
        max_hourly_micro_usd=None,
        sites=(site,),
    )
    return plan, replace(market.trace, pools=tuple(pools))


def _offer(pool: PoolTrace, market: Market, gpus: int) -> Offer:
    price = (pool.price_at(0) or 0) if market is Market.SPOT else ON_DEMAND
    return Offer(
        cloud=pool.cloud,
        region=pool.region,
        zone=pool.zone if market is Market.SPOT else "",
        instance_type=f"a3-highgpu-{gpus}g",
        accelerator="H100",
        gpus=gpus,
        market=market,
        micro_usd_per_hour=round(price * gpus / 8),
        source="replay",
        observed_at="",
    )


def _option(pool: PoolTrace, market: Market, gpus: int) -> Option:
    return Option(
        placement=placement_of(_offer(pool, market, gpus)), on_demand_micro_usd_per_hour=round(ON_DEMAND * gpus / 8)
    )


def run(shape: Shape, market: Market1, trainer: Market, start_ms: int, deadline_ms: int) -> Replayed:
    plan, trace = plan_of(shape, market, trainer)
    return replay(
        plan,
        MoveRules(),
        shape.work,
        trace,
        start_ms,
        seed=start_ms // 600_000,
        deadline_ms=deadline_ms,
        ends_ms=10**12,
        longest_ms=min(2 * deadline_ms, trace.end_ms - start_ms),
        policy=decide,
        gpus_a_place=shape.gpus_a_place,
    )


def rows(traces: Sequence[Trace], starts: int, shapes: Sequence[Shape] = SHAPES) -> list[dict[str, Any]]:
    """Return the mean dollars and hours of each shape in each region, with the trainer on demand and on spot."""
    found = []
    by_region: defaultdict[str, list[Market1]] = defaultdict(list)
    for market in markets(traces):
        by_region[market.region].append(market)
    for shape in shapes:
        for region, parts in sorted(by_region.items()):
            if region == "us" and shape.name != "1+6":
                continue
            of = {
                trainer: [
                    run(shape, part, trainer, start_ms, DEADLINE_MS)
                    for part in parts
                    for start_ms in part.starts(starts, DEADLINE_MS)
                ]
                for trainer in Market
            }
            row = {"shape": shape.name, "region": region, "starts": len(of[Market.SPOT])}
            for trainer, results in of.items():
                row |= {
                    f"usd_{trainer}": statistics.fmean(r.micro_usd for r in results) / 1e6,
                    f"hours_{trainer}": statistics.fmean(r.ms for r in results) / HOUR_MS,
                    f"late_{trainer}": sum(not r.reached or r.ms > DEADLINE_MS for r in results),
                }
            on_spot = of[Market.SPOT]
            row |= {
                "losses": statistics.fmean(r.trainer.losses for r in on_spot),
                "promotions": statistics.fmean(r.trainer.promotions for r in on_spot),
                "lost_iterations": statistics.fmean(r.trainer.lost_iterations for r in on_spot),
                "without_trainer_h": statistics.fmean(r.trainer.without_trainer_ms for r in on_spot) / HOUR_MS,
                "without_trainer_usd": statistics.fmean(r.trainer.without_trainer_micro_usd for r in on_spot) / 1e6,
            }
            found.append(row)
            print(_line(row), file=sys.stderr, flush=True)
    return found


def tight_misses(traces: Sequence[Trace], number: int = TIGHT_STARTS) -> tuple[int, int]:
    """Return the starts that are late at 1.25 times the hours without losses, and the number of starts."""
    every = [(shape, market) for shape in SHAPES for market in markets(traces) if market.region != "us"]
    each = -(-number // len(every))
    cases = [(shape, market, at) for shape, market in every for at in market.starts(each, TIGHT_MS)]
    cases = [cases[len(cases) * n // number] for n in range(min(number, len(cases)))]
    late = 0
    for shape, market, start_ms in cases:
        result = run(shape, market, Market.SPOT, start_ms, TIGHT_MS)
        if not result.reached or result.ms > TIGHT_MS:
            late += 1
            print(f"late: {shape.name} {market.region} +{start_ms / HOUR_MS:.1f} h", file=sys.stderr, flush=True)
    return late, len(cases)


def key(traces: Sequence[Trace], starts: int = STARTS) -> dict[str, Any]:
    """Return the key `trainer_on_spot` of the page of replays."""
    found = rows(traces, starts)
    over: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in found:
        over[row["shape"]][row["region"]] = round(row["usd_spot"] / row["usd_on_demand"], 3)
    misses, tight = tight_misses(traces)
    return {
        "usd_over_mixed": dict(over),
        "late": sum(row["late_spot"] for row in found),
        "misses": misses,
        "misses_of": tight,
        "rows": found,
    }


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['shape']} {row['region']:16s} {row['usd_spot'] / row['usd_on_demand']:.3f} "
        f" ${row['usd_on_demand']:.0f} {row['hours_on_demand']:.1f} h"
        f" -> ${row['usd_spot']:.0f} {row['hours_spot']:.1f} h"
        f" late {row['late_on_demand']}/{row['late_spot']} of {row['starts']}; losses {row['losses']:.1f}"
        f" promoted {row['promotions']:.1f} lost {row['lost_iterations']:.1f} it,"
        f" {row['without_trainer_h']:.2f} h ${row['without_trainer_usd']:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=STARTS, help="starts of each region in each part")
    parser.add_argument("--shape", action="append", help="one shape; may be repeated")
    options = parser.parse_args()
    traces, _ = read_folder(TRACES, time.time())
    shapes = [shape for shape in SHAPES if options.shape is None or shape.name in options.shape]
    begun = time.process_time()
    found = key(traces, options.starts) if options.shape is None else rows(traces, options.starts, shapes)
    print(f"{time.process_time() - begun:.0f} s of CPU", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
