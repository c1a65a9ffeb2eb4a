"""Plan the sequence-parallel (SP) groups of every node (elastic sequence parallelism; our reading of the paper).

observe live workers, groups, running and waiting requests -> decide the groups of every node -> apply the difference

A worker is one GPU, and a group never spans nodes. A high SP degree finishes a single request sooner. Degree 1 finishes
the most requests per hour, because every higher degree spends GPU time on communication. Many requests therefore need
small groups, few requests need large groups, and large images need larger groups than small images. The planner looks
at all partitions of a node into allowed degrees (22 at most for 8 GPUs). For each partition, the planner tries a few
assignments of request classes to degrees ("served first"). The planner takes the partition with the earliest forecast
end (`engine/parallel/forecast.py`). Ties go first to the partition whose new
groups are aligned, (0, 1), (2, 3), (4..7), because their communicators exist already, then to the partition that moves
the fewest workers.

Groups change only if the forecast improves. The forecast includes the cost of the change: a moved worker first ends its
running step and then loses `regroup_seconds`. Groups therefore do not flap for gains smaller than the cost. The new
groups of a node start together. An interrupted request waits for the new groups and resumes on its node.

Sharing the demand. A running request belongs to its node. Each node plans for a share of the waiting requests. The
share of a class is proportional to the steps per hour of the node's live GPUs for the class, rounded up, because a node
should not plan for the end of the work while more work may arrive. A share is a forecast and promises nothing: groups
pull. Requests no node can run are left out. In a fleet of more than `PLANNED_SINGLY` nodes, the planner looks at
kinds of nodes: as long as requests wait, nodes with equally many live GPUs plan for the same average load. Only a node
without waiting requests is planned with its own running requests.

The promises: the module is pure, without clock and memory; equal facts give equal groups. Every live worker is in
exactly one group. Groups pull one request at a time; the plan does not model batches of several requests.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from engine.parallel.forecast import MICROSECONDS, Requests, Seat, StepSeconds, Table, finish_us, spread
from engine.parallel.seating import PlannedNode, degrees_up_to, partitions, planned_nodes, regroup_cost, seatings
from engine.parallel.worker_group import Degrees, WorkerGroup

PLANNED_SINGLY = 8
"""Up to this many nodes, the planner looks at each group's running request. Measured: with five request classes a
node of 8 GPUs takes up to 6 ms (tests/benchmarks/results/sp_plan.md), and a plan should take no longer than 50 ms."""

ROUNDING = 1e-9
"""Tolerance before rounding a share up, so a division error does not turn a whole number into the next number."""


def plan_groups(
    live: Iterable[str],
    *,
    step_seconds: StepSeconds,
    regroup_seconds: float,
    groups: Iterable[WorkerGroup] = (),
    in_flight: Mapping[str, Requests] | None = None,
    waiting: Iterable[Requests] = (),
    sp_degree: int | Literal["auto"] = "auto",
) -> tuple[WorkerGroup, ...]:
    """Return the wanted groups of every node, by node and GPU index. `regroups` returns the groups still to form.

    live             workers to plan with, "NODE/PLACE": "spot-0/3" is the fourth worker of its node
    step_seconds     of each request class, by the degrees allowed for the class and large enough for its memory
    regroup_seconds  from the end of the old group to the first pull in the new group; communicator and weights ready
    groups           existing groups; a group with a dead member no longer exists, and its live members are free
    in_flight        a group's running request, by its first member; the request of any other worker counts as waiting
    waiting          requests without a worker
    sp_degree        a number: as many groups of this degree as fit on each node, the rest in the next smaller degrees
    raises           ValueError: a worker's name without place; a request class without step times; a fixed degree not
                     allowed for a class
    """
    table = Table(step_seconds)
    nodes, loose = planned_nodes(live, groups, in_flight or {})
    demand = [*waiting, *loose]
    for requests in [*demand, *(in_flight or {}).values()]:
        if not table.us.get(requests.request_class):
            raise ValueError(
                f"no step time of request class {requests.request_class!r}; there are "
                f"{', '.join(sorted(table.us)) or 'none'}; start with modelled ones until some are measured "
                "(engine/parallel/latency.py)"
            )
    if sp_degree != "auto":
        degrees = _degrees_for_all(sp_degree, step_seconds)
        return tuple(
            group for node in nodes for group in node.formed(_with_degrees(node, degrees_up_to(node.gpus, degrees)), {})
        )
    return tuple(_planned(nodes, demand, table, round(regroup_seconds * MICROSECONDS)))


def _degrees_for_all(sp_degree: int, step_seconds: StepSeconds) -> Degrees:
    """Return `sp_degree` and the smaller degrees allowed for every request class.

    Raises ValueError if a class does not allow `sp_degree`.
    """
    shared = set.intersection(*(set(times) for times in step_seconds.values())) if step_seconds else {sp_degree}
    for request_class, times in step_seconds.items():
        if sp_degree not in times:
            some = ", ".join(str(degree) for degree in sorted(times)) or "none"
            every = ", ".join(str(degree) for degree in sorted(shared))
            raise ValueError(
                f"sp_degree is {sp_degree}, but requests of class {request_class!r} can be made at degree {some}; use "
                + (f"one of {every}, which go for every class, or auto" if every else "auto: no degree goes for all")
            )
    return tuple(sorted(degree for degree in shared if degree <= sp_degree))


_Decision = tuple[tuple[int, ...], Mapping[int, str | None]]
"""The groups as masks, and for each degree the request class to serve first."""


def _with_degrees(node: PlannedNode, degrees: Degrees) -> tuple[int, ...]:
    if not node.free and node.degrees == degrees:
        return node.now
    return seatings(node.live, node.now, degrees)[0]


# --- choosing the best groups


def _planned(
    nodes: Sequence[PlannedNode], demand: Iterable[Requests], table: Table, regroup_us: int
) -> Iterator[WorkerGroup]:
    running = [requests for node in nodes for requests in node.running.values()]
    singly = len(nodes) <= PLANNED_SINGLY
    demand, running = (_merged if singly else _pooled)(demand), _pooled(running)
    allowed = tuple(sorted({1}.union(*(table.us[requests.request_class] for requests in [*demand, *running]))))
    sizes = Counter(node.gpus for node in nodes)
    shares = {gpus: _share(demand, gpus, sizes, table) for gpus in sizes}
    rankings: dict[int, _Ranking] = {}
    for node in nodes:
        share = shares[node.gpus]
        decision: _Decision
        if not share and not node.running:
            decision = node.as_it_is, {}
        elif singly:
            decision = _best_of_one(node, share, allowed, table, regroup_us)
        elif share:
            if node.gpus not in rankings:
                load = share + _share(running, node.gpus, sizes, table)
                rankings[node.gpus] = _ranking(node.gpus, load, allowed, table, regroup_us)
            decision = _best_of_kind(node, rankings[node.gpus])
        else:
            decision = _best_of_last(node, table, regroup_us)
        yield from node.formed(*decision)


def _share(demand: Sequence[Requests], gpus: int, sizes: Mapping[int, int], table: Table) -> list[Requests]:
    """Return the waiting requests a node with this many GPUs plans for."""
    share = []
    for requests in demand:
        everybody = sum(many * table.rate(requests.request_class, size) for size, many in sizes.items())
        if everybody and (mine := table.rate(requests.request_class, gpus)):
            share.append(replace(requests, count=ceil(requests.count * (mine / everybody) - ROUNDING)))
    return [requests for requests in share if requests.count]


def _merged(demand: Iterable[Requests]) -> list[Requests]:
    """Merge requests of the same class and number of steps."""
    piles: Counter[tuple[str, float]] = Counter()
    for requests in demand:
        piles[requests.request_class, requests.steps] += requests.count
    return [Requests(request_class=name, steps=steps, count=count) for (name, steps), count in piles.items() if count]


def _pooled(demand: Iterable[Requests]) -> list[Requests]:
    """Merge each class into a single pile with the mean of the steps left."""
    counts: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for requests in demand:
        counts[requests.request_class] += requests.count
        steps[requests.request_class] += ceil(requests.steps) * requests.count
    return [
        Requests(request_class=name, steps=ceil(steps[name] / count), count=count)
        for name, count in counts.items()
        if count
    ]


def _firsts(degrees: Degrees, waiting: Iterable[Requests], table: Table) -> list[Mapping[int, str | None]]:
    """Return the candidate assignments of classes to degrees ("served first").

    The candidates are: no assignment; larger groups serve the classes that gain more from size; and, if all groups have
    the same degree, each of the classes.

    A class gains more if a step costs less GPU time at the largest degree relative to the smallest degree. A class that
    does not run at a small degree comes before all classes that do.
    """
    sizes = sorted(set(degrees), reverse=True)
    classes = {requests.request_class for requests in waiting if requests.count}
    if len(classes) < 2:
        return [{}]
    if len(sizes) == 1:
        return [{}, *({sizes[0]: name} for name in sorted(classes) if sizes[0] in table.us[name])]

    def dearness(request_class: str) -> tuple[int, float, str]:
        times = table.us[request_class]
        least, most = min(times), max(times)
        return -least, most * times[most] / (least * times[least]), request_class

    by_gain = sorted(classes, key=dearness)
    apart = (len(classes) - 1) / (len(sizes) - 1)
    first = {size: by_gain[round(number * apart)] for number, size in enumerate(sizes)}
    return [{}, {size: name for size, name in first.items() if size in table.us[name]}]


def _best_of_one(
    node: PlannedNode, share: Sequence[Requests], allowed: Degrees, table: Table, regroup_us: int
) -> _Decision:
    """Return the best groups of one node. Every partition of the node is tried.

    The forecasts include each group's running request, and the steps that end before a regroup.
    """
    best: _Decision | None = None
    least: tuple[int, int, int] | None = None
    for degrees in partitions(node.gpus, allowed):
        for masks in _seatings_worth_a_look(node, degrees):
            cost = regroup_cost(node.now, masks)
            stopped = [mask for mask in node.running if mask not in masks]
            formed = regroup_us + max((_left_us(node.running[mask], mask, table)[1] for mask in stopped), default=0)
            waiting = [*share, *(request for mask in stopped if (request := _at_step_end(node.running[mask])))]
            for firsts in _firsts(degrees, waiting, table):
                seats = []
                for mask in masks:
                    degree, request = mask.bit_count(), node.running.get(mask)
                    if request is not None:
                        seats.append(
                            Seat(degree, _left_us(request, mask, table)[0], request.request_class, firsts.get(degree))
                        )
                    else:
                        seats.append(Seat(degree, formed if cost[1] else 0, None, firsts.get(degree)))
                end = finish_us(seats, waiting, table, gpus=node.gpus, regroup_us=regroup_us)
                if least is None or (end, *cost) < least:
                    best, least = (masks, firsts), (end, *cost)
    assert best is not None  # a node has a live worker, and 1 is allowed
    return best


def _seatings_worth_a_look(node: PlannedNode, degrees: Degrees) -> list[tuple[int, ...]]:
    """Return at most two of the best seatings: one interrupts the least running work, one the most.

    Interrupted work is the number of remaining steps of the running requests whose group changes.
    """
    choices = seatings(node.live, node.now, degrees)
    if len(choices) == 1:
        return list(choices)

    def kept(masks: tuple[int, ...]) -> float:
        return sum(node.running[mask].steps for mask in masks if mask in node.running)

    return list(dict.fromkeys([max(choices, key=kept), min(choices, key=kept)]))


def _left_us(request: Requests, mask: int, table: Table) -> tuple[int, int]:
    """Return the microseconds until a running request ends, and until its current step ends."""
    step = table.step(request.request_class, mask.bit_count())
    return round(request.steps * step), round((request.steps - int(request.steps)) * step)


def _at_step_end(request: Requests) -> Requests | None:
    """Return the remaining request after the end of its current step, or None if no step remains."""
    return replace(request, steps=int(request.steps), count=1) if int(request.steps) else None


@dataclass(frozen=True, slots=True)
class _Ranking:
    """The good group layouts for a kind of node: degrees, with the class served first by each degree."""

    best: dict[Degrees, Mapping[int, str | None]]
    """Layouts with the earliest forecast end."""
    good: dict[Degrees, Mapping[int, str | None]]
    """Layouts so close to the best end that a regroup does not pay."""


def _ranking(gpus: int, load: Sequence[Requests], allowed: Degrees, table: Table, regroup_us: int) -> _Ranking:
    """Rank every partition with its best `firsts`, as if all groups started together."""
    ends: dict[Degrees, tuple[int, Mapping[int, str | None]]] = {}
    for degrees in partitions(gpus, allowed):
        # The class served first matters for the last requests, and a mean load has none.
        ways = _firsts(degrees, load, table) if len(set(degrees)) > 1 else [{}]
        for firsts in ways:
            seats = [Seat(degree, 0, None, firsts.get(degree)) for degree in degrees]
            end = finish_us(seats, load, table, gpus=gpus, regroup_us=regroup_us)
            if degrees not in ends or end < ends[degrees][0]:
                ends[degrees] = end, firsts
    soonest = min(end for end, _ in ends.values())
    return _Ranking(
        best={degrees: firsts for degrees, (end, firsts) in ends.items() if end == soonest},
        good={degrees: firsts for degrees, (end, firsts) in ends.items() if end <= soonest + regroup_us},
    )


def _best_of_kind(node: PlannedNode, ranking: _Ranking) -> _Decision:
    if not node.free and (degrees := node.degrees) in ranking.good:
        return node.now, ranking.good[degrees]
    decisions = [(seatings(node.live, node.now, degrees)[0], firsts) for degrees, firsts in ranking.best.items()]
    return (
        decisions[0]
        if len(decisions) == 1
        else min(decisions, key=lambda decision: regroup_cost(node.now, decision[0]))
    )


def _best_of_last(node: PlannedNode, table: Table, regroup_us: int) -> _Decision:
    """Give idle GPUs to the running requests of a node without waiting work, if the last request then ends sooner."""
    alone: _Decision = (node.as_it_is, {})
    if not node.running or (not node.free and len(node.running) == len(node.groups)):
        return alone
    hold = step_end = 0
    for mask, request in node.running.items():
        left_us, in_step = _left_us(request, mask, table)
        hold, step_end = max(hold, left_us), max(step_end, in_step)
    shared = spread(
        [(int(request.steps), request.request_class) for request in node.running.values()], node.gpus, table
    )
    if shared is None or step_end + regroup_us + shared[0] >= hold:
        return alone
    shared_degrees = sorted(shared[1], reverse=True)
    degrees = tuple(shared_degrees + [1] * (node.gpus - sum(shared_degrees)))
    found_seatings = seatings(node.live, node.now, degrees)
    if len(found_seatings) == 1:
        return found_seatings[0], {}
    # Interrupt the longest requests: the large new groups are for the long requests.
    return min(found_seatings, key=lambda masks: sum(node.running[m].steps for m in masks if m in node.running)), {}
