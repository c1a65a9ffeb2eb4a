"""Views of `spotrl ui` beside the list and a run: prices and hazards, simulations, comparisons; and faults of each."""

import asyncio
import json
import stat
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import ClassVar

import httpx
import pytest

from launcher.ledger.models import Removal
from launcher.ledger.store import find_run, open_ledger, open_read_only
from launcher.money import HOUR_MS, dollars
from launcher.report.build import build_report
from launcher.report.html import MOST_SHEETS, render_html
from launcher.web.market import pool_rows
from launcher.web.reader import POINTS_SHOWN, run_page
from launcher.web.server import Pages
from launcher.web.simulations import KEPT, LANE, WIDTH, fleet_of, keep, simulations
from launcher.web.token import kept_token
from tests.launcher.made_ledger import MINUTE_MS, START_MS, a_run
from tests.launcher.web.served import (
    NASTY,
    TOKEN,
    Served,
    a_png,
    a_simulation,
    locked,
    migrate_back,
    serving,
    two_runs,
)


@pytest.fixture
def served(tmp_path):
    with serving(*two_runs(tmp_path)) as running:
        yield running


def test_a_pool_has_its_prices_and_the_hazard_that_its_nodes_showed(served):
    with served.sessions() as session, session.begin():
        made = a_run(session, "bought")
        made.run.infra = "aws"
        taken = made.node("spot-0", up=0, end=30 * MINUTE_MS, zone="us-east-1a")
        taken.cloud, taken.region, taken.instance_type = "aws", "us-east-1", "g6.xlarge"
        made.preempted(taken, 30 * MINUTE_MS)
    with open_read_only(served.path)() as session:
        (pool,), total = pool_rows(session, START_MS + HOUR_MS)
        ((faded,), _) = pool_rows(session, time.time_ns() // 1_000_000)  # the page is of now, and evidence fades
    assert (pool.zone, pool.instance_type, total) == ("us-east-1a", "g6.xlarge", 1)
    assert (pool.spot_micro_usd, pool.on_demand_micro_usd) == (350_000, 800_000)
    assert (pool.preempted, pool.watched_hours, pool.launches, pool.basis) == (1, 0.5, 1, "measured")
    mean, low, high = pool.hazard
    assert 0 < low < mean < high
    mean, low, high = faded.hazard
    page = served.get(f"/?token={TOKEN}&view=prices").text
    assert "aws us-east-1a" in page
    assert f"{mean:.2f} ({low:.2f} to {high:.2f})" in page


def test_kept_simulations_are_shown_newest_first_and_the_oldest_are_deleted(served, tmp_path):
    folder = tmp_path / "simulations"
    for number in range(KEPT + 3):
        keep(folder, replace(a_simulation(), job=f"job {number}", at_ms=START_MS + number))
    (folder / "9999999999999-torn.json").write_text('{"job": "torn"')
    assert [kept.job for kept in simulations(folder)][:2] == [f"job {KEPT + 2}", f"job {KEPT + 1}"]
    assert len(list(folder.glob("*.json"))) == KEPT + 1
    page = served.get(f"/?token={TOKEN}&view=simulations").text
    assert "$4.00 ($3.50 to $4.50)" in page
    assert NASTY not in page


def test_a_fleet_is_drawn_without_gaps():
    fleet = fleet_of(a_simulation())
    assert (fleet.most, fleet.hours) == (2, "4.0")
    assert sum(bar.width * bar.height for bar in fleet.bars) == pytest.approx(WIDTH * 2 * LANE)
    assert [bar.market for bar in fleet.bars] == ["spot", "spot", "on_demand", "spot"]


def test_a_comparison_is_the_page_of_the_command_and_needs_two_known_runs(served):
    both = httpx.get(f"{served.url}/compare?token={TOKEN}&run=live&run=done")
    assert both.status_code == 200
    assert "What differs in the jobs" in both.text
    assert "script-src" not in both.headers["content-security-policy"]
    for query, code, words in (
        ("&run=live", 400, "Pick 2 to"),
        ("&run=live&run=live", 400, "1 were picked"),
        ("&run=live&run=%3Cb%3E", 404, "no run is called &lt;b&gt;"),
        ("".join(f"&run=r{n}" for n in range(99)), 400, "99 were picked"),
    ):
        answer = httpx.get(f"{served.url}/compare?token={TOKEN}{query}")
        assert (answer.status_code, words in answer.text) == (code, True), answer.text
    assert httpx.get(f"{served.url}/compare?run=live&run=done").status_code == 403
    unknown = httpx.get(f"{served.url}/compare?token={TOKEN}&run=live&run=done&group_by=%3Ci%3E")
    assert (unknown.status_code, "has a field &lt;i&gt;" in unknown.text) == (404, True)
    assert (
        httpx.get(f"{served.url}/compare?token=x&run=live&run=done", headers={"Origin": "http://a.b"}).status_code
        == 403
    )


def test_a_comparison_is_grouped_by_the_ticked_fields(served):
    with served.sessions() as session, session.begin():
        for name, algorithm in (("a1", "nft"), ("a2", "nft"), ("b1", "grpo")):
            run = a_run(session, name, job={"algorithm": {"name": algorithm, "clip": 0.1}, "seed": len(name)}).run
            run.seed = int(name[1])
    address = f"{served.url}/compare?token={TOKEN}&run=a1&run=a2&run=b1"
    assert '<input type="checkbox" name="group_by" value="algorithm.name">' in httpx.get(address).text
    grouped = httpx.get(f"{address}&group_by=algorithm.name&group_by=algorithm.clip").text
    assert "algorithm.name=nft, algorithm.clip=0.1" in grouped
    assert "algorithm.name=grpo, algorithm.clip=0.1" in grouped
    assert grouped.count(" checked") == 2, "a field in which the runs are equal stays ticked too"


READ = ("/api/runs/live", f"/?token={TOKEN}&view=prices", f"/compare?token={TOKEN}&run=live&run=done")
"""Answers that read the nodes of a run."""


def told(served: Served, why: str, *paths: str) -> None:
    """Check that these answers say within seconds why the ledger cannot be read, and that a run's page is not blank."""
    shell = f"/?token={TOKEN}&run=live"
    begun = time.monotonic()
    with ThreadPoolExecutor(len(paths) + 1) as pool:
        *answers, page = pool.map(served.get, (*paths, shell))
    assert time.monotonic() - begun < 20.0, "an answer waits a second for the ledger"
    for answer in answers:
        assert answer.status_code == 503
        assert f"the ledger cannot be read now ({why}" in answer.text
    assert (page.status_code, "Reading the ledger" in page.text) == (200, True), "the page tries again"


def test_a_ledger_that_another_process_locks_is_told_by_every_view_and_read_again(served):
    with httpx.stream("GET", f"{served.url}/api/changes?token={TOKEN}", timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("data: {"))
        with locked(served):
            told(served, "database is locked", *READ, "/api/list")
            assert "database is locked" in next(line for line in lines if "error" in line)
        assert next(line for line in lines if line.startswith('data: {"ids"')), "the trouble is over, without news"
    for path in (*READ, "/api/list"):
        assert served.get(path).status_code == 200


def test_a_ledger_of_an_older_version_is_told_by_every_view_until_it_is_migrated(served):
    migrate_back(served, "0004")
    told(served, "no such column", *READ)
    open_ledger(served.path)
    for path in READ:
        assert served.get(path).status_code == 200


def test_a_run_that_is_removed_while_its_page_is_open_is_told(served):
    with served.sessions() as session, session.begin():
        session.add(Removal(run_id=find_run(session, "live").id, at_wall_ms=START_MS))
    assert served.get("/api/runs/live").json()["view"]["is_removed"]
    log = served.get("/api/runs/live/logs")
    assert (log.status_code, "removed with `spotrl rm`" in log.json()["error"]) == (409, True)
    assert "running, files removed" in served.get("/api/list").json()["html"]
    with served.sessions() as session, session.begin():
        find_run(session, "live").name = "gone"
    page = served.get("/api/runs/live")
    assert (page.status_code, "did you mean" in page.json()["error"]) == (404, True)


@pytest.mark.long
def test_more_image_sheets_than_a_slider_has_places_are_bounded(served):
    """10,000 image sheets: the page, its report and the memory that they take are bounded."""
    with served.add() as made:
        for iteration in range(10_000):
            made.evaluated(100 + iteration, 0.5, HOUR_MS + iteration, pictures="sheet-0.png")
    tracemalloc.start()
    begun = time.process_time()
    page = run_page(open_read_only(served.path), "live")
    used, (_, most) = time.process_time() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 15.0, "2 s on a quiet computer, and three times that while memory is traced"
    assert most < 100e6
    sheets = page["sheets"]
    assert POINTS_SHOWN / 2 < len(sheets) <= POINTS_SHOWN + 1
    assert (sheets[0]["iteration"], sheets[-1]["iteration"]) == (0, 10_099)
    assert len(json.dumps(page)) < 1_000_000
    assert served.get("/api/runs/live/sheets/10099").content == a_png()
    with served.sessions() as session:
        run = find_run(session, "live")
        html = render_html(build_report(session, run, run.clock.now_ms()), lambda path: a_png())
    assert html.count("<img ") == MOST_SHEETS
    assert f"{MOST_SHEETS} of 10003 sheets" in html
    assert len(html) < 4_000_000, "300 bytes for each evaluation, in its charts"


def test_the_live_page_and_the_static_report_show_the_same_figures(served):
    live = run_page(open_read_only(served.path), "done")
    with served.sessions() as session:
        run = find_run(session, "done")
        static = build_report(session, run, run.clock.now_ms())
    html = render_html(static, lambda path: None)
    assert live["headline"] in html
    for name in ("costs", "target", "provenance"):
        shown = json.loads(json.dumps(live[name]))
        assert shown.items() >= json.loads(json.dumps(asdict(getattr(static, name)))).items()
    assert dollars(static.costs.total) in html


def test_a_token_is_kept_for_its_owner_alone(tmp_path):
    path = tmp_path / "home" / "ui-token"
    first = kept_token(path)
    assert kept_token(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    second = kept_token(path)
    assert second != first
    path.write_text("short")
    assert len(kept_token(path)) == len(second)


def test_a_page_that_was_left_is_not_read(served):
    """The reading of a left page that waits would slow every other answer."""
    asked = []
    reading = open_read_only(served.path)
    pages = Pages(reading, lambda name: [], TOKEN, served.path.parent)

    class Left:
        path_params: ClassVar = {"name": "live"}

        def __init__(self, is_left: bool) -> None:
            self._is_left = is_left

        async def is_disconnected(self) -> bool:
            asked.append(self._is_left)
            return self._is_left

    (route,) = [route for route in pages.routes() if route.path == "/api/runs/{name}"]

    async def both() -> list[int]:
        answers = await asyncio.gather(*(route.endpoint(Left(is_left)) for is_left in (False, True)))
        return [answer.status_code for answer in answers]

    assert asyncio.run(both()) == [200, 204]
    assert asked == [False, True]
