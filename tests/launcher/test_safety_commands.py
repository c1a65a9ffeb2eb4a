"""`spotrl reap`, `panic`, `ssh` and `check` as users and scripts call them, on made-up clouds."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner, Result

from launcher.cli.leftovers import CredentialsRefused, NoCloudAnswered
from launcher.cli.main import cli, run
from launcher.cli.panic import panic
from launcher.cli.reap import reap
from launcher.cli.ssh import login_of, newest, ssh, ssh_command
from launcher.exit_codes import ExitCode, Failure
from launcher.ledger.models import Node
from launcher.ledger.store import current_status, find_run, open_ledger, writing
from tests.launcher.cluster.fake_cloud import ACCOUNT, FakeCloud, instance, resource
from tests.launcher.made_ledger import a_run
from tests.launcher.printed import printed

Run = Callable[..., Result]


class MadeSky:
    """SkyPilot with a pending launch. `trouble`: the exception that it raises."""

    cancelled: ClassVar[list[str]] = []
    trouble: Exception | None = None

    def cancel_all(self, runs: Sequence[str]) -> list[str]:
        if self.trouble is not None:
            raise self.trouble
        self.cancelled += runs
        return [f"{run}-spot-0-g1" for run in runs]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setattr("launcher.cleanup.reaping.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("launcher.cli.leftovers.SIGN_IN_SECONDS", 0.0)
    monkeypatch.setattr("launcher.cli.panic.Sky", MadeSky)
    return tmp_path


def a_ledger(home: Path, **runs: tuple[str, str]) -> Path:
    """Create a ledger with these runs: name -> (infra, status). Each had two trainers and a spot node."""
    path = home / "ledger.sqlite"
    with writing(open_ledger(path)) as session:
        for name, (infra, status) in runs.items():
            made = a_run(session, name, folder=str(home / "runs" / name))
            made.run.infra = infra
            made.status(status, 0)
            for slot, generation in (("trainer", 1), ("trainer", 2), ("spot-0", 1)):
                made.node(slot, generation)
    return path


@pytest.fixture
def run_command(home, monkeypatch) -> Run:
    """Run a command on these clouds like a script: standard input is no terminal."""

    def invoke(command: click.Command, *arguments: str, clouds: Iterable[FakeCloud], **more: Any) -> Result:
        there = {cloud.cloud: cloud for cloud in clouds}
        monkeypatch.setattr(
            "launcher.provision.provide.cloud_apis",
            lambda names: {name: there[name] for name in names if name in there},
        )
        ledger = home / "ledger.sqlite"
        obj = open_ledger(ledger) if command is reap else None
        return CliRunner().invoke(command, arguments, obj=obj, standalone_mode=False, **more)

    return invoke


def code_of(result: Result) -> int:
    if result.exception is not None:
        raise result.exception
    return int(result.return_value)


# --- reap --------------------------------------------------------------------------------------------


def test_reap_deletes_only_resources_without_a_live_run(home, run_command):
    a_ledger(home, digits=("aws", "running"), old=("aws", "finished"))
    cloud = FakeCloud().add(
        instance("i-1"), resource("group", "sg-1"), instance("i-2", run="old"), instance("i-3", run="unheard-of")
    )
    result = run_command(reap, "-y", clouds=[cloud])
    assert code_of(result) == ExitCode.OK
    assert cloud.alive == ["i-1"]
    assert "Left alone: 1 x machine, 1 x group of digits." in result.output
    assert "digits is running, and no controller looks after it; `spotrl down digits` ends it" in result.output
    assert "Nothing of it is left." in result.output


def test_reap_lists_resources_first_and_a_script_needs_yes(home, run_command):
    a_ledger(home)
    cloud = FakeCloud().add(instance("i-1", launched_ms=1))
    with pytest.raises(click.UsageError, match="--dry-run, then add -y"):
        code_of(run_command(reap, clouds=[cloud]))
    assert cloud.alive == ["i-1"]


def test_reap_asks_at_a_terminal_and_the_default_is_no(home, run_command, monkeypatch):
    a_ledger(home)
    monkeypatch.setattr("launcher.cli.leftovers.is_a_person", lambda: True)
    cloud = FakeCloud().add(instance("i-1"))
    assert isinstance(run_command(reap, clouds=[cloud], input="\n").exception, click.Abort)
    assert cloud.alive == ["i-1"]
    assert code_of(run_command(reap, clouds=[cloud], input="y\n")) == ExitCode.OK
    assert cloud.alive == []


def test_a_dry_run_deletes_nothing(home, run_command):
    a_ledger(home)
    cloud = FakeCloud().add(instance("i-1"), resource())
    result = run_command(reap, "--dry-run", clouds=[cloud])
    assert code_of(result) == ExitCode.OK
    assert cloud.orders == []
    assert "i-1" in result.output
    assert "not priced" not in result.output  # g6.xlarge is in the catalog


def test_resources_that_are_left_are_named_and_set_the_exit_code(home, run_command):
    a_ledger(home)
    cloud = FakeCloud(immortal={"i-1"}).add(instance("i-1"))
    result = run_command(reap, "-y", "--timeout", "0.05", clouds=[cloud])
    assert code_of(result) == ExitCode.TEARDOWN_INCOMPLETE
    assert "Still there: machine i-1 (aws/us-east-1)." in result.output
    assert "i-1 is protected against termination" in result.output


def test_an_unreachable_region_sets_the_exit_code_even_without_findings(home, run_command):
    a_ledger(home)
    result = run_command(reap, "--dry-run", clouds=[FakeCloud(silent={"us-west-2"})])
    assert code_of(result) == ExitCode.TEARDOWN_INCOMPLETE
    assert "Not known: aws/us-west-2." in result.output


def test_missing_credentials_count_only_for_clouds_with_expected_resources(home, run_command):
    a_ledger(home, old=("aws", "finished"))
    clouds = [FakeCloud(), FakeCloud(cloud="gcp", its_regions=(), who=None)]
    result = run_command(reap, "--dry-run", clouds=clouds)
    assert code_of(result) == ExitCode.OK
    assert "gcp was not looked at, and nothing of yours is expected there" in result.output
    assert code_of(run_command(reap, "--dry-run", "--cloud", "aws", "--cloud", "gcp", clouds=clouds)) == 10
    clouds = [FakeCloud(who=None), FakeCloud(cloud="gcp", its_regions=())]
    assert code_of(run_command(reap, "--dry-run", clouds=clouds)) == ExitCode.TEARDOWN_INCOMPLETE


def test_the_exit_code_separates_missing_credentials_from_silent_clouds(home, run_command):
    a_ledger(home)
    result = run_command(reap, "--dry-run", clouds=[FakeCloud(who=None)])
    assert isinstance(result.exception, CredentialsRefused)
    assert result.exception.exit_code is ExitCode.CREDENTIALS
    result = run_command(reap, "--dry-run", clouds=[FakeCloud(silent={"caller"})])
    assert isinstance(result.exception, NoCloudAnswered)
    assert result.exception.exit_code is ExitCode.TEARDOWN_INCOMPLETE


def test_resources_of_all_owners_are_deleted_only_with_the_account_id(home, run_command):
    a_ledger(home)
    cloud = FakeCloud().add(instance("i-1", owner="bob"))
    result = run_command(reap, "-y", clouds=[cloud])
    assert code_of(result) == ExitCode.TEARDOWN_INCOMPLETE, "it may be ours, under another name that we logged in with"
    assert cloud.alive == ["i-1"]
    assert "Nothing of it is left" not in result.output
    assert "Not yours, and left alone: 1 x machine of bob; --all-owners takes them too." in result.output
    for wrong in ((), ("--account", "999")):
        with pytest.raises(click.UsageError, match="--account ID"):
            code_of(run_command(reap, "-y", "--all-owners", *wrong, clouds=[cloud]))
    assert cloud.alive == ["i-1"]
    assert code_of(run_command(reap, "-y", "--all-owners", "--account", ACCOUNT, clouds=[cloud])) == ExitCode.OK
    assert cloud.alive == []


def test_the_account_id_may_be_typed_at_the_prompt(home, run_command, monkeypatch):
    a_ledger(home)
    monkeypatch.setattr("launcher.cli.leftovers.is_a_person", lambda: True)
    cloud = FakeCloud().add(instance("i-1", owner="bob"))
    with pytest.raises(click.UsageError):
        code_of(run_command(reap, "-y", "--all-owners", clouds=[cloud], input="999\n"))
    assert code_of(run_command(reap, "-y", "--all-owners", clouds=[cloud], input=f"{ACCOUNT}\n")) == ExitCode.OK
    assert cloud.alive == []


def test_reap_ends_only_what_it_listed(home, run_command):
    """Another computer with another ledger starts a run during this cleanup."""
    a_ledger(home)
    cloud = FakeCloud(late={"i-9": (2, instance("i-9", run="another"))}).add(instance("i-1"))
    assert code_of(run_command(reap, "-y", clouds=[cloud])) == ExitCode.OK
    assert cloud.alive == ["i-9"]


def test_reap_json_is_one_object_with_all_results(home, run_command):
    a_ledger(home, digits=("aws", "running"))
    cloud = FakeCloud(silent={"us-west-2"}).add(instance("i-1"), instance("i-2", run="old"), resource(run="old"))
    result = run_command(reap, "-y", "--json", "--timeout", "3", clouds=[cloud])
    assert code_of(result) == ExitCode.TEARDOWN_INCOMPLETE
    printed_output = printed("cleanup", result.output.splitlines()[-1])
    assert [one["id"] for one in printed_output["found"]] == ["i-2", "vol-1"]
    assert [one["id"] for one in printed_output["kept"]] == ["i-1"]
    assert printed_output["ended"] == ["machine i-2 (aws/us-east-1)", "disk vol-1 (aws/us-east-1)"]
    assert (printed_output["left"], [one["region"] for one in printed_output["unasked"]]) == ([], ["us-west-2"])
    assert printed_output["exit_code"] == 10


# --- panic -------------------------------------------------------------------------------------------


def test_panic_stops_every_cloud_run_and_terminates_its_instances(home, run_command):
    path = a_ledger(home, digits=("aws", "running"), here=("local", "running"))
    cloud = FakeCloud().add(instance("i-1"), resource("group", "sg-1"), instance("i-2", "theirs", owner="bob"))
    result = run_command(panic, "-y", clouds=[cloud])
    assert code_of(result) == ExitCode.TEARDOWN_INCOMPLETE, "bob's instance keeps running"
    assert "These runs are stopped: digits." in result.output
    assert cloud.alive == ["i-2"]
    assert cloud.other == {}
    with open_ledger(path)() as session:
        status = {name: current_status(session, find_run(session, name)) for name in ("digits", "here")}
    assert {name: row.status for name, row in status.items() if row} == {"digits": "stopping", "here": "running"}


def test_panic_terminates_instances_of_a_pending_launch(home, run_command):
    a_ledger(home, digits=("aws", "running"))
    cloud = FakeCloud(late={"i-9": (3, instance("i-9"))})
    assert code_of(run_command(panic, "-y", clouds=[cloud])) == ExitCode.OK
    assert (cloud.alive, cloud.orders) == ([], ["end i-9"] * cloud.orders.count("end i-9"))
    assert cloud.orders


def test_panic_cancels_launches_in_skypilot_and_works_without_it(home, run_command, monkeypatch):
    a_ledger(home, digits=("aws", "running"), old=("gcp", "finished"), here=("local", "running"))
    monkeypatch.setattr(MadeSky, "cancelled", [])
    assert code_of(run_command(panic, "--dry-run", clouds=[FakeCloud()])) == ExitCode.OK
    assert MadeSky.cancelled == []
    assert code_of(run_command(panic, "-y", clouds=[FakeCloud()])) == ExitCode.OK
    assert MadeSky.cancelled == ["digits"]
    a_ledger(home, more=("aws", "running"))
    monkeypatch.setattr(MadeSky, "trouble", Failure("SkyPilot is ill"))
    cloud = FakeCloud().add(instance("i-1"))
    result = run_command(panic, "-y", clouds=[cloud])
    assert code_of(result) == ExitCode.TEARDOWN_INCOMPLETE
    assert "SkyPilot did not stop its launches (SkyPilot is ill)" in result.output
    assert cloud.alive == []


@pytest.mark.parametrize("dry", [True, False])
def test_panic_needs_no_ledger(home, run_command, dry):
    cloud = FakeCloud().add(instance("i-1"))
    assert code_of(run_command(panic, "--dry-run" if dry else "-y", clouds=[cloud])) == ExitCode.OK
    assert cloud.alive == (["i-1"] if dry else [])
    assert not (home / "ledger.sqlite").exists()


def test_panic_cleans_up_clouds_with_a_broken_ledger_and_warns(home, run_command):
    (home / "ledger.sqlite").write_bytes(b"this was a database once" * 100)
    cloud = FakeCloud().add(instance("i-1"))
    result = run_command(panic, "-y", clouds=[cloud])
    assert code_of(result) == ExitCode.TEARDOWN_INCOMPLETE
    assert cloud.alive == []
    assert "controllers were not told to stop and may buy again" in result.output


def test_panic_retries_a_locked_ledger_after_the_cloud_cleanup(home, run_command, monkeypatch):
    monkeypatch.setattr("launcher.ledger.store.BUSY_MS", 50)
    path = a_ledger(home, digits=("aws", "running"))
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN EXCLUSIVE")
    cloud = FakeCloud().add(instance("i-1"))
    end = cloud.end

    def end_and_let_go(instances: Any) -> None:
        if holder.in_transaction:
            holder.execute("ROLLBACK")
        end(instances)

    monkeypatch.setattr(cloud, "end", end_and_let_go)
    assert code_of(run_command(panic, "-y", clouds=[cloud])) == ExitCode.OK
    holder.close()
    with open_ledger(path)() as session:
        status = current_status(session, find_run(session, "digits"))
    assert status is not None
    assert status.status == "stopping"


def test_panic_expects_resources_on_the_clouds_of_runs(home, run_command):
    a_ledger(home, old=("aws", "finished"))
    clouds = [FakeCloud(), FakeCloud(cloud="gcp", its_regions=(), who=None)]
    assert code_of(run_command(panic, "-y", clouds=clouds)) == ExitCode.OK
    a_ledger(home, older=("gcp", "stopped"))
    assert code_of(run_command(panic, "-y", clouds=clouds)) == ExitCode.TEARDOWN_INCOMPLETE


def test_panic_stops_the_runs_even_without_cloud_credentials(home, run_command):
    path = a_ledger(home, digits=("aws", "running"))
    result = run_command(panic, "-y", clouds=[FakeCloud(who=None)])
    assert isinstance(result.exception, CredentialsRefused)
    with open_ledger(path)() as session:
        status = current_status(session, find_run(session, "digits"))
    assert status is not None
    assert status.status == "stopping"


# --- ssh ---------------------------------------------------------------------------------------------


def nodes(*named: tuple[str, int]) -> list[Node]:
    return [Node(name=f"digits-{slot}-g{generation}", slot=slot, generation=generation) for slot, generation in named]


def test_a_slot_name_means_its_newest_node():
    had = nodes(("trainer", 1), ("spot-0", 1), ("trainer", 2))
    assert newest("digits", had, "trainer").name == "digits-trainer-g2"
    assert newest("digits", had, "digits-trainer-g1").name == "digits-trainer-g1"
    with pytest.raises(LookupError, match="it has had: trainer, spot-0"):
        newest("digits", had, "spot-7")


def test_ssh_uses_the_login_that_the_provisioner_recorded(tmp_path):
    for text in ("", "{", "{}", '{"login": null}', '{"login": {"host": "", "user": "u", "key": "k"}}'):
        if text:
            (tmp_path / "machine.json").write_text(text)
        with pytest.raises(Failure):
            login_of("n", tmp_path)
    login = {"host": "192.0.2.1", "user": "ubuntu", "key": "/keys/one", "port": 2222}
    (tmp_path / "machine.json").write_text(json.dumps({"login": login}))
    assert login_of("n", tmp_path) == login
    (tmp_path / "ended.json").write_text("{}")
    with pytest.raises(Failure, match="has ended"):
        login_of("n", tmp_path)


def test_ssh_uses_the_nodes_own_key_and_host_key():
    login = {"host": "192.0.2.1", "user": "ubuntu", "key": "/keys/one", "port": 2222}
    command = ssh_command(login, Path("/runs/n"), ["nvidia-smi", "-L"])
    assert command[-4:] == ["ubuntu@192.0.2.1", "--", "nvidia-smi", "-L"]
    assert command[command.index("-i") + 1] == "/keys/one"
    assert command[command.index("-p") + 1] == "2222"
    assert 'UserKnownHostsFile="/runs/n/known_hosts"' in command
    assert ssh_command(login, Path("/runs/n"), [])[-1] == "ubuntu@192.0.2.1"
    assert "ProxyCommand" not in str(command)
    through = ssh_command({**login, "proxy": "ssh -W %h:%p bastion"}, Path("/runs/n"), [])
    assert "ProxyCommand=ssh -W %h:%p bastion" in through


def test_ssh_to_a_local_node_prints_its_folder(home):
    sessions = open_ledger(a_ledger(home, here=("local", "running")))
    result = CliRunner().invoke(ssh, ["here", "trainer"], obj=sessions)
    assert f"its disk is the folder {home}/runs/here/nodes/here-trainer-g2" in result.output


def test_ssh_json_for_a_local_node_has_its_folder_and_runs_no_command(home, capsys):
    a_ledger(home, here=("local", "running"))
    assert run(["ssh", "here", "trainer", "--json"]) == ExitCode.OK
    folder = f"{home}/runs/here/nodes/here-trainer-g2"
    assert printed("ssh", capsys.readouterr().out) == {"node": "here-trainer-g2", "folder": folder}
    assert run(["ssh", "here", "trainer", "--", "nvidia-smi"]) == ExitCode.FAILURE
    assert f"its disk is the folder {folder}; run nvidia-smi there yourself" in capsys.readouterr().err


@pytest.fixture
def call_ssh(home):
    """Call `spotrl ssh digits trainer` in a new process, with a fake `ssh` that prints its arguments and fails."""
    a_ledger(home, digits=("aws", "running"))
    folder = home / "runs" / "digits" / "nodes" / "digits-trainer-g2"
    folder.mkdir(parents=True)
    login = {"host": "192.0.2.1", "user": "ubuntu", "key": str(folder / "ssh.key")}
    (folder / "machine.json").write_text(json.dumps({"login": login}))
    fake = home / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho trouble >&2\nexit 7\n')
    fake.chmod(0o755)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launcher.cli.main", "ssh", "digits", "trainer", *words],
            env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def test_ssh_replaces_the_command_and_passes_on_its_exit_code(call_ssh):
    done = call_ssh("--", "ls", "-la")
    assert done.returncode == 7
    assert done.stdout.splitlines()[-4:] == ["ubuntu@192.0.2.1", "--", "ls", "-la"]


def test_ssh_with_json_reports_how_the_command_ended(call_ssh):
    done = call_ssh("--json", "--", "ls", "--json")
    answer = printed("ssh", done.stdout)
    assert (done.returncode, answer["exit_code"], answer["stderr"]) == (7, 7, "trouble\n")
    assert answer["stdout"].splitlines()[-2:] == ["ls", "--json"], "what follows -- is the node's"
    assert (answer["node"], answer["command"]) == ("digits-trainer-g2", ["ls", "--json"])


def test_ssh_with_json_and_no_command_prints_the_login(call_ssh):
    done = call_ssh("--json")
    answer = printed("ssh", done.stdout)
    assert done.returncode == 0
    assert (answer["node"], answer["host"], answer["user"]) == ("digits-trainer-g2", "192.0.2.1", "ubuntu")
    assert (answer["ssh"][0], answer["ssh"][-1]) == ("ssh", "ubuntu@192.0.2.1")


# --- check -------------------------------------------------------------------------------------------


def check(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["check", *arguments], standalone_mode=False)


def test_a_policy_is_printed_alone(home, capsys):
    assert run(["check", "--print-policy", "aws"]) == 0
    printed_output = capsys.readouterr()
    assert json.loads(printed_output.out)["Version"] == "2012-10-17"
    assert "s3:PutObject" in printed_output.out
    assert "Nodes get a role of their own" in printed_output.err
    assert run(["check", "--print-policy", "gcp"]) == 0
    assert "includedPermissions:" in capsys.readouterr().out


def test_a_policy_names_the_buckets_of_a_job(home):
    (home / "job.yaml").write_text("infra: aws\nstore: {aws: s3://mine/runs}\n")
    assert "arn:aws:s3:::mine/runs/*" in check(str(home / "job.yaml"), "--print-policy", "aws").output


def test_a_policy_omits_named_resources_and_lists_the_identitys_needs(home, capsys):
    (home / "job.yaml").write_text("infra: aws\nidentity: {aws: node-profile}\nstore: {aws: s3://mine/runs}\n")
    assert run(["check", str(home / "job.yaml"), "--print-policy", "aws"]) == 0
    printed_output = capsys.readouterr()
    assert "iam:CreateRole" not in printed_output.out
    assert "role/node-profile" in printed_output.out
    needs = json.loads(printed_output.err[printed_output.err.index("{\n") :])
    assert {"Null": {"ec2:ResourceTag/spotrl-run": "false"}} in [one.get("Condition") for one in needs["Statement"]]
    (home / "job.yaml").write_text("infra: gcp\nnetwork: {gcp: {network: nodes}}\n")
    assert run(["check", str(home / "job.yaml"), "--print-policy", "gcp"]) == 0
    assert "compute.networks.create" not in capsys.readouterr().out


def test_a_local_job_needs_no_cloud_check(home):
    (home / "job.yaml").write_text("name: here\n")
    result = check(str(home / "job.yaml"))
    assert result.return_value == ExitCode.OK
    assert "needs no cloud" in result.output


@pytest.mark.parametrize(
    ("infra", "found"), [("azure", "use local .this machine.* or clouds: aws, gcp"), ("local", "which needs no cloud")]
)
def test_check_without_a_job_names_the_clouds_that_it_knows(home, capsys, infra, found):
    assert run(["check", "--infra", infra, "--json"]) == ExitCode.USAGE
    assert re.search(found, json.loads(capsys.readouterr().out)["error"])


def test_check_reports_a_bad_job_in_a_line_and_an_exit_code(home):
    (home / "job.yaml").write_text("infra: azure\n")
    result = check(str(home / "job.yaml"), "--json")
    assert result.return_value == ExitCode.INVALID_JOB
    printed_output = printed("check", result.output.splitlines()[-1])
    assert printed_output["exit_code"] == 3
    assert [one["verdict"] for one in printed_output["checks"] if one["what"] == "job"] == ["FAIL"]


def test_check_without_a_job_tests_the_cloud_credentials(home, monkeypatch):
    monkeypatch.setattr("launcher.provision.provide.cloud_apis", lambda names: {"aws": FakeCloud(who=None)})
    result = check("--infra", "aws")
    assert result.return_value == ExitCode.CREDENTIALS
    assert "aws credentials" in result.output
