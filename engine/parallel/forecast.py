"""Forecast of the time at which a node finishes its requests with given groups.

The forecast is a small simulation of pulling. A free group takes the next allowed request, one at a time. The group
prefers the request class the group serves first. If no request of the class is left, or the group serves any class, the
group takes the request with the longest time. Groups that are free at the same time pull in order of size, the largest
first.

As soon as a group is idle, the forecast also computes the end after sharing the node's GPUs anew among the running
requests (`spread`), and takes the earlier end. A forecast is therefore never later than keeping the groups to the end.
A planner that always takes the earliest forecast ends no later than forecast, and no later than with the best fixed
groups (rollout of a base policy; Bertsekas, Tsitsiklis and Wu 1997).

The promises: the module is pure; times are whole microseconds, and equal plans therefore forecast equal times; 10,000
requests cost about as much as 100, because a single stride covers the time in which every group takes requests from the
same pile (requests of equal duration).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

StepSeconds = Mapping[str, Mapping[int, float]]
"""Seconds of a denoising step by request class and degree. A missing degree is impossible for the class: the heads
do not divide (`allowed_degrees`), or the activations do not fit on the GPUs."""

MICROSECONDS = 1_000_000

NEVER = 1 << 62
"""Microseconds: the forecast for groups unable to serve any waiting request."""

STRIDE_FROM = 4
"""Requests per group above which the stride is tried. With fewer requests, a step per request is as fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """A number of requests with equal duration."""

    request_class: str
    """The model and resolution, which set the step time."""
    steps: float
    """Denoising steps left of each request. A fraction stands for the rest of a running request's current step."""
    count: int = 1

    def __post_init__(self) -> None:
        if not (self.steps >= 0 and self.count >= 0):
            raise ValueError(
                f"{self.count} requests of class {self.request_class!r} with {self.steps} steps left; neither can be "
                "negative; leave finished requests out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The waiting and running work. A lease counts as a single request, because its images share each forward pass."""

    waiting: Sequence[Requests]
    in_flight: Mapping[str, Requests]
    """The running requests, by the worker that runs the request."""
    images: Mapping[str, int]
    """Images per lease, by request class."""


class Seat(NamedTuple):
    """A group in a forecast."""

    degree: int
    free_us: int
    """Time of the next pull in microseconds: the end of the running request or of the regroup."""
    running: str | None
    """Class of the running request, or None."""
    first: str | None
    """The class served first; None: any class."""


class Table:
    """Step times in microseconds."""

    def __init__(self, step_seconds: StepSeconds) -> None:
        self.us = {
            request_class: {degree: max(1, round(seconds * MICROSECONDS)) for degree, seconds in sorted(times.items())}
            for request_class, times in step_seconds.items()
        }
        self.ladders = {request_class: _ladder(times) for request_class, times in self.us.items()}
        """(degree, microseconds of a step) by class, ascending, without degrees no faster than a smaller degree."""

    def step(self, request_class: str, degree: int) -> int:
        """Return the microseconds of a step.

        For an impossible degree that a group runs anyway, take the nearest possible degree.
        """
        times = self.us[request_class]
        return times.get(degree) or times[min(times, key=lambda possible: abs(possible - degree))]

    def rate(self, request_class: str, gpus: int) -> float:
        """Return the most steps of a class per microsecond on this many GPUs. 0: the class needs more GPUs."""
        times = self.us[request_class].items()
        return max((gpus // degree / us for degree, us in times if degree <= gpus), default=0.0)


def _ladder(times: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    steps: list[tuple[int, int]] = []
    for degree, us in times.items():
        if not steps or us < steps[-1][1]:
            steps.append((degree, us))
    return tuple(steps)


def spread(jobs: Sequence[tuple[int, str]], gpus: int, table: Table) -> tuple[int, tuple[int, ...]] | None:
    """Choose the SP degree of each request so that the last request ends as early as possible.

    All requests run at once.

    jobs     one (steps left, request class) per request
    gpus     number of GPUs that the requests share
    returns  microseconds until the last request ends, and the degree of each request; None: too few GPUs for all

    The result is the exact optimum. Every request starts at the smallest degree of its class. Only a higher degree of
    the request that ends last can make the end earlier, so the function raises that degree until GPUs or degrees run
    out.
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
    """Return the microseconds until the last servable request ends. The module docstring describes the simulation.

    seats       all groups of the node
    waiting     requests that no group has taken yet
    gpus        number of live GPUs of the node
    regroup_us  cost of new groups in microseconds; the time to end the current steps is added
    """
    return _Forecast(seats, waiting, table, gpus, regroup_us).finish()


class _Forecast:
    def __init__(
        self, seats: Sequence[Seat], waiting: Sequence[Requests], table: Table, gpus: int, regroup_us: int
    ) -> None:
        self.seats, self.table, self.gpus, self.regroup_us = seats, table, gpus, regroup_us
        self.piles = [pile for pile in waiting if pile.count and table.rate(pile.request_class, gpus)]
        self.counts = [pile.count for pile in self.piles]
        self.running = [seat.running for seat in seats]
        self.heap = [(seat.free_us, -seat.degree, number) for number, seat in enumerate(seats)]
        heapify(self.heap)
        orders = {(seat.degree, seat.first): self._order(seat.degree, seat.first) for seat in seats}
        self.orders = [orders[seat.degree, seat.first] for seat in seats]
        """For each seat: the piles that the seat can serve, as (pile, microseconds of a request), the next pile last.
        Equal seats share one list."""

    def _order(self, degree: int, first: str | None) -> list[tuple[int, int]]:
        order = [
            (pile.request_class == first, round(pile.steps * us), number)
            for number, pile in enumerate(self.piles)
            if (us := self.table.us[pile.request_class].get(degree)) is not None
        ]
        return [(number, us) for _, us, number in sorted(order)]

    def finish(self) -> int:
        requests_left = sum(self.counts)
        end = 0
        sooner: int | None = None
        heap, counts = self.heap, self.counts
        piles_changed = True
        while heap:
            if piles_changed and requests_left > STRIDE_FROM * len(heap):
                requests_left -= self._stride()
            piles_changed = False
            now, size, number = heap[0]
            order = self.orders[number]
            while order and not counts[order[-1][0]]:
                order.pop()
                piles_changed = True
            if order:
                pile, us = order[-1]
                counts[pile] -= 1
                requests_left -= 1
                self.running[number] = self.piles[pile].request_class
                heapreplace(heap, (now + us, size, number))
                continue
            heappop(heap)
            if self.running[number] is None:
                continue  # the group never had work: its GPUs belong to a new plan now, not to a later plan
            end = now
            if not requests_left and heap and heap[0][0] > now and (shared := self._shared_out(now)) is not None:
                sooner = shared if sooner is None else min(sooner, shared)
        if requests_left:
            return end + self.regroup_us + self._one_after_another() if end else NEVER
        return end if sooner is None else min(end, sooner)

    def _stride(self) -> int:
        """Let every group take from its pile until a pile is nearly used up. Return the number of requests taken."""
        takers: dict[int, list[tuple[int, int]]] = {}
        for free, _, number in self.heap:
            order = self.orders[number]
            while order and not self.counts[order[-1][0]]:
                order.pop()
            if order:
                takers.setdefault(order[-1][0], []).append((free, order[-1][1]))
        # Two requests per taker stay, because rounding down must never take a request of another group.
        until = min(
            (
                min(free for free, _ in of) + (self.counts[pile] - 2 * len(of)) / sum(1 / max(1, us) for _, us in of)
                for pile, of in takers.items()
            ),
            default=0.0,
        )
        served = 0
        for place, (free, size, number) in enumerate(self.heap):
            order = self.orders[number]
            if order and until > free:
                pile, us = order[-1]
                many = int((until - free) // max(1, us))
                if many:
                    self.counts[pile] -= many
                    served += many
                    self.running[number] = self.piles[pile].request_class
                    self.heap[place] = (free + many * us, size, number)
        heapify(self.heap)
        return served

    def _shared_out(self, now: int) -> int | None:
        """Return the end of the running requests if all GPUs are shared anew after the current steps."""
        jobs, step_end = [], 0
        for free, _, number in self.heap:
            if (request_class := self.running[number]) is not None:
                steps, step_left = divmod(free - now, self.table.step(request_class, self.seats[number].degree))
                step_end = max(step_end, step_left)
                jobs.append((steps, request_class))
        shared = spread(jobs, self.gpus, self.table) if jobs else None
        return None if shared is None else now + step_end + self.regroup_us + shared[0]

    def _one_after_another(self) -> int:
        """Return the time for the requests that these groups cannot serve, run in sequence at the fastest degree of
        each.

        After these groups finish, new groups can serve the requests, often faster. The result is an upper bound,
        because a planner that relies on the forecast must not find a later end when the time comes.
        """
        return sum(
            count
            * round(
                pile.steps * min(us for degree, us in self.table.us[pile.request_class].items() if degree <= self.gpus)
            )
            for pile, count in zip(self.piles, self.counts, strict=True)
        )
