"""The budget of paid judges in the launcher: set aside from `max_total`, in the ledger, in plans and in reports."""

from pathlib import Path

import pytest

from engine.clock import ScaledClock
from engine.events import Judged, Progress
from launcher.cli.main import run
from launcher.controller.controller import wanted_of
from launcher.exit_codes import ExitCode
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.job.schema import Job
from launcher.ledger.accounting import judge_calls, judge_micro_usd, run_costs
from launcher.money import HOUR_MS
from launcher.placement.plan import Plan
from launcher.report.build import build_report
from launcher.runs.new_limits import LimitTooLow, NewLimits
from tests.engine.judge_server import JudgeServer
from tests.launcher.made_ledger import JOB, START_MS, a_run, a_session

VLM = {"url": "http://judge", "model": "m", "usd_per_million_input": 5.0, "max_usd": 20.0}
REWARD = {"name": "vlm", "vlm": VLM}
DOLLAR = 1_000_000


def text(max_total="$100", max_usd=20, url="http://judge"):
    judge = f"{{url: '{url}', model: m, usd_per_million_input: 5, max_usd: {max_usd}}}"
    return f"reward: {{name: vlm, vlm: {judge}}}\nbudget: {{max_total: {max_total}, max_hourly: $10}}\n"


@pytest.fixture
def job(tmp_path):
    def job(words: str) -> Job:
        path = Path(tmp_path) / "job.yaml"
        path.write_text(words)
        return load_job(path).job

    return job


def test_nodes_may_spend_what_the_judges_may_not(job):
    assert job(text()).nodes_max_total == 80 * DOLLAR
    assert job("seed: 1\n").nodes_max_total is None
    with pytest.raises(JobError, match=r"max_usd is \$20.00 in all, which leaves nodes no money in budget.max_total"):
        job(text(max_total="$20"))


def test_the_budget_guard_works_with_the_part_for_nodes(job):
    with a_session() as session:
        row = a_run(session).run
        row.max_total_micro_usd, row.max_hourly_micro_usd = 100 * DOLLAR, 10 * DOLLAR
        plan = Plan(region="us", slots=(), max_total_micro_usd=100 * DOLLAR, max_hourly_micro_usd=None)
        wanted = wanted_of(row, job(text()), plan, ScaledClock(origin_ms=START_MS))
    assert (wanted.limits.max_total, wanted.limits.max_hourly) == (80 * DOLLAR, 10 * DOLLAR)


def test_calls_are_in_the_ledger_and_in_the_report_and_not_in_the_price_of_nodes():
    with a_session() as session:
        made = a_run(session, job={**JOB, "reward": REWARD})
        made.node("trainer", rate=DOLLAR, up=0, end=HOUR_MS)
        made.record(Judged(worker="spot-0/0", calls=((1000, 50, 5000), (2000, 10, 10_000))), at=1)
        made.record(Judged(worker="spot-0/0", unaccounted=7000), at=2, lineage=1)
        assert [event.calls for event in judge_calls(session, made.run)] == [
            ((1000, 50, 5000), (2000, 10, 10_000)),
            (),
        ]
        assert judge_micro_usd(session, made.run) == 22_000
        assert run_costs(session, made.run, START_MS + HOUR_MS).total == DOLLAR
        line = next(one for one in build_report(session, made.run, START_MS + HOUR_MS).extras if one.kind == "judges")
    assert (line.micro_usd, line.in_total) == (22_000, False)
    assert line.amount == "2 calls, 3060 tokens, and $0.0070 held by workers that died"


def test_a_new_limit_must_leave_the_judges_their_budget():
    with a_session() as session:
        made = a_run(session, job={**JOB, "reward": REWARD})
        made.node("trainer", rate=DOLLAR, up=0, end=HOUR_MS)
        with pytest.raises(
            LimitTooLow, match=r"has already spent \$21.00 with the budget of its judges; name a larger"
        ):
            NewLimits(max_total_micro_usd=21 * DOLLAR).apply(session, made.run, START_MS + HOUR_MS)
        NewLimits(max_total_micro_usd=22 * DOLLAR).apply(session, made.run, START_MS + HOUR_MS)
        assert made.run.max_total_micro_usd == 22 * DOLLAR


def test_an_event_of_calls_survives_its_json_line():
    event = Judged(worker="spot-0/0", calls=((1, 2, 3),), unaccounted=4)
    line = Progress(run="r", source="coordinator", lineage=1, seq=2, at_ms=3, event=event)
    assert Progress.from_json(line.to_json()) == line
    assert event.micro_usd == 7


@pytest.mark.parametrize("infra", ["local", "aws"])
def test_a_plan_names_the_budget_and_counts_it(job, tmp_path, monkeypatch, capsys, infra):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.chdir(tmp_path)
    with JudgeServer() as server:  # a run on this machine asks the judge for its models
        job(text(url=server.url))
        for more in ([], ["--explain"]):
            assert run(["launch", "job.yaml", "--dry-run", "--infra", infra, *more]) == ExitCode.OK
            assert "judges: at most $20.00 of budget.max_total; the run stops when it is" in capsys.readouterr().out
    assert server.sizes == []
