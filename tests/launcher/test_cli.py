"""The command line: finding commands, their output and their exit codes. Runs are made up; no process starts."""

import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from importlib.resources import files
from io import StringIO
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from launcher.cli import follow as follow_module
from launcher.cli import launch as launch_module
from launcher.cli import progress_words
from launcher.cli.confirm import Declined
from launcher.cli.endings import ending
from launcher.cli.init import EXAMPLES
from launcher.cli.layout import table_rows
from launcher.cli.live import Frame, plain_line, sparkline
from launcher.cli.main import GROUPS, HIDDEN, CommandFolder, cli, run, summaries
from launcher.cli.progress_words import working
from launcher.cli.status import node_rows
from launcher.exit_codes import ExitCode
from launcher.job.load import load_job
from launcher.job.schema import Job
from launcher.ledger.store import open_ledger
from launcher.runs.event_lines import EventLine
from launcher.runs.start import StartWeights
from launcher.runs.views import NodeView, RunView
from tests.launcher.printed import printed


def node(name: str = "quickstart-spot-0-g1", status: str = "ready", groups=()) -> NodeView:
    return NodeView(
        name=name,
        slot="spot-0",
        role="rollout",
        market="spot",
        zone="use2-az3",
        status=status,
        age_ms=65_000,
        micro_usd_per_hour=464_300,
        groups=groups,
    )


VIEW = RunView(
    name="quickstart",
    status="running",
    reason="",
    iteration=3,
    iterations=45,
    reward=0.51,
    score=0.7,
    best_score=0.72,
    metric="exact_match",
    target=0.78,
    spent_micro_usd=1_200_000,
    max_total_micro_usd=10_000_000,
    micro_usd_per_hour=464_300,
    nodes=(node(),),
    last_event="trainer: iteration_done",
    eta_seconds=40.0,
    elapsed_ms=3_900_000,
    wall_seconds=65.0,
    clock_factor=60.0,
    controlled=True,
)
DONE = replace(VIEW, status="finished", reason="target", nodes=(node(status="released"),), eta_seconds=None)


# --- finding commands --------------------------------------------------------------------------------


def commands() -> list[tuple[str, click.Command]]:
    """Yield every command and subcommand with the words that call it."""
    found: list[tuple[str, click.Command]] = [("", cli)]
    context = click.Context(cli)
    for name in summaries():
        command = cli.get_command(context, name)
        found.append((name, command))
        if isinstance(command, click.Group):
            found += [(f"{name} {inner}", each) for inner, each in command.commands.items()]
    return found


@pytest.mark.parametrize(("words", "command"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_help_has_an_example_and_leaves_no_trace(words, command, tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(cli, [*words.split(), "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output
    assert f"spotrl {words}".strip() in result.output.split("Example:")[1]
    assert not (tmp_path / "home").exists()


def test_the_list_of_commands_matches_their_own_help():
    context = click.Context(cli)
    assert isinstance(cli, CommandFolder)
    for name, summary in summaries().items():
        command = cli.get_command(context, name)
        assert command.help.startswith(summary)
        assert summary.endswith("."), f"{name}: the first line of a command's help is a whole sentence"


def test_every_visible_command_is_under_one_heading_of_the_help():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(set(summaries()) - set(HIDDEN))


def test_the_help_has_one_line_for_each_command_at_80_columns():
    lines = CliRunner().invoke(cli, ["--help"], terminal_width=80).output.splitlines()
    assert max(map(len, lines)) <= 80
    for heading, names in GROUPS.items():
        at = lines.index(f"{heading}:")
        for name, line in zip(names, lines[at + 1 : at + 1 + len(names)], strict=True):
            assert line.split() == [name, *summaries()[name].split()]


def test_the_help_imports_no_command():
    code = (
        "import sys; from launcher.cli.main import run; run(['--help']); "
        "print(sorted(name for name in sys.modules if name.startswith('launcher.cli.')), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Start and end runs:" in result.stdout
    assert result.stderr.strip() == "['launcher.cli.main']"


def test_a_misspelt_command_is_answered_with_the_nearest_name(capsys):
    assert run(["lanch", "x.yaml"]) == ExitCode.USAGE
    assert "did you mean `spotrl launch`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("iteratons: 3", ExitCode.INVALID_JOB, "job.yaml, line 1: iteratons is not a key"),
        ("budget: {max_total: -3}", ExitCode.INVALID_JOB, "use more than $0"),
        ("budget: {max_hourly: $1}", ExitCode.REFUSED_BY_BUDGET, "more than budget.max_hourly $1.00/h"),
        ("resources: {trainer: {accelerators: H10}}", ExitCode.INVALID_JOB, "the price catalog does not have"),
        ("runtime: {sp_degree: 2}", ExitCode.INVALID_JOB, "line 1: runtime.sp_degree is 2, but a rollout node has 1"),
        ("secrets: [SPOTRL_TEST_UNSET]", ExitCode.INVALID_JOB, "line 1: secrets names SPOTRL_TEST_UNSET"),
    ],
)
def test_an_invalid_job_ends_with_its_exit_code_before_anything_starts(
    text, code, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    (tmp_path / "job.yaml").write_text(text)
    assert run(["launch", str(tmp_path / "job.yaml"), "-y"]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_init_writes_a_job_that_loads_and_replaces_nothing(tmp_path):
    path = tmp_path / "mine.yaml"
    assert CliRunner().invoke(cli, ["init", str(path)]).exit_code == 0
    assert load_job(path).job.infra == "local"
    path.write_text("precious")
    assert CliRunner().invoke(cli, ["init", str(path)]).exit_code == 1
    assert path.read_text() == "precious"


def test_init_with_json_names_the_files_it_wrote(tmp_path):
    path = tmp_path / "mine.yaml"
    result = CliRunner().invoke(cli, ["init", str(path), "--example", "qwen_image_ocr", "--json"])
    beside = [tmp_path / f"qwen_image_ocr_{kind}.txt" for kind in ("prompts", "test_prompts")]
    assert printed("init", result.output) == {"file": str(path), "beside": [str(one) for one in beside]}
    assert all(one.exists() for one in (path, *beside))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_can_be_launched_from_an_empty_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["init", "--example", name]).exit_code == 0
    checked = load_job(Path(f"{name}.yaml"))
    assert {checked.path.name} | set(EXAMPLES[name][1:]) == {path.name for path in tmp_path.iterdir()}
    if checked.job.prompts.endswith(".txt"):
        assert (tmp_path / checked.job.prompts).exists()


def test_the_help_of_init_describes_every_shipped_example():
    shipped = {Path(str(file)).stem for file in files("sky_yamls").iterdir() if str(file).endswith(".yaml")}
    assert set(EXAMPLES) == shipped - {"template"}
    result = CliRunner().invoke(cli, ["init", "--help"]).output
    assert all(f"\n    {name} " in result for name in EXAMPLES)


def test_an_unknown_example_is_refused_with_the_existing_names(capsys):
    assert run(["init", "--example", "flux2"]) == ExitCode.USAGE
    result = capsys.readouterr().err
    assert all(name in result for name in EXAMPLES)


def test_an_example_replaces_no_prompts_of_the_users(tmp_path):
    job, prompts = tmp_path / "job.yaml", tmp_path / "qwen_image_ocr_prompts.txt"
    prompts.write_text("precious")
    words = ["init", str(job), "--example", "qwen_image_ocr"]
    assert CliRunner().invoke(cli, words).exit_code == 1
    assert prompts.read_text() == "precious"
    assert not job.exists()
    assert CliRunner().invoke(cli, [*words, "--force"]).exit_code == 0
    assert prompts.read_text() != "precious"


def test_config_shows_where_each_value_comes_from(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "user.yaml"))
    monkeypatch.setenv("SPOTRL_SEED", "7")
    (tmp_path / "user.yaml").write_text("iterations: 9\n")
    (tmp_path / "job.yaml").write_text("clock_factor: 30\n")
    result = CliRunner().invoke(cli, ["config", "show", str(tmp_path / "job.yaml"), "--json"])
    fields = printed("config-show", result.output)["fields"]
    assert fields["seed"] == {"value": 7, "origin": "SPOTRL_SEED"}
    assert fields["iterations"] == {"value": 9, "origin": "user.yaml, line 1"}
    assert fields["clock_factor"] == {"value": 30.0, "origin": "job.yaml, line 1"}
    assert fields["sampler.steps"] == {"value": 8, "origin": "default"}
    without = CliRunner().invoke(cli, ["config", "show", "--origin"])
    assert "seed: 7" in without.output


# --- following a run ---------------------------------------------------------------------------------


@dataclass
class FakeRuns:
    """Runs as `launch` sees them: a list of views. An exception in the list is raised while following."""

    script: list
    left_after: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    events: list[list[EventLine]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def create_run(self, sessions, checked, plan, name, command=()):
        return name

    def start_controller(self, sessions, name):
        self.started.append(name)

    def events_after(self, sessions, name, seen):
        return (self.events.pop(0) if self.events else []), seen

    def run_view(self, sessions, name):
        now = self.script[0]
        if len(self.script) > 1:
            self.script.pop(0)
        if isinstance(now, BaseException):
            raise now
        return now() if callable(now) else now

    def request_stop(self, sessions, name, reason):
        self.stops.append(reason)
        self.script[:] = [replace(DONE, status="stopped", reason=reason)]

    def bring_down(self, sessions, name, timeout_s):
        return self.left_after

    def wait_released(self, sessions, name, timeout_s):
        return not self.left_after

    def still_running(self, sessions, name):
        last = self.script[-1]
        return self.left_after or (
            [] if last.status == "finished" or self.stops else [each.name for each in last.nodes]
        )


@dataclass
class Ended:
    """The result of a command with stdout and stderr apart (click 8.1's runner mixes them)."""

    return_value: int | None
    exception: Exception | None
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Call `spotrl launch` on a valid job with made-up runs."""
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.setattr(launch_module, "preflight", lambda checked, folder, start=None, say=None: {"slowness": 1.0})
    monkeypatch.setattr(follow_module, "LOOK_SECONDS", 0)
    job = tmp_path / "job.yaml"
    job.write_text("name: quickstart\nbudget: {max_total: $10}\n")
    sessions = open_ledger(tmp_path / "ledger.sqlite")

    def launch(runs: FakeRuns, *arguments: str):
        faked = ("create_run", "start_controller", "run_view", "request_stop", "bring_down", "wait_released")
        for name in (*faked, "events_after"):
            monkeypatch.setattr(follow_module, name, getattr(runs, name))
        monkeypatch.setattr(launch_module, "start_controller", runs.start_controller)
        monkeypatch.setattr(follow_module, "still_running", runs.still_running)
        value = error = None
        try:
            value = cli.main(["launch", str(job), *arguments], obj=sessions, standalone_mode=False)
        except Exception as caught:
            error = caught
        captured = capsys.readouterr()
        return Ended(return_value=value, exception=error, stdout=captured.out, stderr=captured.err)

    return launch


def test_ctrl_c_ends_the_wait_for_cleanup_and_the_summary_is_still_printed(monkeypatch, tmp_path, capsys):
    def waits(sessions, name, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(follow_module, "still_running", lambda sessions, name: ["groups and identities of demo"])
    monkeypatch.setattr(follow_module, "bring_down", waits)
    follow = follow_module.Follow(name="demo", out=Console(), on_exit="keep", release_seconds=1.0)
    follow_module._settle(open_ledger(tmp_path / "ledger.sqlite"), follow, Job(name="demo", infra="aws"))
    assert "waiting until these are gone: groups and identities of demo" in capsys.readouterr().out


def test_launch_shows_the_plan_follows_the_run_and_prints_its_end(launch):
    runs = FakeRuns([VIEW, VIEW, replace(VIEW, iteration=4), DONE])
    result = launch(runs, "-y")
    assert result.return_value == ExitCode.OK
    assert "priced as aws g6.xlarge in us-east-2, nothing was bought" in result.output
    assert result.output.count("iteration 3/45") == 2, "a line for news: the third iteration, and the end"
    assert "iteration 4/45" in result.output
    assert "Nothing of it runs any more. See it: spotrl report quickstart" in result.output
    assert runs.started == ["quickstart"]


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        ("finished", "target", ExitCode.OK),
        ("finished", "iterations", ExitCode.OK),
        ("stopped", "budget", ExitCode.STOPPED_BY_BUDGET),
        ("stopped", "deadline", ExitCode.DEADLINE_MISSED),
        ("stopped", "max_runtime", ExitCode.DEADLINE_MISSED),
        ("stopped", "asked for by a person", ExitCode.FAILURE),
        ("failed", "no trainer can be had: quota", ExitCode.FAILURE),
    ],
)
def test_the_exit_code_tells_a_script_how_a_run_ended(launch, status, reason, code):
    assert launch(FakeRuns([replace(DONE, status=status, reason=reason)], stops=["x"]), "-y").return_value == code


def test_a_target_reached_after_the_deadline_has_the_exit_code_of_a_missed_deadline(launch):
    late = replace(DONE, status="finished", reason="target", missed_deadline=True)
    assert launch(FakeRuns([late], stops=["x"]), "-y").return_value == ExitCode.DEADLINE_MISSED


def test_resources_left_after_the_end_are_named_because_they_may_cost_money(launch):
    result = launch(FakeRuns([DONE], left_after=["process 17"]), "-y")
    assert result.return_value == ExitCode.TEARDOWN_INCOMPLETE
    assert "Still running: process 17" in result.output
    assert "spotrl down quickstart" in result.output


def test_json_is_one_object_on_stdout_and_the_rest_goes_to_stderr(launch):
    result = launch(FakeRuns([VIEW, DONE]), "-y", "--json")
    answer = printed("launch", result.stdout)
    assert (answer["name"], answer["status"], answer["started"], answer["exit_code"]) == (
        "quickstart",
        "finished",
        True,
        0,
    )
    assert "priced as" in result.stderr


def test_the_plan_shows_image_sharing_only_if_the_job_requests_it(launch):
    eight = ("--set", "resources.rollout.accelerators=A100:8", "--set", "resources.trainer.accelerators=A100:8")
    with_sharing = launch(FakeRuns([VIEW]), "--dry-run", "--explain", *eight, "--set", "runtime.sp_degree=2")
    assert "sp_degree 2: 2 of a rollout node's 8 workers share an image" in with_sharing.output
    assert "goes on whoever shares it, equal to about 5e-7 (resume: close)" in with_sharing.output
    left = launch(
        FakeRuns([VIEW]), "--dry-run", "--explain", *eight, "--set", "runtime={sp_degree: auto, resume: exact}"
    )
    assert "sp_degree auto: a rollout node's 8 workers share images as demand has it" in left.output
    assert "(resume: exact)" in left.output
    assert (
        "only worker works alone"
        in launch(FakeRuns([VIEW]), "--dry-run", "--explain", "--set", "runtime.sp_degree=auto").output
    )
    assert "sp_degree" not in launch(FakeRuns([VIEW]), "--dry-run", "--explain", *eight).output


@pytest.mark.parametrize("accelerators", ["L4:1", "A100-80GB:8"])
def test_no_line_of_a_local_plan_is_longer_than_80_columns(launch, accelerators):
    gpus = [f"resources.{role}.accelerators={accelerators}" for role in ("trainer", "rollout")]
    shown = launch(
        FakeRuns([VIEW]),
        "--dry-run",
        "--explain",
        "--set",
        gpus[0],
        "--set",
        gpus[1],
        "--set",
        "runtime.sp_degree=auto",
    )
    assert accelerators in shown.output
    assert "sp_degree" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80


def test_a_dry_run_starts_nothing(launch):
    runs = FakeRuns([VIEW])
    result = launch(runs, "--dry-run", "--json")
    assert printed("launch", result.stdout)["started"] is False
    assert runs.started == []


def test_start_weights_are_in_the_stores_before_a_controller_starts(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    runs, done = FakeRuns([DONE]), []

    def find_start(sessions, checked, place):
        (place / "weights").write_text("")
        return StartWeights(file=place / "weights", sha256="", text="first, checkpoint l0001-i000007")

    monkeypatch.setattr(launch_module, "find_start", find_start)
    monkeypatch.setattr(
        launch_module, "send_start", lambda start, job, folder: done.append((folder, list(runs.started)))
    )
    result = launch(runs, "-y", "--set", "model.from=first")
    assert result.return_value == ExitCode.OK
    assert done == [(tmp_path / "runs" / "quickstart", [])]
    assert runs.started == ["quickstart"]
    assert "Starts from first, checkpoint l0001-i000007." in result.output
    assert not list(tmp_path.glob(".start-*"))  # its copied files are deleted


def test_without_a_terminal_nothing_starts_unasked(launch):
    runs = FakeRuns([VIEW])
    result = launch(runs)
    assert isinstance(result.exception, click.UsageError)
    assert "-y" in str(result.exception)
    assert runs.started == []


def test_detach_names_what_runs_and_how_to_stop_it(launch):
    result = launch(FakeRuns([VIEW]), "-y", "--detach")
    assert result.return_value == ExitCode.OK
    assert "Still running: quickstart-spot-0-g1" in result.output
    assert "Stop it: spotrl down quickstart" in result.output


@pytest.mark.parametrize(
    ("on_exit", "stops", "code"),
    [
        ("ask", ["stopped by Ctrl-C"], ExitCode.INTERRUPTED),
        ("down", ["stopped by Ctrl-C"], ExitCode.INTERRUPTED),
        ("keep", [], ExitCode.OK),
    ],
)
def test_ctrl_c_stops_the_run_unless_it_is_to_be_kept(launch, on_exit, stops, code):
    runs = FakeRuns([VIEW, KeyboardInterrupt(), VIEW])
    result = launch(runs, "-y", "--on-exit", on_exit)
    assert result.return_value == code
    assert runs.stops == stops
    assert ("Still running" in result.output) == (on_exit == "keep")


class CtrlC(StringIO):
    """Standard input of a user who presses Ctrl-C again."""

    def readline(self, size: int = -1) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("answer", "stops", "code"),
    [
        (StringIO("d\n"), [], ExitCode.OK),
        (StringIO("\nx\nc\n"), [], ExitCode.OK),
        (StringIO("s\n"), ["stopped by Ctrl-C"], ExitCode.INTERRUPTED),
        (StringIO("stop\n"), ["stopped by Ctrl-C"], ExitCode.INTERRUPTED),
        (StringIO("\n"), [], ExitCode.OK),
        (CtrlC(), [], ExitCode.OK),
    ],
    ids=["d", "c after nonsense", "s", "stop", "Enter and no more", "Ctrl-C again"],
)
def test_at_a_terminal_ctrl_c_asks_and_only_an_s_stops(launch, monkeypatch, answer, stops, code):
    monkeypatch.setattr(follow_module, "can_ask", lambda: True)
    monkeypatch.setattr(sys, "stdin", answer)
    runs = FakeRuns([VIEW, KeyboardInterrupt(), VIEW, DONE])
    result = launch(runs, "-y")
    assert result.return_value == code
    assert runs.stops == stops
    assert "d: detach, and let it run; c: continue to follow it; s: stop it." in result.output
    assert ("quickstart finished" in result.output) == (not isinstance(answer, CtrlC) and "c" in answer.getvalue())


def test_after_a_no_the_command_says_that_nothing_was_started(launch, monkeypatch):
    monkeypatch.setattr(launch_module, "can_ask", lambda: True)
    monkeypatch.setattr(sys, "stdin", StringIO("n\n"))
    runs = FakeRuns([VIEW])
    result = launch(runs)
    assert isinstance(result.exception, click.Abort)
    assert runs.started == []
    assert ending(result.exception, ["launch"]) == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("error", "command", "text"),
    [
        (Declined("Nothing was started."), "launch", "Nothing was started.\n"),
        (KeyboardInterrupt(), "attach", "Interrupted. The run goes on.\n"),
        (KeyboardInterrupt(), "report", "Interrupted.\n"),
    ],
)
def test_an_interrupted_command_says_what_became_of_its_work(error, command, text, capsys):
    assert ending(error, [command]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == text


def test_a_slow_step_leaves_a_line_in_a_log_and_a_quick_one_none(monkeypatch):
    monkeypatch.setattr(progress_words, "QUIET_SECONDS", 0.0)
    printed = threading.Event()

    class Log(StringIO):
        def flush(self) -> None:
            printed.set()

    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    with working(Console(file=StringIO()), "Reading") as say:
        assert printed.wait(60)
        say("12 of 30 prompts")
        assert log.getvalue() == "Reading ...\n", "at most one line in ten seconds"
        monkeypatch.setattr(progress_words, "AGAIN_SECONDS", 0.0)
        say("13 of 30 prompts")
    assert log.getvalue() == "Reading ...\n13 of 30 prompts ...\n"
    monkeypatch.setattr(progress_words, "QUIET_SECONDS", 600.0)
    with working(Console(file=StringIO()), "Reading"):
        pass
    assert log.getvalue() == "Reading ...\n13 of 30 prompts ...\n"


def test_a_step_moves_on_one_line_of_a_terminal():
    screen = StringIO()
    with working(Console(file=screen, force_terminal=True, width=80), "Reading") as say:
        say("12 of 30 prompts")
    assert "12 of 30 prompts ..." in screen.getvalue()


def test_a_stop_that_leaves_resources_behind_reports_them(launch):
    runs = FakeRuns([VIEW, KeyboardInterrupt(), VIEW], left_after=["quickstart-trainer-g1"])
    result = launch(runs, "-y")
    assert result.return_value == ExitCode.TEARDOWN_INCOMPLETE
    assert "Still running: quickstart-trainer-g1" in result.output


def test_a_lost_terminal_only_stops_the_following(launch, monkeypatch):
    monkeypatch.setattr(follow_module.os, "dup2", lambda *streams: None)
    runs = FakeRuns([VIEW, lambda: signal.raise_signal(signal.SIGHUP), VIEW])
    assert launch(runs, "-y", "--on-exit", "down").return_value == ExitCode.OK
    assert runs.stops == []


def test_sigterm_to_launch_stops_the_run(launch):
    runs = FakeRuns([VIEW, lambda: signal.raise_signal(signal.SIGTERM), VIEW])
    assert launch(runs, "-y").return_value == ExitCode.INTERRUPTED
    assert runs.stops == ["launch was terminated"]


def test_an_error_while_following_names_what_still_runs(launch):
    runs = FakeRuns([VIEW, OSError("the disk is gone"), VIEW])
    result = launch(runs, "-y", "--on-exit", "down")
    assert isinstance(result.exception, OSError)
    assert runs.stops == ["launch failed"]
    assert "spotrl report quickstart" in result.output


def test_a_dead_controller_is_started_again(launch, monkeypatch):
    monkeypatch.setattr(follow_module, "ALONE_SECONDS", -1)
    alone = replace(VIEW, controlled=False)
    runs = FakeRuns([alone, alone, DONE])
    assert launch(runs, "-y").return_value == ExitCode.OK
    assert len(runs.started) >= 2


def test_detach_refuses_options_that_need_following(launch):
    result = launch(FakeRuns([VIEW]), "-y", "--detach", "--on-exit", "down")
    assert isinstance(result.exception, click.UsageError)


# --- output ------------------------------------------------------------------------------------------


def test_a_plain_line_shows_the_most_important_facts():
    line = plain_line(VIEW)
    for words in ("iteration 3/45", "reward 0.510", "$1.20 at $0.46/h", "1 node"):
        assert words in line
    assert len(line) <= 100


def test_without_a_terminal_each_event_has_a_line(launch):
    first = EventLine(at_ms=0, elapsed_ms=61_000, source="quickstart-spot-0-g0", kind="gone", text="preempted")
    done = replace(first, source="trainer", kind="iteration_done", text="iteration 2: reward 0.510")
    output = launch(FakeRuns([VIEW, DONE], events=[[first, done], [first]]), "-y").output
    assert output.count("     1m 1s  spot-0-g0    gone preempted\n") == 2
    assert "iteration_done" not in output


LONG_NAME = "quickstart-1123-204010"
LONG = replace(
    VIEW,
    name=LONG_NAME,
    nodes=(
        replace(
            node(f"{LONG_NAME}-trainer-g12"), market="on_demand", zone="northamerica-northeast1-a", status="draining"
        ),
        replace(node(f"{LONG_NAME}-spot-11-g3"), age_ms=59 * 3_600_000, micro_usd_per_hour=98_320_000),
    ),
)


def node_lines(view):
    return "\n".join(line for (line,) in table_rows(node_rows(view), width=80))


@pytest.mark.parametrize("drawn", [lambda: node_lines(LONG), lambda: Frame(view=LONG)])
def test_80_columns_show_every_node_completely(drawn):
    console = Console(width=80, height=24, file=StringIO(), color_system=None)
    console.print(drawn())
    text = console.file.getvalue()
    assert "trainer-g12" in text
    assert "spot-11-g3" in text
    assert "northamerica-northeast1-a" in text
    assert "$98.32/h" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_sparkline_ranges_from_lowest_to_highest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([]) == ""


@pytest.mark.parametrize("no_color", [True, False])
def test_the_panel_honours_no_color(monkeypatch, no_color):
    from rich.console import Console

    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(force_terminal=True, width=110, color_system="truecolor", legacy_windows=False)
    with console.capture() as capture:
        console.print(Frame(view=VIEW, rewards=[0.2, 0.5], header="local: priced as X, nothing was bought"))
    text = capture.get()
    assert "nothing was bought" in text
    assert "use2-az3" in text
    assert ("\x1b[32m" in text) == (not no_color)


def test_the_panel_shows_groups_only_of_a_run_that_shares():
    from rich.console import Console

    def text(view: RunView) -> str:
        console = Console(width=140, height=40)
        with console.capture() as capture:
            console.print(Frame(view=view))
        return capture.get()

    shared = (("quickstart-spot-0-g1/0", "quickstart-spot-0-g1/1"), ("quickstart-spot-0-g1/2",))
    assert "groups" not in text(VIEW)
    assert "0+1 2" in text(replace(VIEW, nodes=(node(groups=shared), node("quickstart-spot-1-g1"))))


def test_result_and_report_are_written_however_a_run_ended(launch, tmp_path, monkeypatch):
    written: list[tuple[str, dict[str, Path | None]]] = []
    monkeypatch.setattr(follow_module, "_write_files", lambda sessions, name, **files: written.append((name, files)))
    result_file = tmp_path / "out" / "result.json"
    launch(FakeRuns([replace(DONE, status="failed", reason="x")], stops=["x"]), "-y", "--result", str(result_file))
    assert written == [("quickstart", {"result": result_file, "html": None})]
