"""A partly or completely lost ledger: running nodes are still found and ended, locally and on the clouds."""

import shutil
import sqlite3

import pytest

from launcher.cli.panic import panic
from launcher.cli.reap import reap
from launcher.exit_codes import ExitCode
from launcher.ledger.store import open_ledger, writing
from launcher.provision.local.local_nodes import recorded_clouds
from launcher.provision.local.processes import kill_all, processes_of
from launcher.provision.local.provisioner import LocalProvisioner, node_folder
from launcher.settings import runs_folder
from tests.launcher.cluster.fake_cloud import FakeCloud
from tests.launcher.cluster.stage import FAKE_AGENT, HandClock, placement, spec, wait_until
from tests.launcher.made_ledger import a_run
from tests.launcher.test_safety_commands import a_ledger, code_of, home, run_command  # noqa: F401 (fixtures)

NODE = "demo-spot-0-g0"


@pytest.fixture
def node(home):  # noqa: F811
    """Start a local node of the run `demo`, and return its folder."""
    run, clock = runs_folder() / "demo", HandClock()
    LocalProvisioner(run, clock, None, FAKE_AGENT).request(placement(), spec(run, clock))
    folder = node_folder(run, NODE)
    wait_until(lambda: len(processes_of(folder)) == 2)
    yield folder
    kill_all(folder, None)


@pytest.mark.parametrize("command", [reap, panic])
@pytest.mark.parametrize("lost", ["ledger", "folder"])
def test_a_local_node_unknown_to_the_ledger_is_ended(node, run_command, command, lost):  # noqa: F811
    if lost == "folder":
        shutil.rmtree(node)  # only the mark of its processes is left
    listed = run_command(command, "--dry-run", clouds=[FakeCloud()])
    assert f"{NODE}  demo" in listed.output
    assert len(processes_of(node)) == 2
    result = run_command(command, "-y", clouds=[FakeCloud()])
    assert code_of(result) == ExitCode.OK
    assert f"Gone: machine {NODE}" in result.output
    assert processes_of(node) == []


def test_a_local_node_is_ended_even_without_cloud_credentials(node, run_command):  # noqa: F811
    assert code_of(run_command(reap, "-y", clouds=[FakeCloud(who=None)])) == ExitCode.OK
    assert processes_of(node) == []


@pytest.mark.parametrize("command", [reap, panic])
def test_a_local_node_of_a_live_run_is_left_alone(node, home, run_command, command):  # noqa: F811
    a_ledger(home, demo=("local", "running"))
    result = run_command(command, "-y", clouds=[FakeCloud()])
    assert code_of(result) == ExitCode.OK
    assert "Left alone: 1 x machine of demo." in result.output
    assert len(processes_of(node)) == 2


def test_reaping_named_clouds_leaves_local_nodes_alone(node, run_command):  # noqa: F811
    assert code_of(run_command(reap, "-y", "--cloud", "aws", clouds=[FakeCloud()])) == ExitCode.OK
    assert len(processes_of(node)) == 2


@pytest.mark.parametrize("command", [reap, panic])
def test_a_cloud_named_only_in_run_folders_is_expected_to_answer(home, run_command, command):  # noqa: F811
    folder = runs_folder() / "digits"
    (folder / "nodes" / "digits-trainer-g0").mkdir(parents=True)
    (folder / "common.json").write_text('{"owners": {"aws": "ada"}}')
    (folder / "nodes" / "digits-trainer-g0" / "want.json").write_text('{"cloud": "gcp"}')
    (folder / "nodes" / "digits-trainer-g0" / "machine.json").write_text("")
    assert recorded_clouds(runs_folder()) == {"aws", "gcp"}
    away = FakeCloud(cloud="gcp", who=None)
    assert code_of(run_command(command, "-y", clouds=[FakeCloud(), away])) == ExitCode.TEARDOWN_INCOMPLETE


def test_a_ledger_without_its_write_ahead_log_still_lists_every_node(home):  # noqa: F811
    ledger = home / "ledger.sqlite"
    sessions = open_ledger(ledger)  # the connection stays open, because closing the last one empties the log
    with writing(sessions) as session:
        made = a_run(session, "demo", folder=str(home / "runs" / "demo"))
        made.status("running", 0)
        for slot in ("trainer", "spot-0", "spot-1"):
            made.node(slot, 0)
    copy = home / "copy.sqlite"
    copy.write_bytes(ledger.read_bytes())
    with sqlite3.connect(copy) as connection:
        assert connection.execute("select count(*) from node").fetchone() == (3,)
    sessions.kw["bind"].dispose()
