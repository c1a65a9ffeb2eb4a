"""`spotrl ui` over a live run: a real engine on local nodes, the server as users start it, Debian's Chromium.

The screenshots go to `test-results/web/`, which CI keeps.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.decide.facts import OVER
from tests.end_to_end.test_launch import Bench, bench
from tests.engine.fleet import free_port
from tests.launcher.web.test_browser import AXE, CHROMIUM, RULES

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `pip install playwright`")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no browser here: `apt-get install chromium`"),
]

__all__ = ["bench"]  # the fixture

PICTURES = Path(__file__).parents[2] / "test-results" / "web"
PYTHON = sys.executable
"""The real one: `forked_engine` puts another in its place."""
PATIENCE_MS = 120_000
"""Milliseconds that a busy computer may take for one step of the test."""


@contextmanager
def served(bench: Bench, port: int) -> Iterator[str]:
    """Serve the bench's ledger. Yield the printed address."""
    command = [PYTHON, "-m", "launcher.cli.main", "ui", "--port", str(port)]
    server = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env=bench.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.send_signal(signal.SIGINT)
        _, told = server.communicate(timeout=60)
    assert "Traceback" not in told


def looked_at(page: Any, name: str, width: int = 1280) -> None:
    """Keep a picture, and hold the view against WCAG AA and its width."""
    page.evaluate(AXE)
    found = page.evaluate("rules => axe.run({runOnly: rules})", RULES)
    assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=str(PICTURES / f"{name}.png"), full_page=True)


def test_a_live_run_is_watched_and_stopped_in_the_browser(bench: Bench, forked_engine: None) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    port = free_port()
    # The page is under test, so iterations are small: a computer of two cores also runs a browser.
    small = ("--exploration", "none", "--set", "algorithm.images_per_prompt=2", "--set", "evaluation.prompts=8")
    job = str(bench.folder / bench.job("watched", iterations=2000))
    bench.spotrl_here("launch", job, "--yes", "--detach", *small)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def opened(address: str, width: int = 1280, scheme: str = "light") -> Any:
            look = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "bypass_csp": True}
            page = browser.new_context(**look).new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.goto(address)
            return page

        with served(bench, port) as address:
            page = opened(address)
            page.wait_for_selector("#link.live")
            page.click("td >> text=watched")
            page.wait_for_selector(".events li:has-text('iteration 2')")
            page.wait_for_selector(".inside progress")
            page.wait_for_selector(".stretch.spot")
            page.wait_for_selector("img[src]:visible")
            looked_at(page, "live-run")
        page.wait_for_selector("#link.trouble")
        seen = re.findall(r"iteration (\d+):", page.locator(".events").inner_text())
        bench.wait_for("watched", lambda run: run.iteration > int(seen[0]) + 3)
        with served(bench, port) as again:
            assert again == address
            page.wait_for_selector("#link.live")
            page.wait_for_selector(f".events li:has-text('iteration {int(seen[0]) + 2}:')")
            for view in ("", "&run=watched"):  # test_browser.py looks at all views
                phone = opened(address + view, 400, "dark")
                if view == "&run=watched":
                    phone.wait_for_selector("#h-more")
                looked_at(phone, f"phone-dark-{view.rpartition('=')[2] or 'list'}", 400)
                phone.context.close()
            assert bench.view("watched").status == "running"
            page.click("text=Drain and stop…")
            page.wait_for_selector("dialog[open]")
            page.screenshot(path=str(PICTURES / "stop.png"))
            page.click("#stop-yes")
            page.wait_for_selector(".state.stopped")
            page.wait_for_selector("button.stop:has-text('Drain')", state="detached")
            shown = page.locator(".events li:has(.iteration_done)").all_inner_texts()
            assert len(shown) == len(set(shown))
            looked_at(page, "stopped-run")
        browser.close()
    assert bench.view("watched").status in OVER
    until = time.monotonic() + 60
    while bench.processes() and time.monotonic() < until:  # the controller itself ends one pass later
        time.sleep(0.1)
    assert bench.processes() == []
