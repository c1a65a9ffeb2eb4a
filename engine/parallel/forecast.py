"""When would a node be done with its requests, if it worked in these groups from now on?

A small simulation of pulling: a group that is free takes the next request that it may serve, one at a time. It takes of
the request class that it serves first; when none of that is left, or it serves any, the request that would take it
longest. Groups that are free at the same time pull in order of size, the largest first.

As soon as a group finds nothing to do, the forecast also asks what the node would gain by sharing its GPUs out anew
among the requests still running (`spread`), and believes the better of the two. So a forecast is never later than
keeping the groups to the end, and a planner that always takes the earliest forecast ends no later than it said, and
than the best groups that never change (rollout of a base policy; Bertsekas, Tsitsiklis and Wu 1997).

The promises: pure; times are whole microseconds, so that equal plans forecast equal times; 10,000 requests cost about
as much as 100, because the time in which every group goes on taking from the same pile is passed in one stride.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

StepSeconds = Mapping[str, Mapping[int, float]]
"""Seconds of a denoising step by request class and degree. A degree that is missing does not go, for whatever reason:
its heads do not divide (`allowed_degrees`), or the activations do not fit into so few GPUs."""

MICROSECONDS = 1_000_000

NEVER = 1 << 62
"""Microseconds: what groups forecast that can do nothing at all of what waits."""

STRIDE_FROM = 4
"""Requests to a group from which the stride is tried; below, going one by one is as fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """Some requests that take equally long."""

    request_class: str
    """What decides the time of a step: model and resolution."""
    steps: float
    """Denoising steps left of each. Of a running request a fraction may say what is left of the step it is in."""
    count: int = 1

    def __post_init__(self) -> None:
        if not (self.steps >= 0 and self.count >= 0):
            raise ValueError(
                f"{self.count} requests of class {self.request_class!r} with {self.steps} steps left; neither can be "
                "negative; leave finished requests out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What there is to do. A lease's pictures count as one request: they go through the network together."""

    waiting: Sequence[Requests]
    in_flight: Mapping[str, Requests]
    """By worker that makes it."""
    pictures: Mapping[str, int]
    """Of a lease, by request class."""


class Seat(NamedTuple):
    """A group in a forecast."""

    degree: int
    free_us: int
    """When it pulls next: at the end of the request that it runs, or of the regrouping."""
    running: str | None
    """Class of the request that it runs."""
    first: str | None
    """The class that it serves first; None: any."""


class Table:
    """Step times in microseconds."""

    def __init__(self, step_seconds: StepSeconds) -> None:
        self.us = {
            request_class: {degree: max(1, round(seconds * MICROSECONDS)) for degree, seconds in sorted(times.items())}
            for request_class, times in step_seconds.items()
        }
        self.ladders = {request_class: _ladder(times) for request_class, times in self.us.items()}
        """(degree, us of a step) by class, ascending, without degrees that are no faster than a smaller one."""

    def step(self, request_class: str, degree: int) -> int:
        """Microseconds; of a degree that does not go, but somebody runs it, those of the nearest that does."""
        times = self.us[request_class]
        return times.get(degree) or times[min(times, key=lambda other: abs(other - degree))]

    def rate(self, request_class: str, gpus: int) -> float:
        """The most steps of a class that so many GPUs can make a microsecond; 0: the class needs more of them."""
        times = self.us[request_class].items()
        return max((gpus // degree / us for degree, us in times if degree <= gpus), default=0.0)


def _ladder(times: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    steps: list[tuple[int, int]] = []
    for degree, us in times.items():
        if not steps or us < steps[-1][1]:
            steps.append((degree, us))
    return tuple(steps)


def spread(jobs: Sequence[tuple[int, str]], gpus: int, table: Table) -> tuple[int, tuple[int, ...]] | None:
    """The degrees at which these requests, all at once, end soonest.

    jobs     (steps left, request class)
    returns  when the last one ends, in microseconds, and each job's degree; None: there are not GPUs enough for all

    Exact: whatever the end, each job needs at least its smallest degree that keeps it, and the job that ends last is
    the only one whose degree is worth raising.
    """
    ladders = [table.ladders[request_class] for _, request_class in jobs]
    rungs = [0] * len(jobs)
    spare = gpus - sum(ladder[0][0] for ladder in ladders)
    if spare < 0:
        return None
    ends = [steps * ladder[0][1] for (steps, _), ladder in zip(jobs, ladders, strict=True)]
    while ends:
        end = max(ends)
        last = ends.index(end)
        ladder, rung = ladders[last], rungs[last] + 1
        if rung == len(ladder) or (more := ladder[rung][0] - ladder[rung - 1][0]) > spare:
            break
        spare -= more
        rungs[last] = rung
        ends[last] = jobs[last][0] * ladder[rung][1]
    return max(ends, default=0), tuple(ladder[rung][0] for ladder, rung in zip(ladders, rungs, strict=True))


def finish_us(seats: Sequence[Seat], waiting: Sequence[Requests], table: Table, *, gpus: int, regroup_us: int) -> int:
    """Microseconds until the last request that some number of these GPUs can serve is done; see the module's story.

    seats       all groups of the node
    waiting     requests that no group runs
    gpus        live on the node: what may be shared out anew when a group has nothing to do
    regroup_us  what that costs, beside ending the step that each request is in
    """
    return _Forecast(seats, waiting, table, gpus, regroup_us).finish()


class _Forecast:
    def __init__(
        self, seats: Sequence[Seat], waiting: Sequence[Requests], table: Table, gpus: int, regroup_us: int
    ) -> None:
        self.seats, self.table, self.gpus, self.regroup_us = seats, table, gpus, regroup_us
        self.piles = [one for one in waiting if one.count and table.rate(one.request_class, gpus)]
        self.counts = [one.count for one in self.piles]
        self.running = [seat.running for seat in seats]
        self.heap = [(seat.free_us, -seat.degree, number) for number, seat in enumerate(seats)]
        heapify(self.heap)
        orders = {(seat.degree, seat.first): self._order(seat.degree, seat.first) for seat in seats}
        self.orders = [orders[seat.degree, seat.first] for seat in seats]
        """For each seat the (pile, us of a request) that it may take, the next one last. Shared by seats of a kind."""

    def _order(self, degree: int, first: str | None) -> list[tuple[int, int]]:
        order = [
            (one.request_class == first, round(one.steps * us), number)
            for number, one in enumerate(self.piles)
            if (us := self.table.us[one.request_class].get(degree)) is not None
        ]
        return [(number, us) for _, us, number in sorted(order)]

    def finish(self) -> int:
        left = sum(self.counts)
        end = 0
        sooner: int | None = None
        heap, counts = self.heap, self.counts
        piles_changed = True
        while heap:
            if piles_changed and left > STRIDE_FROM * len(heap):
                left -= self._stride()
            piles_changed = False
            now, size, number = heap[0]
            order = self.orders[number]
            while order and not counts[order[-1][0]]:
                order.pop()
                piles_changed = True
            if order:
                pile, us = order[-1]
                counts[pile] -= 1
                left -= 1
                self.running[number] = self.piles[pile].request_class
                heapreplace(heap, (now + us, size, number))
                continue
            heappop(heap)
            if self.running[number] is None:
                continue  # it never had anything to do: sharing its GPUs out is for a plan of now, not for a later one
            end = now
            if not left and heap and heap[0][0] > now and (shared := self._shared_out(now)) is not None:
                sooner = shared if sooner is None else min(sooner, shared)
        if left:
            return end + self.regroup_us + self._one_after_another() if end else NEVER
        return end if sooner is None else min(end, sooner)

    def _stride(self) -> int:
        """Let every group take from its pile until one of the piles is nearly used up. Returns how many were taken."""
        takers: dict[int, list[tuple[int, int]]] = {}
        for free, _, number in self.heap:
            order = self.orders[number]
            while order and not self.counts[order[-1][0]]:
                order.pop()
            if order:
                takers.setdefault(order[-1][0], []).append((free, order[-1][1]))
        # Two requests to a taker stay, so that rounding down never takes what another group would have had.
        until = min(
            (
                min(free for free, _ in of) + (self.counts[pile] - 2 * len(of)) / sum(1 / max(1, us) for _, us in of)
                for pile, of in takers.items()
            ),
            default=0.0,
        )
        taken = 0
        for place, (free, size, number) in enumerate(self.heap):
            order = self.orders[number]
            if order and until > free:
                pile, us = order[-1]
                many = int((until - free) // max(1, us))
                if many:
                    self.counts[pile] -= many
                    taken += many
                    self.running[number] = self.piles[pile].request_class
                    self.heap[place] = (free + many * us, size, number)
        heapify(self.heap)
        return taken

    def _shared_out(self, now: int) -> int | None:
        """When the running requests end if their steps are ended and the node's GPUs shared out among them anew."""
        jobs, step_end = [], 0
        for free, _, number in self.heap:
            if (request_class := self.running[number]) is not None:
                steps, rest = divmod(free - now, self.table.step(request_class, self.seats[number].degree))
                step_end = max(step_end, rest)
                jobs.append((steps, request_class))
        found = spread(jobs, self.gpus, self.table) if jobs else None
        return None if found is None else now + step_end + self.regroup_us + found[0]

    def _one_after_another(self) -> int:
        """What these groups cannot serve at all, each on as many GPUs as make it fastest. Some other groups can do that
        once these are done, and often better, but who plans with it must find no worse when the time has come."""
        return sum(
            count
            * round(
                one.steps * min(us for degree, us in self.table.us[one.request_class].items() if degree <= self.gpus)
            )
            for one, count in zip(self.piles, self.counts, strict=True)
        )
