"""Failed nodes whose VMs are kept for a look (`recovery.keep_failed`): they cost money, and every limit holds."""

from dataclasses import replace

import pytest

from launcher.controller.spend_deadlines import SpendDeadlines
from launcher.decide.actions import Enter, Release
from launcher.decide.facts import FAILING, Stage
from launcher.decide.reconcile import decide
from launcher.decide.run_budget import planned_hourly
from launcher.decide.steps import unprotected
from launcher.job.schema import Job
from launcher.ledger.store import append_status, writing
from launcher.money import MICRO
from launcher.runs.runs import request_stop, still_running
from launcher.runs.views import run_view
from tests.launcher.cluster.stage import ledger
from tests.launcher.cluster.test_moving import MINUTE
from tests.launcher.cluster.test_moving import Stage as CloudRun
from tests.launcher.cluster.test_reconcile import (
    HOUR,
    SPOT_OPTION,
    STEADY_OPTION,
    bought,
    cloud_facts,
    cloud_wanted,
    ended,
    on_cloud_up,
)

FAILURE = "its agent exited with code 1: no such model"
NOW = 2 * HOUR
TRAINER = on_cloud_up("trainer", STEADY_OPTION)
FAILED = replace(on_cloud_up("spot-0", SPOT_OPTION, kept=NOW - MINUTE), evidence=FAILURE)
KEPT = {"kept": (FAILED,)}


@pytest.fixture
def sessions(home):
    return ledger(home)


def released(actions) -> list[str]:
    return [name for action in actions if isinstance(action, Release) for name in action.nodes]


# --- decisions ----------------------------------------------------------------------------------------


def test_the_successor_of_a_kept_node_is_bought_while_it_is_kept():
    actions = decide(cloud_facts(TRAINER, FAILED.as_failed(), **KEPT), cloud_wanted())
    assert (bought(actions), released(actions)) == (["demo-spot-0-g1"], [])
    kept = replace(TRAINER, happened=TRAINER.happened | {"kept": NOW - MINUTE}, evidence=FAILURE)
    actions = decide(cloud_facts(kept.as_failed(), on_cloud_up("spot-0", SPOT_OPTION), kept=(kept,)), cloud_wanted())
    assert (bought(actions), released(actions)) == (["demo-trainer-g1"], [])


def test_a_kept_node_counts_as_a_failure_of_its_slot_whatever_ended_its_vm():
    failures = [replace(ended("spot-0", n, FAILURE), wanted=SPOT_OPTION) for n in range(2)]
    third = replace(on_cloud_up("spot-0", SPOT_OPTION, 2, kept=100), evidence=FAILURE)
    for happened in ({}, {"releasing": NOW - 10}, {"releasing": NOW - 10, "released": NOW - 5}):
        node = replace(third, happened=third.happened | happened)
        [action] = decide(cloud_facts(TRAINER, *failures, node.as_failed(), kept=(node,)), cloud_wanted())
        assert isinstance(action, Enter)
        assert action.reason.startswith(f"{FAILING}no rollout node works")


def test_a_kept_node_ends_if_its_successor_needs_its_money():
    rate = TRAINER.running_micro_usd_per_hour + 2 * FAILED.running_micro_usd_per_hour
    facts = cloud_facts(TRAINER, FAILED.as_failed(), **KEPT)
    assert bought(decide(facts, cloud_wanted(max_hourly=rate))) == ["demo-spot-0-g1"]
    actions = decide(facts, cloud_wanted(max_hourly=rate - 1))
    assert (bought(actions), released(actions)) == ([], [FAILED.name])
    ending = replace(FAILED, happened=FAILED.happened | {"releasing": NOW})
    [wait] = decide(replace(facts, kept=(ending,)), cloud_wanted(max_hourly=rate - 1))
    assert wait == Enter(stage=Stage.RUNNING, reason=f"spot-0 is not bought before the end of {FAILED.name}")
    assert bought(decide(replace(facts, kept=()), cloud_wanted(max_hourly=rate - 1))) == ["demo-spot-0-g1"]


def test_over_the_hourly_limit_the_kept_node_goes_first():
    running = on_cloud_up("spot-0", SPOT_OPTION, 1)
    limit = TRAINER.running_micro_usd_per_hour + FAILED.running_micro_usd_per_hour
    actions = decide(cloud_facts(TRAINER, FAILED.as_failed(), running, **KEPT), cloud_wanted(max_hourly=limit))
    assert released(actions) == [FAILED.name]


def test_the_budget_counts_a_kept_node_and_ends_it_before_the_run():
    running = on_cloud_up("spot-0", SPOT_OPTION, 1)
    facts = cloud_facts(TRAINER, FAILED.as_failed(), running, metered=MICRO)
    minute = (TRAINER.running_micro_usd_per_hour + running.running_micro_usd_per_hour) / 60
    limit = MICRO + round(minute) + 1000
    assert decide(facts, cloud_wanted(max_total=limit)) == []
    assert released(decide(replace(facts, kept=(FAILED,)), cloud_wanted(max_total=limit))) == [FAILED.name]
    ending = replace(FAILED, happened=FAILED.happened | {"releasing": NOW})
    assert decide(replace(facts, kept=(ending,)), cloud_wanted(max_total=limit)) == []
    drains = [Enter(stage=Stage.DRAINING, reason="budget")]
    assert decide(replace(facts, kept=(FAILED,)), cloud_wanted(max_total=MICRO)) == drains


def test_a_kept_node_counts_in_the_spend_deadline_and_hears_of_it():
    class Told:
        def __init__(self) -> None:
            self.names: list[str] = []

        def rearm(self, name: str, money_deadline_ms: int) -> None:
            self.names.append(name)

    facts, wanted = cloud_facts(TRAINER, FAILED.as_failed()), cloud_wanted(max_total=MICRO)
    with_kept = replace(facts, kept=(FAILED,))
    assert planned_hourly(with_kept, wanted) == planned_hourly(facts, wanted) + FAILED.running_micro_usd_per_hour
    told = Told()
    SpendDeadlines(told, is_cloud=True).send(with_kept, wanted, unprotected(), may_extend=True)
    assert told.names == [TRAINER.name, FAILED.name]


def test_a_run_that_fails_waits_for_its_kept_node_and_no_other_end_does():
    failing = cloud_facts(FAILED.as_failed(), stage=Stage.DRAINING, reason=f"{FAILING}no model", **KEPT)
    assert decide(failing, cloud_wanted()) == []
    assert decide(replace(failing, kept=()), cloud_wanted()) == [Enter(stage=Stage.FAILED, reason="no model")]
    for facts, wanted in (
        (replace(failing, stage=Stage.STOPPING), cloud_wanted()),  # a person stops it
        (failing, cloud_wanted(max_total=1)),
        (failing, cloud_wanted(deadline_ms=NOW)),
        (replace(failing, reason="budget"), cloud_wanted()),
        (replace(failing, stage=Stage.FAILED, reason="no model"), cloud_wanted()),
    ):
        assert released(decide(facts, wanted)) == [FAILED.name]


# --- the run ------------------------------------------------------------------------------------------


def test_a_kept_node_is_paid_and_shown_until_it_goes(sessions):
    stage = CloudRun(sessions, spot=1, recovery={"keep_failed": "30m"})
    stage.passes(5)
    stage.cloud.fail("demo-spot-0-g0", FAILURE, 30 * MINUTE)
    stage.passes(5)
    assert set(stage.live()) == {"demo-trainer-g0", "demo-spot-0-g0", "demo-spot-0-g1"}
    [kept] = [node for node in run_view(sessions, "demo").nodes if node.goes_in_ms is not None]
    assert (kept.name, kept.status, kept.is_live) == ("demo-spot-0-g0", "kept", True)
    before = stage.spent()
    stage.passes(10)
    rates = sum(record.micro_usd_per_hour for record in stage.records().values() if record.is_live)
    assert stage.spent() - before == pytest.approx(rates / 6, rel=1e-4)
    assert "demo-spot-0-g0" in still_running(sessions, "demo")
    stage.passes(16)
    record = stage.records()["demo-spot-0-g0"]
    assert (record.is_live, record.evidence) == (False, FAILURE)
    assert stage.cloud.released == []
    assert stage.spent() == pytest.approx(stage.cloud.true_micro_usd(), rel=0.05)


def test_down_ends_a_kept_node_also_of_a_run_that_fails(sessions):
    stage = CloudRun(sessions, spot=1, recovery={"keep_failed": "30m"})
    stage.passes(5)
    stage.cloud.fail("demo-spot-0-g0", FAILURE, 30 * MINUTE)
    stage.passes(1)
    with writing(sessions) as session:
        append_status(session, stage.run, Stage.DRAINING, f"{FAILING}no model", stage.clock.now_ms())
    stage.passes(5)
    assert set(stage.live()) == {"demo-spot-0-g0"}
    assert stage.reason() == ("draining", f"{FAILING}no model")
    request_stop(sessions, "demo")
    stage.passes(5)
    assert stage.live() == {}
    assert stage.reason() == ("failed", "no model")


def test_the_time_of_a_kept_node_is_a_duration_of_the_job():
    assert Job(name="demo", recovery={"keep_failed": "30m"}).recovery.keep_failed == 30 * MINUTE
    assert Job(name="demo").recovery.keep_failed is None
