"""The forecast of the open batch: seconds by measured rates, the knobs that make them fewest, and the seconds spent.

    a batch begins -> OpenBatch: its work     rates change by a tenth -> played forward anew -> knobs, expected seconds
    a step is trained, time was spent -> rates measured anew, the figures of the batch

`runtime.help: auto`, `algorithm.unit: auto` and `early.share: auto` are the choice of `engine.schedule.choose`.
Until the rates are known, help is `feedback`, which needs none.
"""

import math
import time
from collections import defaultdict
from dataclasses import dataclass

from engine.algorithm.transaction import Trainer
from engine.clock import Clock
from engine.config import EngineConfig
from engine.diffusion.sampler import Plan
from engine.early_config import MOST
from engine.protocol.request import Manifest
from engine.schedule.choose import Best, choose, units_of, with_early
from engine.schedule.simulate import WAITS
from engine.schedule.values import Gpus, Knobs, Rates, Timeline, Work
from engine.schedule.values import Help as HelpKind
from engine.trainer.measured_rates import MeasuredRates
from engine.trainer.report import Reporter

OFF_BY = 3.0
"""Factor between expected and real seconds from which the rates count as wrong."""

MOST_LEASES = 512
"""Leases of a batch above which no iteration is played forward."""


@dataclass(frozen=True, kw_only=True)
class OpenBatch:
    """The open batch, and the place of each group in the order of training."""

    manifest: Manifest
    work: Work
    unit: int
    rows: int
    place: dict[int, int]
    early: float
    """Share of early groups, rounded up so far that the schedule counts as many groups."""
    begun: float


class BatchForecast:
    """Forecasts and figures of one run. Call `begin` for every batch. All durations are wall seconds."""

    def __init__(
        self, config: EngineConfig, trainer: Trainer, reporter: Reporter, clock: Clock, *, ranks: int = 1
    ) -> None:
        """Start without measurements. `ranks`: of the trainer."""
        self._config, self._trainer, self._reporter, self._clock = config, trainer, reporter, clock
        self.ranks = ranks
        self.measured = MeasuredRates()
        self._divides = ranks > 1 and config.model.weights == "full"
        self._batch: OpenBatch | None = None
        self._gpus: Gpus | None = None
        self._chosen: Best | None = None
        self._chosen_for: object = None
        self._early = 0.0
        self._early_for: object = None
        self._distrusts = self._has_warned = False
        self._spent: defaultdict[str, float] = defaultdict(float)

    # --- a batch

    def begin(self, manifest: Manifest, plan: Plan) -> None:
        """Begin a batch: its work, its unit and the place of each group.

        The figures go on if the batch was begun before, with candidates of which `manifest` has the chosen ones.
        """
        config = self._config
        goes_on = self._batch is not None and self._batch.manifest.batch == manifest.batch
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
        self._batch = OpenBatch(
            manifest=manifest,
            work=work,
            unit=work.unit(self._trainer.rows_per_forward, self.ranks, manifest.unit),
            rows=self._trainer.rows_per_forward,
            place={number: place for place, number in enumerate(in_order)},
            early=min(MOST, (len(manifest.early) + 0.5) / len(in_order)) if manifest.early else 0.0,
            begun=self.batch.begun if goes_on else time.monotonic(),
        )
        self._distrusts = False
        if self._trains_candidates:
            self._chosen = self._chosen_for = None  # no schedule is played, and that of an earlier batch does not count
        if not goes_on:
            self._spent = defaultdict(float)

    @property
    def _trains_candidates(self) -> bool:
        """Return True if groups of the open batch are candidates, whose images are there when the batch opens."""
        return bool(self.batch.manifest.early) and self._config.exploration.trains == "candidates"

    @property
    def batch(self) -> OpenBatch:
        """Return the open batch."""
        assert self._batch is not None, "call begin first"
        return self._batch

    def spend(self, name: str, seconds: float) -> None:
        """Add seconds of the trainer in the open batch, of `waited_seconds`, `helped_seconds` or `switch_seconds`."""
        self._spent[name] += seconds

    def trained(self, seconds: float, *, rows: int, collective_ms: float = 0.0) -> None:
        """Record the training seconds of an optimiser step, and its rows on all ranks.

        `collective_ms`: collectives of the step, on the run's clock. With divided weights every pass has some.
        """
        batch = self.batch
        self._spent["seconds"] = time.monotonic() - batch.begun
        units = math.ceil(batch.work.groups_of_step / batch.unit)
        rows_of_unit = batch.unit * batch.work.images * batch.work.rows_of_image
        passes = units * math.ceil(rows_of_unit / self.ranks / batch.rows)
        collectives = min(seconds, self._clock.wall_seconds(1) * collective_ms) if self._divides else 0.0
        planned = batch.work.groups_of_step * batch.work.images * batch.work.rows_of_image
        self.measured.training(
            seconds,
            rows=math.ceil(rows / self.ranks),
            passes=passes,
            planned=math.ceil(planned / self.ranks),
            collectives=collectives,
        )

    @property
    def expected(self) -> Timeline | None:
        """Return the expected iteration with the knobs of the open batch. None: the rates are not known yet."""
        return None if self._chosen is None else self._chosen.timeline

    def figures(self) -> dict[str, float]:
        """Return the `schedule` of an IterationDone event."""
        publish = self.measured.rates().publish.value
        figures = {name: float(self._spent[name]) for name in ("waited_seconds", "helped_seconds", "switch_seconds")}
        figures["seconds"] = self._spent["seconds"] + publish
        if self.expected is not None:
            figures["expected_seconds"] = self.expected.seconds
            figures["expected_waiting"] = self.expected.idle.get(WAITS, 0.0) / self.ranks
            if self._config.early.share:
                figures["expected_stale_share"] = self.expected.stale_share
        return figures

    # --- knobs

    def unit(self) -> int:
        """Return the unit of the next manifest: the job's, or for `auto` the quickest by the measured rates."""
        unit = self._config.algorithm.unit
        if unit == "rows":
            return 0
        if unit != "auto":
            return unit
        if self._batch is None or self._gpus is None:
            return 0
        work, least = (
            self._batch.work,
            self.ranks if self._divides else 1,
        )  # each rank trains at least a group of a unit
        most = work.unit(self._trainer.rows_per_forward, self.ranks)
        units = tuple(size for size in units_of(work) if least <= size <= most)
        chosen = self._best(self._gpus, units or (least,))
        return chosen.knobs.unit if chosen.timeline is not None else 0

    def early_share(self) -> float:
        """Return the share of the next batch's groups to sample early: the job's, or for `auto` the quickest.

        `auto` means 0 until an iteration can be played forward with measured rates.
        """
        first, *more = self._config.early.shares
        if not more or self._gpus is None or self._chosen is None or self._chosen.timeline is None:
            return first
        if self._early_for != self._chosen_for:
            batch, rates = self.batch, self.measured.rates()
            without = self._play(self._gpus, (batch.unit,), early=first)
            chosen = with_early(without, rates, batch.work, self._gpus, self._config.early.shares)
            self._early_for, self._early = self._chosen_for, chosen.knobs.early
        return self._early

    def saw(self, gpus: Gpus) -> bool:
        """Record the GPUs of the run. Return True if they changed."""
        changed, self._gpus = gpus != self._gpus, gpus
        return changed

    def help(self, gpus: Gpus) -> HelpKind:
        """Return how the trainer helps with these GPUs: the job's way, or for `auto` the quickest."""
        help_ = self._best(gpus, (self.batch.unit,)).knobs.help
        self._check_time()
        return "feedback" if self._distrusts and help_ == "search" else help_

    def _best(self, gpus: Gpus, units: tuple[int, ...]) -> Best:
        """Return the knobs for rates as they are now. Played forward again once rates change by a tenth."""
        batch, rates = self.batch, self.measured.rates()
        key = (gpus, units, batch.work, batch.rows, batch.early, _rounded(rates))
        if self._chosen is not None and key == self._chosen_for:
            return self._chosen
        chosen = self._play(gpus, units, early=batch.early)
        if chosen.timeline is None and self._config.runtime.help == "auto":
            chosen = Best(knobs=Knobs(unit=units[0], rows=batch.rows, help="feedback"), timeline=None, why=chosen.why)
        if len(units) == 1:
            self._chosen, self._chosen_for = chosen, key
        return chosen

    def _play(self, gpus: Gpus, units: tuple[int, ...], *, early: float) -> Best:
        """Return the quickest knobs with this share of early groups. No timeline: the batch cannot be played."""
        batch, asked = self.batch, self._config.runtime.help
        too_large = batch.work.groups * batch.work.images > MOST_LEASES * batch.work.lease
        if too_large or self._trains_candidates or self._config.runtime.sp_degree != 1:
            help_: HelpKind = "off" if asked == "auto" else asked
            return Best(knobs=Knobs(unit=units[0], rows=batch.rows, help=help_), timeline=None, why="not played")
        return choose(asked, self.measured.rates(), batch.work, gpus, units=units, rows=batch.rows, early=early)

    def _check_time(self) -> None:
        """Distrust the rates for the rest of a batch that takes much longer than they promised."""
        expected, took = self.expected, time.monotonic() - self.batch.begun
        if expected is None or self._distrusts or took <= OFF_BY * expected.seconds:
            return
        self._distrusts = True
        if not self._has_warned:
            self._has_warned = True
            self._reporter.warn(
                f"batch {self.batch.manifest.batch} was expected to take {expected.seconds:.1f} s and takes "
                f"over {took:.1f} s; until the next batch the trainer helps with rollouts by feedback"
            )


def _rounded(rates: Rates) -> tuple[int, ...]:
    """Return the rates in steps of a tenth."""
    return tuple(
        round(10 * math.log(max(1e-6, figure.value)))
        for figure in (rates.image, rates.row, rates.launch, rates.switch, rates.publish)
    )
