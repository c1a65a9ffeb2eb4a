"""Price history of a zone or region as one offline HTML file: a step per price, one colour per pool, inline SVG.

The page uses the style of the report's charts (charts.py): the same ink, colours and size, no script and no network.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from launcher.market.prices import PricePoint
from launcher.money import MICRO, dollars
from launcher.report.charts import FONT, INK, QUIET, RULE, SLOT_COLOURS, WIDTH

HEIGHT = 320

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }} – spotrl prices</title>
<style>
body { margin: 0 auto; padding: 2rem 1.5rem; max-width: 58rem; color: {{ ink }}; font: 16px/1.5 {{ font }}; }
svg { display: block; width: 100%; height: auto; }
table { width: 100%; border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid {{ rule }}; text-align: left; }
.n { text-align: right; }
.swatch { display: inline-block; width: .9rem; height: .22rem; margin-right: .5rem; vertical-align: .2rem; }
p { color: {{ quiet }}; font-size: .85rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{{ drawing }}
<table>
<thead><tr><th>pool</th><th>source</th>
<th class="n">lowest</th><th class="n">highest</th><th class="n">last</th></tr></thead>
<tbody>
{% for line in lines %}
<tr><td><span class="swatch" style="background: {{ line.colour }}"></span>{{ line.name }}</td><td>{{ line.source }}</td>
<td class="n">{{ line.lowest }}</td><td class="n">{{ line.highest }}</td><td class="n">{{ line.last }}</td></tr>
{% endfor %}
</tbody>
</table>
<p>US dollars an hour for the whole instance, without taxes, disks, traffic or discounts. A step begins when the cloud
says that the price holds from; the last one is drawn to {{ until }} UTC.</p>
</body>
</html>
"""


def price_page(title: str, points: Sequence[PricePoint], *, since_ms: int, until_ms: int, until: str) -> str:
    """Return the page. `points` is not empty, oldest first, as from `price_history`; `until` is the end as text."""
    names = {pool: name_of(pool) for pool in dict.fromkeys(point.pool for point in points)}
    colours = {pool: SLOT_COLOURS[number % len(SLOT_COLOURS)] for number, pool in enumerate(names)}
    lines = []
    for pool, name in names.items():
        prices = [point.micro_usd_per_hour for point in points if point.pool == pool]
        lines.append(
            {
                "name": name,
                "source": pool[-1],
                "colour": colours[pool],
                "lowest": dollars(min(prices)),
                "highest": dollars(max(prices)),
                "last": dollars(prices[-1]),
            }
        )
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(PAGE).render(
        title=title,
        drawing=Markup(_drawing(points, colours, since_ms, until_ms)),
        lines=lines,
        until=until,
        ink=INK,
        quiet=QUIET,
        rule=RULE,
        font=Markup(FONT),
    )


def name_of(pool: tuple[str, ...]) -> str:
    """Return the name of a pool, like `spot p5.48xlarge in us-east-1a`."""
    _, region, zone, instance_type, market, _ = pool
    return f"{market.replace('_', ' ')} {instance_type} in {zone or region}"


def steps(points: Sequence[PricePoint], since_ms: int, until_ms: int) -> list[dict[str, Any]]:
    """Return the corners of the lines, as time and dollars. Every line continues to `until_ms`."""
    rows, last = [], {}
    for point in points:
        rows.append(_corner(point, max(point.effective_ms, since_ms)))
        last[point.pool] = point
    return rows + [_corner(point, until_ms) for point in last.values()]


def _corner(point: PricePoint, at_ms: int) -> dict[str, Any]:
    return {"pool": "|".join(point.pool), "at": at_ms, "dollars": point.micro_usd_per_hour / MICRO}


def _drawing(points: Sequence[PricePoint], colours: Mapping[tuple[str, ...], str], since_ms: int, until_ms: int) -> str:
    shades = alt.Scale(domain=["|".join(pool) for pool in colours], range=list(colours.values()))
    chart = (
        alt.Chart(alt.Data(values=steps(points, since_ms, until_ms)))
        .mark_line(interpolate="step-after", strokeWidth=2)
        .encode(
            x=alt.X("at:T", title="UTC", scale=alt.Scale(type="utc", nice=False)),
            y=alt.Y("dollars:Q", title="dollars an hour", scale=alt.Scale(zero=True, nice=True)),
            color=alt.Color("pool:N", legend=None, scale=shades),
        )
        .properties(width=WIDTH, height=HEIGHT, background="transparent")
        .configure(font=FONT)
        .configure_view(stroke=None)
        .configure_axis(labelColor=QUIET, titleColor=INK, gridColor=RULE, titleFontWeight=500, titlePadding=9)
    )
    svg: str = vl_convert.vegalite_to_svg(chart.to_dict())
    return svg
