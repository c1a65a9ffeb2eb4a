"""Play many schedules over two processes; a finding is identified by its seed."""

import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tests.simulation.world import World

PROCESSES = 2
CHUNK = 250

Given = TypeVar("Given")
Got = TypeVar("Got")


@dataclass(frozen=True, kw_only=True)
class Played:
    """The result of some schedules. `fewest`: events of the shortest. `broken`: (seed, what broke)."""

    schedules: int
    events: int
    fewest: int
    broken: tuple[tuple[int, str], ...]


def broken_by(seed: int, *, quota: int = 200) -> tuple[str | None, int]:
    """Play one schedule. Return the broken invariant or None, and its number of events. Any exception is a finding."""
    world = World(seed, quota=quota)
    try:
        world.run()
    except Exception as error:  # the engine must not raise any exception
        return f"{type(error).__name__}: {error}"[:300], world.events
    return None, world.events


def play(seeds: range) -> Played:
    """Play these schedules one after another."""
    found = [(seed, *broken_by(seed)) for seed in seeds]
    return Played(
        schedules=len(found),
        events=sum(events for _, _, events in found),
        fewest=min((events for _, text, events in found if text is None), default=0),
        broken=tuple((seed, text) for seed, text, _ in found if text is not None),
    )


def play_all(count: int) -> Played:
    """Play seeds 0 to `count` over two processes."""
    chunks = [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
    parts = list(in_processes(play, chunks))
    return Played(
        schedules=sum(part.schedules for part in parts),
        events=sum(part.events for part in parts),
        fewest=min(part.fewest for part in parts),
        broken=tuple(one for part in parts for one in part.broken),
    )


def in_processes(work: Callable[[Given], Got], given: Iterable[Given]) -> Iterator[Got]:
    """Run `work` on each in new processes, which inherit no threads, random state or patched class."""
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, given)


def kinds_of(broken: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Group findings that differ only in numbers: text -> seeds."""
    kinds: dict[str, list[int]] = {}
    for seed, text in broken:
        kinds.setdefault(re.sub(r"\d+", "#", text), []).append(seed)
    return kinds
