"""No bug in a decision ends the process that guards the money, and the facts of a cloud may come in any order.

The controller, its ledger and its decisions are real; the clouds and the clock are simulated.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from launcher.cli.status import status
from launcher.controller.controller import Controller
from launcher.controller.run_process import run_controller
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.ledger.models import Node, NodeEvent, Preemption
from launcher.ledger.node_history import metered_micro_usd, node_records
from launcher.provision.sky import phase
from launcher.runs.runs import request_stop
from tests.launcher.cluster.stage import (
    HandClock,
    SimulatedCloud,
    cloud_run,
    dead_pid,
    ledger,
    made_run,
)
from tests.launcher.cluster.test_sky_provisioner import Stage as ProvisionerStage

MINUTE = 60_000
PASS_MS = 30_000


TEMPLATE = Path("ledger.sqlite")
"""An empty ledger, made once: to make one takes longer than a test."""


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory):
    global TEMPLATE
    folder = tmp_path_factory.mktemp("template")
    ledger(folder).kw["bind"].dispose()
    TEMPLATE = folder / "ledger.sqlite"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    return tmp_path


class LateCloud(SimulatedCloud):
    """A cloud whose inventory lists a node `late_ms` after its workers have called in.

    `late_ms`: by node; 0 for the others. Until then a node that works has `ready_ms`, and no `started_ms` and place. An
    end is reported at once.
    """

    def __init__(self, clock: HandClock) -> None:
        super().__init__(clock, boot_ms=30_000)
        self.late_ms: dict[str, int] = {}

    def _is_listed(self, name: str) -> bool:
        up_ms = self.up.get(name)
        return up_ms is None or self.clock.now_ms() >= up_ms + self.late_ms.get(name, 0)

    def observe(self) -> list[NodeFact]:
        return [fact if self._is_listed(fact.name) else unlisted(fact) for fact in super().observe()]


def unlisted(fact: NodeFact) -> NodeFact:
    return NodeFact(
        name=fact.name,
        status=fact.status,
        evidence=fact.evidence,
        reclaimed=fact.reclaimed,
        ended_ms=fact.ended_ms,
        ready_ms=fact.ready_ms,
        notice_deadline_ms=fact.notice_deadline_ms,
        started_ms=fact.started_ms if fact.status is NodeStatus.GONE and fact.ready_ms is None else None,
    )


class Process:
    """A controller's process: it goes on after a failed pass, as `spotrl controller` does, and counts the failures."""

    def __init__(self, folder: Path, cloud: Callable[[HandClock], SimulatedCloud] = SimulatedCloud, **fields) -> None:
        if not (folder / "ledger.sqlite").exists():
            shutil.copy(TEMPLATE, folder)
        self.sessions = ledger(folder)
        self.run = cloud_run(self.sessions, **fields)
        self.clock = HandClock(factor=1.0)
        self.clock.at_ms = self.run.created_ms
        self.cloud = cloud(self.clock)
        self.failures: list[Exception] = []
        holder = f"test-{time.monotonic_ns()}"
        self.controller = Controller(self.sessions, self.run, self.cloud, self.clock, holder, dead_pid())

    def passes(self, minutes: float, step_ms: int = PASS_MS) -> None:
        until_ms = self.clock.now_ms() + round(minutes * MINUTE)
        while self.clock.now_ms() < until_ms:
            self.clock.pass_ms(step_ms)
            try:
                if self.controller.one_pass():
                    return
            except Exception as error:
                self.failures.append(error)

    def records(self):
        with self.sessions() as session:
            return {record.name: record for record in node_records(session, self.run)}

    def metered(self) -> int:
        with self.sessions() as session:
            return metered_micro_usd(session, self.run, self.clock.now_ms())

    def status(self, *options: str) -> str:
        result = CliRunner().invoke(status, [self.run.name, *options], obj=self.sessions, standalone_mode=False)
        assert result.exception is None
        return result.output


def ends_well(process: Process) -> None:
    """Assert that no pass failed, that `ready` never comes without `up`, and that no time runs backwards."""
    assert process.failures == []
    for record in process.records().values():
        happened = record.happened
        assert "ready" not in happened or "up" in happened, record
        order = [happened[kind] for kind in ("up", "ready") if kind in happened]
        if record.ended_ms is not None:
            order.append(record.ended_ms)
        assert order == sorted(order), record
        assert record.requested_ms <= min(order, default=record.requested_ms), record


# --- facts in any order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("late_s", [60, 180, 240])
@pytest.mark.parametrize("slot", ["trainer", "spot-0"])
def test_workers_that_call_in_before_the_inventory_lists_the_node_harm_no_pass(tmp_path, slot, late_s):
    process = Process(tmp_path, LateCloud)
    process.cloud.late_ms[f"demo-{slot}-g0"] = late_s * 1000
    process.passes(12)
    ends_well(process)
    assert len(process.cloud.live()) == 3, "no node was bought twice"
    assert process.metered() == process.cloud.true_micro_usd()


def test_a_node_that_ends_before_the_inventory_lists_it_is_billed(tmp_path):
    process = Process(tmp_path, LateCloud)
    name = "demo-spot-0-g0"
    process.cloud.late_ms[name] = 240_000
    process.passes(2)
    assert "up" not in process.records()[name].happened
    ended = NodeFact(
        name=name,
        status=NodeStatus.GONE,
        evidence="taken back",
        reclaimed=True,
        ready_ms=process.cloud.up[name],
        ended_ms=process.clock.now_ms(),
    )
    process.cloud.ended[name] = ended
    process.passes(2)
    ends_well(process)
    with process.sessions() as session:
        [up] = session.scalars(select(NodeEvent).join(Node).where(Node.name == name, NodeEvent.kind == "up"))
        assert "no inventory listed it" in up.evidence
        assert session.scalars(select(Preemption)).one().evidence == "taken back"
    assert process.metered() >= process.cloud.true_micro_usd()


def test_an_end_that_is_reported_before_the_start_costs_nothing_negative(tmp_path):
    """A cloud's clock may tell an end seconds before the start that another of its services told."""
    process = Process(tmp_path)
    process.passes(3)
    name = "demo-spot-1-g0"
    up_ms = process.cloud.up[name]
    process.cloud.ended[name] = NodeFact(
        name=name, status=NodeStatus.GONE, evidence="odd", started_ms=up_ms, ended_ms=up_ms - 20_000, reclaimed=True
    )
    process.passes(8)
    ends_well(process)
    assert process.records()[name].ended_ms == up_ms


def test_a_notice_before_the_start_replaces_the_node_once(tmp_path):
    process = Process(tmp_path, LateCloud)
    name = "demo-spot-0-g0"
    process.cloud.late_ms[name] = 240_000
    process.passes(1)
    process.cloud.notices[name] = process.clock.now_ms() + 120_000
    process.passes(8)
    ends_well(process)
    assert [one for one in process.cloud.live() if "spot-0" in one] == [name, "demo-spot-0-g1"]
    process.cloud.preempt(name)
    process.passes(2)
    assert process.metered() == process.cloud.true_micro_usd()


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    late_s=st.lists(st.integers(0, 240), min_size=6, max_size=6),
    ends=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["preempt", "notice", "gone"]), st.sampled_from(["0", "1"])),
        max_size=4,
    ),
)
def test_facts_that_come_late_and_in_any_order_are_billed_as_the_cloud_bills(tmp_path_factory, late_s, ends):
    process = Process(tmp_path_factory.mktemp("ledger"), LateCloud)
    names = [f"demo-{slot}-g{n}" for n in range(2) for slot in ("trainer", "spot-0", "spot-1")]
    process.cloud.late_ms = {name: seconds * 1000 for name, seconds in zip(names, late_s, strict=True)}
    for minute in range(1, 11):
        process.passes(1)
        for at, how, slot in ends:
            live = [name for name in process.cloud.live() if f"spot-{slot}" in name]
            if at != minute or not live:
                continue
            if how == "notice":
                process.cloud.notices[live[0]] = process.clock.now_ms() + 120_000
            else:
                process.cloud.end(live[0], "taken back" if how == "preempt" else "gone", reclaimed=how == "preempt")
    process.passes(20)  # a pool that refused cools down, and its next node is listed late too
    ends_well(process)
    assert process.metered() == process.cloud.true_micro_usd()


# --- a bug in one step of a pass --------------------------------------------------------------------------

WISHES = [
    "launcher.decide.reconcile.place_of",
    "launcher.decide.reconcile.needs_successor",
    "launcher.decide.reconcile.budget_refusal",
    "launcher.decide.reconcile.nodes_to_release",
    "launcher.decide.reconcile.given_back_trainer",
    "launcher.decide.reconcile.KnownNodes.update",
    "launcher.decide.reconcile.KnownNodes.tried",
    "launcher.decide.giving_back.is_home_given_up",
    "launcher.decide.giving_back.nodes_in_other_zones",
    "launcher.decide.giving_back.is_stand_in",
    "launcher.decide.stopping._no_trainer_can_be_had",
    "launcher.decide.stopping._trainer_is_lost",
    "launcher.decide.stopping.is_given_up",
    "launcher.decide.stopping._standstill",
    "launcher.controller.facts_reader.repriced",
    "launcher.controller.facts_reader.FactsReader._advances_ms",
    "launcher.controller.facts_reader.FactsReader.refresh_prices",
    "launcher.controller.recorder.paid",
    "launcher.controller.recorder.Recorder.write_progress",
    "launcher.controller.engine_client.EngineClient.find_trainer",
    "launcher.controller.engine_client.EngineClient.send_capacity",
    "launcher.controller.spend_deadlines.SpendDeadlines.deadline_ms",
    "launcher.controller.controller.Controller._read_limits",
]
"""Steps of a pass that may fail. The names are where a pass looks them up."""

GUARDS = [
    "launcher.decide.stopping.judges_refusal",
    "launcher.decide.stopping._time_is_up",
    "launcher.decide.stopping._money_of_all_runs_is_used_up",
]
"""Guards: the others work while one of them fails."""


def broken(*_, **__):
    raise KeyError("planted")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "ending"),
    [*((step, "budget") for step in (*WISHES, *GUARDS)), *((step, "down") for step in (*WISHES[::5], *GUARDS))],
)
def test_a_bug_in_one_step_buys_nothing_and_the_run_still_ends(tmp_path, monkeypatch, step, ending):
    process = Process(tmp_path, max_total=300_000 if ending == "budget" else 100_000_000)
    process.passes(3)
    assert len(process.cloud.live()) == 3
    monkeypatch.setattr(step, broken)
    process.cloud.preempt("demo-spot-0-g0")
    before = set(process.cloud.requested)
    process.passes(2)
    assert {type(error) for error in process.failures} == {KeyError}
    assert set(process.cloud.requested) == before, "nothing is bought in a pass with an error"
    assert "in trouble: KeyError: 'planted'" in process.status()
    assert json.loads(process.status("--json"))["trouble"] == "KeyError: 'planted'"
    if ending == "down":
        request_stop(process.sessions, "demo")
        process.passes(3)
    else:
        process.passes(10, step_ms=60_000)
    assert process.cloud.live() == []
    assert process.metered() <= process.run.max_total_micro_usd
    monkeypatch.undo()
    process.passes(5)
    ends = [record.ended_ms for record in process.records().values()]
    assert len(ends) >= 3
    assert None not in ends
    assert "in trouble" not in process.status()
    assert json.loads(process.status("--json"))["status"] == "stopped"


@pytest.mark.parametrize("step", ["observe", "news", "facts"])
def test_without_facts_of_the_cloud_nodes_still_end(tmp_path, monkeypatch, step):
    process = Process(tmp_path, max_total=300_000)
    process.passes(3)
    where = {
        "observe": "tests.launcher.cluster.stage.SimulatedCloud.observe",
        "news": "launcher.controller.recorder.news",
        "facts": "launcher.controller.facts_reader.FactsReader._work",
    }
    monkeypatch.setattr(where[step], broken)
    process.passes(12, step_ms=60_000)
    assert process.failures
    monkeypatch.undo()
    assert process.cloud.live() == []
    process.passes(5)
    assert json.loads(process.status("--json"))["status"] == "stopped"


def test_a_node_whose_release_fails_keeps_no_other_node_running(tmp_path, monkeypatch):
    process = Process(tmp_path)
    process.passes(3)
    plain = process.cloud.release

    def release(names):
        if "demo-trainer-g0" in names:
            raise KeyError("planted")
        plain(names)

    monkeypatch.setattr(process.cloud, "release", release)
    request_stop(process.sessions, "demo")
    process.passes(3)
    assert process.cloud.live() == ["demo-trainer-g0"]
    monkeypatch.setattr(process.cloud, "release", plain)
    process.passes(3)
    assert process.cloud.live() == []


@pytest.mark.parametrize("where", ["lifecycle.phase_of", "fact_reader.phase_of"])
def test_a_fault_at_one_node_of_the_clouds_leaves_the_others_in_care(tmp_path, monkeypatch, where):
    stage = ProvisionerStage(tmp_path)
    for name in ("run-trainer-g0", "run-rollout-0-g0"):
        stage.bring_up(name)
    target = f"launcher.provision.sky.{where}"
    plain = phase.phase_of

    def phase_of(node):
        if node.name == "run-rollout-0-g0":
            raise KeyError("planted")
        return plain(node)

    monkeypatch.setattr(target, phase_of)
    facts = stage.passes(1)
    assert facts["run-trainer-g0"].status is NodeStatus.UP
    assert facts["run-rollout-0-g0"].status is NodeStatus.UNKNOWN
    assert facts["run-rollout-0-g0"].fault == "KeyError: 'planted'"
    stage.provisioner.release(["run-rollout-0-g0", "run-trainer-g0"])
    assert stage.passes(5)["run-trainer-g0"].status is NodeStatus.GONE
    monkeypatch.undo()
    assert stage.passes(5)["run-rollout-0-g0"].status is NodeStatus.GONE


@pytest.mark.parametrize("is_whole", [True, False])
def test_spend_deadlines_are_extended_only_while_the_facts_are_whole(tmp_path, monkeypatch, is_whole):
    """Money that was spent and not recorded would be given to the nodes a second time."""
    process, sent = Process(tmp_path, max_total=10_000_000), []
    monkeypatch.setattr(process.cloud, "rearm", lambda name, deadline_ms: sent.append(deadline_ms))
    process.passes(3)
    assert sent
    process.cloud.preempt("demo-spot-0-g0")
    where = "launcher.decide.reconcile.place_of" if is_whole else "launcher.controller.recorder.news"
    monkeypatch.setattr(where, broken)
    sent.clear()
    process.passes(30, step_ms=300_000)
    assert bool(sent) == is_whole


def test_the_process_lives_through_a_bug_and_tries_again_at_short_intervals(tmp_path):
    sessions = ledger(tmp_path)
    run, pauses = made_run(sessions, spot=0), []

    class Broken(SimulatedCloud):
        def observe(self):
            if len(pauses) < 30:
                raise KeyError("planted")
            return super().observe()

    request_stop(sessions, run.name)
    run_controller(sessions, run.name, provisioner=Broken(HandClock()), sleep=pauses.append)
    assert len(pauses) >= 30
    assert 1 < max(pauses) <= 10
    result = CliRunner().invoke(status, [run.name, "--json"], obj=sessions, standalone_mode=False)
    assert json.loads(result.output)["status"] == "stopped"
    assert json.loads(result.output)["trouble"] == ""
