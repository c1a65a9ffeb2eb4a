"""Failing commands print one sentence without a traceback, return the right exit code and lose no data."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from engine.installation import install_command
from launcher.cli import endings
from launcher.cli.controller import utc_format
from launcher.cli.main import run
from launcher.engine_process import OURS, check_engine_is_ours
from launcher.exit_codes import ExitCode, Failure
from launcher.ledger import store
from launcher.ledger.store import append_status, find_run, open_ledger, writing
from tests.launcher.made_ledger import a_long_run
from tests.launcher.printed import printed

RUN = "digits-ocr"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Create a user's spotrl folder with a finished run in its ledger."""
    home = tmp_path / "home"
    monkeypatch.setenv("SPOTRL_HOME", str(home))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.chdir(tmp_path)
    with writing(open_ledger(home / "ledger.sqlite")) as session:
        a_long_run(session, folder=str(home / "runs" / RUN))
    return home


def error_text(capsys) -> str:
    """Return stderr, which must be one sentence."""
    words = capsys.readouterr().err
    assert words.startswith("Error: ")
    assert "Traceback" not in words
    assert len(words.strip().splitlines()) == 1
    return words


@pytest.mark.parametrize(
    "words",
    [
        ("trace", RUN, "-o", "no/such/trace.json"),
        ("report", RUN, "--html", "no/such/report.html"),
        ("trace", RUN, "-o", "a-file/trace.json"),
        ("report", RUN, "--html", "a-file/report.html"),
        ("pull", RUN, "--to", "a-file/weights"),
    ],
)
def test_an_output_path_that_cannot_be_written_is_named(home, tmp_path, capsys, words):
    (tmp_path / "a-file").write_text("")
    a_manifest(home, {"iteration": 1, "files": {"weights.safetensors": "0", "ema.safetensors": "0"}})
    assert run(words) == ExitCode.FAILURE
    assert words[-1].partition("/")[0] in error_text(capsys)


def a_manifest(home, content):
    file = home / "runs" / RUN / "store" / "checkpoints" / "l0001-i000001" / "manifest.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("manifest", [{}, [], {"iteration": 1, "files": {}}, {"iteration": "x", "files": []}])
def test_a_damaged_manifest_is_named_by_pull(home, capsys, manifest):
    a_manifest(home, manifest)
    assert run(["pull", RUN, "--to", "weights"]) == ExitCode.FAILURE
    assert "the manifest of checkpoint l0001-i000001" in error_text(capsys)


def test_escape_sequences_in_node_text_are_shown_and_not_executed(home, capsys):
    with writing(open_ledger(home / "ledger.sqlite")) as session:
        made = find_run(session, RUN)
        made.job = {**made.job, "iterations": 5}
        append_status(session, made, "running", "red \x1b[31m, title \x1b]0;x\x07", 10**15)
    log = home / "runs" / RUN / "controller.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("clear \x1b[2J\n")
    for command in ("events", "logs", "status"):
        assert run([command, RUN]) == ExitCode.OK
        result = capsys.readouterr().out
        assert "\x1b" not in result
        assert "\\x1b[" in result, command


@pytest.mark.parametrize("place", ["a-file", "a-file/below", "x" * 300, "/proc/none"])
def test_an_unusable_home_folder_is_named(tmp_path, monkeypatch, capsys, place):
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / place))
    assert run(["ls"]) == ExitCode.FAILURE
    assert place in error_text(capsys)


def damage(ledger, how):
    whole = ledger.read_bytes()
    ledger.unlink()
    if how == "a folder":
        ledger.mkdir()
    else:
        ledger.write_bytes({"garbage": b"garbage" * 1000, "truncated": whole[:5000]}[how])


@pytest.mark.parametrize("how", ["garbage", "truncated", "a folder"])
def test_a_damaged_ledger_is_named_with_a_remedy(home, capsys, how):
    for file in home.glob("ledger.sqlite-*"):
        file.unlink()
    damage(home / "ledger.sqlite", how)
    assert run(["ls"]) == ExitCode.FAILURE
    words = error_text(capsys)
    assert str(home / "ledger.sqlite") in words
    assert "spotrl reap" in words


def test_the_database_of_another_program_is_not_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    assert run(["ls"]) == ExitCode.FAILURE
    assert "is not a ledger of spotrl: it has tables like recipes" in error_text(capsys)
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]
    connection.close()


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-total", "", "it has no value"),
        ("--max-total", "9" * 40, "is not an amount of money"),
        ("--max-total", "2000000000", "is more than $1,000,000,000"),
        ("--max-hourly", "'2,000,000,000'", "is more than $1,000,000,000"),
        ("--deadline", "99999999999999999999h", "is longer than ten years"),
        ("--seed", "9" * 30, "seed"),
        ("--iterations", "99999999999", "iterations"),
    ],
)
def test_an_impossible_option_value_is_refused(home, tmp_path, capsys, flag, value, words):
    (tmp_path / "job.yaml").write_text("name: a\nbudget: {max_total: $10}\n")
    assert run(["launch", "job.yaml", "--dry-run", flag, value]) == ExitCode.INVALID_JOB
    assert words in error_text(capsys)


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("words", [("down", RUN, "--timeout"), ("reap", "--timeout"), ("panic", "--timeout")])
def test_a_time_that_never_ends_is_refused(home, capsys, words, value):
    assert run([*words, value]) == ExitCode.USAGE
    assert f"{value} is not a finite number of 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("report", RUN), ("compare", RUN, "other")])
def test_a_target_that_is_no_number_is_refused(home, capsys, words):
    assert run([*words, "--target-reward", "nan"]) == ExitCode.USAGE
    assert "nan is not a finite number; write it in decimal digits" in capsys.readouterr().err


def test_a_selftest_writes_no_file_for_a_name_that_is_a_path(home, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text("name: mine\n")
    assert run(["selftest", "--infra", "aws", "--dry-run", "--name", str(tmp_path)]) == ExitCode.USAGE
    assert "use up to 40 of a-z, 0-9 and -" in capsys.readouterr().err
    assert (tmp_path / "job.yaml").read_text() == "name: mine\n"


def test_a_job_file_that_is_empty_or_a_pipe_is_refused(home, tmp_path, capsys):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert run(["launch", "empty.yaml", "--dry-run"]) == ExitCode.INVALID_JOB
    assert "it is empty" in error_text(capsys)
    assert run(["launch", "pipe.yaml", "--dry-run"]) == ExitCode.INVALID_JOB
    assert "it is not a regular file" in error_text(capsys)
    assert run(["launch", "-", "--dry-run"]) == ExitCode.INVALID_JOB
    assert "it is not a regular file; name a file that can be read twice" in error_text(capsys)


@pytest.mark.parametrize(
    ("module", "extra"), [("botocore", "prices"), ("google.cloud", "prices"), ("torch", "engine"), ("sky", "sky")]
)
def test_a_package_that_is_not_installed_names_the_extra(module, extra):
    error = ModuleNotFoundError(f"No module named '{module}'", name=module)
    assert f"`{install_command(extra)}`" in (endings.sentence(error) or "")


def test_an_engine_that_is_not_ours_is_named_by_its_file(tmp_path):
    (tmp_path / "engine.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.cli.main", "ls"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == ExitCode.FAILURE
    assert f"Error: Python finds {tmp_path}/engine.py in place of spotrl's own" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_launcher_uses_its_own_engine():
    check_engine_is_ours()
    check_engine_is_ours(str(OURS))


def test_a_ledger_locked_by_another_process_is_no_damaged_ledger(home, capsys, monkeypatch):
    monkeypatch.setattr(store, "BUSY_MS", 100)
    other = sqlite3.connect(home / "ledger.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert run(["down", RUN]) == ExitCode.FAILURE
    words = error_text(capsys)
    assert "is locked by another process of spotrl" in words
    assert "move it away" not in words
    other.close()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("database or disk is full", "make room on that disk, and repeat the command"),
        ("disk I/O error", "make room on that disk, and look at its health"),  # of a full disk too
        ("attempt to write a readonly database", "become its owner, or make it and its folder writable"),
    ],
)
def test_a_ledger_on_a_full_or_readonly_disk_is_no_damaged_ledger(words, remedy):
    text = endings.sentence(OperationalError("INSERT", {}, sqlite3.OperationalError(words)))
    assert remedy in text
    assert ("`spotrl panic` terminates all nodes" in text) == ("disk" in words)
    assert "move it away" not in text, "a moved ledger forgets which nodes run"


def test_the_controllers_log_is_in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        record = logging.makeLogRecord({"created": 1_762_063_200.25, "msecs": 250, "levelname": "INFO", "msg": "here"})
        assert utc_format().format(record) == "2025-11-02T06:00:00.250Z INFO None: here"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_errors_are_json_with_the_json_option(home, capsys):
    assert run(["status", "nobody", "--json"]) == ExitCode.FAILURE
    result = capsys.readouterr()
    assert printed("error", result.out) == {"error": result.err.removeprefix("Error: ").strip(), "exit_code": 1}


def test_an_error_keeps_its_exit_code(capsys):
    class Missing(Failure):
        exit_code = ExitCode.CREDENTIALS

    assert endings.ending(Missing("no credentials"), []) == ExitCode.CREDENTIALS
    assert error_text(capsys) == "Error: no credentials\n"


def test_an_internal_error_names_the_file_of_its_traceback(capsys):
    with pytest.raises(KeyError) as caught:
        raise KeyError("slot")
    assert endings.ending(caught.value, []) == ExitCode.FAILURE
    path = error_text(capsys).rpartition(" ")[2].strip()
    with open(path) as file:
        assert 'raise KeyError("slot")' in file.read()
    os.unlink(path)


@pytest.mark.slow
def test_a_closed_pipe_and_a_full_device_cause_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    command = [sys.executable, "-m", "launcher.cli.main", "ls"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == ExitCode.FAILURE
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""


@pytest.mark.parametrize(("typed", "ours"), [("stop", "down"), ("ps", "ls"), ("cancel", "down")])
def test_a_command_known_from_other_tools_names_ours(capsys, typed, ours):
    assert run([typed]) == ExitCode.USAGE
    assert f"did you mean `spotrl {ours}`?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_shell_completes_commands_and_the_names_of_runs(home):
    """Completion gets the words and the cursor position like from bash."""

    def completed(words: str, at: int) -> list[str]:
        environment = {**os.environ, "_SPOTRL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        command = [sys.executable, "-c", "from launcher.cli.main import main; main()"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.stderr == ""
        return [line.partition(",")[2] for line in result.stdout.split()]

    assert completed("spotrl stat", 1) == ["status"]
    assert completed("spotrl status dig", 2) == [RUN]
    assert completed("spotrl status none", 2) == []
    (home / "ledger.sqlite").write_bytes(b"garbage")
    assert completed("spotrl logs dig", 2) == []
