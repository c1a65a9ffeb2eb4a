"""Stories of `test_sky_provisioner.py` inside a world: `python -m tests.clouds.provisioning STORY WORLD FOLDER`.

The real SkyProvisioner with the real SkyPilot, cloud APIs, node links and agents, driven like by the controller. Each
story prints its observations as one line of JSON at its end, for the test to check.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import boto3

from engine.config import EngineConfig
from engine.events import Market
from engine.node_spec import ClockConfig, NodeSpec
from launcher.clouds.aws_role import WHO_MAY_BE_A_NODE
from launcher.clouds.base import RegionSetup
from launcher.clouds.build import build_cloud_api
from launcher.clouds.gce import GceApi
from launcher.clouds.gce_services import COMPUTE, IAM
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.job.company import NOTHING_NAMED, Named
from launcher.placement.placement import Placement
from launcher.provision.sky import bring_up
from launcher.provision.sky.bundle import Bundle, make_bundle
from launcher.provision.sky.node_link import NodeLink
from launcher.provision.sky.sky import Sky
from launcher.provision.sky.sky_provisioner import SkyProvisioner
from launcher.provision.sky.surroundings import Purchases
from tests.fakes.clouds.addresses import CLIENT, PROJECT
from tests.fakes.clouds.world import World

PLACES = {
    "aws": ("us-east-1", "us-east-1a", "m6i.large", "s3://spotrl-runs"),
    "gcp": ("us-central1", "us-central1-a", "n2-standard-2", "gs://spotrl-runs"),
}
SPOT_QUOTAS = {"aws": ("aws", "L-34B43A08"), "gcp": ("gcp/us-central1", "PREEMPTIBLE_CPUS")}
"""vCPUs of the types in `PLACES`."""
PASS_SECONDS = 0.25
UP_SECONDS = 1000.0
"""Time limit for a node to work: two to five minutes on an idle computer."""
PATIENCE = bring_up.LAUNCH_SECONDS


class DiesBefore(Sky):
    """A process that dies after recording the intent and before calling SkyPilot."""

    def start(self, launch):
        os._exit(8)


class Dies(Sky):
    """A process that dies right after SkyPilot accepted its request."""

    def start(self, launch):
        Sky.start(self, launch)
        os._exit(9)


class Drive:
    """One process that manages the nodes of a run."""

    def __init__(
        self, cloud: str, run: str, folder: Path, sky: Sky | None = None, named: Named = NOTHING_NAMED
    ) -> None:
        self.cloud, self.run, self.folder = cloud, run, folder
        self.region, self.zone, self.type, self.bucket = PLACES[cloud]
        folder.mkdir(parents=True, exist_ok=True)
        origin = folder / "origin"
        if not origin.exists():
            origin.write_text(str(time.time_ns() // 1_000_000))
        self.clock_config = ClockConfig(origin_ms=int(origin.read_text()))
        self.clock = self.clock_config.clock()
        apis = {cloud: build_cloud_api(cloud)}
        self.seen: dict[str, list[str]] = {}
        self.slowest_pass = 0.0
        self.provisioner = SkyProvisioner(
            Purchases(
                run=run,
                owners={cloud: apis[cloud].caller().owner},
                folder=folder,
                ssh_from=f"{CLIENT}/32",
                buckets=[f"{self.bucket}/{run}"],
                bundle=bundle_of(folder / "bundles"),
                regions=[(cloud, self.region)],
                named=lambda cloud, region: named,
            ),
            sky=sky or Sky(),
            clouds=apis,
            clock=self.clock,
            link=NodeLink,
            pool=ThreadPoolExecutor(8),
        )

    def request(self, slot: str, market: Market = Market.SPOT, zone: str | None = None) -> str:
        name = f"{self.run}-{slot}-g0"
        spec = NodeSpec(
            run=self.run,
            node=name,
            role="trainer" if slot == "trainer" else "rollout",
            market=market,
            folder="/nowhere",
            store=f"{self.bucket}/{self.run}",
            coordinator_port=7000,
            token="a-token-of-this-run",
            clock=self.clock_config,
            engine=EngineConfig(),
            money_deadline_ms=self.clock.now_ms() + 3_600_000,
        )
        want = Placement(
            cloud=self.cloud,
            region=self.region,
            zone=zone or self.zone,
            instance_type=self.type,
            gpus=0,
            accelerator="",
            market=market,
            micro_usd_per_hour=100_000,
            price_source="test",
            price_observed_at="2026-11-01T00:00:00Z",
        )
        self.provisioner.request(want, spec)
        return name

    def until(self, holds: Callable[[dict[str, NodeFact]], bool], seconds: float) -> dict[str, NodeFact]:
        end = time.monotonic() + seconds
        while True:
            began = time.monotonic()
            facts = {fact.name: fact for fact in self.provisioner.observe()}
            self.slowest_pass = max(self.slowest_pass, time.monotonic() - began)
            for fact in facts.values():
                statuses = self.seen.setdefault(fact.name, [])
                if not statuses or statuses[-1] != fact.status.value:
                    statuses.append(fact.status.value)
            if holds(facts) or time.monotonic() > end:
                return facts
            time.sleep(PASS_SECONDS)

    def up(self, name: str) -> NodeFact:
        not_yet = (NodeStatus.PENDING, NodeStatus.UNKNOWN)
        fact = self.until(lambda facts: facts[name].status not in not_yet, UP_SECONDS)[name]
        if fact.status is not NodeStatus.UP:
            raise SystemExit(f"{name} is {fact.status}: {fact.evidence} {list(self.provisioner.troubles())}")
        return fact

    def ended(self, name: str, seconds: float = 300) -> NodeFact:
        over = (NodeStatus.GONE, NodeStatus.NO_CAPACITY, NodeStatus.DENIED)
        return self.until(lambda facts: facts[name].status in over, seconds)[name]

    def tidy(self) -> list[str]:
        """Clean up, and return the resources that are left."""
        end = time.monotonic() + 180
        while not self.provisioner.tidy():
            if time.monotonic() > end:
                return list(self.provisioner.troubles()) or ["it did not end"]
            time.sleep(PASS_SECONDS)
        return []


def bundle_of(to: Path) -> Bundle:
    """Return the run's bundle. The first process makes it, and later changes of files do not matter."""
    made = [one for one in to.glob("*") if not one.name.startswith(".")] if to.exists() else []
    return Bundle(folder=made[0], digest=made[0].name) if made else make_bundle(to, None)


def fact_json(fact: NodeFact) -> dict:
    return {
        "status": fact.status,
        "evidence": fact.evidence,
        "reclaimed": fact.reclaimed,
        "notice": fact.with_notice,
    } | {
        "tried": fact.tried,
        "zone": fact.zone,
        "started": fact.started_ms,
        "ended": fact.ended_ms,
    }


def dies_before_the_request(world: World, folder: Path, cloud: str) -> dict:
    return dies(cloud, folder, DiesBefore())


def dies_after_the_request(world: World, folder: Path, cloud: str) -> dict:
    return dies(cloud, folder, Dies())


def dies(cloud: str, folder: Path, sky: Sky) -> dict:
    drive = Drive(cloud, f"p{cloud}", folder, sky=sky)
    drive.request("trainer", Market.SPOT)
    drive.until(lambda facts: False, UP_SECONDS)  # a slow computer starts SkyPilot's server for minutes
    return {"error": "it lives"}


def life(world: World, folder: Path, cloud: str) -> dict:
    """A node is adopted, up, without API, preempted; the next has no capacity; all is released and deleted."""
    began = time.monotonic()
    drive = Drive(cloud, f"p{cloud}", folder)
    node = drive.request("trainer", Market.SPOT)
    fact = drive.up(node)
    answer = {"up_s": time.monotonic() - began, "up": fact_json(fact)}
    answer["machines"] = len([one for one in world.machines() if one.get("labels", {}).get("spotrl-node") == node])
    answer["spotted"] = world.on(node, ["bash", "-c", SEARCH], root=True, check=False)
    answer["door"] = drive.until(
        lambda _: drive.provisioner.tunnel(node, 7000) is not None, 60
    ) and drive.provisioner.tunnel(node, 7000)
    world.fault("down", cloud, seconds=15)
    answer["while_down"] = drive.until(lambda facts: facts[node].status is not NodeStatus.UP, 12)[node].status
    world.clear()
    drive.until(lambda _: False, 6)
    taken = time.monotonic()
    world.reclaim(node, seconds=10 if cloud == "gcp" else 0, notice=cloud == "gcp")
    if cloud == "gcp":
        fact = drive.until(lambda facts: facts[node].notice_deadline_ms is not None, 20)[node]
        answer["notice_s"] = time.monotonic() - taken
    answer["gone"] = fact_json(drive.ended(node))
    answer["gone_s"] = time.monotonic() - taken
    world.fault("capacity", f"{cloud}/{drive.region}/{drive.zone}")
    answer["refused"] = fact_json(drive.ended(drive.request("rollout-0")))
    world.clear()
    quota, enough = SPOT_QUOTAS[cloud], 256
    world.quota(*quota, 1)
    answer["denied"] = fact_json(drive.ended(drive.request("rollout-2")))
    world.quota(*quota, enough)
    answer |= never_comes_up(drive, world)
    late = drive.request("rollout-1")
    drive.until(lambda facts: facts[late].started_ms is not None, 120)
    drive.provisioner.release([late])
    answer["released"] = fact_json(drive.ended(late))
    answer["left"] = drive.tidy()
    answer["seen"], answer["slowest_pass_s"] = drive.seen, drive.slowest_pass
    return answer


ACCOUNT = f"company-nodes@{PROJECT}.iam.gserviceaccount.com"
COMPANY = {
    "aws": Named(identity="company-profile", network="company", group="company-nodes", subnets=("company-a",)),
    "gcp": Named(identity=ACCOUNT, network="company", subnets=("company-central",)),
}
COMPANY_RANGE = "10.200.0.0/20"
PRIVATE_RANGE = "172.31.240.0/20"
"""A separate subnet on AWS: SkyPilot buys instances without public addresses only without an internet gateway."""


def administrator(world: World, folder: Path, cloud: str) -> dict:
    """Create an administrator's resources: on AWS in the default VPC, because that one has internet access."""
    region, zone, *_ = PLACES[cloud]
    if cloud == "gcp":
        make_on_google(region)
        return {}
    ec2, iam = boto3.client("ec2", region_name=region), boto3.client("iam")
    (vpc,) = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    filters = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}, {"Name": "availability-zone", "Values": [zone]}]
    (subnet,) = ec2.describe_subnets(Filters=filters)["Subnets"]
    private = ec2.create_subnet(VpcId=vpc["VpcId"], AvailabilityZone=zone, CidrBlock=PRIVATE_RANGE)["Subnet"][
        "SubnetId"
    ]
    table = ec2.create_route_table(VpcId=vpc["VpcId"])["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=table, SubnetId=private)
    for thing, name in ((vpc["VpcId"], "company"), (subnet["SubnetId"], "company-a"), (private, "company-private")):
        ec2.create_tags(Resources=[thing], Tags=[{"Key": "Name", "Value": name}])
    made = ec2.create_security_group(GroupName="company-nodes", Description="nodes", VpcId=vpc["VpcId"])
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": made["GroupId"]}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "192.0.2.0/24"}]}
    ec2.authorize_security_group_ingress(GroupId=made["GroupId"], IpPermissions=[inside, ssh])
    iam.create_role(RoleName="company-role", AssumeRolePolicyDocument=WHO_MAY_BE_A_NODE)
    iam.create_instance_profile(InstanceProfileName="company-profile")
    iam.add_role_to_instance_profile(InstanceProfileName="company-profile", RoleName="company-role")
    return {}


def make_on_google(region: str) -> None:
    api = GceApi()
    network = f"projects/{PROJECT}/global/networks/company"
    subnet = {"name": "company-central", "network": network, "ipCidrRange": COMPANY_RANGE}
    inside = {"sourceRanges": [COMPANY_RANGE], "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}]}
    ssh = {"sourceRanges": ["192.0.2.0/24"], "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}]}
    for path, body in (
        ("/global/networks", {"name": "company", "autoCreateSubnetworks": False}),
        (f"/regions/{region}/subnetworks", subnet),
        ("/global/firewalls", {"name": "company-inside", "network": network, **inside}),
        ("/global/firewalls", {"name": "company-ssh", "network": network, **ssh}),
    ):
        api.calls.finish(api.calls.ask("POST", COMPUTE, path, body))
    api.calls.ask("POST", IAM, "/serviceAccounts", {"accountId": "company-nodes", "serviceAccount": {}})


def named(world: World, folder: Path, cloud: str) -> dict:
    """Buy and end an instance in the administrator's resources. Its setup is covered by another story."""
    drive = Drive(cloud, f"n{cloud}", folder, named=COMPANY[cloud])
    node = drive.request("trainer", Market.SPOT)
    drive.until(lambda facts: facts[node].started_ms is not None, 600)
    (instance,) = build_cloud_api(cloud).instances(drive.region, run=drive.run)
    drive.provisioner.release([node])
    drive.ended(node)
    return {"identity": instance.identity, "address": instance.address, "left": drive.tidy()}


def private(world: World, folder: Path, cloud: str) -> dict:
    """Run a node without a public address; SkyPilot and this computer log in through a bastion."""
    key = folder / "bastion-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    instance, end = BASTIONS[cloud](key.with_suffix(".pub").read_text().strip())
    wait_until(lambda: instance in world.hosts())
    host = world.hosts()[instance]
    quiet = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    proxy = f"ssh -i {key} {quiet} -W %h:%p {host['user']}@{host['public']}"
    subnets = ("company-private",) if cloud == "aws" else COMPANY[cloud].subnets
    named = replace(COMPANY[cloud], subnets=subnets, public_addresses=False, ssh_proxy=proxy)
    drive = Drive(cloud, f"v{cloud}", folder, named=named)
    node = drive.request("trainer", Market.SPOT)
    answer: dict = {"up": fact_json(drive.up(node))}
    (bought,) = build_cloud_api(cloud).instances(drive.region, run=drive.run)
    answer |= {"address": bought.address, "public_address": bought.public_address}
    drive.until(lambda _: drive.provisioner.tunnel(node, 7000) is not None, 60)
    answer["door"] = drive.provisioner.tunnel(node, 7000)
    answer["proxy"] = json.loads((folder / "nodes" / node / "login.json").read_text())["proxy"] == proxy
    drive.provisioner.release([node])
    answer["released"] = fact_json(drive.ended(node))
    answer["left"] = drive.tidy()
    end()
    wait_until(lambda: instance not in world.hosts())
    return answer


def wait_until(holds: Callable[[], bool], seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise SystemExit(f"not within {seconds:.0f} s")
        time.sleep(0.1)


def bastion_on_aws(public_key: str) -> tuple[str, Callable[[], object]]:
    """Start an instance with a public address in the group of the nodes. Return its id and a function to end it."""
    ec2 = boto3.client("ec2", region_name=PLACES["aws"][0])
    (subnet,) = ec2.describe_subnets(Filters=[{"Name": "tag:Name", "Values": ["company-a"]}])["Subnets"]
    filters = [{"Name": "group-name", "Values": ["company-nodes"]}]
    (group,) = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
    (instance,) = ec2.run_instances(
        ImageId="ami-0fakeclouds000001",
        InstanceType="m6i.large",
        MinCount=1,
        MaxCount=1,
        SubnetId=subnet["SubnetId"],
        SecurityGroupIds=[group["GroupId"]],
        UserData=f"#cloud-config\nusers:\n- name: ubuntu\n  ssh_authorized_keys:\n  - {public_key}\n",
    )["Instances"]
    return instance["InstanceId"], lambda: ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])


def bastion_on_google(public_key: str) -> tuple[str, Callable[[], object]]:
    """Start the bastion in the network of the nodes. Return its id and a function to end it."""
    api, (region, zone, *_) = GceApi(), PLACES["gcp"]
    subnet = f"projects/{PROJECT}/regions/{region}/subnetworks/company-central"
    body = {
        "name": "bastion",
        "machineType": f"zones/{zone}/machineTypes/n2-standard-2",
        "metadata": {"items": [{"key": "ssh-keys", "value": f"gcpuser:{public_key}"}]},
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"sourceImage": "projects/x/y"}}],
        "networkInterfaces": [{"subnetwork": subnet, "accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]}],
    }
    api.calls.finish(api.calls.ask("POST", COMPUTE, f"/zones/{zone}/instances", body))
    path = f"/zones/{zone}/instances/bastion"
    return str(api.calls.ask("GET", COMPUTE, path)["id"]), lambda: api.calls.finish(
        api.calls.ask("DELETE", COMPUTE, path)
    )


BASTIONS = {"aws": bastion_on_aws, "gcp": bastion_on_google}


def never_comes_up(drive: Drive, world: World) -> dict:
    """Buy an instance that does not boot, and one behind a removed firewall rule. Their timeouts run side by side."""
    bring_up.LAUNCH_SECONDS = 45.0
    world.fault("no_boot", drive.cloud, times=1)
    dark = drive.request("rollout-3")
    drive.until(lambda facts: facts[dark].started_ms is not None, 60)
    place = next(iter(drive.provisioner._regions.prepared.values()))
    remove_ssh_rule(drive.cloud, place)
    shut = drive.request("rollout-4")
    unbooted, behind_rule = drive.ended(dark), drive.ended(shut)
    bring_up.LAUNCH_SECONDS = PATIENCE
    return {"unbooted": fact_json(unbooted), "shut": fact_json(behind_rule)}


def remove_ssh_rule(cloud: str, place: RegionSetup) -> None:
    """Remove the firewall rule, like a user who thinks that it is not needed."""
    if cloud == "gcp":
        import google.auth
        from google.auth.transport.requests import AuthorizedSession

        credentials, project = google.auth.default(["https://www.googleapis.com/auth/cloud-platform"])
        url = f"https://compute.googleapis.com/compute/v1/projects/{project}/global/firewalls/{place.group}-ssh"
        AuthorizedSession(credentials).delete(url).raise_for_status()
        return
    ec2 = boto3.client("ec2", region_name=place.region)
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [place.group]}])["SecurityGroups"]
    rules = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
    ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=rules)


SEARCH = "grep -rlsE 'planted-(aws|gcp|hf)-secret' /home /root /tmp /etc /opt /var 2>/dev/null; true"


if __name__ == "__main__":
    story, at, folder, cloud = sys.argv[1:]
    print(json.dumps(globals()[story](World.at(Path(at)), Path(folder), cloud), default=str), flush=True)
    os._exit(0)
