"""The schedule of the open batch: facts and measured rates become what the trainer does next.

    no group is ready -> coordinator: what waits, what is under way -> State -> next_action -> help | wait
    help              -> stops between denoising steps once a unit is complete: state committed, lease given back

The rates and the way of help are the forecast's (`batch_forecast.py`). Without any rollout GPU the trainer always
samples. The decision is rank 0's: other ranks sample whenever they have no group to train.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from engine.clock import Clock
from engine.config import EngineConfig
from engine.diffusion.sampler import Plan
from engine.protocol.messages import Outlook
from engine.protocol.request import Manifest
from engine.schedule.decide import Action, Help, Wait, next_action
from engine.schedule.simulate import finish
from engine.schedule.state import SCORER, Image, Lease, State
from engine.schedule.values import Gpus, Knobs
from engine.trainer.batch_forecast import BatchForecast
from engine.trainer.coordinator_client import CoordinatorClient
from engine.trainer.rollouts import Rollouts
from engine.trainer_ranks import is_rank


class BatchSchedule:
    """Decides for one run. Call `begin` for every batch."""

    def __init__(
        self,
        config: EngineConfig,
        coordinator: CoordinatorClient,
        forecast: BatchForecast,
        clock: Clock,
        *,
        own_worker: str,
        sampling_ranks: int = 1,
        let_ranks_sample: Callable[..., None] = lambda *, is_on: None,
    ) -> None:
        """Start without a batch. `own_worker`: name of rank 0's worker. `sampling_ranks`: the ranks that sample.

        `let_ranks_sample`: called with `is_on`: whether the trainer's other ranks sample while they have no group.
        """
        self._config, self._coordinator, self._forecast = config, coordinator, forecast
        self._clock, self._own, self._let_ranks_sample = clock, own_worker, let_ranks_sample
        self._sampling_ranks = sampling_ranks
        self._help_left: int | None = None
        self._goes_ahead = self._samples = False

    def begin(self, manifest: Manifest, plan: Plan) -> None:
        """Begin a batch, without a plan of help."""
        self._forecast.begin(manifest, plan)
        self._drop_plan()

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
            self._forecast.spend("helped_seconds", time.monotonic() - begun)
            return
        rollouts.wait()
        self._forecast.spend("waited_seconds", time.monotonic() - begun)

    def fill_time_for_all(self, rollouts: Rollouts) -> None:
        """Use the time until every rollout of the batch is there. Nothing is trained before."""
        while not rollouts.are_complete():
            if rollouts.look():
                continue
            begun = time.monotonic()
            helps = self._config.runtime.help != "off" or not self._rollout_gpus(self._look_ahead())
            helped = helps and rollouts.help(lambda: False)
            if not helped:
                rollouts.wait()
            self._forecast.spend("helped_seconds" if helped else "waited_seconds", time.monotonic() - begun)

    def group_added(self) -> None:
        """Make a new plan at the next decision: the trainer trained, so the facts differ."""
        self._drop_plan()
        self._samples = False

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
            self._forecast.measured.switch(seconds)
            self._forecast.spend("switch_seconds", seconds)
            self._forecast.spend("helped_seconds", -seconds)
        return helped

    def _look_ahead(self) -> Outlook:
        outlook = self._coordinator.look_ahead(self._forecast.batch.manifest.batch)
        work = self._forecast.batch.work
        self._forecast.measured.image(self._wall(outlook.step_ms * work.steps / work.lease))
        self._let_ranks_sample(is_on=self._config.runtime.help != "off" or not self._rollout_gpus(outlook))
        return outlook

    def gpus(self) -> int:
        """Return the number of GPUs of the open batch: the trainer's ranks, and live rollout workers."""
        outlook = self._coordinator.look_ahead(self._forecast.batch.manifest.batch)
        return self._forecast.ranks + len(self._rollout_gpus(outlook))

    def _rollout_gpus(self, outlook: Outlook) -> list[str]:
        """Return the names of the live rollout workers. Ranks of the trainer are none."""
        workers = {*(lease.worker for lease in outlook.leases), *outlook.idle}
        return sorted(worker for worker in workers if not is_rank(worker))

    def _action(self, outlook: Outlook, rollouts: Rollouts) -> Action:
        batch = self._forecast.batch
        gpus = Gpus(
            trainer=self._forecast.ranks,
            rollout=len(self._rollout_gpus(outlook)),
            helpers=self._sampling_ranks,
        )
        if self._forecast.saw(gpus):
            self._drop_plan()
        if any(lease.worker == self._own for lease in outlook.leases):
            return Help()  # a lease of an earlier process of the trainer: the first pull of this one revokes it
        state, rates = self._state(outlook, rollouts, gpus), self._forecast.measured.rates()
        knobs = Knobs(unit=batch.unit, rows=batch.rows, help=self._forecast.help(gpus))
        try:
            action = next_action(rates, state, knobs, finish)
        except RuntimeError:  # the facts do not lead to an end: a lease was lost between two calls
            action = Help()
        self._help_left = action.left if isinstance(action, Help | Wait) else None
        self._goes_ahead = isinstance(action, Help) and action.ahead
        return action

    def _drop_plan(self) -> None:
        self._help_left, self._goes_ahead = None, False

    def _state(self, outlook: Outlook, rollouts: Rollouts, gpus: Gpus) -> State:
        batch = self._forecast.batch
        groups = {group.prompt: number for number, group in enumerate(batch.manifest.groups)}
        number, steps = batch.manifest.batch, batch.work.steps
        gpu_of = {worker: gpu for gpu, worker in enumerate(self._rollout_gpus(outlook))}

        def key(prompt: str) -> tuple[int, int]:
            return number, batch.place[groups[prompt]]

        waiting = tuple(
            Image(number, batch.place[groups[image.prompt]], rest=1 - image.step / steps, is_old=image.is_old)
            for image in outlook.waiting
            if image.prompt in groups
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
        """Return the check between the denoising steps of help: True once a unit is complete.

        Only other GPUs can complete one meanwhile: rollout GPUs, or ranks that sample and wait for the unit.
        """
        config = self._config.runtime
        alone = not self._rollout_gpus(outlook) and self._sampling_ranks == 1
        if self._goes_ahead or config.help == "greedy" or config.resume == "restart" or alone:
            return lambda: False
        before = self._complete_units(rollouts)

        def is_ready() -> bool:
            rollouts.look()
            return self._complete_units(rollouts) > before

        return is_ready

    def _complete_units(self, rollouts: Rollouts) -> int:
        """Return the number of units that can be trained, or were."""
        batch = self._forecast.batch
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


def _without_trained(state: State, unit: int) -> State:
    """Return the state with its complete units trained: the loop trains them before it asks."""
    while groups := state.ready(unit):
        state = replace(state, trained=state.trained | set(groups))
    return state
