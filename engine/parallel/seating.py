"""Seat the workers of a node in groups of given degrees. GPU indices are bits of a mask.

degrees of the groups (a partition of the node) -> best groups of these degrees -> `WorkerGroup` values

The promises: every live worker is in exactly one group, and a seating makes as few unaligned new groups as possible,
then moves as few workers as possible. Unaligned groups must make a communicator first. Pure; results are cached.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from engine.parallel.forecast import Requests
from engine.parallel.worker_group import Degrees, WorkerGroup

# --- a node in the planner: GPU indices are bits


@dataclass(slots=True, eq=False)
class PlannedNode:
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
        """Yield the groups of these masks as `WorkerGroup` values, ordered by the lowest GPU index.

        `firsts`: the request class served first, by degree.
        """
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


def planned_nodes(
    live: Iterable[str], groups: Iterable[WorkerGroup], in_flight: Mapping[str, Requests]
) -> tuple[list[PlannedNode], list[Requests]]:
    """Return the nodes in the order of their first worker, and the in-flight requests without a live group."""
    nodes: dict[str, PlannedNode] = {}
    homes: dict[str, PlannedNode] = {}
    bits: dict[str, int] = {}
    for worker in live:
        name, place = _place(worker)
        node = nodes.get(name)
        if node is None:
            node = nodes[name] = PlannedNode()
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
    return list(nodes.values()), [request for worker, request in in_flight.items() if worker not in led]


def _lowest(mask: int) -> int:
    return mask & -mask


@lru_cache(maxsize=1 << 12)
def _places(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)


# --- number of groups of each degree


@lru_cache(maxsize=256)
def partitions(gpus: int, degrees: Degrees) -> tuple[Degrees, ...]:
    """Return all ways to write `gpus` as a sum of these degrees, small degrees first.

    `degrees` is ascending and contains 1.
    """
    if gpus == 0:
        return ((),)
    return tuple(
        sorted(
            (degree, *smaller)
            for degree in degrees
            if degree <= gpus
            for smaller in partitions(gpus - degree, tuple(d for d in degrees if d <= degree))
        )
    )


def degrees_up_to(gpus: int, degrees: Degrees) -> Degrees:
    """Split `gpus` GPUs into groups, largest degree first, and return the degrees of the groups.

    Degree 1 is always allowed, so the returned degrees sum to `gpus`.
    """
    chosen: list[int] = []
    for degree in sorted({1, *degrees}, reverse=True):
        chosen += [degree] * ((gpus - sum(chosen)) // degree)
    return tuple(chosen)


# --- assigning workers to groups


@lru_cache(maxsize=1 << 14)
def seatings(live: int, now: tuple[int, ...], degrees: Degrees) -> tuple[tuple[int, ...], ...]:
    """Return the best ways to form groups of these degrees: fewest new unaligned groups, then fewest moved workers."""
    best: list[tuple[int, ...]] = []
    least = (len(degrees) + 1, 0)
    big = [degree for degree in degrees if degree > 1]
    choices = {degree: _blocks(live, now, degree) for degree in set(big)}
    singles = sum(mask for mask in now if mask & (mask - 1) == 0)

    def seat(number: int, start: int, free: int, masks: tuple[int, ...], unfilled: Degrees, moves: int) -> None:
        """Try every position for group `number`. `unfilled`: degrees to fill at the end from the free workers."""
        nonlocal least
        if (len(unfilled), moves) > least:
            return
        if number == len(big):
            # Leave a single worker single if enough free workers remain.
            places = [*_places(free & ~singles), *_places(free & singles)]
            for degree in unfilled:
                masks = (*masks, sum(1 << place for place in places[:degree]))
                moves += degree
                places = places[degree:]
            alone = tuple(1 << place for place in places)
            cost = (len(unfilled), moves + sum(1 for mask in alone if not mask & singles))
            if cost < least:
                least = cost
                best.clear()
            if cost == least:
                best.append(masks + alone)
            return
        degree = big[number]
        alike = number + 1 < len(big) and big[number + 1] == degree
        for place in range(start, len(choices[degree])):
            mask, is_new = choices[degree][place]
            if mask & free == mask:
                then = place + 1 if alike else 0  # visit each set of equal-degree groups in a single order
                seat(number + 1, then, free & ~mask, (*masks, mask), unfilled, moves + degree * is_new)
        seat(number + 1, len(choices[degree]) if alike else 0, free, masks, (*unfilled, degree), moves)

    seat(0, 0, live, (), (), 0)
    return tuple(best)


def _blocks(live: int, now: tuple[int, ...], degree: int) -> list[tuple[int, bool]]:
    """Return (group, is new) for groups that need no new communicator: existing groups, then aligned groups."""
    existing = [mask for mask in now if mask.bit_count() == degree]
    block = (1 << degree) - 1
    aligned = (block << start for start in range(0, live.bit_length(), degree))
    return [(mask, False) for mask in existing] + [
        (mask, True) for mask in aligned if mask & live == mask and mask not in existing
    ]


@lru_cache(maxsize=1 << 14)
def regroup_cost(now: tuple[int, ...], masks: tuple[int, ...]) -> tuple[int, int]:
    """Return (number of new unaligned groups, number of workers that change group)."""
    new = [mask for mask in masks if mask not in now]
    unaligned = sum(1 for mask in new if not _is_aligned(mask))
    return unaligned, sum(mask.bit_count() for mask in new)


def _is_aligned(mask: int) -> bool:
    degree = mask.bit_count()
    return mask >> (mask.bit_length() - degree) == (1 << degree) - 1 and (mask.bit_length() - degree) % degree == 0
