"""`make gpu-proof`: parts within their limits, killed in the middle and continued, and what changed is told."""

import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, replace

import psutil
import pytest

from tests.benchmarks.page import PAGE_LINES
from tests.gpu import proof
from tests.gpu.figures import HOLD_VARIABLE, LINES_VARIABLE, NARROW, commit, folded, lines_of, read_lines
from tests.gpu.measure import CHECKS, FAMILIES
from tests.gpu.published import MODELS

SCRIPT = """
import json, os, signal, subprocess, sys, time
file, check, cases, mode = sys.argv[1:]
origin = json.loads(os.environ["ORIGIN"])
lines = [line for line in open(file, errors="replace") if line.endswith("}\\n")] if os.path.exists(file) else []
done = {tuple(line["case"]) for line in map(json.loads, lines) if line.get("check") == check and "case" in line}
for case in cases.split():
    if (case,) in done:
        continue
    with open(file, "a") as out:
        out.write(json.dumps({"check": check, "case": [case], "value": {"s": 1.0}, **origin}) + "\\n")
    if mode == "killed" and not done:
        with open(file, "a") as out:
            out.write('{"check": "torn')
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in ("slow", "stuck") and not done:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a kernel that does not return
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
        time.sleep(600)
"""


@dataclass(frozen=True, kw_only=True)
class Scripted(proof.Part):
    """A part that keeps two cases. `mode`: killed after the first case in its first run, or slow, stuck, or whole."""

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
    """Put scripted parts in the place of the real ones. Their limit is 240 s, or 3 s for a slow one.

    A slow and a stuck part start a child, and hang after the first case of their first run.
    """
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


def test_a_part_that_hangs_ends_at_its_limit_with_its_children(lines, monkeypatch):
    parts(monkeypatch, first="slow", second="whole")
    assert proof.run_parts(NARROW, is_narrow=True, seconds=600) == ["first"]
    (error,) = [line["error"] for line in lines_of("first", NARROW) if "error" in line]
    problem, child = error.splitlines()
    assert problem == "not finished after 3 s"
    assert not is_running(int(child.removeprefix("child ")))
    assert cases_of("second") == ["one", "two"], "the next part runs"


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def begun(folder, *arguments):
    """Start the proof in a process of its own, with the parts of this one."""
    command = ["--narrow", "--to", str(folder), *arguments]

    def run():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
        sys.exit(proof.main(command))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def wait_for(condition, seconds=240.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not after {seconds:.0f} s"
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_a_killed_proof_leaves_no_part_running_and_goes_on(lines, tmp_path, monkeypatch, number, code):
    parts(monkeypatch, first="stuck", second="whole")
    process = begun(tmp_path)
    wait_for(lambda: cases_of("first") == ["one"])
    (part,) = psutil.Process(process.pid).children()
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code
    wait_for(lambda: not is_running(part.pid), 30)
    if number != signal.SIGKILL:
        assert json.loads((tmp_path / proof.RAW).read_text())["first"]["one"] == {"s": 1.0}
        assert "| first | one | s 1 |" in (tmp_path / proof.PAGE).read_text()
    again = begun(tmp_path)
    again.join(240)
    assert again.exitcode == 0
    assert cases_of("first") == cases_of("second") == ["one", "two"]
    assert "done_s" in json.loads((tmp_path / proof.RAW).read_text())["first"]


@pytest.mark.parametrize("name", [proof.RAW, proof.PAGE])
def test_a_kill_between_write_and_rename_leaves_the_old_file_and_the_next_call_replaces_it(
    lines, tmp_path, monkeypatch, name
):
    parts(monkeypatch, first="whole")
    (tmp_path / proof.RAW).write_text('{"not_run": []}')
    (tmp_path / proof.PAGE).write_text("the old page")
    old, rename = (tmp_path / name).read_text(), os.replace

    def replace_or_die(source, target):
        if target.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    with monkeypatch.context() as planted:
        planted.setattr(os, "replace", replace_or_die)
        killed = begun(tmp_path)
        killed.join(240)
    assert killed.exitcode == -9
    assert (tmp_path / name).read_text() == old
    assert cases_of("first") == ["one", "two"]
    again = begun(tmp_path)
    again.join(240)
    assert again.exitcode == 0
    assert json.loads((tmp_path / proof.RAW).read_text())["first"]["two"] == {"s": 1.0}
    assert "| first | two | s 1 |" in (tmp_path / proof.PAGE).read_text()
    assert cases_of("first") == ["one", "two"], "a measured part is not run again"


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe\x00", b"[1]", b'{"first": 3, "not_run": []}', b""])
def test_damaged_raw_figures_are_put_aside_and_made_again_from_the_lines(lines, tmp_path, monkeypatch, damage):
    parts(monkeypatch, first="whole")
    (tmp_path / proof.RAW).write_bytes(damage)
    lines.write_bytes(b'3\n{"check": "first"}\n{"x": 1}\n\xff\n' + b'{"check": "first", "case": ["one"\n')
    assert read_lines(lines) == []
    assert proof.main(["--narrow", "--to", str(tmp_path)]) == 0
    raw = json.loads((tmp_path / proof.RAW).read_text())
    assert raw["first"]["one"] == raw["first"]["two"] == {"s": 1.0}
    assert raw["not_run"] == []
    aside = tmp_path / f"{proof.RAW}.unreadable"
    assert aside.exists() == (not damage.startswith(b'{"first"'))
    assert not aside.exists() or aside.read_bytes() == damage


def test_parts_without_time_are_missing_and_run_by_the_next_call(lines, tmp_path, monkeypatch, capfd):
    parts(monkeypatch, first="slow", second="whole")
    monkeypatch.setattr(proof, "LEAST_S", 1.0)
    assert proof.main(["--narrow", "--to", str(tmp_path), "--seconds", "2"]) == 1
    assert "missing: second; call the command again" in capfd.readouterr().out
    assert json.loads((tmp_path / proof.RAW).read_text())["not_run"] == ["second"]
    assert proof.main(["--narrow", "--to", str(tmp_path)]) == 0
    assert cases_of("first") == cases_of("second") == ["one", "two"]


def test_no_part_begins_without_time(lines, monkeypatch):
    parts(monkeypatch, first="whole", second="whole")
    assert proof.run_parts(NARROW, is_narrow=True, seconds=0.0) == ["first", "second"]
    assert not lines.exists()


def test_lines_of_another_commit_or_device_do_not_count(lines):
    for origin in ({"commit": "other", **NARROW}, {"commit": commit(), "device": "NVIDIA H100"}):
        with lines.open("a") as out:
            out.write(json.dumps({"check": "part", "case": ["one"], "value": 1, **origin}) + "\n")
    assert lines_of("part", NARROW) == []


def raw_of(seconds, commit="new", device="NVIDIA H100", **more):
    case = {"rows 1": {"s_a_row": seconds, "runs": 3, "max_s": 9 * seconds}} if seconds else {}
    return {"step": {"device": device, "commit": commit, **case, **more}}


def test_a_figure_that_changed_by_more_than_a_tenth_is_told():
    def told(before, now):
        return list(proof.changes(proof.with_previous(now, before)))

    old = raw_of(0.78, "old")
    line = "step, rows 1, s_a_row: 0.78 before, now 0.41 (-47%)"
    assert told(old, raw_of(0.41)) == [line]
    assert told(old, raw_of(0.80)) == []
    assert told(raw_of(0.78, "old", "NVIDIA H200"), raw_of(0.41)) == []
    assert told({}, raw_of(0.41)) == []
    unfinished = proof.with_previous(raw_of(0.41), old)
    assert told(unfinished, raw_of(0.41, done_s=9.0)) == [line], "also by the call that finishes the part"
    failed = proof.with_previous(raw_of(None, "failed"), old)
    assert told(failed, raw_of(0.41)) == [line], "also if other code measured nothing in between"
    assert "previous" not in proof.with_previous(raw_of(0.41), failed)["step"]["previous"]


def test_the_parts_fit_into_25_minutes_in_their_order_and_the_first_answers_in_three():
    by_name = {check.name: check for check in CHECKS}
    assert all(part.tests or part.name in by_name for part in proof.PARTS)
    assert all(part.gib >= by_name[part.name].gib for part in proof.PARTS if not part.tests)
    assert proof.TOTAL_S == 25 * 60
    assert proof.PARTS[0].seconds <= 180
    assert sum(part.seconds for part in proof.PARTS[:6] if part.gpus == 1) <= proof.TOTAL_S


def test_every_family_of_the_published_models_is_a_part_by_its_row_alone():
    rows = [name for name, model in MODELS.items() if model.seconds]
    assert [check.name for check in FAMILIES] == [f"{name} passes and steps" for name in rows]
    assert all(check in CHECKS for check in FAMILIES)
    assert {check.name for check in FAMILIES if check.gib <= 40} <= {part.name for part in proof.PARTS}


def test_the_page_says_that_no_figure_is_of_this_code_until_a_gpu_measured_one():
    page = proof.page({})
    assert "No figure is of this code: no GPU ran it." in page
    assert page.count("| not run |") == len(proof.PARTS)
    name = proof.PARTS[0].name
    figures = {"date": "2026-12-01", "commit": "abc", "torch": "2.13", "done_s": 12.3, "rows 1": {"s_a_row": 0.41}}
    page = proof.page({name: {**figures, **NARROW}})
    assert "No figure is of this code: no GPU ran it." in page
    assert "narrow models on the CPU" in page
    previous = {"device": "NVIDIA H100", "rows 1": {"s_a_row": 0.78}}
    page = proof.page({name: {**figures, "device": "NVIDIA H100", "previous": previous}})
    assert "No figure is of this code" not in page
    assert "2026-12-01, commit abc, NVIDIA H100, torch 2.13." in page
    assert f"| {name} | rows 1 | s_a_row 0.41 |" in page
    assert "whole, 12 s" in page
    assert "0.78 before, now 0.41 (-47%)" in page


def test_a_page_of_many_figures_has_at_most_80_lines_and_counts_the_others():
    case = {"s_a_row": 0.41, "peak_gib": 60.0, "mfu": 0.3}
    figures = {"device": "NVIDIA H100", "done_s": 1.0} | {f"images {number}": case for number in range(12)}
    page = proof.page({part.name: figures for part in proof.PARTS})
    shown = page.count("| s_a_row 0.41, peak_gib 60, mfu 0.3 |")
    assert 30 < shown < 12 * len(proof.PARTS)
    assert f"with {12 * len(proof.PARTS) - shown} cases more" in page
    assert len(page.splitlines()) <= PAGE_LINES


def test_the_committed_page_is_as_its_program_writes_it():
    assert proof.page(proof.read_raw(proof.RESULTS / proof.RAW)) == (proof.RESULTS / proof.PAGE).read_text("utf-8")


REAL = {part.name: part for part in proof.PARTS if not part.tests}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("name", REAL)
def test_a_real_part_killed_after_its_first_figure_goes_on(lines, tmp_path, monkeypatch, name, number):
    """On the CPU, with narrow models. The first figure takes three minutes at most."""
    monkeypatch.setattr(proof, "PARTS", (replace(REAL[name], seconds=600.0),))  # the computer may be busy
    monkeypatch.setenv(HOLD_VARIABLE, "1")
    process = begun(tmp_path)
    wait_for(lambda: cases_of_real(name), 180)
    monkeypatch.delenv(HOLD_VARIABLE)
    (part,) = psutil.Process(process.pid).children()
    os.kill(process.pid, number)
    process.join(60)
    wait_for(lambda: not is_running(part.pid), 30)
    before = cases_of_real(name)
    assert not any("done_s" in line for line in lines_of(name, NARROW)), "killed in the middle"
    again = begun(tmp_path)
    again.join(600)
    assert again.exitcode == 0
    after = cases_of_real(name)
    assert len(before) == 1
    assert after[:1] == before
    assert len(after) > 1
    raw = json.loads((tmp_path / proof.RAW).read_text())
    assert "done_s" in raw[name]
    assert raw["not_run"] == []


def cases_of_real(name):
    return [tuple(line["case"]) for line in lines_of(name, NARROW) if "case" in line]
