"""A comparison as one offline HTML file: tables, and the curves as inline SVG. No script, no network."""

from dataclasses import dataclass
from importlib.resources import files
from math import ceil, floor, log10

from jinja2 import Environment, StrictUndefined

from launcher.money import MICRO, dollars
from launcher.report.comparison import ComparedRun, Comparison, SeedMean
from launcher.report.values import Moment

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#7a7f87")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""Okabe and Ito's palette. Dashes tell curves apart without colours; both repeat after some runs."""

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 720, 280, 56, 34, 34, 10
TICKS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One run's curve. `points`: SVG points in pixels. `end`: the last one, which is all there is of one evaluation."""

    name: str
    colour: str
    dash: str
    points: str
    end: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Score against one axis. Ticks: pixel and text."""

    axis: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    target: float | None
    """Height of the target in pixels; None without a target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupForm:
    """A form in the page that asks `spotrl ui` for other groups. `chosen`: the fields of the present groups."""

    token: str
    chosen: tuple[str, ...]


def render_comparison(comparison: Comparison, form: GroupForm | None = None) -> str:
    """Return the page. All text from runs is escaped. `form`: of a page that a server shows; None in a file."""
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters.update(dollars=dollars)
    template = page.from_string(files("launcher.report").joinpath("comparison.html").read_text(encoding="utf-8"))
    phases = dict.fromkeys(phase for run in comparison.runs for phase, amount in run.by_phase.items() if amount)
    drawn = [run for run in comparison.runs if run.curve]
    plots = [_plot(comparison, drawn, axis) for axis in ("dollars", "hours", "iterations")] if drawn else []
    size = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM}
    fields = [one.field for one in comparison.differences]
    if form is not None:
        fields += [field for field in form.chosen if field not in fields]
    return template.render(
        comparison=comparison, plots=plots, phases=list(phases), spread=spread, size=size, form=form, fields=fields
    )


def spread(value: SeedMean | None, kind: str) -> str:
    """Return a mean with its interval as text. `kind`: `dollars`, or a format like `.2f`."""
    if value is None:
        return "–"

    def text(number: float) -> str:
        return dollars(round(number)) if kind == "dollars" else format(number, kind)

    return (
        text(value.mean)
        if value.low is None or value.high is None
        else (f"{text(value.mean)} ({text(value.low)} to {text(value.high)})")
    )


def _plot(comparison: Comparison, runs: list[ComparedRun], axis: str) -> Plot:
    def x_of(point: Moment) -> float:
        return {"dollars": point.micro_usd / MICRO, "hours": point.hours, "iterations": point.iteration}[axis]

    last = max(x_of(point) for run in runs for point in run.curve) or 1.0
    scores = [point.smoothed for run in runs for point in run.curve]
    scores += [comparison.target] if comparison.target is not None else []
    low, high = min(scores), max(scores)
    if low == high:
        low, high = low - 0.05, high + 0.05
    y_ticks = round_ticks(low, high, outside=True)
    low, high = y_ticks[0], y_ticks[-1]
    x_ticks = round_ticks(0.0, last, finest=1.0 if axis == "iterations" else 0.0)

    def px(value: float) -> float:
        return round(LEFT + value / last * (WIDTH - LEFT - RIGHT), 1)

    def py(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    return Plot(
        axis=axis,
        lines=tuple(
            Line(
                name=run.name,
                colour=COLOURS[number % len(COLOURS)],
                dash=DASHES[number // len(COLOURS) % len(DASHES)],
                points=" ".join(f"{px(x_of(point))},{py(point.smoothed)}" for point in run.curve),
                end=(px(x_of(run.curve[-1])), py(run.curve[-1].smoothed)),
            )
            for number, run in enumerate(runs)
        ),
        x_ticks=tuple(
            (px(value), dollars(round(value * MICRO)) if axis == "dollars" else f"{value:,.10g}") for value in x_ticks
        ),
        y_ticks=tuple((py(value), f"{value:,.10g}") for value in y_ticks),
        target=None if comparison.target is None else py(comparison.target),
    )


def round_ticks(low: float, high: float, *, finest: float = 0.0, outside: bool = False) -> list[float]:
    """Return about `TICKS` round numbers between two values, `low` < `high`.

    They are multiples of 1, 2 or 5 times a power of ten. `finest`: smallest distance of two ticks. `outside`: the first
    and the last tick enclose the values.
    """
    wanted = max((high - low) / TICKS, finest)
    power = 10.0 ** floor(log10(wanted))
    step = next(size * power for size in (1, 2, 5, 10) if size * power * 1.25 >= wanted)
    first, last = (floor, ceil) if outside else (ceil, floor)
    return [round(number * step, 12) for number in range(first(round(low / step, 9)), last(round(high / step, 9)) + 1)]
