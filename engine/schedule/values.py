"""The values of a schedule: rates, the work of a batch, GPUs, knobs and the forecast. Pure.

A rollout GPU samples images. A trainer GPU trains units of groups, and samples images when told to help. The groups of
a unit go through the network together. All durations are seconds of one GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil
from typing import Literal

from engine.timing.figures import Figure, Source

Help = Literal["off", "greedy", "feedback", "search"]
"""Rollouts made by a waiting trainer (TAG). `greedy`: whole leases whenever no unit is complete. `feedback`: the same,
but the trainer gives the rest of a lease back once a unit is complete. `search`: as `feedback`, for the number of
leases with the earliest end of the batch."""

HIDDEN_SHARE = 0.9
"""Share of a pass's collectives, or of its computation, that the longer of the two hides. Assumed."""

NOTHING = Figure(value=0.0, source=Source(basis="assumed", text="not counted"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Seconds of each kind of work, each with its source."""

    image: Figure
    """A rollout of an image on one GPU."""
    row: Figure
    """A training row, an (image, step) pair, on one GPU."""
    gather: Figure = NOTHING
    """Collectives of a training pass, whatever the number of its rows."""
    launch: Figure = NOTHING
    """Fixed cost of a training pass."""
    switch: Figure = NOTHING
    """A trainer GPU changes between training and sampling, one way."""
    publish: Figure = NOTHING
    """From an optimiser step until rollout GPUs may fetch the weights."""
    load: Figure = NOTHING
    """A rollout GPU loads the weights."""
    score: Figure = NOTHING
    """From an image's last denoising step until its reward is known. Sampling goes on meanwhile."""

    def problems(self) -> tuple[str, ...]:
        """Return the reasons why no schedule can be computed. Empty: the rates are usable."""
        reasons = []
        for field in fields(self):
            seconds = getattr(self, field.name).value
            if not math.isfinite(seconds) or seconds < 0:
                reasons.append(f"{field.name} takes {seconds} s; seconds are finite and not negative")
            elif seconds == 0 and field.name in ("image", "row"):
                reasons.append(f"{field.name} takes 0 s; a rate that is not known leaves the schedule as it is")
        return tuple(reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A batch."""

    groups: int
    images: int
    """Images of a group."""
    rows_of_image: int
    updates: int = 1
    """Optimiser steps. Each trains `groups / updates` groups, in order."""
    lease: int = 1
    """Images that a GPU samples together, in as many seconds as one after another. A lease with fewer images takes as
    long, because a worker fills it up with copies."""
    steps: int = 10
    """Denoising steps of an image: the points at which help can stop."""
    in_order: bool = False
    """The units of an optimiser step train in order only (`algorithm.order: fixed`)."""

    def minibatch(self, number: int) -> range:
        """Return the groups of an optimiser step."""
        return range(number * self.groups // self.updates, (number + 1) * self.groups // self.updates)

    @property
    def groups_of_step(self) -> int:
        return self.groups // self.updates

    def unit(self, rows_per_forward: int, ranks: int, asked: int = 0) -> int:
        """Return the groups that train together: `asked`, or as many whole groups as fit into a pass of each rank."""
        fit = max(1, rows_per_forward // (self.rows_of_image * self.images)) * ranks
        return min(self.groups_of_step, asked or fit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """GPUs of a run. `rollout` may be 0: the trainer then samples everything."""

    trainer: int
    rollout: int
    helpers: int | None = None
    """GPUs of the trainer that can sample. None: all."""

    @property
    def helping(self) -> int:
        return self.trainer if self.helpers is None else self.helpers

    @property
    def number(self) -> int:
        return self.trainer + self.rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """The settings that a schedule chooses."""

    unit: int
    """Groups that train together. The number of groups of the batch, or more, is the barrier: no training before the
    last rollout."""
    rows: int
    """Most rows of a training pass on a GPU. 1: a pass for each row."""
    help: Help = "off"
    early: float = 0.0
    """Share of the next batch's groups that idle rollout GPUs sample one version early (TCSS), at most .5."""

    def __post_init__(self) -> None:
        if self.unit < 1 or self.rows < 1 or not 0 <= self.early <= 0.5:
            raise ValueError(f"{self}: unit and rows are 1 or more, and early is between 0 and .5")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A forecast: seconds and GPU-seconds of an average iteration."""

    seconds: float
    gpus: int
    idle: Mapping[str, float]
    """Idle GPU-seconds by cause: `trainer waits for rollouts`, `switch`, `rollout GPU waits for weights`, `rollout GPU
    has no rollouts`."""
    collectives: float
    """GPU-seconds of the trainer's collectives that computation does not hide. They count as busy."""
    helped: float
    """Images that the trainer sampled."""
    stale_share: float
    """Share of the trained groups that were sampled one version early."""

    @property
    def bubble_share(self) -> float:
        """Return the idle GPU-seconds over all GPU-seconds, from one publish to the next."""
        return sum(self.idle.values()) / (self.seconds * self.gpus)


def pass_seconds(rates: Rates, rows: int) -> float:
    """Return the seconds of a training pass on each GPU of the trainer."""
    compute, gather = rows * rates.row.value, rates.gather.value
    return max(compute, gather) + (1 - HIDDEN_SHARE) * min(compute, gather) + rates.launch.value


def train_seconds(rates: Rates, work: Work, ranks: int, groups: int, rows: int) -> float:
    """Return the seconds in which `ranks` GPUs train some groups.

    With `rows` 1 a GPU trains whole images, one row after another. With more, the rows of all images are divided
    over the GPUs.
    """
    images = groups * work.images
    if rows == 1:
        return ceil(images / ranks) * work.rows_of_image * pass_seconds(rates, 1)
    full, rows_left = divmod(ceil(images * work.rows_of_image / ranks), rows)
    return full * pass_seconds(rates, rows) + (pass_seconds(rates, rows_left) if rows_left else 0.0)


def lower_bound(rates: Rates, work: Work, gpus: Gpus) -> float:
    """Return seconds that no schedule of an iteration can beat: all work on all GPUs, and training on the trainer's.

    Collectives, switches and weights count as nothing.
    """
    images = work.groups * work.images
    training = images * work.rows_of_image * rates.row.value
    return max((images * rates.image.value + training) / gpus.number, training / gpus.trainer)
