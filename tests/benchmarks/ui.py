"""ui: how soon does `spotrl ui` show 200 runs with 100,000 events, and what does an open page cost a trainer?

    python -m tests.benchmarks.ui --json

A ledger of 200 runs is made: 190 are over, 10 go on, and one of these has 20,000 of the 100,000 engine events. `spotrl
ui` serves it as a process of its own, and Debian's Chromium opens it. The clock of the first paint runs from the
request until the second frame after the first 50 rows are in the page, or the title of a run. Needs chromium and
playwright.

For the slowdown, a process trains: forwards and backwards of a small network, 50 updates a lap. A page of a live run
with 45 iterations is open in half of the blocks, in turns, while an event a second is added in all blocks. The pairs
of neighbouring blocks give a mean ratio with a 95 % interval by Student's t.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import Browser, Page, sync_playwright
from sqlalchemy.orm import Session, sessionmaker

from engine.events import Evaluated, IterationDone, NodeUsage, ProgressEvent
from launcher.ledger.models import NodeEvent
from launcher.ledger.store import append_status, find_run, open_ledger, writing
from launcher.report.comparison import T_975
from launcher.runs.run_list import COUNT
from tests.benchmarks.page import load_now, publish, spread
from tests.launcher.made_ledger import JOB, MINUTE_MS, START_MS, MadeLedger, a_run

RUNS, EVENTS, LARGEST, LIVE = 200, 100_000, 20_000, 10
USUAL, USUAL_EVENTS = f"run-{RUNS - 2:03}", 45 * 4
"""A live run with as many iterations as the quickstart."""

REPETITIONS = 5
PAIRS, BLOCK_S = 100, 2.0
PAINT_LIMIT_MS, VISIBLE_LIMIT_S, MEMORY_LIMIT_MB, SLOWDOWN_LIMIT = 500.0, 1.0, 200.0, 0.01
AGE_LIMIT_S, AGES, AGE_GAP_MS = 2.0, 200, 150
"""The age of the figures at the top of a page is looked at so many times, with so many ms between."""

TRAIN = """
import sys, time, torch
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
optimiser, images = torch.optim.AdamW(net.parameters()), torch.randn(64, 256)
while True:
    for _ in range(50):
        optimiser.zero_grad()
        (net(images) - images).square().mean().backward()
        optimiser.step()
    print(time.monotonic(), flush=True)
"""
"""A trainer whose laps take the same work. It prints the moment of the end of each lap."""


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
    each = (EVENTS - LARGEST - USUAL_EVENTS) // (RUNS - 2)
    for number in range(RUNS):
        is_live = number >= RUNS - LIVE
        count = {RUNS - 1: LARGEST, RUNS - 2: USUAL_EVENTS}.get(number, each)
        with sessions() as session, session.begin():
            made = a_run(session, f"run-{number:03}", job={**JOB, "iterations": 10_000}, factor=1.0)
            made.status("running", 0)
            end = None if is_live else 60 * MINUTE_MS
            nodes = [made.node(slot, up=0, end=end, seen=MINUTE_MS) for slot in ("trainer", "spot-0", "spot-1")]
            for event in range(count):
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


def paint_ms(browser: Browser, url: str, shown: str, then: str = "") -> tuple[float, float]:
    """Open a page in a new context. Return the milliseconds until `shown` is painted, and until `then` is."""
    page = browser.new_context().new_page()
    page.set_default_timeout(120_000)
    begun = time.monotonic()
    page.goto(url, wait_until="commit")
    first = painted(page, shown, begun)
    last = painted(page, then, begun) if then else first
    page.context.close()
    return first, last


def painted(page: Page, shown: str, begun: float) -> float:
    page.wait_for_selector(shown)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return (time.monotonic() - begun) * 1000


class Server:
    """`spotrl ui` as a process. `cpu_ms`: milliseconds of processor time since its start."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url, self._process = url, process

    def cpu_ms(self) -> float:
        used = self._process.cpu_times()
        return float(used.user + used.system) * 1000

    def megabytes(self) -> float:
        return float(self._process.memory_info().rss / 1e6)

    def answer_ms(self, path: str) -> tuple[float, float]:
        """Return wall and processor milliseconds of one answer."""
        used, begun = self.cpu_ms(), time.monotonic()
        httpx.get(path, timeout=120).raise_for_status()
        return (time.monotonic() - begun) * 1000, self.cpu_ms() - used


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "launcher.cli.main", "ui"]
    environ = {**os.environ, "SPOTRL_HOME": str(folder)}
    server = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield Server(server.stdout.readline().strip(), psutil.Process(server.pid))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=10)


@contextmanager
def training() -> Iterator[list[float]]:
    """Train in a process of its own. The list grows by the moment of the end of each lap."""
    process = subprocess.Popen([sys.executable, "-c", TRAIN], stdout=subprocess.PIPE, text=True)
    moments: list[float] = []
    reader = threading.Thread(target=lambda: moments.extend(float(line) for line in process.stdout or ()))
    reader.start()
    try:
        while len(moments) < 3:
            time.sleep(0.05)
        yield moments
    finally:
        process.kill()
        process.wait()
        reader.join()


def block(sessions: sessionmaker[Session], moments: list[float]) -> float:
    """Return seconds a lap over a block. An event a second is added, as by a controller."""
    begun, first, number = time.monotonic(), len(moments), 0
    while time.monotonic() < begun + BLOCK_S:
        add_event(sessions, USUAL, f"block-{number}")
        number += 1
        time.sleep(1.0)
    laps = moments[first:]
    return (laps[-1] - laps[0]) / (len(laps) - 1)


def figure_ages(browser: Browser, server: Server) -> list[float]:
    """Return ages in seconds of the figures on an open page, beside as many trainers as there are cores.

    An age runs from the request for the figures until the look at the page, so it is an upper bound.
    """
    page = browser.new_context().new_page()
    page.set_default_timeout(120_000)
    with ExitStack() as trainers:
        for _ in range(os.cpu_count() or 1):
            trainers.enter_context(training())
        page.goto(f"{server.url}&run={USUAL}")
        page.wait_for_selector("figure.chart svg")
        ages = []
        for _ in range(AGES):
            page.wait_for_timeout(AGE_GAP_MS)
            ages.append(
                page.evaluate("performance.now() - Number(document.querySelector('.age').dataset.readAt)") / 1000
            )
    page.context.close()
    return ages


def slowdown(browser: Browser, server: Server, sessions: sessionmaker[Session]) -> dict[str, Any]:
    """Return the mean ratio of seconds a lap with a page to without, its interval, and the server's part of a core."""
    page = browser.new_context().new_page()
    page.set_default_timeout(120_000)
    ratios, used_ms, open_s = [], 0.0, 0.0
    with training() as moments:
        for pair in range(PAIRS):
            laps: dict[bool, float] = {}
            for is_open in (pair % 2 == 0, pair % 2 == 1):
                page.goto(f"{server.url}&run={USUAL}" if is_open else "about:blank")
                if is_open:
                    page.wait_for_selector("figure.chart svg")
                before, begun = server.cpu_ms(), time.monotonic()
                laps[is_open] = block(sessions, moments)
                if is_open:
                    used_ms, open_s = used_ms + server.cpu_ms() - before, open_s + time.monotonic() - begun
            ratios.append(log(laps[True] / laps[False]))
    page.context.close()
    half = T_975[min(PAIRS - 1, len(T_975)) - 1] * statistics.stdev(ratios) / sqrt(PAIRS)
    middle = statistics.mean(ratios)
    low, mean, high = (exp(value) - 1 for value in (middle - half, middle, middle + half))
    return {"low": low, "mean": mean, "high": high, "server_core": used_ms / 1000 / open_s}


def measure(folder: Path) -> dict[str, Any]:
    sessions = make_ledger(folder / "ledger.sqlite")
    largest = f"run-{RUNS - 1:03}"
    found: dict[str, Any] = {
        name: [] for name in ("empty", "lists", "titles", "pages", "usual", "visible", "list", "page")
    }
    with serving(folder) as server, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(REPETITIONS):
            found["empty"].append(paint_ms(browser, server.url.partition("?")[0], "h1")[0])
            found["lists"].append(paint_ms(browser, server.url, f"tbody tr:nth-child({COUNT})")[0])
            title, charts = paint_ms(browser, f"{server.url}&run={largest}", "p.verdict", "figure.chart svg")
            found["titles"].append(title)
            found["pages"].append(charts)
            usual = paint_ms(browser, f"{server.url}&run={USUAL}", "p.verdict", "figure.chart svg")
            found["usual"].append(usual[1])
            found["list"].append(server.answer_ms(server.url))
            found["page"].append(server.answer_ms(server.url.replace("/?", f"/api/runs/{largest}?")))
        page = browser.new_context().new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{server.url}&run={USUAL}")
        page.wait_for_selector("#link.live")
        page.wait_for_timeout(1000)
        for number in range(REPETITIONS):
            wrote = add_event(sessions, USUAL, f"word-{number}")
            page.wait_for_selector(f".events li:has-text('word-{number}')")
            found["visible"].append(time.monotonic() - wrote)
            page.wait_for_timeout(3000)
        page.context.close()
        found["ages"] = figure_ages(browser, server)
        found["slowdown"] = slowdown(browser, server, sessions)
        browser.close()
        found["memory"] = server.megabytes()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", required=True)
    parser.parse_args()
    load1 = load_now()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    slower = found["slowdown"]
    age = statistics.quantiles(found["ages"], n=20)[-1]
    figures = {
        "empty_paint_ms": round(max(found["empty"])),
        "first_paint_ms": round(max(found["lists"])),
        "run_title_ms": round(max(found["titles"])),
        "run_page_ms": round(max(found["pages"])),
        "event_visible_s": round(max(found["visible"]), 3),
        "figure_age_s": round(age, 3),
        "server_mb": round(found["memory"], 1),
        "list_server_cpu_ms": round(statistics.median(cpu for _, cpu in found["list"])),
        "trainer_slowdown": round(slower["mean"], 4),
        "trainer_slowdown_low": round(slower["low"], 4),
        "trainer_slowdown_high": round(slower["high"], 4),
        "server_share_of_a_core": round(slower["server_core"], 4),
    }
    rows = [
        _row("page without data and scripts painted, ms: what the browser takes", spread(found["empty"])),
        _row(f"first {COUNT} of {RUNS} runs painted, ms", spread(found["lists"]), PAINT_LIMIT_MS, max(found["lists"])),
        _row("title of the largest run painted, ms", spread(found["titles"]), PAINT_LIMIT_MS, max(found["titles"])),
        _row(f"charts of the run with {LARGEST} events painted, ms", spread(found["pages"])),
        _row("charts of a run with 45 iterations painted, ms", spread(found["usual"])),
        _row("answer with the list, ms", spread([wall for wall, _ in found["list"]])),
        _row("answer with the list, ms of the server's processor", spread([cpu for _, cpu in found["list"]])),
        _row("answer with the largest run, ms of the server's processor", spread([cpu for _, cpu in found["page"]])),
        _row(
            "a new event on a page, s after its commit",
            spread(found["visible"]),
            VISIBLE_LIMIT_S,
            max(found["visible"]),
        ),
        _row(
            f"age of the figures at the top of a page beside {os.cpu_count()} trainers, s (limit: 95th percentile)",
            spread(found["ages"]),
            AGE_LIMIT_S,
            age,
        ),
        _row("memory of the server afterwards, MB", f"{found['memory']:.1f}", MEMORY_LIMIT_MB, found["memory"]),
        _row("server's share of a core with a page open", f"{slower['server_core']:.4f}"),
        {
            "figure": f"slowdown of a trainer by an open page, {PAIRS} pairs of blocks",
            "median (range)": f"mean {slower['mean']:.2%} (95 %: {slower['low']:.2%} to {slower['high']:.2%})",
            "limit": SLOWDOWN_LIMIT,
            "kept": _resolved(slower["low"], slower["high"]),
        },
    ]
    publish(
        "ui",
        question=(
            "how soon does `spotrl ui` show 200 runs with 100,000 events, and what does an open page cost a trainer?"
        ),
        command="python -m tests.benchmarks.ui --json",
        result=figures,
        runs=REPETITIONS,
        seeds=[],
        load1=load1,
        rows=rows,
        text=(
            f"Measured: `spotrl ui` as a process of its own, Debian's Chromium, a new browser context for each page. "
            "The headline figures are the slowest of the repetitions. The clock of a first paint runs from the request "
            f"until the second frame after the {COUNT}th row, or the title, is in the page. The server draws both, so "
            "no script runs before. Times by the wall depend on the load; those of the processor do not.\n\n"
            "## What it does not show\n\n"
            "The events are made, with the kinds of a real run in about their shares. The trainer is a small network "
            "on one core of the same computer, which also runs the browser. A page waits 50 times as long as its last "
            "reading took of the server's processor before it reads again. The figures at the top have a "
            "reading of their own, with a pause of a second or more."
        ),
    )


def _resolved(low: float, high: float) -> bool | str:
    """Return whether the limit is kept, or that the interval holds the limit."""
    return "not resolved" if low <= SLOWDOWN_LIMIT < high else high <= SLOWDOWN_LIMIT


def _row(figure: str, value: str, limit: float | None = None, worst: float = 0.0) -> dict[str, Any]:
    return {
        "figure": figure,
        "median (range)": value,
        "limit": "none set" if limit is None else limit,
        "kept": "" if limit is None else worst <= limit,
    }


if __name__ == "__main__":
    main()
