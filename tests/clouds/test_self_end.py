"""Self-termination on hosts of the fake clouds by the guard alone, and the metadata that the node agent reads.

There is no agent, controller or SkyPilot: the guard must work when everything else is gone.
"""

import base64
import json
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.clouds.world import World, why_not

pytestmark = [pytest.mark.clouds, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

ENGINE = Path(__file__).parents[2] / "engine"
MODULES = ("durable", "mark", "node/alone", "node/spend_guard", "node/self_termination", "storage/metadata")
"""Modules of the guard. They need only the standard library."""

BOOT = """
import boto3
from google.cloud import compute_v1 as compute

iam, ec2 = boto3.client("iam"), boto3.client("ec2", region_name="us-west-2")
iam.create_role(RoleName="a-node", AssumeRolePolicyDocument="{}")
iam.create_instance_profile(InstanceProfileName="a-node")
iam.add_role_to_instance_profile(InstanceProfileName="a-node", RoleName="a-node")
ec2.run_instances(
    ImageId=ec2.describe_images()["Images"][0]["ImageId"], MinCount=1, MaxCount=1, InstanceType="m6i.large",
    IamInstanceProfile={"Name": "a-node"}, InstanceMarketOptions={"MarketType": "spot"},
    TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "spotrl-node", "Value": "aws-node"}]}],
)
disk = compute.AttachedDiskInitializeParams(source_image="projects/debian-cloud/global/images/family/debian-12")
compute.InstancesClient().insert(
    project="fake-project",
    zone="us-central1-a",
    instance_resource=compute.Instance(
        name="gcp-node",
        machine_type="zones/us-central1-a/machineTypes/n2-standard-2",
        labels={"spotrl-node": "gcp-node"},
        scheduling=compute.Scheduling(provisioning_model="SPOT", instance_termination_action="DELETE"),
        service_accounts=[compute.ServiceAccount(email="node@fake-project.iam.gserviceaccount.com")],
        disks=[compute.AttachedDisk(boot=True, auto_delete=True, initialize_params=disk)],
        network_interfaces=[compute.NetworkInterface(network="global/networks/default")],
    ),
).result()
"""

NOTICE = {
    "aws": ("Imds().get('meta-data/spot/instance-action')", "terminate"),
    "gcp": ("GceMetadata().watch('instance/preempted', '0', 5)[0]", "TRUE"),
}


@pytest.fixture
def world():
    """Start two hosts with only those modules of the engine that need the standard library."""
    with World().up() as world:
        world.run([sys.executable, "-c", BOOT], timeout=120, check=True)
        wait_for(lambda: len(world.hosts()) == 2)
        for cloud in ("aws", "gcp"):
            for module in MODULES:
                text = base64.b64encode((ENGINE / f"{module}.py").read_bytes()).decode()
                on(
                    world,
                    cloud,
                    f"mkdir -p engine/node engine/storage spotrl/logs; echo {text} | base64 -d > engine/{module}.py",
                )
        yield world


def on(world, cloud, command):
    # Variables of an SSH session; `on` does not use SSH.
    given = f"export AWS_ENDPOINT_URL={world.environment()['AWS_ENDPOINT_URL']}"
    return world.on(f"{cloud}-node", ["sh", "-c", f"{given}; cd /home/*/; {command}"])


def wait_for(what, seconds=240.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["delete", "shut down"])
def test_an_instance_past_its_spend_deadline_deletes_itself_and_its_disk(world, how):
    if how == "shut down":
        world.fault("unreachable", "gcp")
    for cloud in ("aws", "gcp"):
        node = json.dumps({"cloud": cloud, "money_left_ms": -20_000})
        on(world, cloud, f"echo '{node}' > spotrl/node.json")
        on(world, cloud, "setsid python3 -m engine.node.spend_guard spotrl > spotrl/logs/agent.log 2>&1 < /dev/null &")
    wait_for(lambda: not world.hosts(), seconds=60)
    left = {(thing["cloud"], thing["kind"]) for thing in world.inventory() if thing["kind"] in ("instance", "disk")}
    # The shutdown as last resort leaves a stopped instance and its disk, which `spotrl reap` deletes.
    assert left == (set() if how == "delete" else {("gcp", "instance"), ("gcp", "disk")})


def test_the_metadata_services_announce_a_preemption(world):
    for cloud, (call, expected) in NOTICE.items():
        read = f'python3 -c "from engine.storage.metadata import *; print({call})"'
        world.reclaim(f"{cloud}-node", seconds=30, notice=True)
        wait_for(lambda cloud=cloud, read=read, expected=expected: expected in str(on(world, cloud, read)), seconds=15)
