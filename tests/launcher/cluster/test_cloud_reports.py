"""What a node learns from its cloud's lists: VMs that are missing, stopping, moved or gone."""

import pytest

from launcher.clouds.base import InstanceState
from launcher.decide.node_facts import NodeStatus
from tests.launcher.cluster.test_sky_provisioner import NODE, Stage

LOOK_S = 2.0


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def stop(stage: Stage, **how) -> None:
    stage.cloud.change(NODE, state=InstanceState.STOPPING, reason="STOPPING", **how)


def look(stage: Stage):
    return stage.passes(LOOK_S)[NODE]


def test_a_vm_that_is_missing_from_every_other_list_lives(stage):
    stage.bring_up(NODE)
    there = stage.cloud.there
    for _ in range(4):
        stage.cloud.there = []
        look(stage)
        stage.cloud.there = there
        assert look(stage).status is NodeStatus.UP


def test_a_second_stop_has_its_own_time_limit(stage):
    stage.bring_up(NODE)
    stop(stage)
    stage.passes(100)
    stage.cloud.change(NODE, state=InstanceState.RUNNING)
    look(stage)
    stop(stage)
    assert stage.passes(60)[NODE].status is not NodeStatus.GONE
    assert stage.passes(90)[NODE].status is NodeStatus.GONE


@pytest.mark.parametrize("granted_ms", [0, 120_000])
def test_a_vm_that_keeps_stopping_ends_two_minutes_after_its_notice(stage, granted_ms):
    stage.bring_up(NODE)
    stop(stage, notice_ms=granted_ms or None)
    assert stage.passes(110 + granted_ms / 1000)[NODE].status is not NodeStatus.GONE
    assert stage.passes(30)[NODE].status is NodeStatus.GONE


def test_the_notice_that_the_cloud_names_is_the_nodes_deadline(stage):
    stage.bring_up(NODE)
    stop(stage, notice_ms=90_000)
    stage.passes(4)
    [deadline_ms] = stage.links[NODE].notices
    assert 80_000 < deadline_ms - stage.time.ms <= 90_000
    assert look(stage).notice_deadline_ms == deadline_ms


def test_a_vm_that_moved_to_another_address_is_written_down(stage):
    stage.bring_up(NODE)
    stage.cloud.change(NODE, public_address="198.51.100.99")
    stage.passes(4)
    assert stage.file(NODE, "machine")["public_address"] == "198.51.100.99"


def test_a_vm_that_no_list_ever_showed_ends_its_node(stage, monkeypatch):
    monkeypatch.setattr(stage.cloud, "instances", lambda region, **_: [])
    stage.request()
    stage.passes(1)
    stage.sky.finish(NODE)
    assert stage.passes(5)[NODE].status is NodeStatus.PENDING
    assert (stage.folder / "nodes" / NODE / "login.json").exists()
    assert not (stage.folder / "nodes" / NODE / "machine.json").exists()
    assert stage.passes(20)[NODE].status is NodeStatus.PENDING
    fact = stage.passes(30)[NODE]
    assert (fact.status, fact.evidence.partition(",")[0]) == (NodeStatus.GONE, "SkyPilot says that it is up")


def test_a_stopping_vm_is_paid_until_the_last_list_that_showed_it(stage):
    stage.bring_up(NODE)
    stop(stage)
    stage.links[NODE].seconds_since_message = 60.0
    stage.passes(60)
    gone_ms = stage.time.ms
    stage.cloud.vanish(NODE)
    fact = stage.passes(6)[NODE]
    assert fact.status is NodeStatus.GONE
    assert gone_ms - LOOK_S * 1000 - 500 <= fact.ended_ms <= gone_ms


def test_a_stopping_vm_is_gone_with_the_first_list_without_it(stage):
    stage.bring_up(NODE)
    stop(stage)
    stage.passes(4)
    stage.cloud.vanish(NODE, reclaimed=True, ended_ms=stage.time.ms)
    assert stage.passes(LOOK_S + 0.5)[NODE].status is NodeStatus.GONE


def test_a_vm_that_starts_after_a_stop_is_replaced_once_it_runs(stage):
    stage.bring_up(NODE)
    stop(stage)
    assert stage.passes(20)[NODE].status is not NodeStatus.GONE
    stage.cloud.change(NODE, state=InstanceState.PENDING)
    assert stage.passes(20)[NODE].status is not NodeStatus.GONE
    stage.cloud.change(NODE, state=InstanceState.RUNNING)
    assert stage.passes(6)[NODE].status is NodeStatus.GONE


def test_a_vm_that_runs_between_two_stops_was_not_started_again(stage):
    stage.bring_up(NODE)
    for _ in range(3):
        stop(stage)
        stage.passes(4)
        stage.cloud.change(NODE, state=InstanceState.RUNNING)
        assert look(stage).status is not NodeStatus.GONE


def test_skypilot_has_two_minutes_to_say_why_a_vm_ended_during_its_launch(stage):
    stage.launch()
    stage.cloud.change(NODE, state=InstanceState.GONE, reason="Client.UserInitiatedShutdown")
    assert stage.passes(100)[NODE].status is NodeStatus.PENDING
    assert stage.passes(40)[NODE].evidence.startswith("Client.UserInitiatedShutdown")


def test_a_preemption_during_a_launch_needs_no_word_of_skypilot(stage):
    stage.launch()
    stage.cloud.take_back(NODE)
    fact = stage.passes(6)[NODE]
    assert (fact.status, fact.reclaimed) == (NodeStatus.GONE, True)
