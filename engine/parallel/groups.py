"""Which workers of a node share one request's sequence, and how many (elastic sequence parallelism; our reading).

observe who lives, what they form, run and wait for -> decide the groups of every node -> carry out the difference

One worker is one GPU, and a group never spans nodes. A high degree brings a single request home sooner; degree 1 makes
most requests an hour, as every other one spends some of its GPUs' time on talking. So many requests want small groups
and few want large ones, and big pictures want larger ones than small pictures. Of all partitions of a node into allowed
degrees (22 at most for 8 GPUs), each with a few ways to say which group serves which request class first, the one is
taken that would be done soonest (`engine/parallel/forecast.py`; research notes papers 6.5 and engine 6). Of equals: the
one whose new groups are aligned, (0, 1), (2, 3), (4..7), because their communicators exist already; then the one that
moves fewest workers.

Groups stay as they are unless the forecast gains by changing them, although who changes ends the running step first
and then loses `regroup_seconds`: nothing flaps for less than it costs. The new groups of a node begin together, and a
request that was interrupted waits for them and goes on on its node.

How the demand is shared out. A request that is running belongs to its node. Of what waits, each node counts on a share
in proportion to the steps an hour that its live GPUs can make of that class, rounded up: who is not sure that nothing
will come does not begin with the end. A share is a forecast and promises nothing: groups pull. What no node can do is
left out. A fleet of more than `LOOKED_AT_SINGLY` nodes is looked at by kind: as long as requests wait, nodes with
equally many live GPUs plan for the same average load, and only a node with nothing to wait for looks at its own.

The promises: pure, no clock, nothing remembered: the same facts give the same groups. Every live worker is in exactly
one group. Groups pull one request at a time; a batch of several is not planned with.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Literal

from engine.parallel.forecast import MICROSECONDS, Requests, Seat, StepSeconds, Table, finish_us, spread

LOOKED_AT_SINGLY = 8
"""Nodes that are planned with what each of their groups is doing. Measured: with five request classes a node of 8 GPUs
takes up to 6 ms (tests/benchmarks/results/sp_plan.md), and a plan should take no longer than 50 ms."""

ROUNDING = 1e-9
"""A share that is a whole number but for the error of a division is that number."""

Degrees = tuple[int, ...]
"""Of a node's groups, the largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """Workers of one node that share a request's sequence."""

    members: tuple[str, ...]
    """In rank order; the first one pulls."""
    first: str | None = None
    """The request class that it serves first, and any other when none of that waits; None: any, the longest first."""

    @property
    def degree(self) -> int:
        return len(self.members)


def allowed_degrees(heads: int, *, most: int = 8) -> Degrees:
    """Degrees up to `most` at which a model can be shared, ascending: each rank computes heads / degree of its heads.

    Lengths need not divide: what is missing is filled up (engine/parallel/ulysses.py). Raises ValueError: no heads.
    """
    if heads < 1:
        raise ValueError(f"a model of {heads} attention heads; give its number of heads, 1 or more")
    return tuple(degree for degree in range(1, min(heads, most) + 1) if heads % degree == 0)


def aligned_subsets(gpus: int, degrees: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """The places of a node that share a communicator from its start on: (0, 1), (2, 3), ..., (0, 1, 2, 3), ...

    7 for a node of 8 with degrees 1, 2, 4 and 8; a group that is none of these has to make its own first.
    """
    return tuple(
        tuple(range(start, start + degree))
        for degree in sorted(set(degrees))
        if degree > 1
        for start in range(0, gpus - degree + 1, degree)
    )


def regroups(now: Iterable[WorkerGroup], wanted: Iterable[WorkerGroup]) -> tuple[WorkerGroup, ...]:
    """The groups that have to be formed; whose members form one already needs none, whatever it serves first."""
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
    """The groups that every node should have, by node and place; `regroups` says which of them are to be formed.

    live             workers that may be planned on, "NODE/PLACE": "spot-0/3" is the fourth of its node
    step_seconds     of each request class, by the degrees that it allows and that it fits into
    regroup_seconds  from ending one's group to pulling in the next, communicator there, weights there
    groups           that exist; one with a member that is not live is gone, and its survivors are free
    in_flight        what a group runs, by its first member; of a worker that leads no group it counts as waiting
    waiting          requests that nobody runs
    sp_degree        a number: as many groups of it as fit on each node, the rest in the largest smaller degrees
    raises           ValueError: a worker's name without place; a request class without step times; a fixed degree that
                     a class does not allow
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


# --- a node, as the planner sees it: places are bits


@dataclass(slots=True, eq=False)
class _Node:
    workers: dict[int, str] = field(default_factory=dict)
    """By place."""
    free: int = 0
    """Live, and in no group that is whole."""
    groups: dict[int, WorkerGroup] = field(default_factory=dict)
    """That exist and are whole."""
    now: tuple[int, ...] = ()
    """The same, by place."""
    running: dict[int, Requests] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        return len(self.workers)

    @property
    def live(self) -> int:
        return sum(self.now) | self.free

    @property
    def as_it_is(self) -> tuple[int, ...]:
        """Its groups, and every other worker alone."""
        return self.now + tuple(1 << place for place in _places(self.free)) if self.free else self.now

    @property
    def degrees(self) -> Degrees:
        return tuple(sorted([group.bit_count() for group in self.now], reverse=True))

    def formed(self, masks: tuple[int, ...], firsts: Mapping[int, str | None]) -> Iterator[WorkerGroup]:
        """Groups as values, by place."""
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
    """Nodes in the order of their first worker, and what runs nowhere any more."""
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
    for node in nodes.values():  # the order of what was observed says nothing
        node.now = tuple(sorted(node.groups, key=_lowest))
        node.running = {mask: node.running[mask] for mask in node.now if mask in node.running}
    return list(nodes.values()), [one for worker, one in in_flight.items() if worker not in led]


def _lowest(mask: int) -> int:
    return mask & -mask


@lru_cache(maxsize=1 << 12)
def _places(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)


# --- how many groups of which degree


@lru_cache(maxsize=256)
def _partitions(gpus: int, degrees: Degrees) -> tuple[Degrees, ...]:
    """All ways to write `gpus` as a sum of these degrees; small ones first. `degrees` ascends and holds 1."""
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
    """As many of the largest of these degrees as fit, then of the next."""
    found: list[int] = []
    for degree in sorted({1, *degrees}, reverse=True):
        found += [degree] * ((gpus - sum(found)) // degree)
    return tuple(found)


def _degrees_for_all(sp_degree: int, step_seconds: StepSeconds) -> Degrees:
    """`sp_degree` and the smaller ones that every request class allows. Raises ValueError if one does not allow it."""
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


# --- who sits in them


@lru_cache(maxsize=1 << 14)
def _seatings(live: int, now: tuple[int, ...], degrees: Degrees) -> tuple[tuple[int, ...], ...]:
    """Ways to form groups of these degrees: those with fewest new groups that are not aligned, then fewest moves."""
    best: list[tuple[int, ...]] = []
    least = (len(degrees) + 1, 0)
    big = [degree for degree in degrees if degree > 1]
    choices = {degree: _blocks(live, now, degree) for degree in set(big)}
    singles = sum(mask for mask in now if mask & (mask - 1) == 0)

    def seat(number: int, start: int, free: int, taken: tuple[int, ...], left: Degrees, moves: int) -> None:
        """`left`: degrees that are put together at the end, from workers that happen to be free."""
        nonlocal least
        if (len(left), moves) > least:
            return
        if number == len(big):
            # Who is alone already stays alone if others can be had.
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
                then = place + 1 if alike else 0  # each set of groups of a degree in one order only
                seat(number + 1, then, free & ~mask, (*taken, mask), left, moves + degree * is_new)
        seat(number + 1, len(choices[degree]) if alike else 0, free, taken, (*left, degree), moves)

    seat(0, 0, live, (), (), 0)
    return tuple(best)


def _blocks(live: int, now: tuple[int, ...], degree: int) -> list[tuple[int, bool]]:
    """(group, whether it is new) that cost no communicator: those that exist, then those that are aligned."""
    there = [mask for mask in now if mask.bit_count() == degree]
    block = (1 << degree) - 1
    aligned = (block << start for start in range(0, live.bit_length(), degree))
    return [(mask, False) for mask in there] + [
        (mask, True) for mask in aligned if mask & live == mask and mask not in there
    ]


@lru_cache(maxsize=1 << 14)
def _cost(now: tuple[int, ...], masks: tuple[int, ...]) -> tuple[int, int]:
    """(new groups that are not aligned, workers whose group changes)."""
    new = [mask for mask in masks if mask not in now]
    unaligned = sum(1 for mask in new if not _is_aligned(mask))
    return unaligned, sum(mask.bit_count() for mask in new)


def _is_aligned(mask: int) -> bool:
    degree = mask.bit_count()
    return mask >> (mask.bit_length() - degree) == (1 << degree) - 1 and (mask.bit_length() - degree) % degree == 0


_Decision = tuple[tuple[int, ...], Mapping[int, str | None]]
"""Groups, and the class that those of a degree serve first."""


def _with_degrees(node: _Node, degrees: Degrees) -> tuple[int, ...]:
    if not node.free and node.degrees == degrees:
        return node.now
    return _seatings(node.live, node.now, degrees)[0]


# --- what is best


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
    """What a node of so many GPUs counts on."""
    found = []
    for one in demand:
        everybody = sum(many * table.rate(one.request_class, size) for size, many in sizes.items())
        if everybody and (mine := table.rate(one.request_class, gpus)):
            found.append(replace(one, count=ceil(one.count * (mine / everybody) - ROUNDING)))
    return [one for one in found if one.count]


def _merged(demand: Iterable[Requests]) -> list[Requests]:
    """Requests that take equally long in one pile."""
    piles: Counter[tuple[str, float]] = Counter()
    for one in demand:
        piles[one.request_class, one.steps] += one.count
    return [Requests(request_class=name, steps=steps, count=count) for (name, steps), count in piles.items() if count]


def _pooled(demand: Iterable[Requests]) -> list[Requests]:
    """One pile for each class, with the mean of the steps left."""
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
    """Ways to say which degree serves which class first: any; larger groups what gains more by their size; and if all
    groups are alike, each of the classes.

    A class gains the more, the less GPU time a step costs it at the largest degree compared with the smallest; one
    that does not go at a small degree comes before all others.
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
    """Every partition, with what each group is doing and who would have to end his step first."""
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
    """Of equally cheap ones, the one that interrupts the longest requests and the one that interrupts least."""
    found = _seatings(node.live, node.now, degrees)
    if len(found) == 1:
        return list(found)

    def kept(masks: tuple[int, ...]) -> float:
        return sum(node.running[mask].steps for mask in masks if mask in node.running)

    return list(dict.fromkeys([max(found, key=kept), min(found, key=kept)]))


def _left_us(one: Requests, mask: int, table: Table) -> tuple[int, int]:
    """Microseconds until a running request is done, and until its step is."""
    step = table.step(one.request_class, mask.bit_count())
    return round(one.steps * step), round((one.steps - int(one.steps)) * step)


def _at_step_end(one: Requests) -> Requests | None:
    """What is to be done of a running request once its step has ended."""
    return replace(one, steps=int(one.steps), count=1) if int(one.steps) else None


@dataclass(frozen=True, slots=True)
class _Ranking:
    """What is good for a node of a kind: degrees, with the class that each serves first."""

    best: dict[Degrees, Mapping[int, str | None]]
    """Done soonest."""
    good: dict[Degrees, Mapping[int, str | None]]
    """Not worth the regrouping to something better."""


def _ranking(gpus: int, load: Sequence[Requests], allowed: Degrees, table: Table, regroup_us: int) -> _Ranking:
    """Every partition with its best `firsts`, as if all groups began together."""
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
    """Nothing waits: the running requests get the idle GPUs, if that brings the last one home sooner."""
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
    # What is interrupted should be the longest: the large new groups are for them.
    return min(seatings, key=lambda masks: sum(node.running[m].steps for m in masks if m in node.running)), {}
