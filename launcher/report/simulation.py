"""A simulation as one offline HTML page: the policies, one start's fleet over time, and the plans to choose from."""

from importlib.resources import files
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from launcher.money import HOUR_MS, duration
from launcher.placement.front import ParetoFront
from launcher.replay.simulate import Range, Simulated
from launcher.report.charts import BLUE, FONT, INK, QUIET, RULE, WIDTH
from launcher.report.front_chart import front_html

SPOT = "#e69f00"
MARKETS = {"spot": SPOT, "on demand": BLUE}


def simulation_page(found: Simulated, name: str, prices: str, fleets: ParetoFront | None = None) -> str:
    """Return the page. It loads nothing and has no script.

    `prices`: their dates as text. `fleets`: those that the plan was chosen from; None: the job names its nodes.
    """
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = page.from_string(files("launcher.report").joinpath("simulation.html").read_text(encoding="utf-8"))
    return template.render(
        name=name,
        found=found,
        ideal=duration(found.ideal_ms),
        deadline=None if found.deadline_ms is None else duration(found.deadline_ms),
        rows=[
            (r.policy, _span(r.dollars, "$"), _span(r.hours, ""), r.misses, round(r.preemptions, 1), r.starts)
            for r in found.policies
        ],
        has_rollout_nodes=any(spot or steady for _, spot, steady in found.example),
        chart=Markup(fleet_chart(found)),
        colours=MARKETS,
        prices=prices,
        fleets=None if fleets is None else front_html(fleets),
    )


def _span(value: Range, unit: str) -> str:
    return f"{unit}{value.mean:,.1f} ({value.low:,.1f} to {value.high:,.1f})"


def fleet_chart(found: Simulated) -> str:
    """Draw the rollout nodes at work over time, stacked by capacity type, as SVG."""
    rows: list[dict[str, Any]] = []
    ends = [at_ms for at_ms, _, _ in found.example[1:]] + [found.example_ms]
    for (at_ms, spot, steady), end_ms in zip(found.example, ends, strict=True):
        for market, low, high in (("spot", 0, spot), ("on demand", spot, spot + steady)):
            if high > low:
                span = {"from_h": at_ms / HOUR_MS, "to_h": end_ms / HOUR_MS}
                rows.append({"market": market, "low": low, "high": high, **span})
    top = max((row["high"] for row in rows), default=0)
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_rect(strokeWidth=0)
        .encode(
            x=alt.X("from_h:Q", title="hours since the start", axis=alt.Axis(grid=False)),
            x2="to_h:Q",
            y=alt.Y("low:Q", title="rollout nodes at work", axis=alt.Axis(values=list(range(top + 1)), format="d")),
            y2="high:Q",
            color=alt.Color("market:N", legend=None, scale=alt.Scale(domain=list(MARKETS), range=[*MARKETS.values()])),
        )
        .properties(width=WIDTH, height=220, background="transparent")
        .configure(font=FONT)
        .configure_view(stroke=None)
        .configure_axis(labelColor=QUIET, titleColor=INK, titleFontWeight=500, gridColor=RULE)
    )
    return str(vl_convert.vegalite_to_svg(chart.to_dict()))
