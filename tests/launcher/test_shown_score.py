"""A run without a target shows its reward, and a run that learns nothing says so, wherever a run is shown."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from engine.events import Evaluated, IterationDone
from launcher.cli.follow import last_words
from launcher.cli.live import Frame, plain_line
from launcher.cli.ls import _open as ls_row
from launcher.cli.status import headline
from launcher.decide.facts import Stage
from launcher.notifications.notices import due_notices
from launcher.notifications.notifier import facts_of
from launcher.report.build import build_report
from launcher.report.html import render_html
from launcher.report.terminal import print_report
from launcher.report.words import headline as report_headline
from launcher.runs.run_list import run_list
from launcher.runs.views import view_of
from tests.launcher.made_ledger import HOUR_MS, JOB, START_MS, a_run, a_session


@pytest.fixture
def session():
    with a_session() as opened:
        yield opened


def a_run_without_target(session, *, evaluated=True, unlearned=0.0, status="finished", reason="iterations"):
    job = {**{name: value for name, value in JOB.items() if name != "target"}, "iterations": 4}
    made = a_run(session, target=None, job=job, factor=1.0)
    made.run.target_metric = None
    made.status("planned", 0)
    if evaluated:
        made.record(Evaluated(iteration=0, metrics={"drift": 0.1, "reward": 0.3, "colour": 0.9}, prompts=8), HOUR_MS)
        made.record(Evaluated(iteration=4, metrics={"drift": 0.2, "reward": 0.5, "colour": 0.9}, prompts=8), HOUR_MS)
    made.record(
        IterationDone(
            iteration=3,
            reward_mean=0.25,
            reward_std=0.0,
            group_std_mean=0.0,
            explored=0,
            manifest_digest="m",
            phase_ms={},
            wall_seconds=1.0,
            health={"unlearned_batches": unlearned},
        ),
        HOUR_MS,
    )
    made.status(status, 2 * HOUR_MS, reason)
    session.flush()
    return made.run


def screen(view):
    out = io.StringIO()
    Console(file=out, width=120, height=30).print(Frame(view=view))
    return out.getvalue()


def test_a_run_without_a_target_shows_the_reward_of_its_evaluations(session):
    run = a_run_without_target(session)
    view = view_of(session, run)
    assert "iteration 4/4, reward 0.400 (best 0.400)" in headline(view)
    assert next(iter(last_words(view, []))).startswith("demo finished (iterations): reward 0.400 (best 0.400); $")
    assert "reward 0.250, evaluated 0.400" in plain_line(view)
    assert "reward 0.400 (best 0.400)" in screen(view)
    assert ls_row(view)[3] == "0.400 reward"
    (row,) = run_list(session).rows
    assert (row.metric, row.score) == ("reward", pytest.approx(0.4))
    report = build_report(session, run, START_MS + 2 * HOUR_MS)
    assert report.target.metric == "reward"
    assert report_headline(report) == "No target was set; best reward so far 0.400."


def test_before_the_first_evaluation_the_reward_in_training_is_shown(session):
    run = a_run_without_target(session, evaluated=False)
    view = view_of(session, run)
    assert "iteration 4/4, reward 0.250 in training, not evaluated yet" in headline(view)
    assert "reward 0.250 in training, not evaluated yet" in next(iter(last_words(view, [])))
    assert ls_row(view)[3] == "0.250 reward, in training"
    (row,) = run_list(session).rows
    assert (row.score, row.reward) == (None, 0.25)


def notices(session, run):
    return [one.text for one in due_notices(facts_of(session, run, START_MS + 2 * HOUR_MS), HOUR_MS)]


def test_a_run_that_learns_nothing_says_so_while_it_runs(session):
    run = a_run_without_target(session, unlearned=5.0, status="running", reason="")
    view = view_of(session, run)
    text = "the last 5 batches taught nothing; `spotrl events` says why"
    assert f"learns nothing: {text}" in headline(view)
    assert "learns nothing" in plain_line(view)
    assert text in screen(view)
    assert ls_row(replace(view, controlled=True))[1] == "running (learns nothing)"
    (row,) = run_list(session).rows
    assert row.learning == text
    assert any(f"learns nothing: {text}" in notice for notice in notices(session, run))


def test_a_report_says_that_the_last_batches_taught_nothing(session):
    run = a_run_without_target(session, unlearned=20.0, status="failed", reason="unhealthy")
    report = build_report(session, run, START_MS + 2 * HOUR_MS)
    words = "The last 20 batches taught nothing; `spotrl events` says why."
    out = io.StringIO()
    print_report(report, Console(file=out, width=120))
    assert words in out.getvalue()
    assert words in render_html(report, lambda path: None)


@pytest.mark.parametrize(("unlearned", "status"), [(2.0, "running"), (5.0, "failed")])
def test_two_batches_without_learning_and_a_run_that_is_over_raise_no_alarm(session, unlearned, status):
    run = a_run_without_target(session, unlearned=unlearned, status=status, reason="")
    assert view_of(session, run).learning == ""
    assert run_list(session).rows[0].learning == ""
    assert not any("learns nothing" in notice for notice in notices(session, run))


def test_a_run_that_ended_because_it_cannot_learn_gives_that_reason(session):
    reason = "unhealthy: no batch of this run changed the weights: the rewards of each group are equal (mean 0.250)"
    run = a_run_without_target(session, status="failed", reason=reason)
    view = view_of(session, run)
    assert view.status == Stage.FAILED
    assert next(iter(last_words(view, []))).startswith(f"demo failed ({reason})")
    assert f"demo: failed ({reason})" in headline(view)
    assert run_list(session).rows[0].reason == reason
    assert any(reason in notice for notice in notices(session, run))
    assert build_report(session, run, START_MS + 2 * HOUR_MS).run.reason == reason
