"""The report says which command and which code started a run, on which hardware, and when it really ended."""

import csv
import json
import subprocess
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

from launcher.cli.main import cli
from launcher.ledger.models import NodeEvent, StartCommand
from launcher.ledger.store import find_run, open_ledger
from launcher.report.build import build_report
from launcher.report.html import render_html
from launcher.report.tables import write_tables
from launcher.report.terminal import a_console, print_report
from launcher.report.words import span_words
from launcher.runs.start_command import commit_of, commit_of_code, origin_of
from tests.launcher.made_ledger import HOUR_MS, MINUTE_MS, START_MS, a_long_run, a_run, a_session

COMMANDS = (
    "spotrl launch job.yaml --max-total 40 --set reward.http.url=https://***@host/score --name a-long-name-of-a-run",
    "spotrl resume demo --max-total 60",
)


@pytest.fixture
def report():
    """Return the report of a run on a clock 60 times as fast, launched and resumed by a command."""
    with a_session() as session:
        made = a_run(session, factor=60.0)
        made.run.job_yaml = "reward:\n  http:\n    url: https://me:pass@host/score\n"
        made.started()
        for slot, text in (("trainer", "1 NVIDIA L4"), ("spot-0", "8 CPU cores"), ("spot-1", "8 CPU cores")):
            node = made.node(slot, up=0, end=HOUR_MS, seen=MINUTE_MS)
            session.add(NodeEvent(node_id=node.id, at_ms=START_MS, kind="ready", evidence=f"{text}, 31.0 GiB\x1b[31m"))
        for number, command in enumerate(COMMANDS):
            at_ms = START_MS + number * HOUR_MS
            commit = {"code_commit": "a" * 40 + "-dirty", "workdir_commit": "b" * 40 if number == 0 else ""}
            session.add(made.at_wall(StartCommand(run_id=made.run.id, at_ms=at_ms, command=command, **commit)))
        made.status("finished", HOUR_MS, "target")
        yield build_report(session, made.run, START_MS + 2 * HOUR_MS)


def test_the_report_has_the_origin_in_every_form(report, tmp_path):
    origin = report.provenance
    assert [one.command for one in origin.commands] == list(COMMANDS)
    # An hour of the run's clock is a minute of wall time.
    assert [one.at[11:19] for one in origin.commands] == ["08:00:00", "08:01:00"]
    assert (origin.started_at[11:19], origin.ended_at[11:19]) == ("08:00:00", "08:01:00")
    assert json.loads(json.dumps(asdict(report)))["provenance"]["hardware"][0]["hardware"] == (
        "1 NVIDIA L4, 31.0 GiB\\x1b[31m"
    )
    page = render_html(report, lambda path: None)
    for words in (*COMMANDS, "a" * 40 + "-dirty", "b" * 40, "Hardware of spot-0-g1, spot-1-g1", "2025-01-15 08:01 UTC"):
        assert words.replace("'", "&#39;") in page
    files = {path.name: path for path in write_tables(report, tmp_path)}
    rows = list(csv.DictReader(files["commands.csv"].open()))
    assert [(row["command"], row["workdir_commit"]) for row in rows] == [(COMMANDS[0], "b" * 40), (COMMANDS[1], "")]
    assert "1 NVIDIA L4" in files["nodes.csv"].read_text()


def test_the_terminal_fits_80_columns_and_groups_equal_nodes(report, capsys):
    print_report(report, a_console())
    printed = capsys.readouterr().out
    assert "--max-total 40" in printed
    assert f"  spotrl at git {'a' * 40}-dirty" in printed
    assert "spot-0-g1, spot-1-g1: 8 CPU cores" in printed
    assert "From 2025-01-15 08:00 to 08:01 UTC by the wall clock." in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_begin_and_end_are_by_the_wall_clock_and_are_named_if_the_run_has_a_faster_one(report):
    """The run of the fixture ended at 09:00 on its clock."""
    page = render_html(report, lambda path: None)
    assert "From 2025-01-15 08:00 to 08:01 UTC by the wall clock." in page
    assert "09:00" not in page
    going = replace(report, provenance=replace(report.provenance, ended_at=""))
    assert span_words(going) == "Since 2025-01-15 08:00 UTC by the wall clock; not over."
    overnight = replace(report.provenance, ended_at="2025-01-16T02:00:00+00:00")
    on_the_wall = replace(report, run=replace(report.run, clock_factor=1.0), provenance=overnight)
    assert span_words(on_the_wall) == "From 2025-01-15 08:00 to 2025-01-16 02:00 UTC."


def test_a_password_in_the_job_file_is_not_in_the_report(report):
    assert "https://***@host/score" in report.job_text
    assert "me:pass" not in render_html(report, lambda path: None)


def test_a_run_of_an_older_version_has_no_commands_and_a_run_that_goes_on_no_end():
    with a_session() as session:
        origin = build_report(session, a_long_run(session), START_MS + 9 * HOUR_MS).provenance
        assert (origin.commands, origin.hardware) == ((), ())
        made = a_run(session)
        made.status("running", 0)
        assert build_report(session, made.run, START_MS).provenance.ended_at == ""


def git(folder, *words):
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


def test_a_commit_is_marked_when_its_files_have_changed(tmp_path):
    assert commit_of(tmp_path / "none") == ""
    assert commit_of(tmp_path) == ""
    git(tmp_path, "init", "--quiet")
    assert commit_of(tmp_path) == "", "a checkout without a commit"
    (tmp_path / "job.yaml").write_text("name: a\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "v1")
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "inner").mkdir()
    assert commit_of(tmp_path / "inner") == commit
    assert commit_of_code(tmp_path / "inner") == "", "a package inside of somebody's checkout is not the checkout"
    (tmp_path / "job.yaml").write_text("name: b\n")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_a_secret_never_reaches_the_ledger(tmp_path):
    job = {"secrets": ["JUDGE"], "notifications": {"webhook": "HOOK"}, "logging": {"wandb": {"key": "W"}}}
    environ = {"JUDGE": "first-secret", "HOOK": "https://hooks.example/x", "W": "second-secret"}
    words = (
        "spotrl",
        "launch",
        "first-secret",
        "--set",
        "a=second-secret",
        "https://hooks.example/x",
        "--token",
        "t0k",
    )
    command = origin_of(words, job, tmp_path, environ).command
    assert command == "spotrl launch '***' --set 'a=***' '***' --token '***'"


def test_resume_records_the_words_that_were_typed(tmp_path, monkeypatch):
    sessions = open_ledger(tmp_path / "ledger.sqlite")
    with sessions() as session, session.begin():
        a_run(session).status("stopped", HOUR_MS, "asked for by a person")
    monkeypatch.setattr("launcher.runs.runs.start_controller", lambda sessions, name: 1)
    words = ["resume", "demo", "--max-total", "60"]
    result = CliRunner().invoke(cli, words, obj=sessions, standalone_mode=False)
    assert result.exception is None
    with sessions() as session:
        (one,) = build_report(session, find_run(session, "demo"), START_MS + HOUR_MS).provenance.commands
    assert one.command == "spotrl resume demo --max-total 60"
