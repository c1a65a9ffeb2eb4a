"""Play a schedule forward: rollout GPUs and the trainer, event by event. Deterministic unless a `Disturbance` is given.

    rollout GPU   free -> lease of images -> free
    trainer       next_action: train a unit | help | wait; after the last unit: commit, the next batch begins

An early group is sampled with the weights of one version, the version before. A group whose early sampling has begun
ends with that version; the other groups are sampled anew. So no group has images of two versions, no group is older
than one version, and no image is sampled twice.
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from dataclasses import replace
from typing import Protocol

from engine.schedule.decide import Help, Train, next_action
from engine.schedule.state import SCORER, Image, Lease, State
from engine.schedule.values import Gpus, Knobs, Rates, Timeline, Work, pass_seconds, train_seconds

WAITS, SWITCH, WEIGHTS, NOTHING_LEFT = (
    "trainer waits for rollouts",
    "switch",
    "rollout GPU waits for weights",
    "rollout GPU has no rollouts",
)


class Disturbance(Protocol):
    """The difference between rates and facts: factors of durations, 1 if the rates are right."""

    def rollout(self) -> float: ...

    def training(self) -> float: ...


class Undisturbed:
    def rollout(self) -> float:
        return 1.0

    def training(self) -> float:
        return 1.0


class World:
    """The GPUs and the queue of a run."""

    def __init__(self, rates: Rates, state: State, knobs: Knobs, facts: Disturbance | None = None) -> None:
        self.rates, self.work, self.gpus, self.knobs = rates, state.work, state.gpus, knobs
        self.facts = facts or Undisturbed()
        self.now, self.batch, self.trained = state.now, state.batch, state.trained
        self.waiting, self.early = deque(state.waiting), deque(state.early)
        self.free = list(state.free)
        self.doing = [(lease.ends, lease) for lease in state.leases]
        heapq.heapify(self.free)
        heapq.heapify(self.doing)
        self.done: Counter[tuple[int, int]] = Counter(state.done)
        self.weights_at, self.samples = state.weights_at, state.samples
        self.help_left, self.help_ahead = state.help_left, state.help_ahead
        self.begun_early: set[tuple[int, int]] = set()
        self.idle: defaultdict[str, float] = defaultdict(float)
        self.sampled: Counter[tuple[int, int]] = Counter()
        self.helped = self.stale = self.committed = 0
        self.collectives = 0.0

    def state(self) -> State:
        """Return the facts as the trainer knows them."""
        return State(
            work=self.work,
            gpus=self.gpus,
            batch=self.batch,
            now=self.now,
            waiting=tuple(self.waiting),
            early=tuple(self.early),
            leases=tuple(lease for _, lease in self.doing),
            free=tuple(self.free),
            done=dict(self.done),
            trained=self.trained,
            weights_at=self.weights_at,
            help_left=self.help_left,
            help_ahead=self.help_ahead,
            samples=self.samples,
        )

    # --- rollout GPUs

    def _deal(self) -> None:
        while self.free and self.free[0][0] <= self.now and (self.waiting or self.early):
            since, gpu = heapq.heappop(self.free)
            queue = self.waiting or self.early
            is_old, images = queue[0].is_old, [queue.popleft()]
            while len(images) < self.work.lease and queue and queue[0].is_old == is_old:
                images.append(queue.popleft())
            # The GPU still holds the weights of a group that was begun early.
            begins = self.now if is_old else max(self.now, self.weights_at)
            self.idle[WEIGHTS] += begins - self.now
            self.idle[NOTHING_LEFT] += self.now - since
            groups = tuple((image.batch, image.group) for image in images)
            if queue is self.early:
                self.begun_early.update(groups)
            seconds = self.rates.image.value * max(image.rest for image in images) * self.work.lease
            self._push(begins + seconds * self.facts.rollout(), Lease(ends=begins + seconds, gpu=gpu, groups=groups))

    def _push(self, ends: float, lease: Lease) -> None:
        heapq.heappush(self.doing, (ends, lease))

    def _finish(self, ended: float, lease: Lease) -> None:
        """Free the GPU of a lease. Count the images as done once they are scored."""
        if lease.gpu != SCORER:
            heapq.heappush(self.free, (ended, lease.gpu))
            self.sampled.update(lease.groups)
        if lease.gpu == SCORER or not self.rates.score.value:
            self.done.update(lease.groups)
        else:
            scored_at = ended + self.rates.score.value
            self._push(scored_at, Lease(ends=scored_at, gpu=SCORER, groups=lease.groups))

    def _next_event(self) -> float:
        """Return the moment of the next finished lease or free GPU. Infinite: nothing will happen."""
        ends = self.doing[0][0] if self.doing else math.inf
        deals = self.free[0][0] if self.free and (self.waiting or self.early) else math.inf
        return min(ends, deals)

    def _advance(self, until: float) -> None:
        while True:
            self._deal()
            moment = self._next_event()
            if moment > until:
                break
            self.now = max(self.now, moment)
            while self.doing and self.doing[0][0] <= self.now:
                self._finish(*heapq.heappop(self.doing))
        self.now = max(self.now, until)

    # --- trainer

    def train_batch(self, leases_of_help: int | None = None, *, ahead: bool = False) -> None:
        """Train the open batch. `leases_of_help`: a fixed plan; None: as `next_action` decides.

        `ahead`: the leases of the fixed plan come before any training.
        """
        knobs = self.knobs if leases_of_help is None else replace(self.knobs, help="feedback")
        leases_left = math.inf if leases_of_help is None else leases_of_help
        if ahead:
            self.help_left, self.help_ahead = leases_of_help, True
        while (state := self.state()).wanted():
            action = next_action(self.rates, state, knobs, finish)
            match action:
                case Train(groups=groups):
                    self._train(groups)
                case Help() if leases_left > 0:
                    self.help_left, self.help_ahead = action.left, action.ahead
                    leases_left -= 1
                    self._help()
                case _:
                    self.help_left, self.help_ahead = action.left, False
                    self._wait()
        self._commit()

    def _train(self, groups: tuple[int, ...]) -> None:
        self._switch(samples=False)
        ranks, rows = self.gpus.trainer, self.knobs.rows
        seconds = train_seconds(self.rates, self.work, ranks, len(groups), rows)
        rows_per_rank = math.ceil(len(groups) * self.work.images * self.work.rows_of_image / ranks)
        passes, largest = math.ceil(rows_per_rank / rows), min(rows, rows_per_rank)
        shown = pass_seconds(self.rates, largest) - largest * self.rates.row.value - self.rates.launch.value
        self.collectives += ranks * passes * max(0.0, shown)
        self._advance(self.now + seconds * self.facts.training())
        self.trained |= set(groups)
        self.help_left, self.help_ahead = None, False

    def _wait(self) -> None:
        self._deal()
        moment = max(self._next_event(), self.now)
        if moment == math.inf:
            raise RuntimeError(
                f"batch {self.batch} waits for ever: {len(self.waiting)} images wait, and no GPU is free"
            )
        self.idle[WAITS] += (moment - self.now) * self.gpus.trainer
        self._advance(moment)

    def _help(self) -> None:
        """Sample a lease on each trainer GPU that can. Stop between steps once a unit is complete, except `greedy`."""
        work, trainer = self.work, self.gpus.trainer
        images = [image for image in self.waiting if not image.is_old][: self.gpus.helping * work.lease]
        for image in images:
            self.waiting.remove(image)
        busy = math.ceil(len(images) / work.lease)
        step = self.rates.image.value * work.lease / work.steps
        self._switch(samples=True)
        most = round(max(image.rest for image in images) * work.steps)
        steps = 0
        to_the_end = self.knobs.help == "greedy" or self.help_ahead
        while steps < most and (to_the_end or not self.state().ready(self.knobs.unit)):
            seconds = step * self.facts.rollout()
            self._advance(self.now + seconds)
            self.idle[WAITS] += seconds * (trainer - busy)
            steps += 1
        self._give_back(images, steps)

    def _give_back(self, images: list[Image], steps: int) -> None:
        """Finish the images whose steps are all made, and queue the others first, at the step where they stand."""
        advanced = [replace(image, rest=image.rest - steps / self.work.steps) for image in images]
        half_a_step = 0.5 / self.work.steps
        finished = tuple((image.batch, image.group) for image in advanced if image.rest < half_a_step)
        self.sampled.update(finished)
        self.helped += len(finished)
        scored_at = self.now + self.rates.score.value
        self._push(scored_at, Lease(ends=scored_at, gpu=SCORER, groups=finished))
        self.waiting.extendleft(reversed([image for image in advanced if image.rest >= half_a_step]))

    def _switch(self, *, samples: bool) -> None:
        """Prepare the trainer for sampling or training. Leases in a row need one switch."""
        if samples != self.samples:
            self.samples = samples
            self.idle[SWITCH] += self.rates.switch.value * self.gpus.trainer
            self._advance(self.now + self.rates.switch.value)

    def _commit(self) -> None:
        """Take the last optimiser step of the batch, publish, and open the next batch."""
        self.stale += sum(batch == self.batch for batch, _ in self.begun_early)
        self.batch += 1
        self.committed += 1
        self.trained, self.help_left, self.help_ahead = frozenset(), None, False
        self.weights_at = self.now + self.rates.publish.value + self.rates.load.value
        self.done = Counter({key: count for key, count in self.done.items() if key[0] >= self.batch})
        self.begun_early = {key for key in self.begun_early if key[0] >= self.batch}
        begun = [replace(image, is_old=True) for image in self.early if (image.batch, image.group) in self.begun_early]
        fresh = [
            image for image in images_of(self.work, self.batch) if (image.batch, image.group) not in self.begun_early
        ]
        early_groups = math.floor(self.knobs.early * self.work.groups)
        early = [image for image in images_of(self.work, self.batch + 1) if image.group < early_groups]
        self.waiting, self.early = deque([*begun, *fresh]), deque(early)


def images_of(work: Work, batch: int) -> list[Image]:
    """Return the images of a batch, group by group: idle GPUs share the images of a group."""
    return [Image(batch, group) for group in range(work.groups) for _ in range(work.images)]


def start(work: Work, gpus: Gpus) -> State:
    """Return the state before the first rollout of a run."""
    return State(
        work=work,
        gpus=gpus,
        batch=0,
        now=0.0,
        waiting=tuple(images_of(work, 0)),
        early=(),
        leases=(),
        free=tuple((0.0, gpu) for gpu in range(gpus.rollout)),
        done={},
        trained=frozenset(),
        weights_at=0.0,
    )


def finish(rates: Rates, state: State, knobs: Knobs, leases_of_help: int, ahead: bool) -> float:
    """Return the moment at which the open batch is trained, with a fixed amount of help."""
    world = World(rates, state, knobs)
    world.train_batch(leases_of_help, ahead=ahead)
    return world.now


def play(world: World, *, batches: int, warm: int) -> Timeline:
    """Train some batches and return the average after the first `warm`."""
    for _ in range(warm):
        world.train_batch()
    began, committed = world.now, world.committed
    idle, collectives = dict(world.idle), world.collectives
    helped, stale = world.helped, world.stale
    for _ in range(batches):
        world.train_batch()
    number = world.committed - committed
    return Timeline(
        seconds=(world.now - began) / number,
        gpus=world.gpus.number,
        idle={cause: (seconds - idle.get(cause, 0.0)) / number for cause, seconds in sorted(world.idle.items())},
        collectives=(world.collectives - collectives) / number,
        helped=(world.helped - helped) / number,
        stale_share=(world.stale - stale) / (number * world.work.groups),
    )
