"""The HTML of the page. Its first paint waits for no script and no large read: the list's first rows, or a run's title.

All text from the ledger is escaped. The scripts of the page replace the parts that are live.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from launcher.money import dollars, duration
from launcher.report.front_chart import front_html
from launcher.runs.event_lines import Seen
from launcher.runs.run_list import RunList, RunRow
from launcher.web.market import PoolRow
from launcher.web.simulations import Kept, fleet_of


def list_page(token: str, ids: Seen, runs: RunList | None) -> str:
    """Return the page of all runs. `ids`: the newest ids of the ledger. `runs`: None if the ledger cannot be read."""
    return _template("list.html").render(token=token, ids=ids, list=runs)


def run_shell(token: str, name: str, row: RunRow | None) -> str:
    """Return the page of a run before its curves are read. `row`: None if the ledger does not show the run."""
    return _template("run.html").render(token=token, run=name, row=row)


def notice_page(token: str, title: str, text: str) -> str:
    """Return a page with one sentence. `token`: empty for a request without the right one."""
    return _template("notice.html").render(token=token, title=title, text=text)


def prices_page(token: str, pools: Sequence[PoolRow], total: int, at_ms: int) -> str:
    return _template("prices.html").render(token=token, pools=pools, total=total, at_ms=at_ms)


def simulations_page(token: str, kept: Sequence[Kept]) -> str:
    return _template("simulations.html").render(token=token, kept=kept)


def list_part(token: str, runs: RunList) -> str:
    """Return the table of runs, which the page puts in place of the one it shows."""
    return _template("runs.html").render(token=token, list=runs)


def _utc(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"


@cache
def _environment() -> Environment:
    page = Environment(
        loader=FunctionLoader(lambda name: files("launcher.web").joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    page.filters.update(
        dollars=dollars, duration=duration, fleet=fleet_of, front=front_html, utc=_utc, score="{:.3f}".format
    )
    return page


def _template(name: str) -> Template:
    return _environment().get_template(name)
