"""Launches that are sent again: what an earlier attempt left behind, and what a crash hides."""

import pytest

from launcher.clouds.base import InstanceState, NotSettled
from launcher.decide.node_facts import NodeStatus
from launcher.provision.sky.outcome import Failed, Outcome
from tests.launcher.cluster.test_sky_provisioner import NODE, Killed, Stage

LOST = Outcome(failed=Failed.UNKNOWN, text="server restarted")


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_the_vm_of_an_earlier_attempt_is_not_missed_during_the_next(stage):
    stage.launch()
    stage.cloud.vanish(NODE)
    stage.sky.finish(NODE, LOST)
    while len(stage.sky.launches) < 2:
        stage.passes(1)
    assert stage.passes(200)[NODE].status is NodeStatus.PENDING
    stage.sky.finish(NODE)
    stage.passes(5)
    assert stage.file(NODE, "machine")["id"] == stage.cloud.there[-1].id


def test_a_cluster_that_never_came_up_is_launched_again_after_a_crash(stage):
    stage.sky.reply_lost = True
    stage.request()
    with pytest.raises(Killed):
        stage.passes(1)
    stage.sky.names.clear()  # SkyPilot knows the cluster, and no request for it
    assert stage.sky.known[NODE] == "INIT"
    stage.process()
    stage.passes(3)
    assert len(stage.sky.launches) == 2


def test_a_request_whose_reply_was_lost_is_cancelled_by_a_release(stage):
    stage.sky.reply_lost = True
    stage.request()
    with pytest.raises(Killed):
        stage.passes(1)
    stage.process()
    stage.provisioner.release([NODE])
    stage.passes(10)
    assert (stage.sky.cancelled, stage.sky.downs) == (["request-0"], [NODE])
    assert stage.file(NODE, "ended")["evidence"] == "released"


def test_a_vm_of_a_launch_whose_reply_was_lost_is_ended_by_a_release(stage):
    stage.sky.reply_lost = True
    stage.request()
    with pytest.raises(Killed):
        stage.passes(1)
    stage.sky.finish(NODE)
    stage.process()
    stage.provisioner.release([NODE])
    stage.passes(10)
    assert [one.state for one in stage.cloud.there] == [InstanceState.GONE]
    assert stage.sky.downs == [NODE]


def test_a_release_before_the_launch_needs_no_skypilot(stage):
    stage.sky.down_for_good = True
    stage.request()
    stage.provisioner.release([NODE])
    assert stage.passes(10)[NODE].evidence == "released before it was started"
    assert (stage.folder / "nodes" / NODE / "cleared.json").exists()


def test_each_launch_has_its_own_time_until_the_clouds_resources_are_known(stage, monkeypatch):
    prepare = stage.cloud.prepare

    def refuse(*_, **__):
        raise NotSettled("InvalidGroup.NotFound: sg-1 does not exist")

    monkeypatch.setattr(stage.cloud, "prepare", refuse)
    stage.request()
    stage.passes(200, step=1)
    monkeypatch.setattr(stage.cloud, "prepare", prepare)
    stage.passes(60, step=1)
    assert len(stage.sky.launches) == 1
    monkeypatch.setattr(stage.cloud, "prepare", refuse)
    stage.provisioner._regions.prepared.clear()  # as after a rule was removed by hand
    stage.sky.finish(NODE, LOST)
    assert stage.passes(200, step=1)[NODE].status is NodeStatus.UNKNOWN
    monkeypatch.setattr(stage.cloud, "prepare", prepare)
    stage.passes(60, step=1)
    assert len(stage.sky.launches) == 2


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("PendingVerification: your account is being verified", NodeStatus.GONE),
        ("UnauthorizedOperation: you are not authorized", NodeStatus.DENIED),
    ],
)
def test_what_mends_itself_while_the_run_waits_is_no_denial(stage, words, status):
    stage.cloud.refuses = words
    stage.request()
    fact = stage.passes(5)[NODE]
    assert (fact.status, fact.evidence) == (status, words)
    assert stage.sky.launches == []


def test_a_launch_sent_after_another_controller_took_over_is_cancelled(stage, monkeypatch):
    """The controller is frozen between its look at the lease and the launch."""
    start = stage.sky.start

    def frozen(launch):
        stage.taken_over = True
        return start(launch)

    monkeypatch.setattr(stage.sky, "start", frozen)
    stage.request()
    stage.passes(1)
    assert len(stage.sky.launches) == 1
    assert stage.sky.cancelled == ["request-0"]
