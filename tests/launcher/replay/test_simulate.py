"""`spotrl simulate`: figures of many starts, and what is refused."""

import json
import shutil
from dataclasses import replace
from importlib.resources import files
from statistics import fmean

import pytest

from launcher.cli.main import run
from launcher.decide.launch_history import MoveRules
from launcher.exit_codes import ExitCode
from launcher.ledger.store import open_ledger
from launcher.market.hazard import COLD_START_MS
from launcher.money import HOUR_MS
from launcher.placement.plan import PlacementError
from launcher.replay.simulate import Range, generated_markets, recorded_markets, simulate
from tests.launcher.made_ledger import a_run
from tests.launcher.replay.markets import market, plan, work, zones

JOB = "qwen_image_ocr.yaml"


def a_plan(nodes: int = 2):
    left = work(nodes, 3.0)
    pace = tuple(round(ms) for ms in left.iteration_ms)
    return replace(plan("ab", nodes), iterations=left.iterations, pace_ms=pace)


def test_a_range_holds_the_middle_ninety_percent():
    assert Range.of([float(n) for n in range(1, 41)]) == Range(mean=20.5, low=2.0, high=39.0)


def test_a_calm_recording_gives_the_same_dollars_at_each_start():
    trace = market({"a": [9] * 6 * 40, "b": [9] * 6 * 40})
    markets = recorded_markets(a_plan(), trace, 3, 6 * HOUR_MS)
    found = simulate(a_plan(), MoveRules(), markets, starts=3, deadline_ms=6 * HOUR_MS)
    (ours,) = found.policies
    assert (ours.misses, ours.finished, ours.starts) == (0, 3, 3)
    assert ours.dollars.high - ours.dollars.low < 0.02 * ours.dollars.mean
    assert 3 < ours.hours.mean < 3 + (2 * COLD_START_MS + 400_000) / HOUR_MS


def test_a_bound_on_the_time_runs_fewer_starts_and_says_so():
    markets = generated_markets(a_plan(), zones("ab"), 6 * HOUR_MS)
    found = simulate(a_plan(), MoveRules(), markets, starts=500, deadline_ms=6 * HOUR_MS, seconds=0.0)
    assert (found.starts, found.asked_starts) == (1, 500)


def test_a_trace_of_other_zones_or_too_short_is_refused():
    with pytest.raises(PlacementError, match="the trace has us-test-1c, the plan has us-test-1a, us-test-1b"):
        recorded_markets(a_plan(), market({"c": [1] * 600}), 3, HOUR_MS)
    with pytest.raises(PlacementError, match="2h long, and a run may take 6h"):
        recorded_markets(a_plan(), market({"a": [1] * 12}), 3, 6 * HOUR_MS)


@pytest.fixture
def spotrl(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    for name in (JOB, "qwen_image_ocr_prompts.txt", "qwen_image_ocr_test_prompts.txt", "quickstart.yaml"):
        shutil.copy(str(files("sky_yamls") / name), tmp_path / name)

    def spotrl(job: str, *arguments: str) -> tuple[int, str, str]:
        code = run(["simulate", str(tmp_path / job), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return spotrl


def test_the_command_prints_every_policy_and_writes_a_page(spotrl, tmp_path):
    page = tmp_path / "s.html"
    more = ("--infra", "gcp,aws", "--starts", "2", "--policy", "ours", "--policy", "all-on-demand")
    code, out, _ = spotrl(JOB, *more, "--html", str(page), "--json")
    found = json.loads(out)
    assert code == ExitCode.OK
    assert [result["policy"] for result in found["policies"]] == ["ours", "all-on-demand"]
    assert found["market"].startswith("generated: ")
    text = page.read_text()
    assert "<svg" in text
    assert "<script" not in text


def test_replays_go_neither_into_the_users_ledger_nor_over_earlier_ones(spotrl, tmp_path, monkeypatch):
    """In the user's ledger, replays would count against the limits over all runs. Refused before anything is played."""
    home, there = tmp_path / "own", tmp_path / "there"
    monkeypatch.setenv("SPOTRL_HOME", str(home))
    code, _, error = spotrl(JOB, "--infra", "aws", "--ledger", str(home))
    assert (code, "is the folder of your own runs" in error) == (ExitCode.FAILURE, True)
    with open_ledger(there / "ledger.sqlite")() as session, session.begin():
        a_run(session, "ours-1")
    code, _, error = spotrl(JOB, "--infra", "aws", "--starts", "2", "--ledger", str(there))
    assert (code, "there holds the replay ours-1 already" in error) == (ExitCode.FAILURE, True)


def test_a_page_that_cannot_be_written_is_refused_before_the_simulation(spotrl, tmp_path):
    (tmp_path / "file").touch()
    code, _, error = spotrl(JOB, "--infra", "aws", "--html", str(tmp_path / "file" / "page.html"))
    assert (code, "cannot be made for page.html" in error) == (ExitCode.FAILURE, True)


def test_a_job_of_this_machine_has_no_market(spotrl):
    code, _, error = spotrl("quickstart.yaml")
    assert code == ExitCode.INVALID_JOB
    assert "--infra aws,gcp" in error


def test_a_replay_is_a_run_in_a_ledger_of_its_own(spotrl, tmp_path, monkeypatch, capsys):
    """The report's dollars are those of the simulation, its stand-ins and preemptions too."""
    there = tmp_path / "there"
    code, out, _ = spotrl(JOB, "--infra", "gcp,aws", "--starts", "2", "--ledger", str(there), "--json")
    assert code == ExitCode.OK
    (ours,) = json.loads(out)["policies"]
    monkeypatch.setenv("SPOTRL_HOME", str(there))
    reports = []
    for number in range(2):
        assert run(["report", f"ours-{number}", "--json"]) == ExitCode.OK
        reports.append(json.loads(capsys.readouterr().out))
    beside = [sum(line["micro_usd"] or 0 for line in r["extras"] if not line["in_total"]) for r in reports]
    mean = fmean(r["costs"]["total"] + more for r, more in zip(reports, beside, strict=True)) / 1e6
    assert mean == pytest.approx(ours["dollars"]["mean"], rel=0.0005)
    assert fmean(len(report["preemptions"]) for report in reports) == pytest.approx(ours["preemptions"])
    assert reports[0]["money_basis"] == "simulated"


def test_a_replay_in_which_a_node_took_the_trainers_role_has_a_report(spotrl, tmp_path, monkeypatch, capsys):
    there, settings = tmp_path / "there", ("resources.trainer.use_spot=true", "recovery.controller_stays_up=true")
    on_spot = [f"--set={setting}" for setting in (*settings, "runtime.name=local")]
    code, out, _ = spotrl(JOB, "--infra", "gcp,aws", "--starts", "2", "--ledger", str(there), "--json", *on_spot)
    assert code == ExitCode.OK
    promotions = json.loads(out)["policies"][0]["trainer"]["promotions"]
    assert promotions > 0
    monkeypatch.setenv("SPOTRL_HOME", str(there))
    taken = 0
    for number in range(2):
        assert run(["report", f"ours-{number}", "--json"]) == ExitCode.OK
        nodes = json.loads(capsys.readouterr().out)["nodes"]
        taken += sum(node["taken"] is not None and node["role"] == "rollout" for node in nodes)
    assert taken / 2 == promotions
