"""The report's three charts as SVG text: reward against dollars, spend rate, and the nodes' timeline.

Altair describes the charts and vl-convert draws the charts on this machine, so the page needs no script and no
network. The colours are Okabe and Ito's palette, readable with any common colour blindness. Shapes repeat the
information of the colours.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import altair as alt
import vl_convert

from launcher.ledger.accounting import Charge
from launcher.money import HOUR_MS, MICRO, dollars
from launcher.report.values import Moment, NodeLine, Report

WIDTH = 760
REWARD_HEIGHT, SCORE_HEIGHT = 300, 90
FONT = "Helvetica Neue, Helvetica, Arial, sans-serif"
INK, QUIET, RULE = "#1f2328", "#5b6470", "#e4e6e9"

BLUE, VERMILLION, GREEN, SKY = "#0072b2", "#d55e00", "#009e73", "#56b4e9"
SLOT_COLOURS = (BLUE, "#e69f00", GREEN, "#cc79a7", SKY, "#882255", "#999933", "#44aa99", "#7a7f87")
STAGES = {
    "on demand": BLUE,
    "on demand, cold start": "#a9cbe2",
    "spot": "#e69f00",
    "spot, cold start": "#f6dca8",
}
SHAPES = {"without": "M-1,-1L1,1M1,-1L-1,1", "after": "triangle-down"}
"""Marks of a preemption: a cross without notice, a triangle after a notice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One entry of a chart's key. The page renders the text, because an SVG cannot know the reader's fonts."""

    shape: str
    """Name of the mark: bar, circle, dot, line, dash, diamond, cross or triangle."""
    colour: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    svg: str
    key: tuple[Key, ...]


def reward_chart(report: Report) -> Drawing:
    """Draw score against dollars: every evaluation, the smoothed curve, the target and its crossings."""
    metric = report.target.metric.replace("_", " ")
    rows = [
        {"dollars": point.micro_usd / MICRO, "score": point.score, "smoothed": point.smoothed} for point in report.curve
    ]
    top = max(row["dollars"] for row in rows) or 1
    basis = report.money_basis if report.bill is None else "metered"  # a bill does not say when money was spent
    x = alt.X(
        "dollars:Q",
        title=f"dollars spent ({basis})",
        axis=alt.Axis(format=_money_format(top), grid=False, tickCount=8, labelFlush=False),
        scale=alt.Scale(domain=[0, top], nice=True),
    )
    scores = alt.Scale(zero=False, nice=True)
    title = f"{metric} on held-out prompts"
    evaluated = alt.Chart(_data(rows)).encode(x=x)
    layers: list[Any] = []
    key = [
        Key(shape="circle", colour=SKY, text="one evaluation"),
        Key(shape="line", colour=BLUE, text="mean of the last three"),
    ]
    if report.target.value is not None:
        layers.append(
            alt.Chart(_data([{"target": report.target.value}]))
            .mark_rule(strokeDash=[5, 4], color=INK, strokeWidth=1.1)
            .encode(y=alt.Y("target:Q", scale=scores))
        )
        key.append(Key(shape="dash", colour=INK, text=f"target {report.target.value:g}"))
    layers += [
        evaluated.mark_point(size=34, strokeWidth=1.7, filled=False, color=SKY, opacity=1).encode(
            y=alt.Y("score:Q", title=title, scale=scores, axis=alt.Axis(format=".2~f", tickCount=7))
        ),
        evaluated.mark_line(strokeWidth=2.5, strokeCap="round", strokeJoin="round", color=BLUE).encode(
            y=alt.Y("smoothed:Q", title=title)
        ),
    ]
    first, confirmed = report.target.first, report.target.confirmed
    if first is not None and first != confirmed:
        layers += _marked(first, first.score, x, "diamond", f"first reached: {_price(first)}", top, row=2)
        key.append(Key(shape="diamond", colour=VERMILLION, text="first reached"))
    if confirmed is not None:
        layers += _marked(confirmed, confirmed.smoothed, x, "circle", f"confirmed: {_price(confirmed)}", top, row=1)
        key.append(Key(shape="dot", colour=VERMILLION, text="confirmed"))
    return _draw(alt.layer(*layers), height=REWARD_HEIGHT, prefix="reward", key=key)


def _price(moment: Moment) -> str:
    return f"{dollars(moment.micro_usd)}, iteration {moment.iteration}"


def _marked(moment: Moment, height: float, x: Any, shape: str, text: str, top: float, row: int) -> list[Any]:
    """Return the layers of a marked evaluation: a mark, a line down to the dollars, and a text near the axis.

    A rising curve is far from the axis, so the text does not cover the curve.
    """
    spent = moment.micro_usd / MICRO
    before = spent > top * 0.6
    mark = alt.Chart(_data([{"dollars": spent, "height": height, "text": text}])).encode(x=x)
    words: dict[str, Any] = {
        "align": "right" if before else "left",
        "dx": -7 if before else 7,
        "fontSize": 12,
        "fontWeight": 600,
    }
    at = alt.value(REWARD_HEIGHT - 20 * row)
    return [
        mark.mark_rule(color=VERMILLION, strokeWidth=1).encode(y="height:Q", y2=alt.value(REWARD_HEIGHT)),
        mark.mark_point(shape=shape, size=100, color=VERMILLION, fill=VERMILLION, strokeWidth=1.5, opacity=1).encode(
            y="height:Q"
        )
        if shape == "circle"
        else mark.mark_point(shape=shape, size=110, color=VERMILLION, strokeWidth=2, opacity=1).encode(y="height:Q"),
        mark.mark_text(stroke="white", strokeWidth=5, **words).encode(y=at, text="text:N"),
        mark.mark_text(color=VERMILLION, **words).encode(y=at, text="text:N"),
    ]


def scores_chart(report: Report) -> Drawing:
    """Draw the score of each of several rewards against dollars, one panel below another, each with its own scale."""
    names = list(dict.fromkeys(point.name for point in report.scores))
    rows = [{"name": point.name, "dollars": point.micro_usd / MICRO, "score": point.score} for point in report.scores]
    top = max(point.micro_usd for point in report.scores) / MICRO or 1
    x = alt.X(
        "dollars:Q",
        title=None,
        axis=alt.Axis(format=_money_format(top), grid=False, tickCount=8, labelFlush=False),
        scale=alt.Scale(domain=[0, top], nice=True),
    )
    panels = [
        alt.Chart(_data([row for row in rows if row["name"] == name]), width=WIDTH, height=SCORE_HEIGHT)
        .mark_line(strokeWidth=2, color=BLUE, point=alt.OverlayMarkDef(color=SKY, size=30))
        .encode(
            x=x,
            y=alt.Y(
                "score:Q", title=name, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(format=".3~g", tickCount=4)
            ),
        )
        for name in names
    ]
    return _draw(alt.vconcat(*panels, spacing=14), height=None, prefix="scores", key=())


def spend_chart(report: Report) -> Drawing:
    """Draw dollars per hour over time, stacked by slot. The total height is the run's rate at a moment."""
    slots = _slots(report.nodes)
    colours = [SLOT_COLOURS[number % len(SLOT_COLOURS)] for number in range(len(slots))]
    segments = _stacked(report, slots)
    top = max((row["to"] for row in segments), default=0.0)
    chart = (
        alt.Chart(_data(segments))
        .mark_rect(strokeWidth=0)
        .encode(
            x=_time("from_h", report, grid=False),
            x2="to_h:Q",
            y=alt.Y("from:Q", title="dollars an hour", axis=alt.Axis(format=_money_format(top), tickCount=5)),
            y2="to:Q",
            color=alt.Color("slot:N", legend=None, scale=alt.Scale(domain=slots, range=colours)),
        )
    )
    key = [Key(shape="bar", colour=colour, text=slot) for slot, colour in zip(slots, colours, strict=True)]
    return _draw(chart, height=170, prefix="spend", key=key)


def timeline_chart(report: Report) -> Drawing:
    """Draw one row per slot, one bar per node (pale during cold start), and a mark for each preemption."""
    slots = _slots(report.nodes)
    bars = [bar for node in report.nodes for bar in _bars(report, node)]
    used = [stage for stage in STAGES if any(bar["stage"] == stage for bar in bars)]
    key = [Key(shape="bar", colour=STAGES[stage], text=stage) for stage in used]
    y = alt.Y("slot:N", sort=slots, title=None, axis=alt.Axis(labelLimit=220, labelFontSize=12, domain=False))
    colours = alt.Scale(domain=used, range=[STAGES[stage] for stage in used])
    layers: list[Any] = [
        alt.Chart(_data(bars))
        .mark_bar(height=15)
        .encode(
            x=_time("from_h", report, grid=True),
            x2="to_h:Q",
            y=y,
            color=alt.Color("stage:N", legend=None, scale=colours),
        )
    ]
    for notice, shape in ((False, "without"), (True, "after")):
        marks = [{"slot": line.slot, "at_h": line.hours} for line in report.preemptions if line.notice is notice]
        if not marks:
            continue
        reclaims = alt.Chart(_data(marks)).encode(x="at_h:Q", y=y)
        layers.append(reclaims.mark_tick(color=VERMILLION, thickness=2.5, size=23, opacity=1))
        layers.append(
            reclaims.mark_point(
                shape=SHAPES[shape],
                size=80 if notice else 110,
                color=VERMILLION,
                fill=VERMILLION if notice else None,
                strokeWidth=1 if notice else 2.6,
                opacity=1,
                yOffset=-18,
            )
        )
        text = "preempted after a notice" if notice else "preempted without notice"
        key.append(Key(shape="triangle" if notice else "cross", colour=VERMILLION, text=text))
    return _draw(alt.layer(*layers), height=max(60, 46 * len(slots)), prefix="timeline", key=key)


LEARNING = {
    "reward": "mean reward of the trained rollouts",
    "kl": "KL divergence from the base model",
    "clip_share": "share of samples clipped",
    "gradient_norm": "norm of the gradient",
    "velocity_change": "change of the velocity",
    "reference_distance": "distance from the base model",
}
"""Curves of the learning chart that a run may have, with their titles."""


def learning_chart(report: Report) -> Drawing | None:
    """Draw small curves over the iterations, two in a row: reward, and the algorithm's figures that the run has.

    A figure that never changed is left out. None: there is nothing to draw.
    """
    panels = []
    for name, title in LEARNING.items():
        rows = [
            {"iteration": done.iteration, "value": value}
            for done in report.learning
            if (value := done.reward_mean if name == "reward" else done.health.get(name)) is not None
        ]
        if len({row["value"] for row in rows}) > 1:
            panels.append(
                alt.Chart(_data(rows), title=alt.Title(title, fontSize=12, fontWeight=500, color=INK, anchor="start"))
                .mark_line(strokeWidth=1.8, color=BLUE)
                .encode(
                    x=alt.X("iteration:Q", title="iteration", axis=alt.Axis(grid=False, tickMinStep=1, tickCount=6)),
                    y=alt.Y(
                        "value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(format="~g", tickCount=4)
                    ),
                )
                .properties(width=WIDTH // 2 - 70, height=110)
            )
    if not panels:
        return None
    return _draw(alt.concat(*panels, columns=2), height=None, prefix="learning", key=())


# --- rows ---------------------------------------------------------------------------------------------


def _slots(nodes: Sequence[NodeLine]) -> list[str]:
    """Return the slots with a charge, in the order of the first request; the trainer comes first."""
    paid = [node for node in nodes if node.charges]
    return list(dict.fromkeys(node.slot for node in sorted(paid, key=lambda node: node.role == "rollout")))


def _placed(node: NodeLine) -> Iterator[tuple[str, int | None, Charge]]:
    """Yield the slot of each part of the node's paid time, the end of the cold start, and the part.

    A promoted node is in another slot from its promotion on, and its processes start again.
    """
    taken = node.taken
    for charge in node.charges:
        if taken is None or charge.end_ms <= taken.at_ms:
            yield node.slot, node.seen_ms, charge
        elif charge.start_ms >= taken.at_ms:
            yield taken.slot, taken.ready_ms, charge
        else:
            yield node.slot, node.seen_ms, replace(charge, end_ms=taken.at_ms)
            yield taken.slot, taken.ready_ms, replace(charge, start_ms=taken.at_ms)


def _stacked(report: Report, slots: Sequence[str]) -> list[dict[str, Any]]:
    """Return rectangles of $/h by slot, between the moments of rate changes."""
    charges = [(slot, charge) for node in report.nodes for slot, _, charge in _placed(node) if charge.ms]
    moments = sorted({moment for _, charge in charges for moment in (charge.start_ms, charge.end_ms)})
    rows: list[dict[str, Any]] = []
    for start, end in pairwise(moments):
        height = 0.0
        for slot in slots:
            rate = sum(
                charge.micro_usd_per_hour
                for of, charge in charges
                if of == slot and charge.start_ms <= start and charge.end_ms >= end
            )
            if rate:
                box = {"slot": slot, "from": height, "to": height + rate / MICRO}
                height += rate / MICRO
                same = next((row for row in reversed(rows) if row["slot"] == slot), None)
                if same and same | box == same and same["to_h"] == _since(report, start):
                    same["to_h"] = _since(report, end)  # Extend the last box, to draw no seam between two boxes.
                else:
                    rows.append(box | {"from_h": _since(report, start), "to_h": _since(report, end)})
    return rows


def _bars(report: Report, node: NodeLine) -> list[dict[str, Any]]:
    rows = []
    market = "spot" if node.market == "spot" else "on demand"
    for slot, seen_ms, charge in _placed(node):
        seen = charge.end_ms if seen_ms is None else min(max(seen_ms, charge.start_ms), charge.end_ms)
        for stage, start, end in ((f"{market}, cold start", charge.start_ms, seen), (market, seen, charge.end_ms)):
            if end > start:
                box = {"slot": slot, "stage": stage}
                rows.append(box | {"from_h": _since(report, start), "to_h": _since(report, end)})
    return rows


def _since(report: Report, at_ms: int) -> float:
    return (at_ms - report.start_ms) / HOUR_MS


# --- drawing ------------------------------------------------------------------------------------------


def _data(rows: list[dict[str, Any]]) -> Any:
    return alt.Data(values=rows)


def _time(field: str, report: Report, *, grid: bool) -> Any:
    factor = report.run.clock_factor
    title = "hours since the start" + (f" (simulated: {factor:g} s for a second of work)" if factor != 1 else "")
    until = max(_since(report, report.end_ms), 1e-6)
    return alt.X(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(domain=[0, until], nice=False),
        axis=alt.Axis(grid=grid, tickCount=9, format="~g", labelFlush=False),
    )


def _money_format(top: float) -> str:
    """Return the number format for an axis up to `top` dollars: two decimals, four below $0.10, none above $50."""
    return "$,.0f" if top > 50 else "$,.2f" if top > 0.1 else "$.4f"


def _draw(chart: Any, *, height: int | None, prefix: str, key: Sequence[Key]) -> Drawing:
    """Draw the chart as SVG. Give every id a prefix, because several charts share the page.

    `height`: None for a chart of several parts, which have sizes of their own.
    """
    sized = chart if height is None else chart.properties(width=WIDTH, height=height)
    spec = (
        sized.properties(background="transparent")
        .configure(font=FONT)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=QUIET,
            titleColor=INK,
            titleFontWeight=500,
            titleFontSize=12,
            labelFontSize=11,
            gridColor=RULE,
            domainColor="#9aa1a9",
            tickColor="#9aa1a9",
            titlePadding=9,
        )
        .to_dict()
    )
    svg: str = vl_convert.vegalite_to_svg(spec)
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    for name in ids:
        svg = svg.replace(f'id="{name}"', f'id="{prefix}-{name}"').replace(f"url(#{name})", f"url(#{prefix}-{name})")
    return Drawing(svg=svg, key=tuple(key))
