"""Plan the sequence-parallel (SP) groups of every node (elastic sequence parallelism; our reading of the paper).

observe live workers, groups, running and waiting requests -> decide the groups of every node -> apply the difference

A worker is one GPU, and a group never spans nodes. A high SP degree finishes a single request sooner. Degree 1 finishes
the most requests per hour, because every higher degree spends GPU time on communication. Many requests therefore need
small groups, few requests need large groups, and large images need larger groups than small images. The planner looks
at all partitions of a node into allowed degrees (22 at most for 8 GPUs). For each partition, the planner tries a few
assignments of request classes to degrees ("served first"). The planner takes the partition with the earliest forecast
end (`engine/parallel/forecast.py`; research notes papers 6.5 and engine 6). Ties go first to the partition whose new
groups are aligned, (0, 1), (2, 3), (4..7), because their communicators exist already, then to the partition that moves
the fewest workers.

Groups change only if the forecast improves. The forecast includes the cost of the change: a moved worker first ends its
running step and then loses `regroup_seconds`. Groups therefore do not flap for gains smaller than the cost. The new
groups of a node start together. An interrupted request waits for the new groups and resumes on its node.

Sharing the demand. A running request belongs to its node. Each node plans for a share of the waiting requests. The
share of a class is proportional to the steps per hour of the node's live GPUs for the class, rounded up, because a node
should not plan for the end of the work while more work may arrive. A share is a forecast and promises nothing: groups
pull. Requests no node can run are left out. In a fleet of more than `LOOKED_AT_SINGLY` nodes, the planner looks at
kinds of nodes: as long as requests wait, nodes with equally many live GPUs plan for the same average load. Only a node
without waiting requests is planned with its own running requests.

The promises: the module is pure, without clock and memory; equal facts give equal groups. Every live worker is in
exactly one group. Groups pull one request at a time; the plan does not model batches of several requests.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Literal

from engine.parallel.forecast import MICROSECONDS, Requests, Seat, StepSeconds, Table, finish_us, spread

LOOKED_AT_SINGLY = 8
"""Up to this many nodes, the planner looks at each group's running request. Measured: with five request classes a
node of 8 GPUs takes up to 6 ms (tests/benchmarks/results/sp_plan.md), and a plan should take no longer than 50 ms."""

ROUNDING = 1e-9
"""Tolerance before rounding a share up, so a division error does not turn a whole number into the next number."""

Degrees = tuple[int, ...]
"""Degrees of a node's groups, the largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """Workers of a node that share a request's sequence."""

    members: tuple[str, ...]
    """Workers in rank order. The first member pulls."""
    first: str | None = None
    """The request class the group serves first. Without waiting requests of the class, the group serves any class.
    None: the group serves any class, the longest request first."""

    @property
    def degree(self) -> int:
        return len(self.members)


def allowed_degrees(heads: int, *, most: int = 8) -> Degrees:
    """Return the degrees up to `most` that divide the number of heads, ascending.

    Each rank computes heads / degree heads. Sequence lengths need not divide: missing tokens are padded
    (engine/parallel/ulysses.py). Raises ValueError if `heads` is below 1.
    """
    if heads < 1:
        raise ValueError(f"a model of {heads} attention heads; give its number of heads, 1 or more")
    return tuple(degree for degree in range(1, min(heads, most) + 1) if heads % degree == 0)


def aligned_subsets(gpus: int, degrees: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of GPU indices with a communicator from the node's start: (0, 1), (2, 3), ..., (0, 1, 2, 3), ...

    There are 7 sets for a node of 8 with degrees 1, 2, 4 and 8. Any other group must make its own communicator first.
    """
    return tuple(
        tuple(range(start, start + degree))
        for degree in sorted(set(degrees))
        if degree > 1
        for start in range(0, gpus - degree + 1, degree)
    )


def regroups(now: Iterable[WorkerGroup], wanted: Iterable[WorkerGroup]) -> tuple[WorkerGroup, ...]:
    """Return the wanted groups that do not exist yet.

    A group with the same members exists, even with another `first`.
    """
    there = {frozenset(group.members) for group in now}
    return tuple(group for group in wanted if frozenset(group.members) not in there)


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
    nodes, loose = _nodes(live, groups, in_flight or {})
    demand = [*waiting, *loose]
    for one in [*demand, *(in_flight or {}).values()]:
        if not table.us.get(one.request_class):
            raise ValueError(
                f"no step time of request class {one.request_class!r}; there are "
                f"{', '.join(sorted(table.us)) or 'none'}; start with modelled ones until some are measured "
                "(engine/parallel/latency.py)"
            )
    if sp_degree != "auto":
        degrees = _degrees_for_all(sp_degree, step_seconds)
        return tuple(
            group for node in nodes for group in node.formed(_with_degrees(node, _fixed(node.gpus, degrees)), {})
        )
    return tuple(_planned(nodes, demand, table, round(regroup_seconds * MICROSECONDS)))


# --- a node in the planner: GPU indices are bits


@dataclass(slots=True, eq=False)
class _Node:
    workers: dict[int, str] = field(default_factory=dict)
    """Worker names, by GPU index."""
    free: int = 0
    """Live workers outside every complete group, as a bit mask."""
    groups: dict[int, WorkerGroup] = field(default_factory=dict)
    """Existing complete groups, by bit mask."""
    now: tuple[int, ...] = ()
    """The masks of `groups`, ordered by GPU index."""
    running: dict[int, Requests] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        return len(self.workers)

    @property
    def live(self) -> int:
        return sum(self.now) | self.free

    @property
    def as_it_is(self) -> tuple[int, ...]:
        """The node's existing groups, plus every free worker as a group of its own."""
        return self.now + tuple(1 << place for place in _places(self.free)) if self.free else self.now

    @property
    def degrees(self) -> Degrees:
        return tuple(sorted([group.bit_count() for group in self.now], reverse=True))

    def formed(self, masks: tuple[int, ...], firsts: Mapping[int, str | None]) -> Iterator[WorkerGroup]:
        """Yield groups as values, ordered by GPU index."""
        for mask in masks if masks is self.now else sorted(masks, key=_lowest):
            first = firsts.get(mask.bit_count()) if firsts else None
            group = self.groups.get(mask)
            if group is None:
                yield WorkerGroup(members=tuple([self.workers[place] for place in _places(mask)]), first=first)
            else:
                yield group if group.first == first else replace(group, first=first)


@lru_cache(maxsize=1 << 16)
def _place(worker: str) -> tuple[str, int]:
    node, slash, place = worker.rpartition("/")
    if not slash or not place.isdecimal():
        raise ValueError(f"worker {worker!r} has no place on a node; name workers NODE/PLACE, like spot-0/3")
    return node, int(place)


def _nodes(
    live: Iterable[str], groups: Iterable[WorkerGroup], in_flight: Mapping[str, Requests]
) -> tuple[list[_Node], list[Requests]]:
    """Return the nodes in the order of their first worker, and the in-flight requests without a live group."""
    nodes: dict[str, _Node] = {}
    homes: dict[str, _Node] = {}
    bits: dict[str, int] = {}
    for worker in live:
        name, place = _place(worker)
        node = nodes.get(name)
        if node is None:
            node = nodes[name] = _Node()
        node.workers[place] = worker
        homes[worker] = node
        bits[worker] = bit = 1 << place
        node.free |= bit
    led = set()
    for group in groups:
        node = homes.get(group.members[0]) if group.members else None
        if node is None:
            continue
        mask = 0
        for worker in group.members:
            if homes.get(worker) is node:
                mask |= bits[worker]
        if mask & node.free == mask and mask.bit_count() == len(group.members):
            node.free &= ~mask
            node.groups[mask] = group
            if (running := in_flight.get(group.members[0])) is not None:
                node.running[mask] = running
                led.add(group.members[0])
    for node in nodes.values():  # sort, because the order of the observed groups carries no meaning
        node.now = tuple(sorted(node.groups, key=_lowest))
        node.running = {mask: node.running[mask] for mask in node.now if mask in node.running}
    return list(nodes.values()), [one for worker, one in in_flight.items() if worker not in led]


def _lowest(mask: int) -> int:
    return mask & -mask


@lru_cache(maxsize=1 << 12)
def _places(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)


# --- number of groups of each degree


@lru_cache(maxsize=256)
def _partitions(gpus: int, degrees: Degrees) -> tuple[Degrees, ...]:
    """Return all ways to write `gpus` as a sum of these degrees, small degrees first.

    `degrees` is ascending and contains 1.
    """
    if gpus == 0:
        return ((),)
    return tuple(
        sorted(
            (degree, *rest)
            for degree in degrees
            if degree <= gpus
            for rest in _partitions(gpus - degree, tuple(d for d in degrees if d <= degree))
        )
    )


def _fixed(gpus: int, degrees: Degrees) -> Degrees:
    """Return as many of the largest of these degrees as fit, then of the next degree, and onward."""
    found: list[int] = []
    for degree in sorted({1, *degrees}, reverse=True):
        found += [degree] * ((gpus - sum(found)) // degree)
    return tuple(found)


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


# --- assigning workers to groups


@lru_cache(maxsize=1 << 14)
def _seatings(live: int, now: tuple[int, ...], degrees: Degrees) -> tuple[tuple[int, ...], ...]:
    """Return the best ways to form groups of these degrees: fewest new unaligned groups, then fewest moved workers."""
    best: list[tuple[int, ...]] = []
    least = (len(degrees) + 1, 0)
    big = [degree for degree in degrees if degree > 1]
    choices = {degree: _blocks(live, now, degree) for degree in set(big)}
    singles = sum(mask for mask in now if mask & (mask - 1) == 0)

    def seat(number: int, start: int, free: int, taken: tuple[int, ...], left: Degrees, moves: int) -> None:
        """Try every position for group `number`. `left`: degrees to fill at the end from the free workers."""
        nonlocal least
        if (len(left), moves) > least:
            return
        if number == len(big):
            # Leave a single worker single if enough free workers remain.
            others = [*_places(free & ~singles), *_places(free & singles)]
            for degree in left:
                taken = (*taken, sum(1 << place for place in others[:degree]))
                moves += degree
                others = others[degree:]
            alone = tuple(1 << place for place in others)
            found = (len(left), moves + sum(1 for mask in alone if not mask & singles))
            if found < least:
                least = found
                best.clear()
            if found == least:
                best.append(taken + alone)
            return
        degree = big[number]
        alike = number + 1 < len(big) and big[number + 1] == degree
        for place in range(start, len(choices[degree])):
            mask, is_new = choices[degree][place]
            if mask & free == mask:
                then = place + 1 if alike else 0  # visit each set of equal-degree groups in a single order
                seat(number + 1, then, free & ~mask, (*taken, mask), left, moves + degree * is_new)
        seat(number + 1, len(choices[degree]) if alike else 0, free, taken, (*left, degree), moves)

    seat(0, 0, live, (), (), 0)
    return tuple(best)


def _blocks(live: int, now: tuple[int, ...], degree: int) -> list[tuple[int, bool]]:
    """Return (group, is new) for groups that need no new communicator: existing groups, then aligned groups."""
    there = [mask for mask in now if mask.bit_count() == degree]
    block = (1 << degree) - 1
    aligned = (block << start for start in range(0, live.bit_length(), degree))
    return [(mask, False) for mask in there] + [
        (mask, True) for mask in aligned if mask & live == mask and mask not in there
    ]


@lru_cache(maxsize=1 << 14)
def _cost(now: tuple[int, ...], masks: tuple[int, ...]) -> tuple[int, int]:
    """Return (number of new unaligned groups, number of workers that change group)."""
    new = [mask for mask in masks if mask not in now]
    unaligned = sum(1 for mask in new if not _is_aligned(mask))
    return unaligned, sum(mask.bit_count() for mask in new)


def _is_aligned(mask: int) -> bool:
    degree = mask.bit_count()
    return mask >> (mask.bit_length() - degree) == (1 << degree) - 1 and (mask.bit_length() - degree) % degree == 0


_Decision = tuple[tuple[int, ...], Mapping[int, str | None]]
"""The groups as masks, and for each degree the request class to serve first."""


def _with_degrees(node: _Node, degrees: Degrees) -> tuple[int, ...]:
    if not node.free and node.degrees == degrees:
        return node.now
    return _seatings(node.live, node.now, degrees)[0]


# --- choosing the best groups


def _planned(
    nodes: Sequence[_Node], demand: Iterable[Requests], table: Table, regroup_us: int
) -> Iterator[WorkerGroup]:
    running = [one for node in nodes for one in node.running.values()]
    singly = len(nodes) <= LOOKED_AT_SINGLY
    demand, running = (_merged if singly else _pooled)(demand), _pooled(running)
    allowed = tuple(sorted({1}.union(*(table.us[one.request_class] for one in [*demand, *running]))))
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
    found = []
    for one in demand:
        everybody = sum(many * table.rate(one.request_class, size) for size, many in sizes.items())
        if everybody and (mine := table.rate(one.request_class, gpus)):
            found.append(replace(one, count=ceil(one.count * (mine / everybody) - ROUNDING)))
    return [one for one in found if one.count]


def _merged(demand: Iterable[Requests]) -> list[Requests]:
    """Merge requests of the same class and number of steps."""
    piles: Counter[tuple[str, float]] = Counter()
    for one in demand:
        piles[one.request_class, one.steps] += one.count
    return [Requests(request_class=name, steps=steps, count=count) for (name, steps), count in piles.items() if count]


def _pooled(demand: Iterable[Requests]) -> list[Requests]:
    """Merge each class into a single pile with the mean of the steps left."""
    counts: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for one in demand:
        counts[one.request_class] += one.count
        steps[one.request_class] += ceil(one.steps) * one.count
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
    classes = {one.request_class for one in waiting if one.count}
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


def _best_of_one(node: _Node, share: Sequence[Requests], allowed: Degrees, table: Table, regroup_us: int) -> _Decision:
    """Try every partition, including each group's running request and the steps to end before a regroup."""
    best: _Decision | None = None
    least: tuple[int, int, int] | None = None
    for degrees in _partitions(node.gpus, allowed):
        for masks in _seatings_worth_a_look(node, degrees):
            cost = _cost(node.now, masks)
            stopped = [mask for mask in node.running if mask not in masks]
            formed = regroup_us + max((_left_us(node.running[mask], mask, table)[1] for mask in stopped), default=0)
            waiting = [*share, *(one for mask in stopped if (one := _at_step_end(node.running[mask])))]
            for firsts in _firsts(degrees, waiting, table):
                seats = []
                for mask in masks:
                    degree, one = mask.bit_count(), node.running.get(mask)
                    if one is not None:
                        seats.append(Seat(degree, _left_us(one, mask, table)[0], one.request_class, firsts.get(degree)))
                    else:
                        seats.append(Seat(degree, formed if cost[1] else 0, None, firsts.get(degree)))
                end = finish_us(seats, waiting, table, gpus=node.gpus, regroup_us=regroup_us)
                if least is None or (end, *cost) < least:
                    best, least = (masks, firsts), (end, *cost)
    assert best is not None  # a node has a live worker, and 1 is allowed
    return best


def _seatings_worth_a_look(node: _Node, degrees: Degrees) -> list[tuple[int, ...]]:
    """Return at most two seatings of equal cost: one interrupts the fewest remaining steps, one the most."""
    found = _seatings(node.live, node.now, degrees)
    if len(found) == 1:
        return list(found)

    def kept(masks: tuple[int, ...]) -> float:
        return sum(node.running[mask].steps for mask in masks if mask in node.running)

    return list(dict.fromkeys([max(found, key=kept), min(found, key=kept)]))


def _left_us(one: Requests, mask: int, table: Table) -> tuple[int, int]:
    """Return the microseconds until a running request ends, and until its current step ends."""
    step = table.step(one.request_class, mask.bit_count())
    return round(one.steps * step), round((one.steps - int(one.steps)) * step)


def _at_step_end(one: Requests) -> Requests | None:
    """Return the remaining request after the end of its current step, or None if no step remains."""
    return replace(one, steps=int(one.steps), count=1) if int(one.steps) else None


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
    for degrees in _partitions(gpus, allowed):
        ways = _firsts(degrees, load, table) if len(set(degrees)) > 1 else [{}]  # a mean load has no last request
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


def _best_of_kind(node: _Node, ranking: _Ranking) -> _Decision:
    if not node.free and (degrees := node.degrees) in ranking.good:
        return node.now, ranking.good[degrees]
    found = [(_seatings(node.live, node.now, degrees)[0], firsts) for degrees, firsts in ranking.best.items()]
    return found[0] if len(found) == 1 else min(found, key=lambda one: _cost(node.now, one[0]))


def _best_of_last(node: _Node, table: Table, regroup_us: int) -> _Decision:
    """Give idle GPUs to the running requests of a node without waiting work, if the last request then ends sooner."""
    alone: _Decision = (node.as_it_is, {})
    if not node.running or (not node.free and len(node.running) == len(node.groups)):
        return alone
    hold = step_end = 0
    for mask, one in node.running.items():
        left, in_step = _left_us(one, mask, table)
        hold, step_end = max(hold, left), max(step_end, in_step)
    found = spread([(int(one.steps), one.request_class) for one in node.running.values()], node.gpus, table)
    if found is None or step_end + regroup_us + found[0] >= hold:
        return alone
    taken = sorted(found[1], reverse=True)
    degrees = tuple(taken + [1] * (node.gpus - sum(taken)))
    seatings = _seatings(node.live, node.now, degrees)
    if len(seatings) == 1:
        return seatings[0], {}
    # Interrupt the longest requests: the large new groups are for the long requests.
    return min(seatings, key=lambda masks: sum(node.running[m].steps for m in masks if m in node.running)), {}
