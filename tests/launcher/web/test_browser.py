"""`spotrl ui` in Debian's Chromium: every view, live events, the stop that asks, markup, keyboard, 400 px, axe-core.

With SPOTRL_SCREENSHOTS set to a folder, the views are kept there as PNG files.
"""

import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.controller.lease import this_process
from launcher.ledger.models import ControllerLease, TroubleRow
from launcher.ledger.store import find_run, open_ledger
from launcher.report.build import build_report
from launcher.report.comparison import compare_runs
from launcher.report.comparison_html import render_comparison
from launcher.report.html import render_html
from launcher.report.values import StandInLine
from tests.launcher.made_ledger import HOUR_MS, MadeLedger
from tests.launcher.web.served import a_png, locked, migrate_back, serving, two_runs

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `pip install playwright`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no browser here: `apt-get install chromium`"),
]

AXE = (Path(__file__).parents[2] / "data" / "axe" / "axe.min.js").read_text("utf-8")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
VIEWS = {
    "list": "",
    "run": "&run=live",
    "over": "&run=done",
    "unknown": "&run=nobody",
    "prices": "&view=prices",
    "simulations": "&view=simulations",
}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def served(tmp_path):
    with serving(*two_runs(tmp_path)) as running:
        yield running


@pytest.fixture
def open_page(browser):
    """Open a page in a context of its own; an error of the page fails the test."""
    contexts, errors = [], []

    def open_page(url, width=1280, scheme="light", **more):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def ready(page, view: str) -> None:
    """Wait until a view has been drawn from the ledger."""
    page.wait_for_selector(
        {"unknown": "[role=alert]", "list": "table", "prices": "table", "simulations": "svg"}.get(view, "#h-more")
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_no_violation_of_wcag_aa_and_fits_its_width(served, open_page, view, width, scheme):
    page = open_page(served.page + VIEWS[view], width, scheme, bypass_csp=True)
    ready(page, view)
    page.evaluate(AXE)
    found = page.evaluate("rules => axe.run({runOnly: rules})", RULES)
    assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if folder := os.environ.get("SPOTRL_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{view}-{scheme}-{width}.png", full_page=True)


def test_a_run_is_reached_from_the_list_and_drawn_whole(served, open_page):
    page = open_page(served.page)
    page.wait_for_selector("#link.live")
    page.fill("#filter", "liv")
    page.wait_for_selector("[role=status]:has-text('1 of 1 runs that match')")
    page.click("td >> text=live")
    ready(page, "run")
    assert page.locator("h1").inner_text() == "live"
    assert page.locator("figure.chart svg").count() >= 3
    assert page.locator(".stretch").count() == 2
    assert page.locator(".cross").count() == 1
    assert page.title() == "live – spotrl"


def test_picked_runs_are_compared(served, open_page):
    page = open_page(served.page, 400, bypass_csp=True)
    page.wait_for_selector("#link.live")
    page.check("[aria-label='Compare live']")
    with served.add("done") as made:
        made.status("finished", HOUR_MS, "while the list is open")
    page.wait_for_selector("[title='while the list is open']")
    page.check("[aria-label='Compare done']")
    page.click("#compare")
    page.wait_for_selector("h1:has-text('live, done')")
    page.evaluate(AXE)
    assert page.evaluate("rules => axe.run({runOnly: rules})", RULES)["violations"] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.go_back()
    page.uncheck("[aria-label='Compare done']")
    page.click("#compare")
    page.wait_for_selector("[role=alert]:has-text('Pick 2 to')")


def test_markup_in_zones_and_logs_is_shown_as_text(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    page.wait_for_selector("pre:has-text('first line')")
    assert "<script>" in page.locator("pre[aria-label='End of the log']").inner_text()
    assert page.locator("td:has-text('onerror')").count() > 0
    assert page.title() == "live – spotrl"
    assert page.locator("td img, pre img, li img").count() == 0


def test_an_event_is_on_the_page_while_it_is_open(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    page.wait_for_selector("#link.live")
    page.wait_for_timeout(500)
    with served.add() as made:
        made.status("running", 2 * HOUR_MS, "a word of the test")
    page.wait_for_selector(".events li:has-text('a word of the test')", timeout=10_000)


def test_a_page_that_was_read_again_shows_an_event_once(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    page.wait_for_selector("#link.live")
    for number in range(3):
        with page.expect_response("**/api/runs/live"), served.add() as made:
            made.status("running", 2 * HOUR_MS + number, f"word-{number}")
        page.wait_for_selector(f".events li:has-text('word-{number}')")
    page.wait_for_timeout(1000)
    assert [page.locator(f".events li:has-text('word-{number}')").count() for number in range(3)] == [1, 1, 1]


def test_a_run_is_stopped_only_after_the_question(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    page.click("text=Drain and stop…")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    page.click("text=Drain and stop…")
    page.click("text=Let it run")
    assert served.stopped == []
    page.click("text=Drain and stop…")
    page.click("#stop-yes")
    page.wait_for_selector(".state.stopping")
    assert served.stopped == ["live"]


def test_a_stopped_run_shows_the_command_that_goes_on_with_it(served, open_page):
    page = open_page(served.page + VIEWS["over"])
    ready(page, "over")
    assert page.locator(".command").count() == 0, "it reached its target"
    with served.add("done") as made:
        made.run.max_total_micro_usd = 2_000_000
        made.status("stopped", HOUR_MS, "budget")
    page.wait_for_selector("p:has-text('Go on with more money: spotrl resume done --max-total 4')")
    with served.add("done") as made:
        made.status("stopped", HOUR_MS, "asked for by a person")
    page.wait_for_selector("p:has-text('Go on with it: spotrl resume done')")
    assert page.locator(".command").inner_text() == "spotrl resume done"


def test_a_run_in_trouble_raises_an_alert_on_its_open_page_and_in_the_list(served, open_page):
    page, runs = open_page(served.page + VIEWS["run"]), open_page(served.page + VIEWS["list"])
    ready(page, "run")
    ready(runs, "list")
    with served.add() as made:
        made.session.add(TroubleRow(run_id=made.run.id, at_ms=made.run.created_ms + HOUR_MS, text="KeyError: 'up'"))
    page.wait_for_selector("[role=alert]:has-text(\"In trouble: KeyError: 'up'; nothing is bought\")")
    runs.wait_for_selector(".state:has-text('running, in trouble')")


def test_the_keyboard_reaches_every_control_and_moves_in_a_chart(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    ready(page, "run")
    reached = set()
    for _ in range(90):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className || 'other'"))
    assert {
        "home",
        "stop",
        "chart",
        "sheet",
        "enlarge",
        "smoothing",
        "events-filter",
        "events",
        "log",
        "wide",
    } <= reached
    page.focus("figure.chart >> nth=0")
    page.keyboard.press("ArrowRight")
    assert "each evaluation 0.4" in page.locator("figure.chart .reading >> nth=0").inner_text()


def test_the_slider_shows_every_sheet_and_names_a_lost_one(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    now = "#sheet-label + .enlarge"
    page.wait_for_selector(now)
    assert "iteration 6" in page.locator("#sheet-label").inner_text()
    page.wait_for_function(f"document.querySelector('{now} img').naturalWidth == 8")
    page.focus("#sheet")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#sheet-label:has-text('in no store any more')")
    page.keyboard.press("Home")
    page.wait_for_selector(now)
    assert "iteration 0" in page.locator("#sheet-label").inner_text()


def test_the_first_and_the_newest_images_are_side_by_side_and_enlarged_by_a_click(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    page.wait_for_selector("#sheet-before-label:has-text('iteration 0')")
    before, now = (page.locator(f"#{name} + .enlarge").bounding_box() for name in ("sheet-before-label", "sheet-label"))
    assert before["y"] == pytest.approx(now["y"], abs=2)
    assert before["x"] + before["width"] <= now["x"]
    page.click("#sheet-before-label + .enlarge")
    page.wait_for_selector("dialog.large[open] img[alt*='iteration 0']")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.large", state="hidden")
    page.click("#sheet-label + .enlarge")
    page.click("dialog.large >> text=Close")
    page.wait_for_selector("dialog.large", state="hidden")


def test_figures_are_read_every_second_and_their_age_is_shown(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    ready(page, "run")
    for _ in range(3):
        with page.expect_response("**/api/runs/live/state"):
            pass
    page.wait_for_selector(".age:has-text('s old')")
    page.route("**/api/runs/live/state*", lambda route: None)  # the server no longer answers
    page.route("**/api/runs/live?*", lambda route: None)
    page.wait_for_selector(".age.alarm:has-text('these figures are')")


def test_the_contents_lead_to_each_section_and_smoothing_draws_a_mean(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    ready(page, "run")
    targets = [link.get_attribute("href") for link in page.locator(".contents a").all()]
    assert targets == [f"#{heading.get_attribute('id')}" for heading in page.locator("section h2").all()]
    page.click(".contents >> text=Logs")
    assert page.evaluate("document.getElementById('h-logs').getBoundingClientRect().top") < 200
    assert page.locator("li:has-text('smoothed by')").count() == 0
    page.fill("#smoothing", "0.5")
    page.wait_for_selector("li:has-text('reward, smoothed by 0.50')")


def test_a_run_whose_controller_died_is_an_alarm_in_the_open_list(served, open_page):
    with served.add() as made:
        lease = ControllerLease(run_id=made.run.id, epoch=1, holder=this_process(), pid=os.getpid())
        lease.expires_wall_ms = 2**52
        made.session.add(lease)
    page = open_page(served.page)
    page.wait_for_selector("#link.live")
    assert page.locator("strong.alarm").count() == 0
    with served.add() as made:
        made.session.get(ControllerLease, made.run.id).expires_wall_ms = 1  # nothing else is written
    page.wait_for_selector("strong.alarm:has-text('no controller: spotrl resume live')")
    page.click("td >> text=live")
    page.wait_for_selector("[role=alert]:has-text('No controller manages this run')")


def test_a_wrong_token_is_told_and_shows_nothing(served, open_page):
    page = open_page(served.url + "/?token=wrong")
    page.wait_for_selector("h1:has-text('Refused')")
    assert "live" not in page.locator("main").inner_text()


def test_a_page_comes_back_after_the_server_was_away(tmp_path, open_page):
    path, sessions = two_runs(tmp_path)
    with serving(path, sessions) as first:
        page = open_page(first.page + VIEWS["run"])
        ready(page, "run")
        port = int(first.url.rpartition(":")[2])
    page.wait_for_selector("#link.trouble")
    with serving(path, sessions, port) as again:
        with again.add() as made:
            made.status("running", 2 * HOUR_MS, "while it was away")
        page.wait_for_selector(".events li:has-text('while it was away')")
        page.wait_for_selector("#link.live")
    assert page.locator(".events li:has-text('while it was away')").count() == 1


def test_a_page_read_again_before_its_stream_is_back_misses_no_event(tmp_path, open_page):
    path, sessions = two_runs(tmp_path)
    with serving(path, sessions) as first:
        page = open_page(first.page + VIEWS["run"])
        page.wait_for_selector("#link.live")
        page.route("**/api/runs/live/changes*", lambda route: route.abort())  # the open stream stays, a new one fails
        with page.expect_response("**/api/runs/live"), first.add() as made:  # a quick reading: the next comes soon
            made.status("running", 2 * HOUR_MS, "a change")
        with first.add() as made:
            made.trained(8, 2 * HOUR_MS + 1)
        page.wait_for_selector(".events li:has-text('iteration 8')")
        port = int(first.url.rpartition(":")[2])
    page.wait_for_selector("#link.trouble")
    with first.add() as made:
        made.status("running", 2 * HOUR_MS + 2, "while it was away")
    with serving(path, sessions, port):
        with page.expect_response("**/api/runs/live"):
            pass
        page.wait_for_selector(".state.running")
        page.unroute("**/api/runs/live/changes*")
        page.wait_for_selector(".events li:has-text('while it was away')")


def test_a_page_over_a_locked_or_migrating_ledger_is_never_blank_and_comes_back(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    ready(page, "run")
    for trouble in (lambda: locked(served), lambda: older(served)):
        with trouble():
            page.wait_for_selector("#link.trouble:has-text('the ledger cannot be read now')")
            assert page.locator("figure.chart svg").count() >= 3, "what was read before stays"
            fresh = open_page(served.page + VIEWS["run"])
            fresh.wait_for_selector("[role=alert]:has-text('the ledger cannot be read now')")
            assert fresh.locator("h1").inner_text() == "live"
        page.wait_for_selector("#link.live")
        ready(fresh, "run")
        fresh.wait_for_selector("#link.live")


@contextmanager
def older(served):
    """Give the ledger the tables of an older version until the block ends."""
    migrate_back(served, "0004")
    yield
    open_ledger(served.path)


def test_a_run_that_goes_away_is_told_on_its_open_page(served, open_page):
    page = open_page(served.page + VIEWS["run"])
    page.wait_for_selector("#link.live")
    with served.sessions() as session, session.begin():
        find_run(session, "live").name = "gone"
    page.wait_for_selector("#link.trouble:has-text('no run is called live')")
    assert page.locator("figure.chart svg").count() >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_static_pages_fit_their_width_without_a_violation_of_wcag_aa(tmp_path, open_page, width, scheme):
    _, sessions = two_runs(tmp_path)
    with sessions() as session:
        run = find_run(session, "live")
        report = build_report(session, run, run.created_ms + 2 * HOUR_MS)
        compared = compare_runs(session, [run, find_run(session, "done")])
    (tmp_path / "report.html").write_text(render_html(report, lambda path: a_png()))
    (tmp_path / "compare.html").write_text(render_comparison(compared))
    for name in ("report", "compare"):
        page = open_page((tmp_path / f"{name}.html").as_uri(), width, scheme, bypass_csp=True)
        page.evaluate(AXE)
        found = page.evaluate("rules => axe.run({runOnly: rules})", RULES)
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if folder := os.environ.get("SPOTRL_SCREENSHOTS"):
            page.screenshot(path=f"{folder}/static-{name}-{scheme}-{width}.png", full_page=True)


def test_only_wide_tables_of_a_static_report_scroll_sideways_at_400_px(tmp_path, open_page):
    _, sessions = two_runs(tmp_path)
    zone, kind, name = "northamerica-northeast1-b", "a2-ultragpu-16g-with-local-disks", "on-demand-stand-in-" * 3
    with sessions() as session:
        made = MadeLedger(session=session, run=find_run(session, "live"), seq=100_000)
        made.run.max_total_micro_usd = 2_000_000
        node = made.node("spot-9", up=0, end=HOUR_MS, seen=0, zone=zone)
        node.instance_type = kind
        made.preempted(node, HOUR_MS, signal="SIGSTOP", lost_steps=412)
        made.status("stopped", HOUR_MS, "budget")
        report = build_report(session, made.run, made.run.created_ms + 2 * HOUR_MS)
    stood = StandInLine(
        node=name, zone=zone, market="on_demand", hours=1.0, why="no spot", paid_hours=1234.5, micro_usd=10**12
    )
    amounts = dict.fromkeys(("rollout", "a_phase_of_a_long_name_of_its_own"), 10**14)
    costs = replace(report.costs, by_phase=amounts, by_role=amounts, total=2 * 10**14)
    page_file = tmp_path / "report.html"
    page_file.write_text(render_html(replace(report, stand_ins=(stood,), costs=costs), lambda path: a_png()))
    page = open_page(page_file.as_uri(), 400, bypass_csp=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    wide = "[...document.querySelectorAll('[role=region]')].filter(one => one.scrollWidth > one.clientWidth)"
    scrolling = page.evaluate(f"{wide}.map(one => one.getAttribute('aria-label'))")
    assert {"Nodes", "Preemptions", "Stand-ins"} <= set(scrolling)
    page.evaluate(AXE)
    assert page.evaluate("rules => axe.run({runOnly: rules})", RULES)["violations"] == []
