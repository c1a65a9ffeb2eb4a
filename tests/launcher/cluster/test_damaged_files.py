"""A power cut of the launcher's computer can empty a node's files. No run may stall or pay forever because of it.

Each file that a node has at a stage of its life is emptied, and a new process continues with the rest.
"""

import json

import pytest

from launcher.clouds.base import InstanceState
from launcher.decide.node_facts import NodeStatus
from launcher.job.schema import Job
from launcher.provision.local.processes import processes_of
from launcher.provision.local.provisioner import LocalProvisioner, node_folder
from launcher.provision.provide import prepare_folder
from launcher.provision.sky.bundle import Bundle
from tests.launcher.cluster.fake_cloud import ME, FakeCloud
from tests.launcher.cluster.stage import FAKE_AGENT, HandClock, fact_of, placement, spec, wait_until
from tests.launcher.cluster.test_sky_provisioner import TRAINER, Stage

ENDS = {NodeStatus.GONE, NodeStatus.DENIED, NodeStatus.NO_CAPACITY}

UP = ("want", "spec", "launch", "machine", "seen", "login", "agent", "ready")
STAGES = {
    "asked": ("want", "spec"),
    "launching": ("want", "spec", "launch"),
    "up": UP,
    "noticed": (*UP, "stopping"),
    "released": (*UP, "release"),
    "ending": (*UP, "release", "ending"),
    "ended": (*UP, "release", "ending", "ended"),
    "cleared": (*UP, "release", "ending", "ended", "cleared"),
}
"""The JSON files of a cloud node, by stage."""

LIVES_ON = {
    ("launching", "launch"),
    *(("up", name) for name in ("want", "launch", "machine", "seen", "login", "agent")),
}
"""Files whose content can be read again from the cloud, SkyPilot or the node, so the node is kept."""


def bring_to(stage: Stage, which: str) -> None:
    """Drive a node to a stage of its life."""
    if which == "asked":
        stage.request(TRAINER)
    elif which == "launching":
        stage.request(TRAINER)
        stage.passes(2)
    else:
        stage.bring_up(TRAINER)
    if which == "noticed":
        stage.cloud.change(TRAINER, state=InstanceState.STOPPING)
        stage.passes(3)
    if which == "released":
        stage.provisioner.release([TRAINER])
    if which == "ending":
        stage.cloud.ends_slowly = True
        stage.provisioner.release([TRAINER])
        stage.passes(3)
        stage.cloud.ends_slowly = False
    if which in ("ended", "cleared"):
        stage.provisioner.release([TRAINER])
        stage.sky.down_for_good = which == "ended"
        stage.passes(10)
        stage.sky.down_for_good = False


def files_of(stage: Stage) -> set[str]:
    return {path.stem for path in (stage.folder / "nodes" / TRAINER).glob("[a-z]*.json")}


def end_of_run(stage: Stage) -> NodeStatus | None:
    """Release the node like a controller at the end of a run, and poll until it had time to end."""
    stage.provisioner.release([TRAINER])
    facts = stage.passes(60)
    assert stage.provisioner.tidy()
    return facts[TRAINER].status if TRAINER in facts else None


@pytest.mark.parametrize("which", STAGES)
def test_the_stages_list_every_file_of_a_node(tmp_path, which):
    stage = Stage(tmp_path)
    bring_to(stage, which)
    assert files_of(stage) == set(STAGES[which])


@pytest.mark.parametrize(("which", "file"), [(which, file) for which, files in STAGES.items() for file in files])
def test_a_node_with_an_empty_file_continues_or_ends(tmp_path, which, file):
    stage = Stage(tmp_path)
    bring_to(stage, which)
    (tmp_path / "nodes" / TRAINER / f"{file}.json").write_text("\0" * 64 if file == "launch" else "")
    stage.process()
    stage.passes(5)
    if TRAINER in stage.sky.names and stage.sky.requests[stage.sky.names[TRAINER]] is None:
        stage.sky.finish(TRAINER)
    stage.passes(5)
    if (
        link := stage.links.get(TRAINER)
    ) is not None and not link.closed:  # a new connection mirrors the node's own files again
        link.shows("agent", pid=5)
        link.shows("ready", at_ms=stage.time.ms, pid=5)
    fact = stage.passes(5).get(TRAINER)
    assert fact is not None, "its instance would be lost"
    if file == "spec":
        assert fact.status in ENDS
    if (which, file) in LIVES_ON:
        assert fact.status is NodeStatus.UP
        assert stage.cloud.ended == []
    assert end_of_run(stage) in ENDS
    assert [one for one in stage.cloud.there if one.state is not InstanceState.GONE] == []
    assert (stage.cloud.disks, stage.cloud.groups) == ([], [])


@pytest.mark.parametrize("lost", [("want", "machine"), ("want", "machine", "login", "launch", "spec")])
def test_an_instance_without_a_known_place_is_found_by_its_label(tmp_path, lost):
    stage = Stage(tmp_path)
    stage.bring_up(TRAINER)
    for file in lost:
        (tmp_path / "nodes" / TRAINER / f"{file}.json").write_text("")
    stage.process()
    stage.provisioner.release([TRAINER])
    assert stage.passes(20)[TRAINER].status in ENDS
    assert stage.provisioner.tidy()
    assert {one.state for one in stage.cloud.there} == {InstanceState.GONE}


def test_a_lost_login_is_fetched_again(tmp_path):
    stage = Stage(tmp_path)
    stage.bring_up(TRAINER)
    stage.time.ms += 3_600_000
    for file in ("login.json", "ssh.key"):
        (tmp_path / "nodes" / TRAINER / file).write_text("")
        stage.process()
        stage.passes(5)
        assert stage.passes(5)[TRAINER].status is NodeStatus.UP
        assert (tmp_path / "nodes" / TRAINER / "ssh.key").read_text() == "KEY"
    assert (stage.cloud.ended, len(stage.sky.launches)) == ([], 1)


def test_a_launch_with_a_lost_record_is_still_cancelled_in_skypilot(tmp_path):
    stage = Stage(tmp_path)
    bring_to(stage, "launching")
    (tmp_path / "nodes" / TRAINER / "launch.json").write_text("")
    stage.process().release([TRAINER])
    stage.passes(5)
    assert stage.sky.cancelled == ["request-0"]
    assert stage.sky.downs == [TRAINER]


def test_an_empty_file_shared_by_all_nodes_is_written_again(tmp_path, monkeypatch):
    bundle = Bundle(folder=tmp_path / "bundle", digest="d1", setup="")
    monkeypatch.setattr("launcher.provision.provide.make_bundle", lambda *_, **__: bundle)
    job = Job(name="demo", iterations=1, infra="aws", store={"aws": "s3://bucket/runs"}, ssh_from="203.0.113.7/32")
    common = prepare_folder(tmp_path, job, {"aws": FakeCloud()}, None)
    accounts = {"aws": FakeCloud().caller().account}
    assert common == {"owners": {"aws": ME}, "accounts": accounts, "bundle": "d1", "ssh_from": "203.0.113.7/32"}
    (tmp_path / "common.json").write_text("")
    assert prepare_folder(tmp_path, job, {"aws": FakeCloud()}, None) == common
    assert json.loads((tmp_path / "common.json").read_text()) == common


# --- the local infra ------------------------------------------------------------------------------------

LOCAL_UP = ("node", "request", "spawned", "agent", "ready")
LOCAL_STAGES = {
    "up": LOCAL_UP,
    "dead": LOCAL_UP,
    "reclaimed": (*LOCAL_UP, "reclaim"),
    "ended": (*LOCAL_UP, "ended"),
}
LOCAL = "demo-spot-0-g0"


@pytest.mark.parametrize(("which", "file"), [(which, file) for which, files in LOCAL_STAGES.items() for file in files])
def test_a_local_node_with_an_empty_file_is_still_accounted_for(tmp_path, which, file):
    clock = HandClock()
    provisioner = LocalProvisioner(tmp_path, clock, None, FAKE_AGENT, lambda: clock.at_ms)
    folder = node_folder(tmp_path, LOCAL)
    provisioner.request(placement(), spec(tmp_path, clock))
    wait_until(lambda: (fact := fact_of(provisioner, LOCAL)) is not None and fact.status is NodeStatus.UP)
    if which != "up":
        provisioner.release([LOCAL])
    if which in ("dead", "reclaimed"):
        (folder / "ended.json").unlink()
    if which == "reclaimed":
        (folder / "reclaim.json").write_text(json.dumps({"at_ms": clock.at_ms}))
    assert {path.stem for path in folder.glob("[a-z]*.json")} == set(LOCAL_STAGES[which])
    (folder / f"{file}.json").write_text("")
    again = LocalProvisioner(tmp_path, clock, None, FAKE_AGENT, lambda: clock.at_ms)
    again.observe()
    clock.pass_ms(3_600_000 * 12)  # 12 minutes of wall time: every timeout is over
    again.observe()
    fact = fact_of(again, LOCAL)
    assert fact is not None
    assert fact.status is not NodeStatus.PENDING
    assert (fact.status is NodeStatus.GONE) == (processes_of(folder) == [])
    again.release([LOCAL])
    assert fact_of(again, LOCAL).status is NodeStatus.GONE
    assert processes_of(folder) == []
