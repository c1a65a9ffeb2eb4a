"""Runs and their commands, with controllers as separate processes that are killed and restarted."""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner
from sqlalchemy import select

from launcher.cli.down import down
from launcher.cli.events import events
from launcher.cli.logs import logs
from launcher.cli.ls import ls
from launcher.cli.resume import resume
from launcher.cli.status import status
from launcher.controller.lease import give_up, take_lease
from launcher.controller.run_process import run_controller
from launcher.decide.facts import Stage
from launcher.ledger.models import ControllerLease, Node, ProgressRow, Run, RunStatus
from launcher.ledger.store import append_status, find_run, writing
from launcher.provision.local.processes import is_alive, processes_of
from launcher.provision.local.provisioner import node_folder
from launcher.report.build import build_report
from launcher.runs import runs
from launcher.runs.new_limits import LimitTooLow, NewLimits
from launcher.runs.runs import (
    ControllerFailed,
    NameTaken,
    NothingToResume,
    bring_down,
    request_stop,
    resume_run,
    running_processes,
    start_controller,
    still_running,
    wait_released,
)
from launcher.runs.views import is_controlled, node_logs, run_view
from launcher.storage.store_lease import LeaseHeld
from tests.launcher.cluster.stage import assert_consistent, cloud_run, ledger, made_run, wait_until
from tests.launcher.printed import printed

CONTROLLED = (sys.executable, str(Path(__file__).parent / "controlled.py"))


@pytest.fixture
def sessions(home, monkeypatch):
    monkeypatch.setattr(runs, "CONTROLLER", CONTROLLED)
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    sessions = ledger(home)
    yield sessions
    with sessions() as session:
        leases = session.scalars(select(ControllerLease)).all()
    for lease in leases:
        if is_alive(lease.pid, float(lease.holder.partition("@")[2])):
            os.kill(lease.pid, signal.SIGKILL)


def invoke(command, sessions, *arguments):
    return CliRunner().invoke(command, list(arguments), obj=sessions, standalone_mode=False)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid, None))


def iterations(sessions, run: Run) -> int:
    return run_view(sessions, run.name).iteration


def trains_on(sessions, run: Run) -> Callable[[], bool]:
    """Return whether the run has made two more iterations or is over, as a function."""
    reached = iterations(sessions, run)
    return lambda: iterations(sessions, run) > reached + 1 or not still_running(sessions, run.name)


@pytest.mark.slow
def test_a_run_survives_kill_9_of_any_process_at_any_moment(sessions):
    """Controllers, agents and workers are killed at random times; `resume` continues each time.

    A run that loses its trainer three times without a new iteration fails, so there is one between two pairs of kills.
    """
    chance = random.Random(7)
    run = made_run(sessions, spot=1, iterations=20, factor=3000.0)
    pid = start_controller(sessions, run.name)
    for kills in range(4):
        if kills == 2:
            wait_until(trains_on(sessions, run))
        time.sleep(chance.uniform(0.0, 0.5))
        victims = running_processes(run)
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(victims), signal.SIGKILL)
        if is_alive(pid, None):
            kill(pid)
        assert not is_controlled(sessions, run.name)
        try:
            pid = resume_run(sessions, run.name)
        except NothingToResume:  # on a busy computer the run may be over before the last kill
            break
    wait_until(lambda: run_view(sessions, run.name).status in ("finished", "failed"))
    assert run_view(sessions, run.name).status == "finished"
    assert wait_released(sessions, run.name, 60)
    assert iterations(sessions, run) == 20
    assert_consistent(sessions, run)


@pytest.mark.slow
def test_a_run_goes_on_without_its_controller(sessions):
    run = made_run(sessions, spot=0, iterations=1000)
    pid = start_controller(sessions, run.name)
    wait_until(lambda: iterations(sessions, run) > 0)
    kill(pid)
    reached = iterations(sessions, run)
    before = running_processes(run)
    trained = node_folder(Path(run.folder), "demo-trainer-g0") / "progress" / "trainer.jsonl"
    length = len(trained.read_text().splitlines())
    wait_until(lambda: len(trained.read_text().splitlines()) > length + 6)
    assert "no controller" in invoke(status, sessions, run.name).output
    resume_run(sessions, run.name)
    wait_until(lambda: iterations(sessions, run) > reached + 1)
    assert running_processes(run) == before  # still the same node
    assert bring_down(sessions, run.name, 120) == []


@pytest.mark.slow
def test_a_stopped_run_resumes_from_its_checkpoint(sessions, home):
    run = made_run(sessions, spot=1, iterations=1000)
    start_controller(sessions, run.name)
    wait_until(lambda: iterations(sessions, run) >= 2)
    code = home / "code"
    (own,) = code.iterdir()
    (code / "of-an-old-version").mkdir()
    result = invoke(down, sessions, run.name, "--json")
    assert printed("down", result.output) == {"run": "demo", "left": []}
    assert result.return_value == 0
    assert run_view(sessions, run.name).status == "stopped"
    reached = iterations(sessions, run)
    wait_until(lambda: not is_controlled(sessions, run.name))
    assert printed("resume", invoke(resume, sessions, run.name, "--json").output)["run"] == "demo"
    wait_until(lambda: iterations(sessions, run) > reached)
    assert list(code.iterdir()) == [own], "a start removes code that nothing uses"
    with sessions() as session:
        starts = session.scalars(select(ProgressRow).where(ProgressRow.kind == "engine_started")).all()
    assert [start.lineage for start in starts] == [0, 1]
    assert starts[1].event["iteration"] == reached
    assert bring_down(sessions, run.name, 120) == []
    with sessions() as session:
        origin = build_report(session, run, run.clock.now_ms()).provenance
    assert len(origin.commands) == 2, "the launch and the resume"
    hardware = {one.node: one.hardware for one in origin.hardware}
    assert {hardware[f"demo-trainer-g{generation}"] for generation in (0, 1)} == {"2 CPU cores (made up)"}
    assert origin.ended_at
    assert_consistent(sessions, run)


@pytest.mark.slow
def test_a_run_that_its_budget_stopped_goes_on_with_a_larger_one(sessions):
    run = made_run(sessions, spot=1, iterations=1000, max_total=150_000)
    start_controller(sessions, run.name)
    wait_until(lambda: run_view(sessions, run.name).status == "stopped")
    wait_until(lambda: not is_controlled(sessions, run.name))
    spent, reached = run_view(sessions, run.name).spent_micro_usd, iterations(sessions, run)
    refused = invoke(resume, sessions, run.name, "--max-total", "0.01").exception
    assert isinstance(refused, LimitTooLow)
    assert "--max-total is $0.01, and demo has already spent $0.0" in str(refused)
    assert not is_controlled(sessions, run.name)
    invoke(resume, sessions, run.name, "--max-total", "$5", "--max-hourly", "4", "--deadline", "10h")
    wait_until(lambda: iterations(sessions, run) > reached)
    assert run_view(sessions, run.name).max_total_micro_usd == 5_000_000
    # The start of a controller holds the clock, and these nodes report no work that would move it.
    wait_until(lambda: run_view(sessions, run.name).spent_micro_usd > spent)
    with pytest.raises(NothingToResume, match="stop it first: `spotrl down demo`"):
        resume_run(sessions, run.name, NewLimits(max_total_micro_usd=9_000_000))
    with sessions() as session:
        kept = find_run(session, run.name)
        reasons = session.scalars(select(RunStatus.reason).where(RunStatus.run_id == kept.id)).all()
        assert kept.max_hourly_micro_usd == 4_000_000
        assert 9 * 3_600_000 < kept.deadline_ms - kept.created_ms < 12 * 3_600_000
    changed = "max_total $0.15 -> $5.00, max_hourly unlimited -> $4.00, ends in 10h at the latest"
    assert f"resumed: {changed}" in reasons
    assert bring_down(sessions, run.name, 120) == []
    assert_consistent(sessions, run)


@pytest.mark.parametrize(
    ("flag", "value", "found"),
    [("--max-total", "0", "is not a budget"), ("--max-hourly", "-1", "no price"), ("--deadline", "soon", "soon")],
)
def test_a_new_limit_is_written_as_in_a_job_file(sessions, flag, value, found):
    run = made_run(sessions)
    with pytest.raises(click.BadParameter, match=found):
        CliRunner().invoke(resume, [run.name, flag, value], obj=sessions, standalone_mode=False, catch_exceptions=False)
    assert not is_controlled(sessions, run.name)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["dead", "frozen"])
def test_down_needs_no_running_controller(sessions, frozen):
    run = made_run(sessions, spot=1, iterations=1000)
    pid = start_controller(sessions, run.name)
    wait_until(lambda: iterations(sessions, run) > 0)
    if frozen:
        with writing(sessions) as session:
            os.kill(pid, signal.SIGSTOP)  # the controller cannot hold the lock while it is frozen
            lease = session.get(ControllerLease, run.id)  # its lease runs out
            assert lease is not None
            lease.expires_wall_ms = 0
    else:
        kill(pid)
    assert bring_down(sessions, run.name, 120) == []
    assert_consistent(sessions, run)
    if frozen:
        os.kill(pid, signal.SIGCONT)
        psutil.Process(pid).wait(60)  # it notices that its lease is lost, and exits
        assert_consistent(sessions, run)


def test_a_second_controller_is_refused_and_down_names_what_it_could_not_end(sessions):
    run = made_run(sessions, spot=0, iterations=1000)
    pid = start_controller(sessions, run.name)
    wait_until(lambda: iterations(sessions, run) > 0)
    with pytest.raises(LeaseHeld, match=f"process {pid}"):
        run_controller(sessions, run.name)
    with pytest.raises(NothingToResume, match=f"process {pid}"):
        resume_run(sessions, run.name)
    result = invoke(down, sessions, run.name, "--timeout", "0")
    assert result.return_value == 10
    assert "demo-trainer-g0" in result.output
    assert wait_released(sessions, run.name, 120)


@pytest.mark.slow
def test_the_real_controller_process_stops_a_run_beyond_its_budget(sessions, monkeypatch):
    monkeypatch.setattr(runs, "CONTROLLER", (sys.executable, "-m", "launcher.cli.main", "controller"))
    run = made_run(sessions, max_total=10)
    start_controller(sessions, run.name)
    wait_until(lambda: run_view(sessions, run.name).status == "stopped")
    assert run_view(sessions, run.name).reason == "budget"
    assert "at most $" in (Path(run.folder) / "controller.log").read_text()


@pytest.mark.slow
def test_a_controller_that_does_not_start_reports_the_reason(sessions, monkeypatch):
    monkeypatch.setattr(runs, "CONTROLLER", (sys.executable, "-c", "raise SystemExit('no such library')"))
    run = made_run(sessions)
    with pytest.raises(ControllerFailed, match="no such library"):
        start_controller(sessions, run.name)


def test_a_finished_run_is_not_resumed_and_its_name_is_taken(sessions):
    run = made_run(sessions, spot=0, iterations=1)
    start_controller(sessions, run.name)
    wait_until(lambda: run_view(sessions, run.name).status == "finished")
    wait_until(lambda: not is_controlled(sessions, run.name))
    with pytest.raises(NothingToResume, match="is finished"):
        resume_run(sessions, run.name)
    request_stop(sessions, run.name)
    assert run_view(sessions, run.name).status == "finished"
    with pytest.raises(NameTaken, match="choose another name"):
        made_run(sessions)


def test_commands_show_a_run_and_its_lost_nodes(sessions):
    assert "No runs yet" in invoke(ls, sessions).output
    run = made_run(sessions, spot=1, iterations=1000)
    start_controller(sessions, run.name)
    wait_until(lambda: {node.status for node in run_view(sessions, run.name).nodes} == {"ready"})
    for pid in processes_of(node_folder(Path(run.folder), "demo-spot-0-g0")):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: any(node.name == "demo-spot-0-g1" for node in run_view(sessions, run.name).nodes))
    wait_until(lambda: run_view(sessions, run.name).eta_seconds is not None)
    [listed] = printed("ls", invoke(ls, sessions, "--json").output)
    assert (listed["name"], listed["status"], listed["controlled"]) == ("demo", "running", True)
    assert "demo" in invoke(ls, sessions).output
    shown = invoke(status, sessions, run.name).output
    assert "spot-0-g1" in shown
    assert printed("status", invoke(status, sessions, run.name, "--json").output)["micro_usd_per_hour"] > 0
    assert bring_down(sessions, run.name, 120) == []
    shown = invoke(events, sessions, run.name, "--json", "--follow").output
    listed = [printed("events", line) for line in shown.splitlines()]
    assert ("demo-spot-0-g0", "gone") in [(line["source"], line["kind"]) for line in listed]
    assert (listed[0]["source"], listed[0]["kind"]) == ("run", "planned")
    (node_folder(Path(run.folder), "demo-spot-0-g0") / "logs" / "worker.log").write_text("last words\n")
    text = invoke(logs, sessions, run.name, "--node", "spot-0", "--follow").output
    assert "==> demo-spot-0-g0/worker.log <==\nlast words" in text
    shown = invoke(logs, sessions, run.name, "--json").output
    assert "controller.log" in shown
    assert [printed("logs", line)["line"] for line in shown.splitlines()]
    with pytest.raises(LookupError, match="demo-trainer-g0"):
        node_logs(sessions, run.name, "spot-9")


def test_every_command_has_an_example_and_names_an_unknown_run(sessions):
    for command in (ls, status, events, logs, down, resume):
        assert "Example:" in invoke(command, sessions, "--help").output
    result = invoke(status, sessions, "nobody")
    assert isinstance(result.exception, LookupError)


def test_an_intent_is_shown_before_the_cloud_is_called(sessions):
    run = made_run(sessions, spot=0)
    plain = {"slot": "trainer", "role": "trainer", "market": "on_demand", "cloud": "aws", "region": "r", "zone": "z"}
    more = {"instance_type": "i", "accelerator": "L4", "price_source": "s", "price_observed_at": "d"}
    numbers = {"generation": 0, "gpus": 1, "micro_usd_per_hour": 5, "on_demand_micro_usd_per_hour": 5}
    with writing(sessions) as session:
        session.add(Node(run_id=run.id, name="n", requested_ms=1, reserved_micro_usd=0, **plain, **more, **numbers))
    [node] = run_view(sessions, run.name).nodes
    assert (node.status, run_view(sessions, run.name).micro_usd_per_hour) == ("asked", 5)


def test_a_cloud_run_is_not_down_before_its_controller_has_cleaned_up(sessions):
    run = cloud_run(sessions)
    other = psutil.Popen(["sleep", "60"])
    holder = f"{other.pid}@{other.create_time()}"
    try:
        with writing(sessions) as session:
            append_status(session, session.merge(run), Stage.STOPPED, "", 1)
        lease = take_lease(sessions, run, holder, other.pid)
        left = [f"groups and identities of {run.name} (its controller takes them away)"]
        assert still_running(sessions, run.name) == left
        assert bring_down(sessions, run.name, 0.3) == left
        give_up(sessions, lease)
        assert bring_down(sessions, run.name, 0.3) == []
    finally:
        other.kill()
        other.wait()
