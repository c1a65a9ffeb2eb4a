"""sp_plan: is the elastic plan never slower than the best fixed SP degree, and how long does planning take?

    python -m tests.benchmarks.sp_plan --json

A small discrete-event simulation of its own (nothing of `engine/parallel/forecast.py`): one node of H100, a queue of
requests, groups that pull. Elastic groups are planned anew as the queue drains, and every regrouping is paid for; they
are compared with every degree that never changes, in two orders of pulling, the best of them chosen with hindsight.
Step times: the model of `engine/parallel/latency.py`, from measured and published timings (`engine/timing/`): so
makespans are modelled. The milliseconds of planning are measured.
"""

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.model_folder import ImageSize
from engine.parallel.forecast import Requests, StepSeconds
from engine.parallel.groups import plan_groups
from engine.parallel.latency import modelled_step_seconds
from engine.parallel.worker_group import WorkerGroup, allowed_degrees, regroups
from engine.timing.seconds import published_at
from tests.benchmarks.page import load_now, publish

TEXT = 128
"""Text tokens of Qwen-Image, padding included. Assumed."""


def step_times(model: str, size: ImageSize, least: int = 1) -> dict[int, float]:
    """Return step times with guidance (two forward passes). `least`: the fewest GPUs that the model fits into."""
    sized = published_at(model, size)
    # Only powers of two are published and measured; degrees 2 and 4 in turn are better than 3 or 6.
    allowed = allowed_degrees(sized.architecture.heads)
    degrees = [degree for degree in allowed if degree >= least and degree.bit_count() == 1]
    return modelled_step_seconds(sized, degrees, forwards=2)


def square(pixels: int) -> ImageSize:
    return ImageSize(pixels, pixels, text_tokens=TEXT)


STEP_SECONDS = {
    "qwen 512": step_times("Qwen-Image", square(512)),
    "qwen 1024": step_times("Qwen-Image", square(1024)),
    "qwen 1280": step_times("Qwen-Image", square(1280)),
    "qwen 1536": step_times("Qwen-Image", square(1536)),
    "wan 480p": step_times("Wan2.1-14B", ImageSize(480, 832, 81)),
    "wan 720p": step_times("Wan2.1-14B", ImageSize(720, 1280, 81), least=2),
}
"""Seconds a step by class and degree. That Wan at 720p needs 2 GPUs is assumed, to have a class with a least degree."""

STEPS = {"qwen 512": 20, "qwen 1024": 20, "qwen 1280": 20, "qwen 1536": 35, "wan 480p": 30, "wan 720p": 30}

MIXES: dict[str, dict[str, int]] = {
    **{name: {name: 1} for name in STEP_SECONDS},
    "512 and 1280": {"qwen 512": 1, "qwen 1280": 1},
    "9 of 512, 1 of 1536": {"qwen 512": 9, "qwen 1536": 1},
    "all pictures": {"qwen 512": 1, "qwen 1024": 1, "qwen 1280": 1, "qwen 1536": 1},
    "1536 and wan 480p": {"qwen 1536": 3, "wan 480p": 1},
    "512 and wan 720p": {"qwen 512": 19, "wan 720p": 1},
}
"""Shares of the request classes in the queue."""

COUNTS = (1, 2, 3, 5, 7, 8, 9, 12, 17, 33, 64, 100, 333, 1000, 10_000)
NODES = (2, 4, 8)

REGROUP_SECONDS = 0.05
"""To leave a group and pull in the next, with communicators made before and weights there (engine 6, assumed)."""

TRIES = 3

PLAN_FROM = 4
"""Waiting requests to a GPU above which a plan is asked for only when a twentieth of them is gone, or a group has
nothing to do; below, after every event."""

US = 1_000_000


def step_us(request_class: str, degree: int) -> int:
    return round(STEP_SECONDS[request_class][degree] * US)


# --- one working node


@dataclass
class Running:
    """A working group. Times are in microseconds."""

    group: WorkerGroup
    free: int
    """Time of its next pull."""
    job: str | None = None

    def steps_left(self, now: int) -> float:
        assert self.job is not None
        return (self.free - now) / step_us(self.job, self.group.degree)


Piles = dict[tuple[str, int], int]
"""Number of waiting requests, by class and steps left."""
Pull = Callable[[Piles, WorkerGroup], tuple[str, int] | None]
Plan = Callable[..., tuple[WorkerGroup, ...]]


def longest(piles: Piles, group: WorkerGroup) -> tuple[str, int] | None:
    """Pull by the rule of `plan_groups`: the first class, else the request that takes this group longest."""
    able = [pile for pile in piles if group.degree in STEP_SECONDS[pile[0]]]
    return max(able, key=lambda p: (p[0] == group.first, step_us(p[0], group.degree) * p[1], p), default=None)


class InOrder:
    """Pulls requests as they came, in a random order of the classes."""

    def __init__(self, piles: Piles) -> None:
        self.queue = [pile for pile, count in piles.items() for _ in range(count)]
        random.Random(0).shuffle(self.queue)
        self.queue.reverse()

    def __call__(self, piles: Piles, group: WorkerGroup) -> tuple[str, int] | None:
        """Return the next request. The single GPUs left over by a fixed degree pull nothing."""
        return self.queue.pop() if self.queue and group.degree in STEP_SECONDS[self.queue[-1][0]] else None


@dataclass
class Node:
    """Discrete events: ends of requests and of regroupings."""

    gpus: int
    step_seconds: StepSeconds
    piles: Piles
    pull: Pull
    groups: list[Running] = field(default_factory=list)
    later: list[tuple[int, str, int]] = field(default_factory=list)
    """(time, class, steps) of interrupted requests that wait for the new groups."""
    regrouped: int = 0
    plans: int = 0
    ended: int = 0

    @property
    def waiting(self) -> int:
        return sum(self.piles.values()) + len(self.later)

    def run(self, plan: Plan, *, again: bool) -> float:
        """Return the seconds until the queue is empty. `again`: plan repeatedly while it drains."""
        now, planned_at = 0, self.waiting
        self.change(plan, now)
        while True:
            self.settle(now)
            idle = any(one.free <= now for one in self.groups)
            changed = self.waiting <= max(PLAN_FROM * self.gpus, 0.95 * planned_at)
            if again and (idle or changed) and (self.waiting or any(one.job for one in self.groups)):
                planned_at = self.waiting
                self.change(plan, now)
                self.settle(now)
            times = [one.free for one in self.groups if one.free > now] + [when for when, *_ in self.later]
            if not times:
                break
            now = min(times)
        assert not self.waiting, "requests were left over"
        return self.ended / US

    def settle(self, now: int) -> None:
        """Let all free groups pull, the largest first."""
        while self.later and self.later[0][0] <= now:
            _, request_class, steps = heapq.heappop(self.later)
            self.piles[request_class, steps] = self.piles.get((request_class, steps), 0) + 1
        for one in sorted(self.groups, key=lambda one: -one.group.degree):
            if one.free > now:
                continue
            if one.job is not None:
                one.job, self.ended = None, now
            if (found := self.pull(self.piles, one.group)) is not None:
                self.piles[found] -= 1
                if not self.piles[found]:
                    del self.piles[found]
                one.job, one.free = found[0], now + found[1] * step_us(found[0], one.group.degree)

    def change(self, plan: Plan, now: int) -> None:
        """Make a plan and carry it out: changing groups end their step, then the new groups begin together."""
        self.plans += 1
        there = {one.group.members: one for one in self.groups}
        wanted = plan(
            [f"n/{place}" for place in range(self.gpus)],
            step_seconds=self.step_seconds,
            regroup_seconds=REGROUP_SECONDS,
            groups=[one.group for one in self.groups],
            in_flight={
                one.group.members[0]: Requests(request_class=one.job, steps=one.steps_left(now))
                for one in self.groups
                if one.job is not None
            },
            waiting=[
                Requests(request_class=name, steps=steps, count=many) for (name, steps), many in self.piles.items()
            ]
            + [Requests(request_class=name, steps=steps) for _, name, steps in self.later],
        )
        formed = regroups([one.group for one in self.groups], wanted)
        if formed:
            self.regrouped += 1
            kept = {group.members for group in wanted}
            stopped = [one for one in self.groups if one.group.members not in kept]
            step_end = max((self.stop(one, now) for one in stopped), default=now)
            begin = step_end + round(REGROUP_SECONDS * US)
            self.later = [(max(when, begin), *rest) for when, *rest in self.later]
            self.later += [(begin, one.job, steps) for one in stopped if one.job and (steps := self.whole(one, now))]
            heapq.heapify(self.later)
        self.groups = [
            Running(group=group, free=begin) if group in formed else self.go_on(there[group.members], group)
            for group in wanted
        ]

    def go_on(self, one: Running, group: WorkerGroup) -> Running:
        one.group = group
        return one

    def whole(self, one: Running, now: int) -> int:
        assert one.job is not None
        return (one.free - now) // step_us(one.job, one.group.degree)

    def stop(self, one: Running, now: int) -> int:
        """Return the end of the running step."""
        if one.job is None:
            return max(now, one.free)
        end = now + (one.free - now) % step_us(one.job, one.group.degree)
        if not self.whole(one, now):
            self.ended = max(self.ended, end)
        return end


@dataclass(frozen=True, kw_only=True)
class Cell:
    mix: str
    gpus: int
    requests: int
    elastic: float
    fixed: Mapping[str, float]
    regrouped: int

    @property
    def best(self) -> str:
        return min(self.fixed, key=lambda name: self.fixed[name])

    @property
    def ratio(self) -> float:
        return self.elastic / self.fixed[self.best]


def queue_of(mix: Mapping[str, int], requests: int) -> Piles:
    """Return `requests` in these shares; each class is rounded, the last one gets the rest."""
    left, parts, piles = requests, sum(mix.values()), {}
    for name, part in mix.items():
        count = min(left, round(requests * part / parts)) if name != list(mix)[-1] else left
        left -= count
        if count:
            piles[name, STEPS[name]] = count
    return piles


def play(mix: str, gpus: int, requests: int) -> Cell:
    piles = queue_of(MIXES[mix], requests)
    there = {name for name, _ in piles}
    seconds = {name: STEP_SECONDS[name] for name in there}
    shared = set.intersection(*(set(times) for times in seconds.values()))
    fixed = {}
    for degree in sorted(degree for degree in shared if degree <= gpus):
        for order, rule in (("longest first", longest), ("as they came", InOrder(piles))):
            node = Node(gpus, seconds, dict(piles), rule)
            fixed[f"{degree}, {order}"] = node.run(partial(plan_groups, sp_degree=degree), again=False)
    node = Node(gpus, seconds, dict(piles), longest)
    elastic = node.run(plan_groups, again=True)
    return Cell(mix=mix, gpus=gpus, requests=requests, elastic=elastic, fixed=fixed, regrouped=node.regrouped)


# --- time of planning


def fleet(nodes: int, seed: int, *, alike: bool, begun: bool, waits: bool, lost: float = 0.0) -> dict[str, object]:
    """Return the arguments of `plan_groups` for a fleet of nodes with 8 GPUs."""
    draw = random.Random(seed)
    classes = list(STEP_SECONDS)[:5]
    live, groups, in_flight = [], [], {}
    for number in range(nodes):
        places = list(range(8)) if alike else sorted(draw.sample(range(8), draw.randint(1, 8)))
        live += [f"spot-{number}/{place}" for place in places if not lost or draw.random() > lost]
        while begun and places:
            degree = 1 if alike else draw.choice([d for d in (1, 2, 4, 8) if d <= len(places)])
            members, places = places[:degree], places[degree:]
            groups.append(WorkerGroup(members=tuple(f"spot-{number}/{place}" for place in members)))
            if waits or draw.random() < 0.5:
                name = draw.choice(classes)
                if degree in STEP_SECONDS[name]:
                    in_flight[groups[-1].members[0]] = Requests(request_class=name, steps=STEPS[name] * draw.random())
    waiting = [Requests(request_class=name, steps=STEPS[name], count=2 * nodes) for name in classes] if waits else []
    return {"live": live, "groups": groups, "in_flight": in_flight, "waiting": waiting}


LARGE: dict[str, Callable[[int], dict[str, object]]] = {
    "fresh, all alike": partial(fleet, 1000, alike=True, begun=False, waits=True),
    "at work, all alike": partial(fleet, 1000, alike=True, begun=True, waits=True),
    "all different": partial(fleet, 1000, alike=False, begun=True, waits=True),
    "all different, 1 worker in 8 lost": partial(fleet, 1000, alike=False, begun=True, waits=True, lost=0.125),
    "all different, nothing waits": partial(fleet, 1000, alike=False, begun=True, waits=False),
    "alike groups, nothing waits": partial(fleet, 1000, alike=True, begun=True, waits=False),
}
FLEETS = LARGE | {
    "8 nodes, all different": partial(fleet, 8, alike=False, begun=True, waits=True),
    "8 nodes, all alike": partial(fleet, 8, alike=True, begun=True, waits=True),
}
"""Five request classes; groups make requests of any of them, each anywhere between its first and its last step."""


def plan_ms(make: Callable[[int], dict[str, object]], times: int) -> list[float]:
    """Return the CPU milliseconds of plans, each of another fleet of this kind.

    Each is the fastest of TRIES, because work on the other hyperthread slows it down.
    """
    return [min(_plan_ms(make(seed)) for _ in range(TRIES)) for seed in range(times)]


def _plan_ms(arguments: dict[str, object]) -> float:
    live = arguments.pop("live")
    begun = time.process_time()
    plan_groups(live, step_seconds=STEP_SECONDS, regroup_seconds=REGROUP_SECONDS, **arguments)  # type: ignore[arg-type]
    return 1e3 * (time.process_time() - begun)


# --- the page


def cells(counts: Sequence[int]) -> Iterator[Cell]:
    for mix in MIXES:
        for gpus in NODES:
            for requests in counts:
                if "wan 720p" not in mix or gpus >= 2:
                    yield play(mix, gpus, requests)


def row_of(mix: str, gpus: int, of: Sequence[Cell]) -> dict[str, object]:
    best = [f"{cell.best.partition(',')[0]}" for cell in of]
    ratios = [cell.ratio for cell in of]
    return {
        "queue": mix,
        "GPUs": gpus,
        "ratio, median": f"{statistics.median(ratios):.3f}",
        "smallest": f"{min(ratios):.3f}",
        "largest": f"{max(ratios):.4f}",
        "best fixed degree at " + ", ".join(str(n) for n in sorted({c.requests for c in of})): " ".join(best),
        "regroupings, most": max(cell.regrouped for cell in of),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=COUNTS[-1], help="largest queue")
    parser.add_argument("--times", type=int, default=21, help="plans of each fleet")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    begun = time.perf_counter()
    milliseconds = {name: plan_ms(make, options.times) for name, make in FLEETS.items()}
    played = list(cells([count for count in COUNTS if count <= options.most]))
    ratios = [cell.ratio for cell in played]
    counts = [cell.requests for cell in played]
    by_fleet = "; ".join(
        f"{name} {statistics.median(found):.0f} ({max(found):.0f})" for name, found in milliseconds.items()
    )
    by_row = {(mix, gpus): [c for c in played if (c.mix, c.gpus) == (mix, gpus)] for mix in MIXES for gpus in NODES}
    publish(
        "sp_plan",
        question="is the elastic plan never slower than the best fixed SP degree, and how long does planning take?",
        command="python -m tests.benchmarks.sp_plan --json",
        result={
            "plan_ms_1000_nodes": max(
                statistics.median(found) for name, found in milliseconds.items() if name in LARGE
            ),
            "plan_ms": {
                name: {"median": statistics.median(found), "worst": max(found)} for name, found in milliseconds.items()
            },
            "makespan_ratio_to_best_fixed_degree": max(ratios),
            "makespan_ratio_median": statistics.median(ratios),
            "cells": len(played),
            "cells_above_1": sum(ratio > 1 for ratio in ratios),
            "regroup_seconds": REGROUP_SECONDS,
            "step_seconds": STEP_SECONDS,
            "steps": STEPS,
            "by_cell": {
                f"{cell.mix}, {cell.gpus} GPUs, {cell.requests} requests": (
                    f"{cell.elastic:.3f} s elastic with {cell.regrouped} regroupings, "
                    f"{cell.fixed[cell.best]:.3f} s at degree {cell.best}: {cell.ratio:.5f}"
                )
                for cell in played
            },
            "seconds": time.perf_counter() - begun,
        },
        runs=options.times,
        seeds=[0, options.times - 1],
        load1=load1,
        rows=[row_of(mix, gpus, of) for (mix, gpus), of in by_row.items()],
        text=f"""
Ratio: seconds until a queue is empty with elastic groups, over those with the best fixed SP degree of the same cell
(node and queue), chosen with hindsight among all degrees that go for every class, each pulling the longest request
first and in a random order of arrival. Modelled: {len(played)} cells, queues of 1 to {max(counts):,} requests,
one request a group at a time, one node of H100 with the step times of `engine/parallel/latency.py`: passes of
diffusers' networks, most of them as we measured them, and published efficiencies of shared ones
(`engine/timing/figures.py`). Both sides pay {REGROUP_SECONDS} s (assumed) for forming their first groups, the elastic
one for every later regrouping too, and whoever is regrouped ends the running step first.
Largest ratio {max(ratios):.5f}, median {statistics.median(ratios):.3f}, smallest {min(ratios):.3f}.
Why it hardly exceeds 1: a forecast is what keeping the present groups would take, or less, and groups change only for
an earlier one; so the end is no later than the first forecast, and that no later than any degree that stays and pulls
the longest first. Against a lucky random order there is no such argument, only these cells:
{sum(ratio > 1 for ratio in ratios)} are above 1.
Why small queues gain and large ones do not: what is gained is the end, when there are fewer requests than groups. With
wan 480p, 2 GPUs are nearly as efficient as one, and little is to be gained there.
Milliseconds of planning: processor time, median of {options.times} fleets (worst), of each the fastest of {TRIES} plans
(other work on the machine slows it; the first one is no slower than the next):
{by_fleet}.
All but the last two have 1,000 nodes of 8 places; `all different`: other workers live, other groups and other requests
at other steps on each. Small fleets are looked at node by node and larger ones by kind (`PLANNED_SINGLY`); whether
that is as good for a large fleet as looking at each node is not shown here.
What it changed: a forecast used to count on a later regrouping even when GPUs were idle already, so that waiting was
always as good as acting and nobody acted; work that no group of a partition could serve was forecast better than any
plan could do it, so that groups flapped; and equal groups that all took the longest request first lost to a lucky order
of arrival by 0.02 % in one cell, so that now each class may come first.
""",
    )


if __name__ == "__main__":
    main()
