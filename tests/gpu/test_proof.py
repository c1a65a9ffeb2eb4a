"""`make gpu-proof`: parts within their limits, killed in the middle and continued, and what changed is told."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from tests.benchmarks.page import ROOT
from tests.gpu import proof
from tests.gpu.figures import LINES_VARIABLE, NARROW, commit, folded, lines_of
from tests.gpu.measure import CHECKS

SCRIPT = """
import json, os, signal, sys, time
file, check, cases, mode = sys.argv[1:]
origin = json.loads(os.environ["ORIGIN"])
lines = [json.loads(line) for line in open(file) if line.endswith("}\\n")] if os.path.exists(file) else []
done = {tuple(line["case"]) for line in lines if line["check"] == check and "case" in line}
for case in cases.split():
    if (case,) in done:
        continue
    with open(file, "a") as out:
        out.write(json.dumps({"check": check, "case": [case], "value": {"s": 1.0}, **origin}) + "\\n")
    if mode == "killed" and not done:
        with open(file, "a") as out:
            out.write('{"check": "torn')
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "slow" and not done:
        time.sleep(600)
"""


@dataclass(frozen=True, kw_only=True)
class Scripted(proof.Part):
    """A part that keeps two cases. `mode`: killed after the first case in its first run, or slow, or nothing."""

    mode: str = "whole"

    def command(self, *, is_narrow):
        return [sys.executable, "-c", SCRIPT, os.environ[LINES_VARIABLE], self.name, "one two", self.mode]


@pytest.fixture
def lines(tmp_path, monkeypatch):
    file = tmp_path / "lines.jsonl"
    monkeypatch.setenv(LINES_VARIABLE, str(file))
    monkeypatch.setenv("ORIGIN", json.dumps({"commit": commit(), **NARROW}))
    monkeypatch.setattr(proof, "LEAST_S", 0.5)
    return file


def parts(monkeypatch, **modes):
    """Put scripted parts in the place of the real ones. Their limit is 240 s, or 3 s for a slow one."""
    made = tuple(
        Scripted(name=name, answers="", seconds=3.0 if mode == "slow" else 240.0, mode=mode)
        for name, mode in modes.items()
    )
    monkeypatch.setattr(proof, "PARTS", made)


def cases_of(name):
    return [line["case"][0] for line in lines_of(name, NARROW) if "case" in line]


def test_a_part_that_was_killed_goes_on_with_the_cases_it_lacks(lines, monkeypatch):
    parts(monkeypatch, first="killed", second="whole")
    assert proof.run_parts(NARROW, is_narrow=True, seconds=600) == ["first"]
    assert cases_of("first") == ["one"]
    assert cases_of("second") == ["one", "two"]
    assert any("error" in line for line in lines_of("first", NARROW))
    assert proof.run_parts(NARROW, is_narrow=True, seconds=600) == []
    assert cases_of("first") == ["one", "two"], "no case is measured twice"
    assert cases_of("second") == ["one", "two"], "a whole part is not run again"
    raw = folded(lines_of("first", NARROW), {})["first"]
    assert set(raw) >= {"one", "two", "done_s"}
    assert "error" not in raw


def test_a_part_ends_at_its_limit_and_the_next_one_runs(lines, monkeypatch):
    parts(monkeypatch, first="slow", second="whole")
    assert proof.run_parts(NARROW, is_narrow=True, seconds=600) == ["first"]
    assert [line["error"] for line in lines_of("first", NARROW) if "error" in line] == ["not finished after 3 s"]
    assert cases_of("second") == ["one", "two"]


def test_no_part_begins_without_time(lines, monkeypatch):
    parts(monkeypatch, first="whole", second="whole")
    assert proof.run_parts(NARROW, is_narrow=True, seconds=0.0) == ["first", "second"]
    assert not lines.exists()


def test_lines_of_another_commit_or_device_do_not_count(lines):
    for origin in ({"commit": "other", **NARROW}, {"commit": commit(), "device": "NVIDIA H100"}):
        with lines.open("a") as out:
            out.write(json.dumps({"check": "part", "case": ["one"], "value": 1, **origin}) + "\n")
    assert lines_of("part", NARROW) == []


def test_a_figure_that_changed_by_more_than_a_tenth_is_told():
    def raw(seconds, device="NVIDIA H100"):
        return {"step": {"device": device, "rows 1": {"s_a_row": seconds, "runs": 3, "max_s": 9 * seconds}}}

    assert list(proof.changes(raw(0.78), raw(0.41))) == ["step, rows 1, s_a_row: 0.78 before, now 0.41 (-47%)"]
    assert list(proof.changes(raw(0.78), raw(0.80))) == []
    assert list(proof.changes(raw(0.78, "NVIDIA H200"), raw(0.41))) == []
    assert list(proof.changes({}, raw(0.41))) == []


def test_the_parts_fit_into_25_minutes_in_their_order_and_the_first_answers_in_three():
    by_name = {check.name: check for check in CHECKS}
    assert all(part.tests or part.name in by_name for part in proof.PARTS)
    assert all(part.gib >= by_name[part.name].gib for part in proof.PARTS if not part.tests)
    assert proof.TOTAL_S == 25 * 60
    assert proof.PARTS[0].seconds <= 180
    assert sum(part.seconds for part in proof.PARTS[:6] if part.gpus == 1) <= proof.TOTAL_S


def test_the_page_says_that_no_figure_is_of_this_code_until_one_is(tmp_path):
    proof.write_page(tmp_path, {}, [])
    page = (tmp_path / proof.PAGE).read_text()
    assert "No figure is of this code" in page
    assert page.count("| not run |") == len(proof.PARTS)
    name = proof.PARTS[0].name
    raw = {name: {"device": "NVIDIA H100", "done_s": 12.3, "rows 1": {"s_a_row": 0.41}}}
    proof.write_page(tmp_path, raw, ["a figure changed"])
    page = (tmp_path / proof.PAGE).read_text()
    assert "No figure is of this code" not in page
    assert "| rows 1, s_a_row | 0.41 |" in page
    assert "whole, 12 s" in page
    assert "a figure changed" in page


def test_the_committed_page_is_as_its_program_writes_it(tmp_path):
    file = proof.RESULTS / proof.RAW
    proof.write_page(tmp_path, json.loads(file.read_text()) if file.exists() else {}, [])
    written, committed = ((folder / proof.PAGE).read_text("utf-8") for folder in (tmp_path, proof.RESULTS))
    assert written == committed


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [part.name for part in proof.PARTS if not part.tests])
def test_a_real_part_killed_after_its_first_figure_goes_on(lines, name):
    """On the CPU, with narrow models."""
    command = [sys.executable, "-m", "tests.gpu.measure", name, "--narrow"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 240
    while not cases_of_real(name) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = cases_of_real(name)
    assert before
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = cases_of_real(name)
    assert after[: len(before)] == before
    assert len(after) > len(before) or process.returncode == 0


def cases_of_real(name):
    return [tuple(line["case"]) for line in lines_of(name, NARROW) if "case" in line]
