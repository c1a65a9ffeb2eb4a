"""A run with a paid judge from its launch to a larger budget of the judge, and where the judge's key is not."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.test_launch import Bench, bench  # noqa: F401  a fixture
from tests.engine.judge_server import JudgeServer

KEY = "sk-planted-" + "7" * 20

REWARD = """{{name: vlm, vlm: {{url: '{url}', model: m, key: JUDGE_KEY, usd_per_million_input: 5,
  usd_per_million_output: 10, most_input_tokens: 1000, max_usd: 1}}}}
secrets: [JUDGE_KEY]"""

MICRO_USD = 5500
"""Price of a call: 1,000 tokens for $5 and 50 tokens for $10 a million."""


@contextmanager
def process_list() -> Iterator[set[str]]:
    """Collect the command lines of all processes until the block ends. `ps` shows them to every user."""
    found: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            for process in psutil.process_iter():
                try:
                    found.update(process.cmdline())
                except psutil.Error:
                    continue

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield found
    finally:
        ended.set()
        looker.join()


def files_with_the_key(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.long
def test_a_run_goes_on_with_more_money_for_its_judge_and_keeps_the_key(bench: Bench) -> None:  # noqa: F811
    bench.environment["JUDGE_KEY"] = KEY
    with JudgeServer() as server, process_list() as commands:
        job = bench.job("judged", iterations=40, reward=REWARD.format(url=server.url))
        said = bench.spotrl("launch", job, "--yes", "--html", "report.html", exit_code=7)
        assert "judged stopped (budget: the judges' money is used up: the next calls may cost" in " ".join(said.split())
        made, first = len(server.sizes), bench.view("judged")
        assert MICRO_USD * made <= 1_000_000
        (command,) = re.findall(r"Go on with more money: spotrl (resume judged --max-judges 2 --max-total 101)", said)
        said += bench.spotrl(*command.split())
        last = bench.wait_for("judged", lambda run: run.iteration > first.iteration and run.status == "stopped", 120)
        assert made + 50 < len(server.sizes) <= 2_000_000 // MICRO_USD, "the money spent before counts"
        assert last.resume_with == "spotrl resume judged --max-judges 4 --max-total 103"
        said += bench.spotrl("status", "judged") + bench.spotrl("report", "judged") + bench.spotrl("events", "judged")
        said += bench.spotrl("logs", "judged")
    assert {head["Authorization"] for head in server.heads} == {f"Bearer {KEY}"}
    assert any("launcher.cli.main" in command for command in commands)
    assert not [command for command in commands if KEY in command]
    assert not files_with_the_key(bench.folder)
    assert (bench.folder / "report.html").exists()
    assert KEY not in said
