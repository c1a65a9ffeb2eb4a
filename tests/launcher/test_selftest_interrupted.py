"""Whatever ends `spotrl selftest`, its cleanup follows, or the next command finds what is left."""

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

from launcher.cli.main import run
from launcher.exit_codes import ExitCode, Failure
from launcher.ledger.store import open_ledger, writing
from launcher.runs.runs import ControllerFailed
from launcher.selftest.abandoned import abandoned, alive, folder_of, is_abandoned
from launcher.selftest.conduct import Conductor
from launcher.selftest.interruption import Interrupted, Interruption, interruptions
from launcher.selftest.outcome import outcome_of
from launcher.selftest.steps import ALWAYS, Step, Verdict
from tests.launcher.made_ledger import JOB, MINUTE_MS, a_run
from tests.launcher.test_selftest import FakeRun

RUN = "selftest-aws-1"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


# --- signals --------------------------------------------------------------------------------------------


class Signalled(FakeRun):
    """A run during which signals come: `at` maps an act to the number of signals that come just before it."""

    def __init__(self, interruption, at):
        super().__init__()
        self.interruption, self.at = interruption, at

    def _do(self, what):
        for _ in range(self.at.pop(what, 0)):
            self.interruption.arrive("SIGTERM")
        super()._do(what)


def conduct(at, *, said_at="", signals=0):
    """Conduct a selftest during which signals come. `said_at`: so many `signals` come while this text is printed."""
    interruption, left = Interruption(), {said_at: signals}

    def say(step, text):
        for fragment in [one for one in left if one and one in text]:
            for _ in range(left.pop(fragment)):
                interruption.arrive("Ctrl-C")

    conductor = Conductor(
        run=Signalled(interruption, at),
        say=say,
        minutes=dict.fromkeys(Step, 0.0),
        look_seconds=0.0,
        interruption=interruption,
    )
    conductor.conduct()
    return conductor


def verdicts(conductor):
    return {result.step: result.judgement.verdict for result in conductor.results}


@pytest.mark.parametrize("act", ["preempt run-spot-0-g0", "resume"])
def test_a_signal_in_a_step_leads_to_the_cleanup(act):
    conductor = conduct({act: 1})
    step = Step.RESUME if act == "resume" else Step.PREEMPT
    assert verdicts(conductor)[step] is Verdict.INTERRUPTED
    assert [verdicts(conductor)[step] for step in ALWAYS] == [Verdict.PASSED] * 2
    assert conductor.run.did[-2:] == ["stop", "look"]
    assert conductor.exit_code(conductor.facts()) == ExitCode.INTERRUPTED
    outcome = outcome_of("run", conductor.facts(), conductor.results, ExitCode.INTERRUPTED)
    found = {line.step: (line.verdict, line.text) for line in outcome.steps}
    assert found[step] == ("interrupted", "by SIGTERM; cleaning up (again: do not wait)")
    assert (outcome.failed_steps, outcome.passed) == ([], False)


def test_a_second_signal_ends_the_waiting_and_is_a_failed_cleanup():
    conductor = conduct({"resume": 1, "look": 1})
    assert [result.step for result in conductor.failed] == [Step.CLEANUP]
    assert conductor.exit_code(conductor.facts()) == ExitCode.TEARDOWN_INCOMPLETE, "nobody knows what is left"


@pytest.mark.parametrize("text", ["by SIGTERM", "is preempted by", "stopping the run"])
@pytest.mark.parametrize("signals", [1, 2, 3])
def test_signals_while_a_line_is_printed_lose_neither_cleanup_nor_result(text, signals):
    conductor = conduct({"preempt run-spot-0-g0": 1 if text == "by SIGTERM" else 0}, said_at=text, signals=signals)
    assert "ask to stop" in conductor.run.did
    assert set(ALWAYS) <= set(verdicts(conductor))
    assert conductor.is_interrupted


def test_a_signal_after_the_cleanup_changes_nothing():
    conductor = conduct({}, said_at="passed: nothing is left", signals=2)
    assert set(verdicts(conductor).values()) == {Verdict.PASSED}
    assert conductor.exit_code(conductor.facts()) == ExitCode.OK


def test_an_interrupted_launch_leads_to_the_cleanup():
    conductor = Conductor(run=FakeRun(), say=lambda *_: None, minutes=dict.fromkeys(Step, 0.0))
    conductor.end_launch(Interrupted("SIGTERM"))
    assert verdicts(conductor)[Step.BUY] is Verdict.INTERRUPTED
    assert conductor.exit_code(conductor.facts()) == ExitCode.INTERRUPTED
    failed = Conductor(run=FakeRun(), say=lambda *_: None, minutes=dict.fromkeys(Step, 0.0))
    failed.end_launch(Failure("no such bucket"))
    assert failed.failed[0].judgement.text == "no such bucket"
    assert failed.exit_code(failed.facts()) == ExitCode.FAILURE


def test_a_run_that_does_not_end_is_named_while_it_is_waited_for():
    class Sticky(FakeRun):
        def facts(self, seen):
            return replace(super().facts(seen), still_running=("run-spot-0-g1",))

        def stop(self, seconds):
            return ("run-spot-0-g1",)

    said = []
    conductor = Conductor(run=Sticky(), say=lambda step, text: said.append(text), minutes=dict.fromkeys(Step, 0.0))
    conductor.clean_up()
    assert "stopping the run; still there: run-spot-0-g1" in said
    assert conductor.exit_code(conductor.facts()) == ExitCode.TEARDOWN_INCOMPLETE


def test_a_controller_that_does_not_start_at_once_spoils_neither_step_nor_cleanup():
    class Slow(FakeRun):
        def ensure_controller(self):
            self._do("ensure")
            return False

    slow = ControllerFailed("the controller of run did not start")
    run, said = Slow(raises={"ensure": slow, "stop": slow}), []
    minutes = dict.fromkeys(Step, 1.0)
    conductor = Conductor(run=run, say=lambda step, text: said.append(text), minutes=minutes, look_seconds=0.0)
    conductor.conduct()
    assert set(verdicts(conductor).values()) == {Verdict.PASSED}
    assert said.count(f"{slow}; trying again") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_raised_only_where_it_may_interrupt(number, capfd):
    before = signal.getsignal(number)
    outputs = [os.dup(stream) for stream in (1, 2)]
    try:
        with interruptions() as interruption:
            os.kill(os.getpid(), number)
            assert interruption.pending, "kept, and not raised"
            with pytest.raises(Interrupted), interruption.may_interrupt():
                pass
            interruption.answer()
            with interruption.may_interrupt():
                pass
            with pytest.raises(Interrupted), interruption.may_interrupt():
                os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # after the first one, nothing is interrupted before the answer
            with pytest.raises(Interrupted):
                interruption.check()
    finally:
        for stream, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, stream)
            os.close(output)
    assert signal.getsignal(number) == before


# --- what a killed selftest leaves ----------------------------------------------------------------------


def a_selftest(home):
    """Make the ledger of a selftest whose node runs, and the folder of its job."""
    sessions = open_ledger(home / "ledger.sqlite")
    with writing(sessions) as session:
        made = a_run(session, RUN, job=JOB | {"iterations": 200}, factor=1.0)
        made.run.infra = "aws"
        made.status("running", 0)
        made.node("trainer", 0, market="on_demand", up=MINUTE_MS)
    folder_of(RUN).mkdir(parents=True)
    return sessions


def hold(run, held):
    with alive(run):
        held.set()
        signal.pause()


def test_a_killed_selftest_is_found_by_its_lock_and_shown_by_status(home, capsys):
    sessions = a_selftest(home)
    assert abandoned(sessions) == [], "no selftest of this name has begun"
    forks = multiprocessing.get_context("fork")
    held = forks.Event()
    process = forks.Process(target=hold, args=(RUN, held), daemon=True)
    process.start()
    assert held.wait(120)
    assert (abandoned(sessions), is_abandoned(sessions, RUN)) == ([], False)
    with pytest.raises(Failure, match="runs already"), alive(RUN):
        pass
    process.kill()
    process.join()
    assert (abandoned(sessions), is_abandoned(sessions, RUN)) == ([RUN], True)
    assert run(["status", RUN]) == ExitCode.OK
    assert f"its selftest has ended, and left it; end it: spotrl down {RUN}" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_selftest_that_ended_in_time_left_nothing(home):
    sessions = open_ledger(home / "ledger.sqlite")
    (home / "selftests").mkdir()
    with alive(RUN):
        pass
    assert abandoned(sessions) == [], "the ledger has no run of it"


# --- limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["buy", "buy=0", "buy=-1", "buy=nan", "buy=inf", "sell=5", "=5"])
def test_a_time_that_is_none_is_refused_with_the_steps(home, capsys, text):
    assert run(["selftest", "--infra", "aws", "--minutes", text]) == ExitCode.USAGE
    assert "buy, train, publish" in " ".join(capsys.readouterr().err.split())


def test_a_price_above_the_budget_is_refused_before_anything_is_bought(home, capsys):
    """One H100 on demand costs more an hour than both nodes of a selftest may."""
    words = ["selftest", "--infra", "aws", "--store", "s3://my-bucket/spotrl", "--gpu", "H100", "--dry-run"]
    assert run(words) == ExitCode.REFUSED_BY_BUDGET
    assert "choose a cheaper GPU (--gpu)" in " ".join(capsys.readouterr().err.split())
    assert not (home / "runs").exists()
