"""The schedule of the open batch: facts and measured rates become what the trainer does next.

    no group is ready -> coordinator: what waits, what is under way -> State -> next_action -> help | wait
    help              -> stops between denoising steps once a unit is complete: state committed, lease given back
    a batch is over   -> rates measured anew, the expected seconds of the next

`runtime.help: auto` and `early.share: auto` are the choice of `engine.schedule.choose.best`. Rates that are unknown, or
that promised an iteration three times too short, lead to `feedback`, which needs none. Without any rollout GPU the
trainer always samples.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.algorithm.transaction import Trainer
from engine.clock import Clock
from engine.config import EngineConfig
from engine.diffusion.sampler import Plan
from engine.early_config import MOST
from engine.protocol.messages import Outlook
from engine.protocol.request import Manifest
from engine.schedule.choose import Allowed, Best, best, units_of, with_early
from engine.schedule.decide import Action, Help, Wait, next_action
from engine.schedule.simulate import WAITS, finish
from engine.schedule.state import SCORER, Image, Lease, State
from engine.schedule.values import Gpus, Knobs, Rates, Timeline, Work
from engine.schedule.values import Help as HelpKind
from engine.trainer.coordinator_client import CoordinatorClient
from engine.trainer.measured_rates import MeasuredRates
from engine.trainer.report import Reporter
from engine.trainer.rollouts import Rollouts

OFF_BY = 3.0
"""Factor between expected and real seconds from which the rates count as wrong."""

MOST_LEASES = 512
"""Leases of a batch above which no iteration is played forward."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The open batch, and the place of each group in the order of training."""

    manifest: Manifest
    work: Work
    unit: int
    rows: int
    place: dict[int, int]
    early: float
    """Share of early groups, rounded up so far that the schedule counts as many groups."""
    begun: float


class BatchSchedule:
    """Decides for one run. Call `begin` for every batch."""

    def __init__(
        self,
        config: EngineConfig,
        coordinator: CoordinatorClient,
        trainer: Trainer,
        reporter: Reporter,
        clock: Clock,
        *,
        own_worker: str,
        ranks: int = 1,
    ) -> None:
        """Start without measurements. `own_worker`: name of the trainer's own worker, which is no rollout GPU."""
        self._config, self._coordinator, self._trainer = config, coordinator, trainer
        self._reporter, self._clock, self._own, self._ranks = reporter, clock, own_worker, ranks
        self.measured = MeasuredRates()
        self._divides = ranks > 1 and config.model.weights == "full"
        self._batch: _Batch | None = None
        self._help_left: int | None = None
        self._goes_ahead = self._samples = False
        self._gpus: Gpus | None = None
        self._chosen: Best | None = None
        self._chosen_for: object = None
        self._early = 0.0
        self._early_for: object = None
        self._distrusts = self._has_warned = False
        self._spent: defaultdict[str, float] = defaultdict(float)
        """Seconds of the open batch in which the trainer waited, sampled and switched; and until it was trained."""

    # --- a batch

    def begin(self, manifest: Manifest, plan: Plan) -> None:
        """Begin a batch: its work, and the knobs."""
        config = self._config
        in_order = [number for step in manifest.minibatches for number in step]
        rows = self._trainer.objective.rows_per_image(plan)
        images = max(len(group.seeds) for group in manifest.groups)
        work = Work(
            groups=len(in_order),
            images=images,
            rows_of_image=max(1, rows),
            updates=len(manifest.minibatches),
            lease=config.runtime.shape,
            steps=plan.steps,
            in_order=config.algorithm.order == "fixed",
        )
        fit = max(1, self._trainer.rows_per_forward // max(1, rows * images)) * self._ranks
        self._batch = _Batch(
            manifest=manifest,
            work=work,
            unit=min(work.groups_of_step, manifest.unit or fit),
            rows=self._trainer.rows_per_forward,
            place={number: place for place, number in enumerate(in_order)},
            early=min(MOST, (len(manifest.early) + 0.5) / len(in_order)) if manifest.early else 0.0,
            begun=time.monotonic(),
        )
        self._distrusts = False
        self._drop_plan()
        self._spent = defaultdict(float)

    def unit(self) -> int:
        """Return the unit of the next manifest: the job's, or for `auto` the quickest by the measured rates."""
        unit = self._config.algorithm.unit
        if unit == "rows":
            return 0
        if unit != "auto":
            return unit
        if self._batch is None or self._gpus is None:
            return 0
        fit = max(1, self._trainer.rows_per_forward // (self._batch.work.rows_of_image * self._batch.work.images))
        least = self._ranks if self._divides else 1  # each rank trains at least a group of a unit
        units = tuple(one for one in units_of(self._batch.work) if least <= one <= fit * self._ranks)
        found = self._best(self._gpus, units or (least,))
        return found.knobs.unit if found.timeline is not None else 0

    def early_share(self) -> float:
        """Return the share of the next batch's groups to sample early: the job's, or for `auto` the quickest.

        `auto` means 0 until an iteration can be played forward with measured rates.
        """
        first, *more = self._config.early.shares
        if not more or self._gpus is None or self._chosen is None or self._chosen.timeline is None:
            return first
        if self._early_for != self._chosen_for:
            batch, rates = self._open_batch(), self.measured.rates()
            without = self._play(self._gpus, (batch.unit,), early=first)
            found = with_early(without, rates, batch.work, self._gpus, self._config.early.shares)
            self._early_for, self._early = self._chosen_for, found.knobs.early
        return self._early

    @property
    def expected(self) -> Timeline | None:
        """Return the expected iteration with the knobs of the open batch. None: the rates are not known yet."""
        return None if self._chosen is None else self._chosen.timeline

    def figures(self) -> dict[str, float]:
        """Return the `schedule` of an IterationDone event."""
        publish = self.measured.rates().publish.value
        found = {name: float(self._spent[name]) for name in ("waited_seconds", "helped_seconds", "switch_seconds")}
        found["seconds"] = self._spent["seconds"] + publish
        if self.expected is not None:
            found["expected_seconds"] = self.expected.seconds
            found["expected_waiting"] = self.expected.idle.get(WAITS, 0.0) / self._ranks
            if self._config.early.share:
                found["expected_stale_share"] = self.expected.stale_share
        return found

    # --- between units

    @property
    def goes_ahead(self) -> bool:
        """Return True while a plan of help comes before training, even of complete groups."""
        return self._goes_ahead and bool(self._help_left)

    def fill_time(self, rollouts: Rollouts) -> None:
        """Use the time until the next group is complete: sample, or wait for a result."""
        begun = time.monotonic()
        outlook = self._look_ahead()
        if self.goes_ahead and not outlook.waiting:
            self._drop_plan()  # other workers were quicker
            return
        action = self._action(outlook, rollouts)
        self._samples = self._samples or isinstance(action, Help)
        if isinstance(action, Help) and self._help(outlook, rollouts):
            self._spent["helped_seconds"] += time.monotonic() - begun
            return
        rollouts.wait()
        self._spent["waited_seconds"] += time.monotonic() - begun

    def fill_time_for_all(self, rollouts: Rollouts) -> None:
        """Use the time until every rollout of the batch is there. Nothing is trained before."""
        while not rollouts.are_complete():
            if rollouts.look():
                continue
            helps = self._config.runtime.help != "off" or not self._rollout_gpus(self._look_ahead())
            if not (helps and rollouts.help(lambda: False)):
                rollouts.wait()

    def group_added(self) -> None:
        """Make a new plan at the next decision: the trainer trained, so the facts differ."""
        self._drop_plan()
        self._samples = False

    def trained(self, seconds: float, *, rows: int, collective_ms: float = 0.0) -> None:
        """Record the training seconds of an optimiser step, and its rows on all ranks.

        `collective_ms`: collectives of the step, on the run's clock. With divided weights every pass has some.
        """
        batch = self._open_batch()
        self._spent["seconds"] = time.monotonic() - batch.begun
        units = math.ceil(batch.work.groups_of_step / batch.unit)
        rows_of_unit = batch.unit * batch.work.images * batch.work.rows_of_image
        passes = units * math.ceil(rows_of_unit / self._ranks / batch.rows)
        collectives = min(seconds, self._wall(collective_ms)) if self._divides else 0.0
        rows_of_rank = math.ceil(rows / self._ranks)
        self.measured.training(seconds, rows=rows_of_rank, passes=passes, collectives=collectives)

    def _help(self, outlook: Outlook, rollouts: Rollouts) -> bool:
        """Sample a lease, and stop between steps once a unit is complete. Returns False if no work was there."""
        stopped: list[float] = []
        is_ready = self._stop_for(outlook, rollouts)

        def stop() -> bool:
            if is_ready():
                stopped.append(time.monotonic())
            return bool(stopped)

        helped = rollouts.help(stop)
        if stopped:
            seconds = time.monotonic() - stopped[0]
            self.measured.switch(seconds)
            self._spent["switch_seconds"] += seconds
            self._spent["helped_seconds"] -= seconds
        return helped

    def _look_ahead(self) -> Outlook:
        outlook = self._coordinator.look_ahead(self._open_batch().manifest.batch)
        work = self._open_batch().work
        self.measured.image(self._wall(outlook.step_ms * work.steps / work.lease))
        return outlook

    def _rollout_gpus(self, outlook: Outlook) -> list[str]:
        """Return the names of the live rollout workers."""
        return sorted({*(lease.worker for lease in outlook.leases), *outlook.idle} - {self._own})

    def _action(self, outlook: Outlook, rollouts: Rollouts) -> Action:
        batch = self._open_batch()
        gpus = Gpus(trainer=self._ranks, rollout=len(self._rollout_gpus(outlook)), helpers=1)
        if gpus != self._gpus:
            self._gpus = gpus
            self._drop_plan()
        if any(lease.worker == self._own for lease in outlook.leases):
            return Help()  # a lease of an earlier process of the trainer: the first pull of this one revokes it
        state, rates = self._state(outlook, rollouts, gpus), self.measured.rates()
        knobs = Knobs(unit=batch.unit, rows=batch.rows, help=self._best(gpus, (batch.unit,)).knobs.help)
        self._check_time()
        if self._distrusts and knobs.help == "search":
            knobs = Knobs(unit=batch.unit, rows=batch.rows, help="feedback")
        try:
            action = next_action(rates, state, knobs, finish)
        except RuntimeError:  # the facts do not lead to an end: a lease was lost between two calls
            action = Help()
        self._help_left = action.left if isinstance(action, Help | Wait) else None
        self._goes_ahead = isinstance(action, Help) and action.ahead
        return action

    def _drop_plan(self) -> None:
        self._help_left, self._goes_ahead = None, False

    def _best(self, gpus: Gpus, units: tuple[int, ...]) -> Best:
        """Return the knobs for rates as they are now. Played forward again once rates change by a tenth."""
        batch, rates = self._open_batch(), self.measured.rates()
        key = (gpus, units, batch.work, batch.rows, batch.early, _rounded(rates))
        if self._chosen is not None and key == self._chosen_for:
            return self._chosen
        found = self._play(gpus, units, early=batch.early)
        if found.timeline is None and self._config.runtime.help == "auto":
            found = Best(knobs=Knobs(unit=units[0], rows=batch.rows, help="feedback"), timeline=None, why=found.why)
        if len(units) == 1:
            self._chosen, self._chosen_for = found, key
        return found

    def _play(self, gpus: Gpus, units: tuple[int, ...], *, early: float) -> Best:
        """Return the quickest knobs with this share of early groups. No timeline: the batch cannot be played."""
        batch, job = self._open_batch(), self._config.runtime.help
        helps: tuple[HelpKind, ...] = ("off", "search") if job == "auto" else (job,)
        too_large = batch.work.groups * batch.work.images > MOST_LEASES * batch.work.lease
        if too_large or self._config.runtime.sp_degree != 1:
            return Best(knobs=Knobs(unit=units[0], rows=batch.rows, help=helps[0]), timeline=None, why="not played")
        allowed = Allowed(units=units, rows=(batch.rows,), helps=helps, early=(early,))
        return best(self.measured.rates(), batch.work, gpus, allowed)

    def _check_time(self) -> None:
        """Distrust the rates for the rest of a batch that takes much longer than they promised."""
        expected, took = self.expected, time.monotonic() - self._open_batch().begun
        if expected is None or self._distrusts or took <= OFF_BY * expected.seconds:
            return
        self._distrusts = True
        if not self._has_warned:
            self._has_warned = True
            self._reporter.warn(
                f"batch {self._open_batch().manifest.batch} was expected to take {expected.seconds:.1f} s and takes "
                f"over {took:.1f} s; until the next batch the trainer helps with rollouts by feedback"
            )

    def _state(self, outlook: Outlook, rollouts: Rollouts, gpus: Gpus) -> State:
        batch = self._open_batch()
        groups = {group.prompt: number for number, group in enumerate(batch.manifest.groups)}
        number, steps = batch.manifest.batch, batch.work.steps
        gpu_of = {worker: gpu for gpu, worker in enumerate(self._rollout_gpus(outlook))}

        def key(prompt: str) -> tuple[int, int]:
            return number, batch.place[groups[prompt]]

        waiting = tuple(
            Image(number, batch.place[groups[one.prompt]], rest=1 - one.step / steps, is_old=one.is_old)
            for one in outlook.waiting
            if one.prompt in groups
        )
        leases, busy = [], set()
        for lease in outlook.leases:
            scores = lease.steps_left == 0 or lease.worker not in gpu_of or lease.worker in busy
            if not scores:
                busy.add(lease.worker)
            ends = self._wall(lease.left_ms)
            images = tuple(key(prompt) for prompt, _ in lease.images if prompt in groups)
            leases.append(Lease(ends=ends, gpu=SCORER if scores else gpu_of[lease.worker], groups=images))
        done = {(number, place): rollouts.count(group) for group, place in batch.place.items()}
        state = State(
            work=batch.work,
            gpus=gpus,
            batch=number,
            now=0.0,
            waiting=waiting,
            early=(),
            leases=tuple(sorted(leases)),
            free=tuple((0.0, gpu) for worker, gpu in gpu_of.items() if worker not in busy),
            done=done,
            trained=frozenset(),
            weights_at=0.0,
            help_left=self._help_left,
            help_ahead=self._goes_ahead,
            samples=self._samples,
        )
        return _without_trained(state, batch.unit)

    def _stop_for(self, outlook: Outlook, rollouts: Rollouts) -> Callable[[], bool]:
        """Return the check between the denoising steps of help: True once a unit is complete."""
        config = self._config.runtime
        if self._goes_ahead or config.help == "greedy" or config.resume == "restart" or not self._rollout_gpus(outlook):
            return lambda: False
        before = self._complete_units(rollouts)

        def is_ready() -> bool:
            rollouts.look()
            return self._complete_units(rollouts) > before

        return is_ready

    def _complete_units(self, rollouts: Rollouts) -> int:
        """Return the number of units that can be trained, or were."""
        batch = self._open_batch()
        number = 0
        for step in batch.manifest.minibatches:
            for first in range(0, len(step), batch.unit):
                if all(map(rollouts.is_complete, step[first : first + batch.unit])):
                    number += 1
                elif batch.work.in_order:
                    return number
        return number

    def _wall(self, ms: float) -> float:
        return self._clock.wall_seconds(1) * ms

    def _open_batch(self) -> _Batch:
        assert self._batch is not None, "call begin first"
        return self._batch


def _without_trained(state: State, unit: int) -> State:
    """Return the state with its complete units trained: the loop trains them before it asks."""
    while groups := state.ready(unit):
        state = replace(state, trained=state.trained | set(groups))
    return state


def _rounded(rates: Rates) -> tuple[int, ...]:
    """Return the rates in steps of a tenth."""
    return tuple(
        round(10 * math.log(max(1e-6, figure.value)))
        for figure in (rates.image, rates.row, rates.launch, rates.switch, rates.publish)
    )
