"""The fleets that a plan chose from, as a chart with a table: hours along, dollars up, a point for each fleet.

Pages of all kinds show the same HTML. It has no script, and takes the colours of its page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import ceil, floor, log10
from textwrap import shorten
from typing import Literal

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from launcher.money import HOUR_MS, duration
from launcher.placement.front import FrontFleet, ParetoFront

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 64.0, 748.0, 26.0, 292.0
"""The plot within the drawing, in pixels. The deadline's name is above it, hours and their title below."""

FAR = 1.5
"""A limit beyond this many times the largest value is named and not drawn: it would squeeze the points."""

CHARACTER, LINE = 6.5, 17
"""Width of a letter, on the safe side, and height of a line of text. In pixels, at the chart's 12."""

GAP, STEPS = 12, 12
"""From a point to its label, in pixels; and the most lines by which the label is moved up or down."""


LONGEST = 100
"""Letters of a label that fits into the plot."""

TEXT, STROKE = 3, 1
"""Harm of a label that overlaps a text or a point, and of one that overlaps a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A part of the drawing that a label should not cover. In pixels."""

    left: float
    top: float
    right: float
    bottom: float
    harm: int = TEXT

    def overlap(self, other: "Box") -> int:
        """Return the harm of the other box if the two overlap, else 0."""
        beside = self.left >= other.right or other.left >= self.right
        return 0 if beside or self.top >= other.bottom or other.top >= self.bottom else other.harm


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    text: str
    x: float
    y: float
    anchor: Literal["start", "middle", "end"]
    """Part of the text that is at `x`. Browsers differ in the widths of letters, so it is the part near the point."""
    link: tuple[float, float] | None
    """End of the line from the point. None: the label is beside its point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A fleet in the chart. Places are in pixels."""

    x: float
    y: float
    low_y: float
    high_y: float
    """The ends of the middle 90 % of the dollars."""
    label: Label
    title: str
    is_chosen: bool
    is_late: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontChart:
    """The chart. A tick and a limit are pixels along their axis, and text."""

    points: tuple[Point, ...]
    hours: tuple[tuple[float, str], ...]
    dollars: tuple[tuple[float, str], ...]
    deadline: tuple[float, str] | None
    budget: tuple[float, str] | None
    """None: there is no such limit, or it is far beyond the points."""
    beyond: str
    """The limits that are not drawn, as a sentence."""


def front_html(front: ParetoFront) -> Markup:
    """Return the chart and its table. All text is escaped."""
    rows = [_row(front, fleet) for fleet in front.front]
    return Markup(_template().render(front=front, chart=front_chart(front), rows=rows))


def front_chart(front: ParetoFront) -> FrontChart:
    """Place the points, their labels and the limits."""
    most_hours = max(fleet.hours for fleet in front.front)
    most_usd = max(fleet.usd_high for fleet in front.front) or 1.0
    deadline, budget = _near(front.deadline_hours, most_hours), _near(front.budget_usd, most_usd)
    last_hour, last_usd = 1.06 * max(most_hours, deadline or 0), 1.06 * max(most_usd, budget or 0)

    def x(hours: float) -> float:
        return round(LEFT + hours / last_hour * (RIGHT - LEFT), 1)

    def y(usd: float) -> float:
        return round(BOTTOM - usd / last_usd * (BOTTOM - TOP), 1)

    limits: dict[str, tuple[float, str]] = {}
    beyond = []
    taken = []
    if front.deadline_hours is not None:
        text = f"deadline {duration(round(front.deadline_hours * HOUR_MS))}"
        if deadline is None:
            beyond.append(text)
        else:
            limits["deadline"] = at, _ = x(deadline), text
            taken.append(Box(left=at - 3, top=TOP, right=at + 3, bottom=BOTTOM, harm=STROKE))
    if front.budget_usd is not None:
        text = f"budget ${front.budget_usd:,.2f}".removesuffix(".00")
        if budget is None:
            beyond.append(text)
        else:
            limits["budget"] = at, _ = y(budget), text
            taken.append(Box(left=LEFT, top=at - 3, right=RIGHT, bottom=at + 3, harm=STROKE))
            taken.append(Box(left=LEFT, top=at - LINE, right=LEFT + CHARACTER * len(text), bottom=at))
    for fleet in front.front:
        at_x, at_y = x(fleet.hours), y(fleet.usd)
        taken.append(Box(left=at_x - 8, top=at_y - 8, right=at_x + 8, bottom=at_y + 8))
        low, high = y(fleet.usd_low), y(fleet.usd_high)
        taken.append(Box(left=at_x - 4, top=high, right=at_x + 4, bottom=low, harm=STROKE))
    points = []
    for fleet in front.front:
        at_x, at_y = x(fleet.hours), y(fleet.usd)
        is_chosen = fleet.number == front.chosen
        nodes = fleet.nodes.removesuffix(f", {fleet.place}")  # with the region, a label has no place
        label, box = _label(f"{fleet.number} {nodes}{', chosen' if is_chosen else ''}", at_x, at_y, taken)
        taken.append(box)
        points.append(
            Point(
                x=at_x,
                y=at_y,
                low_y=y(fleet.usd_low),
                high_y=y(fleet.usd_high),
                label=label,
                title=f"{fleet.number} {fleet.nodes}: {_cost(fleet)}, {_time(fleet)}",
                is_chosen=is_chosen,
                is_late=not fleet.in_time,
            )
        )
    return FrontChart(
        points=tuple(points),
        hours=tuple((x(at), f"{at:g}") for at in ticks(last_hour, 8)),
        dollars=tuple((y(at), f"${at:,g}") for at in ticks(last_usd, 5)),
        deadline=limits.get("deadline"),
        budget=limits.get("budget"),
        beyond=f"Beyond the chart: {' and '.join(beyond)}." if beyond else "",
    )


def _near(limit: float | None, most: float) -> float | None:
    return limit if limit is not None and limit <= FAR * most else None


def ticks(top: float, count: int) -> list[float]:
    """Return about `count` round numbers from 0 to `top`."""
    power = 10 ** floor(log10(top / count))
    step = next(size for size in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if size >= top / count * 0.999)
    return [number * step for number in range(ceil(top / step))]


def _label(text: str, x: float, y: float, taken: Sequence[Box]) -> tuple[Label, Box]:
    """Place the label of a point within the plot, where it does the least harm; and the nearest of such places."""
    text = shorten(text, LONGEST, placeholder=" ...")
    width = CHARACTER * len(text)
    centred = min(max(x - width / 2, LEFT + 1), RIGHT - width - 1)
    sides: tuple[tuple[Literal["start", "middle", "end"], float], ...]
    sides = (("start", x + GAP), ("end", x - GAP - width), ("middle", centred))
    places = [
        (anchor, Box(left=left, top=y + shift - LINE / 2, right=left + width, bottom=y + shift + LINE / 2))
        for step in range(STEPS)
        for anchor, left in sides
        for shift in (-step * (LINE + 1), step * (LINE + 1))
        if left > LEFT and left + width < RIGHT and y + shift - LINE / 2 > TOP and y + shift + LINE / 2 < BOTTOM
    ]
    anchor, box = min(places, key=lambda place: sum(map(place[1].overlap, taken)))
    middle = (box.top + box.bottom) / 2
    near = {"start": box.left, "middle": (box.left + box.right) / 2, "end": box.right}[anchor]
    link = None
    if anchor == "middle":
        link = round(min(max(x, box.left), box.right), 1), round(box.bottom if box.bottom < y else box.top, 1)
    elif middle != y:
        link = round(near, 1), round(middle, 1)
    return Label(text=text, x=round(near, 1), y=round(middle + 4, 1), anchor=anchor, link=link), box


def _row(front: ParetoFront, fleet: FrontFleet) -> tuple[str, ...]:
    """Return the fleet's cells: number, nodes, dollars, time, replays in time, and why it is not the cheapest."""
    named = (
        ("chosen", front.chosen),
        ("cheapest", front.cheapest),
        ("cheapest in time", front.in_time),
        ("quickest", front.quickest),
    )
    words = ", ".join(name for name, number in named if number == fleet.number)
    met = f"{fleet.starts} replays" if fleet.met is None else f"{fleet.met} of {fleet.starts} replays"
    number = f"{fleet.number}: {words}" if words else str(fleet.number)
    return number, fleet.nodes, _cost(fleet), _time(fleet), met, fleet.why_not


def _cost(fleet: FrontFleet) -> str:
    return f"${fleet.usd:,.2f} (${fleet.usd_low:,.2f} to ${fleet.usd_high:,.2f})"


def _time(fleet: FrontFleet) -> str:
    return duration(round(fleet.hours * HOUR_MS))


@cache
def _template() -> Template:
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(files("launcher.report").joinpath("front.html").read_text(encoding="utf-8"))
