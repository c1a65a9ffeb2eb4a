"""The report as one offline HTML file: charts are inline SVG, images are data URIs, no script.

All text from a run (names, zones, evidence) is escaped. The page's content security policy forbids loading anything.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from launcher.money import dollars, duration, hourly
from launcher.report.bill import WHY, by_kind
from launcher.report.charts import Drawing, learning_chart, reward_chart, scores_chart, spend_chart, timeline_chart
from launcher.report.exploration import exploration_words
from launcher.report.front_chart import front_html
from launcher.report.provenance import hardware_by_nodes
from launcher.report.ranks import collectives_words
from launcher.report.schedule import schedule_words
from launcher.report.sharing import sharing_words
from launcher.report.throughput import throughput_words
from launcher.report.values import Pictures, Report
from launcher.report.words import (
    age,
    bill_words,
    bucket_words,
    drift_words,
    headline,
    how_lost,
    learning_words,
    moment,
    move_words,
    phase_name,
    point_words,
    resume_label,
    saved_percent,
    saving_words,
    score,
    short_node,
    span_words,
    trainer_loss_words,
    trainer_time_words,
)

MOST_SHEETS = 64
"""Contact sheets in the page. A sheet takes about 50 kB, so the page stays below 5 MB."""

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One line of a split: name, micro-dollars, and the percentage of the total."""

    name: str
    micro_usd: int
    percent: float


def render_html(report: Report, read: Callable[[str], bytes | None]) -> str:
    """Return the page. `read` returns an object from the run's stores (images of evaluations), or None if missing."""
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters.update(dollars=dollars, duration=duration, hourly=hourly, score=score, age=age, moment=moment)
    page.filters.update(how=how_lost)
    page.filters.update(phase=phase_name, short=lambda node: short_node(node, report.run.name))
    template = page.from_string(files("launcher.report").joinpath("report.html").read_text(encoding="utf-8"))
    costs = report.costs
    return template.render(
        report=report,
        bill_differences=[
            (WHY[kind], paid) for kind, paid in by_kind(report.bill.differences if report.bill else ()).items()
        ],
        bill_lines=bill_words(report),
        bucket_lines=bucket_words(report),
        headline=headline(report),
        drift=drift_words(report),
        point=point_words(report.point, report.target.metric),
        learns_nothing=learning_words(report),
        resume_label=resume_label(report),
        span=span_words(report),
        trainer_losses=trainer_loss_words(report),
        moves=move_words(report),
        exploration=exploration_words(report.exploration),
        schedule=schedule_words(report.schedule),
        collectives=collectives_words(report.collectives),
        trainer_time=trainer_time_words(report.trainer_time),
        throughput=throughput_words(report.throughput),
        sharing=sharing_words(report.sharing),
        reward=_figure(reward_chart(report)) if report.curve else None,
        scores=_figure(scores_chart(report)) if report.scores else None,
        spend=_figure(spend_chart(report)) if costs.total else None,
        timeline=_figure(timeline_chart(report)) if costs.total else None,
        splits=[
            {
                "Role": _shares(costs.by_role, costs.total),
                "Market": _shares(costs.by_market, costs.total),
                **({"Place": _shares(costs.by_place, costs.total)} if report.extras else {}),
            },
            {"Phase": _shares(costs.by_phase, costs.total)},
        ],
        learning=_figure(learning) if (learning := learning_chart(report)) is not None else None,
        saved=saving_words(report),
        saved_percent=saved_percent(report),
        pictures=[
            (sheet, picture) for sheet in _some(report.pictures, MOST_SHEETS) if (picture := _image_uri(sheet, read))
        ],
        sheets=len(report.pictures),
        fleets=None if report.fleets is None else front_html(report.fleets),
        hardware=hardware_by_nodes(report.provenance),
    )


def _some(sheets: Sequence[Pictures], most: int) -> list[Pictures]:
    """Return at most this many sheets, evenly spread, with the first and the last."""
    if len(sheets) <= most:
        return list(sheets)
    return [sheets[round(number * (len(sheets) - 1) / (most - 1))] for number in range(most)]


KEY_SHAPES = {
    "bar": '<rect x="1" y="3" width="14" height="10" fill="{0}"/>',
    "circle": '<circle cx="8" cy="8" r="4" fill="none" stroke="{0}" stroke-width="1.7"/>',
    "dot": '<circle cx="8" cy="8" r="5" fill="{0}"/>',
    "line": '<path d="M0 8H16" stroke="{0}" stroke-width="2.6"/>',
    "dash": '<path d="M0 8H16" stroke="{0}" stroke-width="1.4" stroke-dasharray="4 2"/>',
    "diamond": '<path d="M8 2L14 8L8 14L2 8Z" fill="none" stroke="{0}" stroke-width="2"/>',
    "cross": '<path d="M3 3L13 13M13 3L3 13" stroke="{0}" stroke-width="2.6"/>',
    "triangle": '<path d="M2 4H14L8 14Z" fill="{0}"/>',
}


def _figure(drawing: Drawing) -> Markup:
    """Return a chart below its key. The chart's text is already escaped; the key's text is escaped here."""
    items = Markup("").join(
        Markup('<li><svg viewBox="0 0 16 16" aria-hidden="true">')
        + Markup(KEY_SHAPES[entry.shape]).format(entry.colour)
        + Markup("</svg>{}</li>").format(entry.text)
        for entry in drawing.key
    )
    return Markup('<ul class="key">{}</ul>').format(items) + Markup(drawing.svg)


def _shares(split: Mapping[str, int], total: int) -> list[Share]:
    paid = [(name, amount) for name, amount in split.items() if amount]
    return [
        Share(name=phase_name(name), micro_usd=amount, percent=100 * amount / total)
        for name, amount in sorted(paid, key=lambda item: -item[1])
    ]


def _image_uri(sheet: Pictures, read: Callable[[str], bytes | None]) -> str | None:
    """Return the contact sheet as a data URI; None if no store has the file or the file is not a PNG."""
    data = read(sheet.path)
    if data is None or not data.startswith(PNG):
        return None
    return "data:image/png;base64," + base64.b64encode(data).decode()
