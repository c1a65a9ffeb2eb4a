"""fleet: can the shipped decisions follow 1,000 nodes for 30 days within a minute, and what does one decision take?

    python -m tests.benchmarks.fleet --json

60 runs of 16 or 17 slots (an on-demand trainer, and spot rollout nodes in four zones), each for 30 days on a made-up
market: up-times of a zone are Weibull, outages log-normal, and a zone that comes back has room for every node. The
shipped `decide()` runs after each event, and every four minutes while a slot waits, starts or has a stand-in.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from random import Random
from typing import Any

from engine.events import Market
from launcher.decide.actions import Buy, Enter, Release
from launcher.decide.budget_guard import NO_LIMITS, RELEASE_ALLOWANCE_MS
from launcher.decide.facts import Facts, NodeRecord, Stage, Wanted
from launcher.decide.failover import LaunchRate
from launcher.decide.known_nodes import KnownNodes
from launcher.decide.reconcile import decide
from launcher.money import HOUR_MS
from launcher.replay.replay import PASS_MS, QUIET_MS
from launcher.replay.trace import PoolTrace, Trace
from launcher.replay.world import World
from tests.benchmarks.page import load_now, publish
from tests.launcher.replay.markets import plan, pool, work

RUNS, DAYS, ZONES = 60, 30, "abcd"
SLOTS = (16, 17)
UP_HOURS, UP_SHAPE = 8.0, 0.6
"""Scale and shape of the Weibull up-times of a zone. The shape is that of the recorded V100 zones (.5 to .7)."""
OUT_HOURS, OUT_SIGMA = 0.4, 1.4
"""Median and log deviation of the log-normal outages of a zone."""
ENDED = 8000
LIVE = 16
TIMED = 300


def zone_trace(zone: str, nodes: int, random: Random) -> PoolTrace:
    """Return a made zone: room for every node, or for none, in turn, in steps of a minute."""
    t_ms, capacity, at_ms = [0], [nodes], 0
    while at_ms < DAYS * 24 * HOUR_MS:
        is_up = capacity[-1] > 0
        hours = random.weibullvariate(UP_HOURS, UP_SHAPE) if is_up else OUT_HOURS * random.lognormvariate(0, OUT_SIGMA)
        at_ms += max(1, round(hours * 60)) * 60_000
        t_ms.append(at_ms)
        capacity.append(0 if is_up else nodes)
    made = pool(zone, [0])
    return replace(made, t_ms=tuple(t_ms), capacity=tuple(capacity), micro_usd_per_hour=(None,) * len(t_ms))


def is_settled(nodes: KnownNodes, slots: int) -> bool:
    """Return whether only an event can change the next decision: each slot has the node of its plan, at work."""
    live = nodes.live
    return len(live) == slots and all(
        "ready" in node.happened and not node.is_leaving and (node.market is Market.SPOT or node.role == "trainer")
        for node in live
    )


def follow(seed: int) -> dict[str, int]:
    """Follow one run for 30 days. Return how often it was decided, and how many nodes it had."""
    random = Random(seed)
    slots = SLOTS[seed % len(SLOTS)]
    made = plan(ZONES, slots - 1)
    end_ms = DAYS * 24 * HOUR_MS
    trace = Trace(name=f"fleet {seed}", pools=tuple(zone_trace(z, slots, random) for z in ZONES), end_ms=end_ms)
    world = World(trace=trace, start_ms=0, work=work(slots - 1, hours=10 * DAYS * 24), random=random)
    wanted = wanted_of(made.slots)
    stage, reason, decided = Stage.PLANNED, "", 0
    while world.now_ms < end_ms:
        nodes = world.records()
        facts = facts_of(nodes, world.now_ms, stage, reason, made.sites)
        actions = decide(facts, wanted)
        decided += 1
        acted = False
        for action in actions:
            match action:
                case Enter():
                    stage, reason = action.stage, action.reason
                case Buy():
                    world.buy(action)
                    acted = True
                case Release():
                    world.release(action.nodes)
                    acted = True
        settled = not acted and not reason and is_settled(nodes, slots)
        step_ms = end_ms if settled else PASS_MS if acted else QUIET_MS
        world.advance(min(end_ms, world.now_ms + step_ms), to_next_event=True)
    return {"decisions": decided, "nodes": len(world.instances), "preemptions": world.counts["preemptions"]}


def wanted_of(slots: Any) -> Wanted:
    return Wanted(
        run="fleet",
        slots=slots,
        limits=NO_LIMITS,
        deadline_ms=None,
        allowance_ms=RELEASE_ALLOWANCE_MS,
        settle_ms=0,
        launch_rate=LaunchRate(),
    )


def facts_of(nodes: KnownNodes, now_ms: int, stage: Stage, reason: str, sites: Any) -> Facts:
    return Facts(
        now_ms=now_ms,
        stage=stage,
        reason=reason,
        stage_ms=0,
        planned_ms=0,
        nodes=nodes,
        metered=0,
        advances_ms=(now_ms,),
        sites=sites,
    )


def decide_ms() -> tuple[list[float], list[float]]:
    """Return milliseconds of decisions with 16 live slots and 8,000 ended attempts: kept up to date, and built anew.

    Before each decision one more attempt ends. Half of the ended nodes were refused, half preempted.
    """
    made = plan(ZONES, LIVE - 1)
    spots = [option for option in made.sites[0].rollout if option.placement.market is Market.SPOT]

    def node(number: int, slot_number: int, **happened: int) -> NodeRecord:
        slot = made.slots[slot_number]
        option = made.sites[0].trainer[0] if slot.role == "trainer" else spots[number % len(spots)]
        return NodeRecord(
            name=f"fleet-{slot.name}-g{number}",
            slot=slot.name,
            generation=number,
            role=slot.role,
            market=option.placement.market,
            micro_usd_per_hour=option.placement.micro_usd_per_hour,
            requested_ms=happened["requested"],
            reserved_micro_usd=0,
            happened=happened,
            reclaimed="gone" in happened,
            wanted=option,
            zone=option.placement.zone,
        )

    def ended(number: int) -> NodeRecord:
        at_ms = number * 300_000
        slot_number = 1 + number % (LIVE - 1)
        if number % 2:
            return node(number, slot_number, requested=at_ms, no_capacity=at_ms + 60_000)
        return node(
            number, slot_number, requested=at_ms, up=at_ms + 60_000, ready=at_ms + 540_000, gone=at_ms + HOUR_MS
        )

    now_ms = (ENDED + TIMED) * 300_000 + 2 * HOUR_MS
    past = [ended(number) for number in range(ENDED)]
    live = [
        node(10**6, n, requested=now_ms - HOUR_MS, up=now_ms - HOUR_MS, ready=now_ms - HOUR_MS) for n in range(LIVE)
    ]
    live[1] = replace(live[1], happened={**live[1].happened, "notice": now_ms})  # one slot needs a successor
    known, wanted = KnownNodes([*past, *live]), wanted_of(made.slots)
    kept, anew = [], []
    for number in range(ENDED, ENDED + TIMED):
        began = time.perf_counter()
        known.update([ended(number)])
        actions = decide(facts_of(known, now_ms, Stage.RUNNING, "", made.sites), wanted)
        kept.append(1000 * (time.perf_counter() - began))
        assert any(isinstance(action, Buy) for action in actions)
        if number % 30 == 0:
            whole = list(known)
            began = time.perf_counter()
            assert (
                decide(replace(facts_of(known, now_ms, Stage.RUNNING, "", made.sites), nodes=whole), wanted) == actions
            )
            anew.append(1000 * (time.perf_counter() - began))
    return kept, anew


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.parse_args()
    load1 = load_now()
    kept, anew = decide_ms()
    print(
        f"decide: {statistics.median(kept):.3f} ms, built anew {statistics.median(anew):.1f} ms",
        file=sys.stderr,
        flush=True,
    )
    began, cpu = time.perf_counter(), time.process_time()
    runs = [follow(seed) for seed in range(RUNS)]
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    total = {key: sum(run[key] for run in runs) for key in runs[0]}
    publish(
        "fleet",
        question="can the shipped decisions follow 1,000 nodes for 30 days in a minute?",
        command="python -m tests.benchmarks.fleet --json",
        result={
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu_seconds, 1),
            "decide_ms": round(statistics.median(kept), 3),
            "decide_ms_worst_of_20": round(sorted(kept)[int(0.95 * len(kept))], 3),
            "decide_ms_built_anew": round(statistics.median(anew), 1),
            "slots": sum(SLOTS[seed % len(SLOTS)] for seed in range(RUNS)),
            "days": DAYS,
            **total,
        },
        runs=RUNS,
        seeds=list(range(RUNS)),
        load1=load1,
        rows=[
            {"what": f"{RUNS} runs, {DAYS} days, seconds (target 60)", "value": round(seconds, 1)},
            {"what": "the same, seconds of the processor", "value": round(cpu_seconds, 1)},
            {
                "what": f"one decision, {LIVE} live and {ENDED} ended, ms (target 2)",
                "value": round(statistics.median(kept), 3),
            },
            {
                "what": "the same, 95 of 100 decisions within, ms",
                "value": round(sorted(kept)[int(0.95 * len(kept))], 3),
            },
            {"what": "the same, all indexes built anew, ms", "value": round(statistics.median(anew), 1)},
            {"what": "decisions", "value": total["decisions"]},
            {"what": "nodes bought or refused", "value": total["nodes"]},
            {"what": "preemptions", "value": total["preemptions"]},
        ],
        text="""
Simulated: the market is made up, the clouds are on paper, and the decisions are those of the shipped `decide()`. One
process, one run after the other. A run that has every node of its plan at work is not decided until the next event.
The plan predicts no iteration times here, so stand-ins follow the fixed wait. The ledger is not part of it.

A decision's facts hold every node of the run. Ended nodes are indexed once (`launcher/decide/known_nodes.py`), live
nodes in each decision; before each timed decision one more attempt ended. A property test compares the indexes with a
full rebuild after every change.
""",
    )


if __name__ == "__main__":
    main()
