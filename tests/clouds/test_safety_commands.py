"""`spotrl check`, `reap` and `panic` against both fake clouds, through their real client libraries.

The left-behind resources are created directly, as a crash would leave them, without a ledger entry.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.exit_codes import ExitCode
from tests.fakes.clouds.world import World

pytestmark = pytest.mark.clouds

SPOTRL = [sys.executable, "-m", "launcher.cli.main"]

LEAVE_BEHIND = """
import boto3
from launcher.clouds.build import build_cloud_api

for cloud, region in (("aws", "us-west-2"), ("gcp", "us-east4")):
    api = build_cloud_api(cloud)
    buckets = ["s3://spotrl-runs/forgotten", "gs://spotrl-runs/forgotten"]
    api.prepare(region, run="forgotten", owner=api.caller().owner, ssh_from="192.0.2.1/32", buckets=buckets)

owner = build_cloud_api("aws").caller().owner
tags = [{"Key": f"spotrl-{key}", "Value": value} for key, value in
        (("run", "forgotten"), ("owner", owner), ("node", "forgotten-trainer-g1"))]
client = boto3.client("ec2", region_name="us-west-2")
client.run_instances(
    ImageId="ami-0fakeclouds000001", MinCount=1, MaxCount=1, InstanceType="g6.xlarge",
    TagSpecifications=[{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
)
client.create_volume(
    Size=100, AvailabilityZone="us-west-2a", TagSpecifications=[{"ResourceType": "volume", "Tags": tags}]
)
"""


LAUNCHING = """
import os, sys
from pathlib import Path

from engine.events import Market
from launcher.clouds.base import NODE_LABEL, OWNER_LABEL, RUN_LABEL
from launcher.clouds.build import build_cloud_api
from launcher.provision.sky.task import Launch
from launcher.provision.sky.sky import Sky
from launcher.ledger.store import open_ledger, writing
from launcher.placement.placement import Placement
from tests.launcher.made_ledger import a_run

with writing(open_ledger(Path(os.environ["SPOTRL_HOME"]) / "ledger.sqlite")) as session:
    made = a_run(session, "forgotten", folder=os.environ["SPOTRL_HOME"])
    made.run.infra = "aws"
    made.status("running", 0)
api = build_cloud_api("aws")
owner = api.caller().owner
place = api.prepare("us-west-2", run="forgotten", owner=owner, ssh_from="192.0.2.1/32", buckets=[])
want = Placement(
    cloud="aws", region="us-west-2", zone="us-west-2a", instance_type="m6i.large", gpus=0, accelerator="",
    market=Market.SPOT, micro_usd_per_hour=100_000, price_source="test", price_observed_at="2026-11-01T00:00:00Z",
)
name = "forgotten-spot-0-g1"
labels = {RUN_LABEL: "forgotten", NODE_LABEL: name, OWNER_LABEL: owner}
Sky().start(
    Launch(name=name, want=want, region_setup=place, labels=labels, autostop_minutes=60)
)
"""

SKYPILOT_CHECKS = """
from sky.clouds import GCP
from sky.clouds.cloud import CloudCapability

print(GCP.check_credentials(CloudCapability.COMPUTE))
"""

JOB = """
name: nobody
infra: gcp
store: {gcp: gs://spotrl-runs/nobody}
ssh_from: 192.0.2.1/32
iterations: 2
model: digits-ocr
runtime: {device: cpu}
resources:
  trainer: {accelerators: L4:1}
  rollout: {accelerators: L4:1, use_spot: true, num_nodes: 0}
budget: {max_total: $4, max_hourly: $9, deadline: 1h}
"""

UNDER_WAY = "import json; from launcher.provision.sky.sky import Sky; print(json.dumps(Sky().pending('forgotten-')))"


def spotrl(world: World, *words: str, home: Path, **env: str) -> tuple[int, Any, subprocess.CompletedProcess[str]]:
    """Run a command, and return its exit code and JSON output."""
    done = world.run([*SPOTRL, *words, "--json"], env={"SPOTRL_HOME": str(home)} | env, check=False, timeout=180)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else None, done


def kinds(world: World) -> set[tuple[str, str]]:
    """Return the kinds of resources left of the run. The custom role is shared by all runs and stays."""
    return {(one["cloud"], one["kind"]) for one in world.inventory() if "forgotten" in json.dumps(one)}


def leave_behind(world: World) -> None:
    world.run([sys.executable, "-c", LEAVE_BEHIND], timeout=120)
    assert {("aws", "instance"), ("aws", "disk"), ("aws", "group"), ("gcp", "firewall")} <= kinds(world)


def test_credentials_clocks_and_permissions_are_found(world, tmp_path):
    code, answer, done = spotrl(world, "check", home=tmp_path)
    assert code == 0, done.stderr
    assert {
        check["what"]: check["verdict"] for check in answer["checks"] if check["what"].startswith(("aws", "gcp"))
    } == {"gcp gcloud": "OK"} | {
        f"{cloud} {what}": "OK" for cloud in ("aws", "gcp") for what in ("credentials", "clock", "permissions")
    }


def test_check_and_launch_report_a_gcloud_without_account_before_buying(world, tmp_path):
    """SkyPilot would refuse every launch on Google Cloud; application-default credentials do not help."""
    no_account, before = {"GCLOUD_ACCOUNT": ""}, world.inventory()
    refused = world.run([sys.executable, "-c", SKYPILOT_CHECKS], env=no_account, timeout=120).stdout
    assert "No GCP account is activated" in refused
    code, answer, _ = spotrl(world, "check", "--infra", "gcp", home=tmp_path, **no_account)
    (line,) = (check for check in answer["checks"] if check["what"] == "gcp gcloud")
    assert (code, line["verdict"] != "OK") == (ExitCode.CREDENTIALS, True)
    assert "no active account" in line["found"]
    (tmp_path / "job.yaml").write_text(JOB)
    home = {"SPOTRL_HOME": str(tmp_path)}
    world.run([*SPOTRL, "catalog", "refresh"], env=home, timeout=180)
    launch = [*SPOTRL, "launch", tmp_path / "job.yaml", "-y", "--detach"]
    done = world.run(launch, env=home | no_account, check=False, timeout=180)
    assert (done.returncode, "no active account" in done.stderr) == (ExitCode.CREDENTIALS, True), done.stderr
    assert world.inventory() == before


def test_reap_names_an_unreachable_region_and_deletes_all_once_reachable(world, tmp_path):
    leave_behind(world)
    world.fault("unreachable", "aws/us-east-1")
    code, answer, _ = spotrl(world, "reap", "--cloud", "gcp", "--dry-run", home=tmp_path)
    assert code == 0
    assert "network" in {one["kind"] for one in answer["found"]}
    world.clear()
    code, answer, done = spotrl(world, "reap", "-y", "--timeout", "120", home=tmp_path)
    assert (code, answer["left"], answer["unasked"]) == (0, [], []), done.stderr
    assert kinds(world) == set()


def test_panic_deletes_everything_with_a_broken_ledger_and_warns(world, tmp_path):
    leave_behind(world)
    (tmp_path / "ledger.sqlite").write_bytes(b"this was a database once" * 100)
    code, answer, done = spotrl(world, "panic", "-y", "--timeout", "120", home=tmp_path)
    assert kinds(world) == set(), done.stderr
    assert code == 10
    assert "were not told to stop" in answer["left"][0]


def test_panic_stops_skypilots_launch_for_a_dead_controller(world, tmp_path):
    world.fault("no_boot", "aws")
    world.run([sys.executable, "-c", LAUNCHING], env={"SPOTRL_HOME": str(tmp_path)}, timeout=180)
    wait_until(lambda: ("aws", "instance") in kinds(world), 120)
    assert under_way(world)
    code, answer, done = spotrl(world, "panic", "-y", "--timeout", "120", home=tmp_path)
    assert (code, answer["left"], answer["unasked"]) == (0, [], []), done.stderr
    assert "forgotten" in answer["notes"][0]
    assert under_way(world) == {}
    assert kinds(world) == set()


def test_panic_reports_a_frozen_skypilot_and_still_ends_the_instances(world, tmp_path):
    world.fault("no_boot", "aws")
    world.run([sys.executable, "-c", LAUNCHING], env={"SPOTRL_HOME": str(tmp_path)}, timeout=180)
    wait_until(lambda: ("aws", "instance") in kinds(world), 120)
    (server,) = [one for one in psutil.process_iter() if is_skypilots_server(one, world)]
    server.suspend()
    try:
        code, answer, done = spotrl(world, "panic", "-y", "--timeout", "120", home=tmp_path)
    finally:
        server.resume()
    assert code == 10, done.stderr
    assert "SkyPilot did not stop its launches (no answer within 30 s)" in answer["left"][0]
    assert kinds(world) == set()
    code, answer, done = spotrl(world, "panic", "-y", "--timeout", "120", home=tmp_path)
    assert (code, answer["left"], under_way(world), kinds(world)) == (0, [], {}, set()), done.stderr


def is_skypilots_server(process: psutil.Process, world: World) -> bool:
    try:
        here = process.environ().get("HOME") == str(world.folder / "home")
        return here and "sky.server.server" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def under_way(world: World) -> dict[str, str]:
    """Return the pending launches of SkyPilot's server."""
    done = world.run([sys.executable, "-c", UNDER_WAY], timeout=60)
    return json.loads(done.stdout.splitlines()[-1])


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(1.0)
