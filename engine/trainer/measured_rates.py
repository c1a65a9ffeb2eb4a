"""Seconds of each kind of work, as measured in this run, for the schedule (engine/schedule/).

A rate is the median of the newest measurements. A rate that was not measured yet is 0, so `Rates.problems` names it,
and the schedule falls back to decisions that need no rates.
"""

from collections import defaultdict, deque
from statistics import median

from engine.schedule.values import NOTHING, Rates
from engine.timing.figures import Figure, Source

NEWEST = 8
"""Measurements that count. Old ones are forgotten, because GPUs come and go."""

LEAST_SHARE = 0.01
"""Least share of the planned rows, so that a run whose groups all have equal rewards keeps a rate."""


class MeasuredRates:
    """Measurements of one run. All durations are wall seconds."""

    def __init__(self) -> None:
        self._newest: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._passes: dict[int, deque[float]] = {}
        """Seconds of a training pass by its rows, the newest sizes last. Two sizes tell the fixed cost of a pass, so a
        size stays until as many others have come as measurements count."""

    def image(self, seconds: float) -> None:
        """Record the GPU-seconds of an image on a rollout GPU. 0: not known."""
        if seconds > 0:
            self._newest["image"].append(seconds)

    def switch(self, seconds: float) -> None:
        """Record the seconds from the end of help until the trainer was free."""
        self._newest["switch"].append(seconds)

    def publish(self, seconds: float) -> None:
        """Record the seconds from the last optimiser step of a batch until its weights were published."""
        self._newest["publish"].append(seconds)

    def training(
        self, seconds: float, *, rows: int, passes: int, planned: int | None = None, collectives: float = 0.0
    ) -> None:
        """Record the seconds of some training passes on one rank, with their rows together.

        `planned`: rows that all groups would have; None: `rows`. A group with equal rewards trains none. `collectives`:
        those of the seconds that every pass needs, whatever its rows.
        """
        if planned:
            self._newest["share"].append(rows / planned)
        if rows > 0 and passes > 0:
            size = round(rows / passes)
            self._passes[size] = self._passes.pop(size, deque(maxlen=NEWEST))
            self._passes[size].append((seconds - collectives) / passes)
            if len(self._passes) > NEWEST:
                del self._passes[next(iter(self._passes))]
            self._newest["collective"].append(collectives / passes)

    def rates(self) -> Rates:
        """Return the rates as known now. A row is a planned row: its seconds are those of the share that is trained."""
        row, launch = self._row_and_launch()
        shares = self._newest["share"]
        share = max(LEAST_SHARE, median(shares)) if shares else 1.0
        return Rates(
            image=self._figure("image"),
            row=_figure(row * share, "training passes"),
            launch=_figure(launch + self._figure("collective").value, "training passes"),
            switch=self._figure("switch"),
            publish=self._figure("publish"),
        )

    def _figure(self, name: str) -> Figure:
        newest = self._newest[name]
        if newest:
            return _figure(median(newest), f"the last {len(newest)}")
        return NOTHING

    def _row_and_launch(self) -> tuple[float, float]:
        """Return the seconds of a row, and the seconds of a pass without rows: the line through two sizes of passes."""
        medians = {rows: median(seconds) for rows, seconds in self._passes.items()}
        if not medians:
            return 0.0, 0.0
        small, large = min(medians), max(medians)
        slope = (medians[large] - medians[small]) / (large - small) if large > small else 0.0
        launch = medians[large] - slope * large
        if slope <= 0 or launch < 0:
            return medians[large] / large, 0.0
        return slope, launch


def _figure(seconds: float, text: str) -> Figure:
    return Figure(value=seconds, source=Source(basis="measured", text=f"in this run: {text}"))
