"""ui: how soon does `spotrl ui` show 200 runs with 100,000 events, and how soon a new event?

    python -m tests.benchmarks.ui --json

A ledger of 200 runs is made: 190 are over, 10 go on, and one of these has 20,000 of the 100,000 engine events. `spotrl
ui` serves it as a process of its own, and Debian's Chromium opens it. Each figure is the slowest of the repetitions.
Needs chromium and playwright.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright
from sqlalchemy.orm import Session, sessionmaker

from engine.events import Evaluated, IterationDone, NodeUsage, ProgressEvent
from launcher.ledger.models import NodeEvent
from launcher.ledger.store import append_status, find_run, open_ledger, writing
from tests.benchmarks.page import load_now, publish, spread
from tests.launcher.made_ledger import JOB, MINUTE_MS, START_MS, MadeLedger, a_run

RUNS, EVENTS, LARGEST, LIVE = 200, 100_000, 20_000, 10
REPETITIONS = 5
PAINT_LIMIT_MS, VISIBLE_LIMIT_S, MEMORY_LIMIT_MB = 500.0, 1.0, 200.0


def event_of(number: int, made: MadeLedger) -> ProgressEvent:
    """Return the kinds of a real run in about their shares: two usage windows for a batch, an evaluation for three."""
    iteration = number // 4
    if number % 4 == 0:
        return IterationDone(
            iteration=iteration,
            reward_mean=0.5,
            reward_std=0.1,
            group_std_mean=0.1,
            explored=12,
            manifest_digest="0" * 64,
            phase_ms={"rollout": 900, "training": 800},
            wall_seconds=2.0,
            health={"kl": 0.001 * iteration, "clip_share": 0.02, "gradient_norm": 0.3, "zero_variance_share": 0.1},
        )
    if number % 12 == 1:
        return Evaluated(iteration=iteration, metrics={"exact_match": min(0.99, iteration / 900)}, prompts=96)
    node = list(made.nodes)[number % len(made.nodes)]
    at = number * 10_000
    return NodeUsage(node=node, from_ms=at, to_ms=at + 9_000, phase_ms={"rollout": 5_000, "exploration": 3_000})


def make_ledger(path: Path) -> sessionmaker[Session]:
    """Make the ledger of 200 runs."""
    sessions = open_ledger(path)
    each = (EVENTS - LARGEST) // (RUNS - 1)
    for number in range(RUNS):
        is_live = number >= RUNS - LIVE
        with sessions() as session, session.begin():
            made = a_run(session, f"run-{number:03}", job={**JOB, "iterations": 10_000}, factor=1.0)
            made.status("running", 0)
            end = None if is_live else 60 * MINUTE_MS
            nodes = [made.node(slot, up=0, end=end, seen=MINUTE_MS) for slot in ("trainer", "spot-0", "spot-1")]
            for event in range(LARGEST if number == RUNS - 1 else each):
                made.record(event_of(event, made), event * 10_000)
            if not is_live:
                made.status("finished", 60 * MINUTE_MS, "target")
                ended = [NodeEvent(node_id=node.id, at_ms=START_MS + 60 * MINUTE_MS, kind="released") for node in nodes]
                session.add_all(ended)
    return sessions


def add_event(sessions: sessionmaker[Session], run: str, text: str) -> float:
    """Write one event. Return the moment after the commit (monotonic seconds)."""
    with writing(sessions) as session:
        found = find_run(session, run)
        append_status(session, found, "running", text, found.created_ms + 10**9)
    return time.monotonic()


def first_paint_ms(page: Page, url: str, shown: str) -> float:
    """Open a page in a new tab and return the milliseconds from the request until `shown` is painted."""
    begun = time.monotonic()
    page.goto(url, wait_until="commit")
    page.wait_for_selector(shown)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return (time.monotonic() - begun) * 1000


def measure(folder: Path) -> dict[str, Any]:
    sessions = make_ledger(folder / "ledger.sqlite")
    environ = {**os.environ, "SPOTRL_HOME": str(folder)}
    command = [sys.executable, "-P", "-m", "launcher.cli.main", "ui"]
    server = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        lists, pages, visible = [], [], []
        largest = f"run-{RUNS - 1:03}"
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for _ in range(REPETITIONS):
                page = browser.new_context().new_page()
                lists.append(first_paint_ms(page, url, f"tbody tr:nth-child({RUNS})"))
                page.context.close()
                page = browser.new_context().new_page()
                pages.append(first_paint_ms(page, f"{url}#/run/{largest}", "figure.chart svg"))
                page.context.close()
            page = browser.new_context().new_page()
            first_paint_ms(page, f"{url}#/run/{largest}", "figure.chart svg")
            page.wait_for_timeout(1000)
            for number in range(REPETITIONS):
                wrote = add_event(sessions, largest, f"word-{number}")
                page.wait_for_selector(f".events li:has-text('word-{number}')")
                visible.append(time.monotonic() - wrote)
                page.wait_for_timeout(3000)
            browser.close()
        memory = psutil.Process(server.pid).memory_info().rss / 1e6
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=10)
    return {"lists": lists, "pages": pages, "visible": visible, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", required=True)
    parser.parse_args()
    load1 = load_now()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    figures = {
        "first_paint_ms": round(max(found["lists"])),
        "run_page_ms": round(max(found["pages"])),
        "event_visible_s": round(max(found["visible"]), 3),
        "server_mb": round(found["memory"], 1),
    }
    rows = [
        {
            "figure": "list of 200 runs painted, ms",
            "median (range)": spread(found["lists"]),
            "limit": PAINT_LIMIT_MS,
            "kept": figures["first_paint_ms"] <= PAINT_LIMIT_MS,
        },
        {
            "figure": f"page of the run with {LARGEST} events painted, ms",
            "median (range)": spread(found["pages"]),
            "limit": "none set",
            "kept": "",
        },
        {
            "figure": "a new event on that page, s after its commit",
            "median (range)": spread(found["visible"]),
            "limit": VISIBLE_LIMIT_S,
            "kept": figures["event_visible_s"] <= VISIBLE_LIMIT_S,
        },
        {
            "figure": "memory of the server afterwards, MB",
            "median (range)": f"{statistics.median([found['memory']]):.1f}",
            "limit": MEMORY_LIMIT_MB,
            "kept": figures["server_mb"] <= MEMORY_LIMIT_MB,
        },
    ]
    publish(
        "ui",
        question="how soon does `spotrl ui` show 200 runs with 100,000 events, and how soon a new event?",
        command="python -m tests.benchmarks.ui --json",
        result=figures,
        runs=REPETITIONS,
        seeds=[],
        load1=load1,
        rows=rows,
        text=(
            "Measured: `spotrl ui` as a process of its own, Debian's Chromium, a new browser context for each page. "
            "The headline figures are the slowest of the repetitions. The clock runs from the request until the second "
            "frame after the last row, or the first chart, is in the page.\n\n## What it does not show\n\n"
            "The events are made, with the kinds of a real run in about their shares. The slowdown of a trainer by an "
            "open page was not measured. A page waits ten times as long as its last reading took before it reads "
            "again, so it takes at most a tenth of one core."
        ),
    )


if __name__ == "__main__":
    main()
