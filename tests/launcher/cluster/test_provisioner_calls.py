"""The controller's calls of SkyProvisioner: repeated, in another order, and while one node is broken."""

import json

import pytest

from launcher.clouds.base import InstanceState, Resource
from launcher.decide.node_facts import NodeStatus
from launcher.job.schema import Job
from launcher.provision import provide
from launcher.provision.sky.node_files import NodeFiles
from tests.launcher.cluster.stage import HandClock, cloud_run, ledger
from tests.launcher.cluster.test_sky_provisioner import NODE, REGION, TRAINER, AtOnce, Killed, Stage, placement

OTHER_REGION = "us-west-2"


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def ask_for_address(stage: Stage) -> list[int]:
    """Start another process, and return the list of the times at which it asks for this machine's address."""
    asked: list[int] = []

    def find() -> str:
        asked.append(stage.time.ms)
        return stage.address

    stage.find_ssh_from = find
    stage.process()
    return asked


def look_at(stage: Stage, monkeypatch) -> list[str]:
    """Return the list of the regions whose VMs are read from now on."""
    looked: list[str] = []
    instances = stage.cloud.instances

    def read(region, **which):
        looked.append(region)
        return instances(region, **which)

    monkeypatch.setattr(stage.cloud, "instances", read)
    return looked


# --- request and release ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["requested", "launched", "ended"])
def test_a_repeated_request_changes_nothing(stage, when):
    if when == "requested":
        stage.request()
    else:
        stage.bring_up(NODE)
    if when == "ended":
        stage.cloud.take_back(NODE)
        stage.passes(5)
    before = stage.file(NODE, "want"), stage.file(NODE, "spec")
    stage.request(zone="us-east-1b", money_deadline_ms=1)
    assert (stage.file(NODE, "want"), stage.file(NODE, "spec")) == before
    stage.passes(5)
    assert [launch.want.zone_name for launch in stage.sky.launches] == ["us-east-1a"]


def test_a_request_cut_off_between_its_files_is_made_again(stage, monkeypatch):
    """The spec is written last, because a node with a spec and without a placement counts as damaged."""
    written = []

    def cut_off(write):
        def instead(files, content):
            if written:
                raise Killed
            written.append(write.__name__)
            write(files, content)

        return instead

    with monkeypatch.context() as patch:
        for name in ("write_want", "write_spec"):
            patch.setattr(NodeFiles, name, cut_off(getattr(NodeFiles, name)))
        with pytest.raises(Killed):
            stage.request()
    stage.process()
    assert NODE not in stage.passes(2)
    assert stage.bring_up(NODE).status is NodeStatus.UP


def test_every_named_node_is_released(stage):
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    for name in ("run-rollout-7-g3", "run-rollout-8-g0"):
        stage.cloud.start(name, placement())
    stage.passes(3)
    stage.provisioner.release([NODE, "run-rollout-7-g3", TRAINER, "run-rollout-8-g0"])
    stage.passes(10)
    assert {one.state for one in stage.cloud.there} == {InstanceState.GONE}


def test_an_ended_node_that_skypilot_still_lists_is_not_released(stage):
    stage.bring_up(NODE)
    stage.sky.down_for_good = True
    stage.cloud.take_back(NODE)
    stage.passes(5)
    stage.provisioner.release([NODE])
    assert not (stage.folder / "nodes" / NODE / "cleared.json").exists()
    assert not (stage.folder / "nodes" / NODE / "release.json").exists()


# --- a pass -----------------------------------------------------------------------------------------------


def break_link(stage: Stage) -> None:
    del stage.links[NODE].messages  # the node's step raises


def break_want(stage: Stage) -> None:
    """The node's fact raises: an older version wrote other keys."""
    (stage.folder / "nodes" / NODE / "want.json").write_text(json.dumps({"cloud": "aws", "region": REGION}))


@pytest.mark.parametrize(
    ("break_node", "words"), [(break_link, "AttributeError"), (break_want, "ValidationError")], ids=["step", "fact"]
)
def test_an_error_at_a_node_is_its_own_fault_and_the_others_go_on(stage, break_node, words):
    stage.bring_up(NODE)
    stage.bring_up(TRAINER)
    break_node(stage)
    stage.request("run-rollout-1-g0")
    stage.time.ms += 500
    seen = stage.provisioner.observe()
    assert sorted(fact.name for fact in seen) == [NODE, "run-rollout-1-g0", TRAINER]
    facts = {fact.name: fact for fact in seen}
    assert (facts[NODE].status, facts[TRAINER].status) == (NodeStatus.UNKNOWN, NodeStatus.UP)
    assert words in facts[NODE].fault
    assert not facts[TRAINER].fault
    stage.passes(2)
    assert len(stage.sky.launches) == 3, "a node behind the broken one is launched"
    stage.provisioner.release([NODE])
    stage.passes(5)
    assert stage.cloud.ended == ["i-1"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ready", '{"at_ms": "soon"}'),
        ("ready", '{"at_ms": 1, "hardware": 7}'),
        ("notice", '{"deadline_ms": []}'),
        ("exit", '{"code": 1, "at_ms": Infinity}'),
    ],
)
def test_a_node_that_writes_nonsense_does_not_hinder_its_own_end(stage, file, text):
    """The mirror takes any text from a node under the names of the agent's files."""
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    (stage.folder / "nodes" / NODE / f"{file}.json").write_text(text)
    assert stage.passes(2)[NODE].fault == ""
    stage.provisioner.release([NODE])
    assert stage.passes(5)[NODE].status is NodeStatus.GONE
    assert stage.file(NODE, "cleared")


def test_a_message_from_before_a_suspension_is_no_sign_of_life_after_it(stage):
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    stage.links[NODE].messages = 1
    stage.passes(2)
    last_ms = stage.time.ms
    stage.cloud.vanish(NODE)
    stage.links[NODE].messages += 1
    stage.time.ms += 600_000
    stage.time.suspended_ms += 600_000
    fact = stage.passes(6)[NODE]
    assert fact.status is NodeStatus.GONE
    assert fact.ended_ms <= last_ms


def test_the_address_is_asked_for_once_a_minute_while_a_node_is_silent(stage):
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    asked = ask_for_address(stage)
    stage.passes(1)
    stage.links[NODE].seconds_since_message = 30.0
    asked.clear()
    stage.passes(58, step=1)
    assert len(asked) <= 1
    stage.passes(10, step=1)
    assert len(asked) == 1
    assert stage.links[TRAINER].seconds_since_message == 0.0


def test_nothing_is_asked_while_every_node_answers_that_should(stage):
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    asked = ask_for_address(stage)
    stage.passes(1)
    stage.provisioner.release([NODE])
    stage.passes(5)
    asked.clear()
    assert stage.passes(130, step=1)[TRAINER].status is NodeStatus.UP
    assert asked == []


# --- where a pass looks -----------------------------------------------------------------------------------


def test_every_region_of_the_run_is_looked_at_and_those_without_nodes_seldom(stage, monkeypatch):
    stage.regions = [("aws", REGION), ("aws", OTHER_REGION)]
    stage.process()
    stage.cloud.start("run-rollout-7-g3", placement(), OTHER_REGION)
    stage.bring_up(NODE)
    assert "run-rollout-7-g3" in stage.passes(1)
    looked = look_at(stage, monkeypatch)
    stage.passes(60, step=1)
    assert looked.count(OTHER_REGION) in (1, 2)
    assert looked.count(REGION) in (29, 30, 31)
    stage.cloud.take_back(NODE)
    stage.passes(10)
    looked.clear()
    stage.passes(60, step=1)
    assert looked.count(REGION) in (1, 2), "its node has ended"


def test_a_region_that_the_run_no_longer_buys_in_is_looked_at_while_a_node_is_there(stage):
    stage.bring_up(NODE)
    stage.regions = []
    stage.process()
    stage.passes(2)
    stage.cloud.take_back(NODE)
    fact = stage.passes(6)[NODE]
    assert (fact.status, fact.reclaimed) == (NodeStatus.GONE, True)


def test_another_machine_that_continues_the_run_is_let_in(stage):
    stage.bring_up(NODE)
    stage.address = "198.51.100.9/32"
    stage.process()
    stage.passes(2)
    assert stage.cloud.let_in == ["203.0.113.7/32", "198.51.100.9/32"]


# --- orders to a node -------------------------------------------------------------------------------------


def test_a_deadline_of_before_the_first_contact_starts_the_agent(stage):
    stage.request(TRAINER)
    for left_ms in (9_000_000, 1_000_000):
        stage.provisioner.rearm(TRAINER, stage.time.ms + left_ms)
    stage.bring_up(TRAINER)
    left_ms = stage.links[TRAINER].specs[0].money_left_ms
    assert 900_000 < left_ms <= 1_000_000, "an earlier deadline holds too"


def test_each_deadline_is_sent_as_the_time_that_is_left(stage):
    stage.bring_up(TRAINER)
    stage.provisioner.rearm(TRAINER, stage.time.ms + 9_000_000)
    stage.provisioner.rearm(TRAINER, stage.time.ms + 5000)
    assert stage.links[TRAINER].rearmed_ms == [9_000_000, 5000]
    stage.provisioner.rearm("run-rollout-9-g0", stage.time.ms)
    assert "run-rollout-9-g0" not in stage.passes(1)


def test_a_tunnel_leads_to_a_silent_node_too(stage):
    stage.bring_up(TRAINER)
    stage.links[TRAINER].seconds_since_message = 400.0
    assert stage.provisioner.tunnel(TRAINER, 7000) == ("127.0.0.1", 7001)


# --- the end ----------------------------------------------------------------------------------------------


def tidied(stage: Stage, seconds: int = 20) -> bool:
    """Call nothing but `tidy`, as a controller does once a run is over."""
    for _ in range(seconds):
        stage.time.ms += 1000
        if stage.provisioner.tidy():
            return True
    return False


def test_a_node_after_a_tidy_leaves_nothing_either(stage):
    for name in (NODE, "run-rollout-0-g1"):
        stage.bring_up(name)
        assert stage.cloud.groups
        stage.provisioner.release([name])
        assert tidied(stage)
        assert (stage.cloud.groups, stage.cloud.disks) == ([], [])


def test_a_run_is_tidy_once_all_of_its_regions_are(stage, monkeypatch):
    stage.regions = [("aws", REGION), ("aws", OTHER_REGION)]
    other = stage.cloud.start("run-rollout-7-g3", placement(), OTHER_REGION)
    stage.process()
    stage.bring_up(NODE)
    stage.provisioner.release([NODE, other.name])
    stage.passes(5)
    group = Resource(cloud="aws", region=OTHER_REGION, kind="group", id="sg-2", run="run")
    stage.cloud.groups.append(group)
    remove = stage.cloud.remove
    with monkeypatch.context() as patch:
        patch.setattr(stage.cloud, "remove", lambda resources: [group] if group in resources else remove(resources))
        assert not tidied(stage)
        assert stage.cloud.groups == [group]
    assert tidied(stage)
    assert stage.cloud.groups == []


def test_a_closed_provisioner_starts_no_task_and_drops_its_connections(stage, monkeypatch):
    ended = []
    monkeypatch.setattr(AtOnce, "shutdown", lambda self, **how: ended.append(how))
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    stage.provisioner.close()
    assert ended == [{"wait": False, "cancel_futures": True}]
    assert {link.closed for link in stage.links.values()} == {True}


def test_other_users_cannot_list_the_nodes(stage):
    assert oct((stage.folder / "nodes").stat().st_mode & 0o777) == "0o700"


def test_nodes_get_the_secrets_that_the_job_names_and_nothing_else_of_this_environment(home, monkeypatch):
    for name, value in {"JUDGE": "of the job", "AWS_SECRET_ACCESS_KEY": "of the user", "OTHER_TOKEN": "x"}.items():
        monkeypatch.setenv(name, value)
    common = {"owners": {"aws": "me", "gcp": "me"}, "ssh_from": "203.0.113.7/32", "bundle": "b"}
    for name, made in {
        "cloud_apis": lambda clouds: {},
        "prepare_folder": lambda *_: common,
        "Sky": lambda: None,
        "NodeLink": lambda login, mirror, *, secrets: secrets,
        "SkyProvisioner": lambda purchases, **parts: parts,
    }.items():
        monkeypatch.setattr(provide, name, made)
    run = cloud_run(ledger(home), secrets=("JUDGE", "NOT_SET"))
    parts = provide.provisioner_of(run, Job.model_validate(run.job), HandClock())
    assert parts["link"]("login", "mirror") == {"JUDGE": "of the job"}


def test_the_end_of_a_node_ends_no_other_machine_and_removes_no_other_disk(stage):
    for name in (TRAINER, NODE):
        stage.bring_up(name)
    others = [disk for disk in stage.cloud.disks if disk.node == TRAINER]
    assert others
    stage.provisioner.release([NODE])
    facts = stage.passes(60, step=1)
    assert (facts[NODE].status, facts[TRAINER].status) == (NodeStatus.GONE, NodeStatus.UP)
    assert [one.name for one in stage.cloud.there if one.state is InstanceState.RUNNING] == [TRAINER]
    assert stage.cloud.disks == others


def test_a_controller_without_its_lease_ends_no_node(stage):
    """The controller that took over may have bought the node again."""
    stage.bring_up(NODE)
    stage.taken_over = True
    stage.provisioner.release([NODE])
    stage.passes(6)
    assert [one.state for one in stage.cloud.there] == [InstanceState.RUNNING]
    stage.taken_over = False
    stage.passes(60, step=1)
    assert [one.state for one in stage.cloud.there] == [InstanceState.GONE]


def test_a_released_machine_that_no_list_shows_is_paid_to_its_end_and_may_have_been_preempted(stage):
    stage.bring_up(NODE)
    stage.cloud.ends_slowly = True
    stage.provisioner.release([NODE])
    stage.passes(5)
    ended_ms = stage.time.ms - 1500
    stage.cloud.vanish(NODE, ended_ms=ended_ms, reclaimed=True, reason="compute.instances.preempted")
    fact = stage.passes(60, step=1)[NODE]
    assert (fact.status, fact.ended_ms, fact.reclaimed) == (NodeStatus.GONE, ended_ms, True)
    assert fact.evidence.startswith("compute.instances.preempted")
