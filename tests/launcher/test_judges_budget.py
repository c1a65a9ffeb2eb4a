"""The budget of paid judges in the launcher: set aside from `max_total`, in the ledger, in plans and in reports."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.clock import ScaledClock
from engine.events import JUDGES_USED_UP, Judged, Progress
from launcher.cli.follow import exit_code, last_words
from launcher.cli.main import run
from launcher.cli.status import headline
from launcher.controller.controller import wanted_of
from launcher.controller.node_specs import node_spec
from launcher.decide.actions import Enter
from launcher.decide.facts import Others, Stage
from launcher.decide.reconcile import decide
from launcher.decide.run_budget import judges_refusal
from launcher.exit_codes import ExitCode
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.job.schema import Job
from launcher.ledger.accounting import judge_budget, judge_calls, judge_micro_usd, run_costs
from launcher.money import HOUR_MS
from launcher.placement.plan import Plan
from launcher.report.build import build_report
from launcher.report.resume_command import resume_with_more
from launcher.runs.new_limits import LimitTooLow, NewLimits
from launcher.runs.views import view_of
from tests.engine.judge_server import JudgeServer
from tests.launcher.cluster.test_reconcile import bought, facts, node, wanted
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


def test_a_budget_that_bears_no_lease_is_refused_before_nodes_are_bought(job):
    """A worker holds money for all its images first, so such a run would stop before its first score."""
    assert job(text(max_usd=2)).reward.judge_micro_usd == 2 * DOLLAR
    found = r"max_usd is \$1.90 in all, and the 48 images that a worker scores at a time may cost \$1.97"
    with pytest.raises(JobError, match=found):
        job(text(max_usd=1.9))
    smaller = "evaluation: {shape: 12}\nexploration: {profiles: [{shape: 12}]}\n"
    assert job(text(max_usd=1.9) + smaller).evaluation.shape == 12


def test_the_budget_guard_works_with_the_part_for_nodes(job):
    with a_session() as session:
        row = a_run(session, job={**JOB, "reward": REWARD}).run
        row.max_total_micro_usd, row.max_hourly_micro_usd = 100 * DOLLAR, 10 * DOLLAR
        plan = Plan(region="us", slots=(), max_total_micro_usd=100 * DOLLAR, max_hourly_micro_usd=None)
        wanted = wanted_of(row, job(text()), plan, ScaledClock(origin_ms=START_MS))
    assert (wanted.limits.max_total, wanted.limits.max_hourly) == (80 * DOLLAR, 10 * DOLLAR)


@pytest.mark.parametrize(
    ("metered", "reserved", "starts"), [(60, 20, True), (60, 21, False), (81, 0, False), (0, 81, False)]
)
def test_judges_start_only_beside_what_other_runs_spent_and_hold(metered, reserved, starts):
    """All runs may spend $100, the judges $20. Once the run has bought a node, the other runs set its judges aside."""
    run = wanted(others_at_most=80 * DOLLAR)
    others = Others(metered=metered * DOLLAR, reserved=reserved * DOLLAR)
    first = facts(stage=Stage.PLANNED, others=others, planned_ms=1000)
    earlier = replace(first, nodes=(node("trainer", up=999, released=999),))
    for beginning in (first, earlier):
        refusal = judges_refusal(beginning, run)
        assert (refusal is None) == starts
        assert starts or "all_runs.max_total does not bear the judges" in refusal
        actions = decide(beginning, run)
        assert bool(bought(actions)) == starts
        draining = [action.stage for action in actions if isinstance(action, Enter)]
        assert (Stage.DRAINING in draining) != starts
    begun = replace(first, nodes=(node("trainer", up=1000),))
    assert judges_refusal(begun, run) is None
    assert judges_refusal(first, wanted()) is None, "no limit across runs, or no paid judge"


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


SPENT = f"{JUDGES_USED_UP}: the next calls may cost $0.0100, and less is left of $20.00"


def a_judged_run(session, max_total=None):
    """A run with a judge of $20 whose trainer has cost $1."""
    made = a_run(session, job={**JOB, "iterations": 1, "reward": REWARD}, folder="/nowhere")
    made.node("trainer", rate=DOLLAR, up=0, end=HOUR_MS)
    made.run.max_total_micro_usd = max_total
    return made


@pytest.mark.parametrize(
    ("max_total", "command"),
    [(None, "spotrl resume demo --max-judges 40"), (100, "spotrl resume demo --max-judges 40 --max-total 120")],
)
def test_a_run_without_money_for_its_judges_names_the_command_that_continues_it(max_total, command):
    with a_session() as session:
        made = a_judged_run(session, max_total and max_total * DOLLAR)
        made.status("stopped", HOUR_MS, SPENT)
        view = view_of(session, made.run)
        assert view.resume_with == command
        assert f"Go on with more money: {command}" in headline(view)
        assert f"Go on with more money: {command}" in list(last_words(view, []))
        assert exit_code(view) is ExitCode.STOPPED_BY_BUDGET
        words = command.split()[3:]
        limits = {
            name.replace("-", "_"): int(value) * DOLLAR for name, value in zip(words[::2], words[1::2], strict=True)
        }
        changed = NewLimits(
            max_judges_micro_usd=limits["__max_judges"], max_total_micro_usd=limits.get("__max_total")
        ).apply(session, made.run, START_MS + HOUR_MS)
        assert "max_judges $20.00 -> $40.00" in changed
        assert judge_budget(made.run) == 40 * DOLLAR
        assert view_of(session, made.run).resume_with.startswith("spotrl resume demo --max-judges 80")


def test_a_run_without_money_for_nodes_names_its_command_and_others_name_none():
    with a_session() as session:
        run = a_judged_run(session, 100 * DOLLAR).run
        assert resume_with_more(run, "budget", 80 * DOLLAR) == "spotrl resume demo --max-total 200"
        assert resume_with_more(run, SPENT, 90 * DOLLAR) == "spotrl resume demo --max-judges 40 --max-total 130"
        for reason in ("asked for by a person", "budget: all_runs.max_total is used up by all runs together", "target"):
            assert resume_with_more(run, reason, DOLLAR) == ""


def test_a_larger_budget_of_judges_reaches_the_nodes_and_leaves_the_job_as_it_was(job):
    with a_session() as session:
        made = a_judged_run(session, 100 * DOLLAR)
        the_job = job(text())
        NewLimits(max_judges_micro_usd=30 * DOLLAR).apply(session, made.run, START_MS + HOUR_MS)
        node = made.nodes["demo-trainer-g1"]
        spec = node_spec(made.run, the_job, node, is_cloud=False, money_deadline_ms=None, money_longest_ms=None)
        plan = Plan(region="us", slots=(), max_total_micro_usd=100 * DOLLAR, max_hourly_micro_usd=None)
        wanted = wanted_of(made.run, the_job, plan, ScaledClock(origin_ms=START_MS))
    assert spec.judges_micro_usd == 30 * DOLLAR
    assert spec.engine == the_job.engine(), "the digest of checkpoints is of the job"
    assert wanted.limits.max_total == 70 * DOLLAR


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        (
            {"max_judges_micro_usd": 20 * DOLLAR},
            r"--max-judges is \$20.00, and the judges of demo have \$20.00; name a",
        ),
        ({"max_judges_micro_usd": 99 * DOLLAR}, r"budget.max_total is \$100.00, and demo has already spent \$100.00"),
        (
            {"max_judges_micro_usd": 30 * DOLLAR, "max_total_micro_usd": 31 * DOLLAR},
            r"--max-total is \$31.00, and demo has already spent \$31.00 with the budget of its judges; name a larger",
        ),
    ],
)
def test_a_budget_of_judges_that_cannot_hold_is_refused_and_changes_nothing(limits, found):
    with a_session() as session:
        run = a_judged_run(session, 100 * DOLLAR).run
        with pytest.raises(LimitTooLow, match=found):
            NewLimits(**limits).apply(session, run, START_MS + HOUR_MS)
        assert (run.max_total_micro_usd, run.max_judges_micro_usd) == (100 * DOLLAR, None)


def test_a_run_without_a_paid_judge_takes_no_budget_for_one():
    with a_session() as session, pytest.raises(LimitTooLow, match="demo has no paid judge; leave it out"):
        NewLimits(max_judges_micro_usd=DOLLAR).apply(session, a_run(session).run, START_MS)


def test_an_event_of_calls_survives_its_json_line():
    event = Judged(worker="spot-0/0", calls=((1, 2, 3),), unaccounted=4)
    line = Progress(run="r", source="coordinator", lineage=1, seq=2, at_ms=3, event=event)
    assert Progress.from_json(line.to_json()) == line
    assert event.micro_usd == 7


@pytest.mark.parametrize("infra", ["local", "aws"])
def test_a_plan_names_the_budget_and_counts_it(job, tmp_path, monkeypatch, capsys, forked_engine, few_replays, infra):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.chdir(tmp_path)
    with JudgeServer() as server:  # a run on this machine asks the judge for its models
        job(text(url=server.url))
        for more in ([], ["--explain"]):
            assert run(["launch", "job.yaml", "--dry-run", "--infra", infra, *more]) == ExitCode.OK
            assert "judges: at most $20.00 of budget.max_total; the run stops when it is" in capsys.readouterr().out
    assert server.sizes == []
