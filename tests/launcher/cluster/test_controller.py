"""The controller over real processes: the ledger after nodes, controllers and the budget ended."""

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from engine.events import Capacity, Market, NodeState
from engine.node_spec import NodeSpec, role_token
from launcher.cli.follow import exit_code
from launcher.cli.status import headline
from launcher.controller import controller as controller_module
from launcher.controller.controller import Controller
from launcher.controller.lease import LEASE_MS, take_lease
from launcher.controller.node_specs import node_spec
from launcher.exit_codes import ExitCode
from launcher.job.schema import Job
from launcher.ledger.models import Node, Preemption, ProgressRow, Run, RunStatus
from launcher.ledger.node_history import node_records
from launcher.ledger.store import current_status, nodes_of
from launcher.money import dollars
from launcher.provision.local.processes import processes_of
from launcher.provision.local.provisioner import LocalProvisioner, node_folder, nodes_folder
from launcher.runs.runs import request_stop, still_running
from launcher.runs.views import run_view
from launcher.storage.store_lease import LeaseHeld, LeaseLost
from tests.launcher.cluster.stage import FAKE_AGENT, assert_consistent, dead_pid, ledger, made_run, rule, wait_until


@pytest.fixture
def sessions(home):
    return ledger(home)


def provisioner_of(run: Run, schedule=None) -> LocalProvisioner:
    return LocalProvisioner(Path(run.folder), run.clock, schedule, FAKE_AGENT)


def controller_of(sessions, run: Run, provisioner=None) -> Controller:
    """Return a controller that counts as dead later, because its holder's process does not exist."""
    return Controller(
        sessions, run, provisioner or provisioner_of(run), run.clock, f"test-{time.monotonic_ns()}", dead_pid()
    )


def passes(controller: Controller, until, seconds: float = 120.0) -> None:
    """Run passes until the condition holds or the run is over."""
    ends = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < ends, "it did not happen in time"
        if controller.one_pass():
            assert until()
            return
        time.sleep(0.02)


def status_of(sessions, run: Run) -> tuple[str, str]:
    with sessions() as session:
        status = current_status(session, run)
        assert status is not None
        return status.status, status.reason


def names_ready(sessions, run: Run) -> list[str]:
    with sessions() as session:
        return [record.name for record in node_records(session, run) if record.is_live and "ready" in record.happened]


def node_names(sessions, run: Run) -> list[str]:
    with sessions() as session:
        return [node.name for node in nodes_of(session, run)]


def run_until_over(sessions, run: Run, controller: Controller) -> None:
    passes(
        controller,
        lambda: not still_running(sessions, run.name) and status_of(sessions, run)[0] in controller_module.OVER,
    )


# --- a whole run --------------------------------------------------------------------------------------


def test_a_run_buys_nodes_trains_and_releases_everything(sessions):
    run = made_run(sessions, spot=2, iterations=5)
    run_until_over(sessions, run, controller_of(sessions, run))
    assert status_of(sessions, run) == ("finished", "iterations")
    assert_consistent(sessions, run)
    view = run_view(sessions, run.name)
    assert (view.iteration, view.iterations, view.reward) == (5, 5, 0.4)
    assert view.score == pytest.approx(0.04)
    assert view.micro_usd_per_hour == 0
    assert view.spent_micro_usd > 0
    assert {node.status for node in view.nodes} <= {"gone", "released"}


def test_a_run_that_stopped_paying_finishes(sessions, monkeypatch):
    monkeypatch.setenv("FAKE_BEST", "0.05")
    stop, target = {"usd_per_point": "$0.01"}, {"metric": "exact_match", "value": 0.9}
    run = made_run(sessions, spot=1, iterations=100_000, stop=stop, target=target)
    run_until_over(sessions, run, controller_of(sessions, run))
    status, reason = status_of(sessions, run)
    assert (status, reason.partition(" costs ")[0]) == ("finished", "a point (+.01 of exact_match)")
    assert "above stop.usd_per_point $0.01, at 3 evaluations in a row" in reason
    assert_consistent(sessions, run)
    view = run_view(sessions, run.name)
    assert exit_code(view) is ExitCode.OK
    assert view.score == pytest.approx(0.05)
    assert 10_000 < view.point.last_micro_usd < view.spent_micro_usd
    assert f"The last +.01 of exact_match cost {dollars(view.point.last_micro_usd)}, of it " in "\n".join(
        headline(view)
    )
    assert view.point.why_no_next == "the last 8 evaluations show no rise"


def test_the_engine_gets_capacity_snapshots(sessions, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    run = made_run(sessions, spot=1, trainers=2, iterations=1000)
    controller = controller_of(sessions, run)
    received = node_folder(Path(run.folder), "demo-trainer-g0") / "calls.jsonl"

    def snapshots() -> list[Capacity]:
        lines = [json.loads(line) for line in received.read_text().splitlines()] if received.exists() else []
        assert all(line["allowed"] for line in lines)
        return [Capacity.from_json(json.dumps(line["body"])) for line in lines if line["path"] == "/capacity"]

    passes(controller, lambda: snapshots() and len(snapshots()[-1].nodes) == 3)  # ranks sample too
    assert {(node.node, node.market, node.state) for node in snapshots()[-1].nodes} == {
        ("demo-trainer-g0", Market.ON_DEMAND, NodeState.READY),
        ("demo-trainer-1-g0", Market.ON_DEMAND, NodeState.READY),
        ("demo-spot-0-g0", Market.SPOT, NodeState.READY),
    }
    before = len(snapshots())
    for _ in range(5):
        controller.one_pass()
    assert len(snapshots()) == before  # without a change there is no new snapshot
    provisioner_of(run).release(["demo-spot-0-g0"])
    passes(controller, lambda: any(node.state is NodeState.LOST for node in snapshots()[-1].nodes))
    generations = [snapshot.generation for snapshot in snapshots()]
    assert generations == sorted(set(generations))


def test_only_the_trainers_node_gets_the_runs_token(sessions):
    run = made_run(sessions, spot=1, trainers=2, iterations=1000)
    passes(controller_of(sessions, run), lambda: len(names_ready(sessions, run)) == 3)
    specs = {
        name: NodeSpec.model_validate_json((node_folder(Path(run.folder), f"demo-{name}-g0") / "node.json").read_text())
        for name in ("trainer", "trainer-1", "spot-0")
    }
    assert {name: spec.token for name, spec in specs.items()} == {
        "trainer": run.token,
        "trainer-1": role_token(run.token, "ranks"),
        "spot-0": role_token(run.token, "rollout"),
    }
    places = {name: (spec.role, spec.trainer_node, spec.trainer_nodes) for name, spec in specs.items()}
    assert places == {"trainer": ("trainer", 0, 2), "trainer-1": ("ranks", 1, 2), "spot-0": ("rollout", 0, 1)}


# --- nodes are lost -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "signum"),
    [*itertools.product(("trainer", "spot-0"), (signal.SIGKILL, signal.SIGSTOP)), ("trainer-1", signal.SIGKILL)],
)
def test_a_node_that_is_killed_or_frozen_is_replaced(sessions, monkeypatch, slot, signum):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    monkeypatch.setattr("launcher.provision.local.node_end.STOPPED_SECONDS", 0.5)
    run = made_run(sessions, spot=1, trainers=2, iterations=1000)
    controller = controller_of(sessions, run)
    passes(controller, lambda: len(names_ready(sessions, run)) == 3)
    for pid in processes_of(node_folder(Path(run.folder), f"demo-{slot}-g0")):
        os.kill(pid, signum)
    passes(controller, lambda: f"demo-{slot}-g1" in names_ready(sessions, run))
    request_stop(sessions, run.name)
    run_until_over(sessions, run, controller)
    assert status_of(sessions, run)[0] == "stopped"
    assert_consistent(sessions, run)


@pytest.mark.slow
@pytest.mark.parametrize("manner", range(4))
def test_a_preempted_node_is_recorded_and_gets_a_successor(sessions, monkeypatch, manner):
    """Manners: notice + SIGKILL, SIGSTOP, SIGKILL, notice + SIGSTOP. 30 s of the run's clock are half a second."""
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    monkeypatch.setattr("launcher.decide.facts.YOUNG_MS", 0)
    run = made_run(sessions, spot=1, iterations=1000)
    rules = rule(60_000, 10**9, notice_ms=30_000, first=manner)
    fate = rules.preemption(0).manner
    controller = controller_of(sessions, run, provisioner_of(run, rules))
    passes(controller, lambda: "demo-spot-0-g1" in names_ready(sessions, run))
    passes(controller, lambda: "demo-spot-0-g0" not in names_ready(sessions, run))
    request_stop(sessions, run.name)
    run_until_over(sessions, run, controller)
    assert_consistent(sessions, run)
    with sessions() as session:
        [preemption] = session.scalars(select(Preemption))
        node = session.get(Node, preemption.node_id)
        assert node is not None
        assert (node.name, preemption.signal) == ("demo-spot-0-g0", fate.signal)
        assert (preemption.noticed_ms is not None) == fate.with_notice
        successor = session.scalars(select(Node).where(Node.name == "demo-spot-0-g1")).one()
        assert (
            successor.requested_ms < preemption.at_ms
        ) == fate.with_notice  # the successor was requested at the notice


def test_a_trainer_that_cannot_start_fails_the_run_with_its_log(sessions, monkeypatch):
    monkeypatch.setenv("FAKE_TROUBLE", "crash")
    run = made_run(sessions, spot=0, factor=3000.0)
    run_until_over(sessions, run, controller_of(sessions, run))
    status, reason = status_of(sessions, run)
    assert status == "failed"
    assert "lost 3 times in the same way without a new iteration: its agent exited with code 1" in reason
    assert "no such model" in reason
    assert_consistent(sessions, run)


# --- budget -------------------------------------------------------------------------------------------


def test_the_budget_stops_a_run_within_its_limit(sessions, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    # Stopping takes 360 s of the run's clock and costs $0.13. $0.15 leave about 55 s, 1.4 s of wall time.
    run = made_run(sessions, spot=1, iterations=1000, factor=40.0, max_total=150_000)
    run_until_over(sessions, run, controller_of(sessions, run))
    assert status_of(sessions, run) == ("stopped", "budget")
    assert_consistent(sessions, run)
    view = run_view(sessions, run.name)
    assert 0 < view.spent_micro_usd <= 150_000
    received = (node_folder(Path(run.folder), "demo-trainer-g0") / "calls.jsonl").read_text()
    assert '{"reason": "budget"}' in received


def test_nodes_get_a_spend_deadline_that_moves_with_the_running_cost(sessions, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    run = made_run(sessions, spot=1, iterations=1000, max_total=13_000_000)
    controller = controller_of(sessions, run)
    controller.one_pass()
    folder = node_folder(Path(run.folder), "demo-trainer-g0")
    deadline_ms = json.loads((folder / "node.json").read_text())["money_deadline_ms"]
    hours = (deadline_ms - run.created_ms) / 3_600_000
    assert hours == pytest.approx(10, rel=0.01)  # $13 at $1.30 an hour
    passes(controller, lambda: (folder / "money.json").exists())
    assert json.loads((folder / "money.json").read_text())["deadline_ms"] >= deadline_ms - 60_000


def test_a_run_without_budget_for_its_trainer_stops_without_spending(sessions):
    run = made_run(sessions, spot=1, max_total=10)
    run_until_over(sessions, run, controller_of(sessions, run))
    assert status_of(sessions, run) == ("stopped", "budget")
    assert run_view(sessions, run.name).spent_micro_usd == 0


# --- controllers die ----------------------------------------------------------------------------------


def test_a_second_controller_is_refused_until_the_first_is_dead_or_silent(sessions):
    run = made_run(sessions)
    now_ms = 1_000_000
    alive = f"{os.getpid()}@"
    first = take_lease(sessions, run, alive, os.getpid(), now_ms)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()}"):
        take_lease(sessions, run, "other", os.getpid(), now_ms + LEASE_MS - 1)
    second = take_lease(sessions, run, "other", dead_pid(), now_ms + LEASE_MS)
    assert second.epoch == first.epoch + 1
    third = take_lease(sessions, run, "third", os.getpid(), now_ms + LEASE_MS + 1)  # the lease holder is dead
    assert third.epoch == second.epoch + 1


def test_a_controller_without_its_lease_stops_acting(sessions):
    run = made_run(sessions)
    frozen = controller_of(sessions, run)
    controller_of(sessions, run)
    with pytest.raises(LeaseLost):
        frozen.one_pass()
    assert not nodes_folder(Path(run.folder)).exists()


class Killed(BaseException):
    """Like kill -9: no handler of ours catches this exception."""


class Deadly(LocalProvisioner):
    """A provisioner that kills its caller at the n-th call of a method, before or after the call."""

    def __init__(self, run: Run, method: str, before: bool) -> None:
        super().__init__(Path(run.folder), run.clock, None, FAKE_AGENT)
        plain = getattr(self, method)

        def deadly(*arguments):
            if not before:
                plain(*arguments)
            raise Killed

        setattr(self, method, deadly)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_controller_killed_around_a_request_leaves_exactly_one_node(sessions, before):
    run = made_run(
        sessions, spot=1, iterations=1000
    )  # the run lasts until its spot node is bought, however slow the test is
    with pytest.raises(Killed):
        controller_of(sessions, run, Deadly(run, "request", before)).one_pass()
    assert node_names(sessions, run) == ["demo-trainer-g0"]  # the intent was recorded first
    successor = controller_of(sessions, run)
    passes(successor, lambda: len(names_ready(sessions, run)) == 2)
    request_stop(sessions, run.name)
    run_until_over(sessions, run, successor)
    assert_consistent(sessions, run)
    assert node_names(sessions, run) == ["demo-trainer-g0", "demo-spot-0-g0"]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_controller_killed_around_a_release_leaves_no_node_running(sessions, before):
    run = made_run(sessions, spot=1, iterations=3)
    with pytest.raises(Killed):
        run_until_over(sessions, run, controller_of(sessions, run, Deadly(run, "release", before)))
    run_until_over(sessions, run, controller_of(sessions, run))
    assert status_of(sessions, run) == ("finished", "iterations")
    assert_consistent(sessions, run)


def test_a_stop_between_intent_and_request_never_starts_the_node(sessions):
    run = made_run(sessions, spot=0)
    with pytest.raises(Killed):
        controller_of(sessions, run, Deadly(run, "request", True)).one_pass()
    request_stop(sessions, run.name)
    run_until_over(sessions, run, controller_of(sessions, run))
    assert status_of(sessions, run)[0] == "stopped"
    assert run_view(sessions, run.name).spent_micro_usd == 0


def test_a_node_without_a_record_is_released(sessions):
    run = made_run(sessions, spot=0, iterations=1000)
    controller = controller_of(sessions, run)
    controller.one_pass()
    with sessions() as session:
        trainer = session.scalars(select(Node)).one()
        spec = node_spec(
            run, Job.model_validate(run.job), trainer, is_cloud=False, money_deadline_ms=None, money_longest_ms=None
        )
        unknown = spec.model_copy(
            update={
                "node": "demo-spot-7-g0",
                "role": "rollout",
                "folder": str(node_folder(Path(run.folder), "demo-spot-7-g0")),
            }
        )
    provisioner_of(run).request(controller.wanted.slots[0].placement, unknown)
    passes(controller, lambda: (node_folder(Path(run.folder), "demo-spot-7-g0") / "ended.json").exists())
    assert processes_of(node_folder(Path(run.folder), "demo-spot-7-g0")) == []


# --- progress -----------------------------------------------------------------------------------------


def test_partial_and_invalid_progress_lines_are_tolerated(sessions, monkeypatch):
    monkeypatch.setenv("FAKE_TROUBLE", "deaf")
    run = made_run(sessions, spot=0)
    controller = controller_of(sessions, run)
    controller.one_pass()
    folder = node_folder(Path(run.folder), "demo-trainer-g0") / "progress"
    folder.mkdir()
    warned = {"run": "demo", "source": "trainer", "lineage": 0, "at_ms": 1, "kind": "warned", "event": {"text": "ü"}}
    lines = [json.dumps(warned | {"seq": seq}) for seq in range(3)]
    file = folder / "trainer.jsonl"
    half = lines[1].encode()[:-9]

    def kept() -> int:
        controller.one_pass()
        with sessions() as session:
            return len(session.scalars(select(ProgressRow)).all())

    file.write_bytes(lines[0].encode() + b"\n" + half)
    assert (kept(), kept()) == (1, 1)
    file.write_bytes(lines[0].encode() + b"\n" + lines[1].encode() + b"\n")
    assert kept() == 2
    with file.open("a") as more:
        more.write('{"run": "demo", "sou\n' + lines[1] + "\n" + lines[2] + "\n")
    assert kept() == 3
    controller.recorder.progress_files.forget()
    assert kept() == 3


def test_a_users_stop_request_is_not_overwritten(sessions, monkeypatch):
    run = made_run(sessions, spot=0, iterations=1000)
    controller = controller_of(sessions, run)

    def decide_late(*given):
        actions = decide(*given)
        request_stop(sessions, run.name)  # between the controller's observation and its action
        return actions

    decide = controller_module.decide
    monkeypatch.setattr(controller_module, "decide", decide_late)
    controller.one_pass()
    with sessions() as session:
        assert [row.status for row in session.scalars(select(RunStatus))] == ["planned", "stopping"]


def test_bills_and_views_follow_the_runs_own_clock(sessions):
    run = made_run(sessions, factor=600.0)
    clock = run.clock
    wait_until(lambda: clock.now_ms() - run.created_ms > 60_000)
    began = time.monotonic()
    view = run_view(sessions, run.name)
    reading_seconds = time.monotonic() - began  # the two clocks are read at two moments of it
    assert view.wall_seconds * 600 == pytest.approx(view.elapsed_ms / 1000, abs=300 + 600 * reading_seconds)
