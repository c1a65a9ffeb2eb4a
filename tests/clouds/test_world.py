"""The promises of the fake clouds to their tests: real protocols, real hosts and a complete cleanup."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import boto3
import obstore
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EndpointConnectionError, HTTPClientError
from google.api_core import exceptions as google_exceptions
from google.cloud import compute_v1
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.store import GCSStore, S3Store

from launcher.clouds.aws_fis import AwsPreempter
from launcher.clouds.aws_inventory import instance_of as described_instance
from launcher.clouds.selftest_policies import FIS_ROLE, fis_role_policy, fis_trust
from launcher.market.instance_types import instance_type_of
from launcher.market.sources.gcp import GcpAdvice, GcpCatalog
from tests.fakes.clouds import addresses
from tests.fakes.clouds.image import CHECKOUT
from tests.fakes.clouds.world import World

pytestmark = pytest.mark.clouds

AMI = "ami-0fakeclouds000001"
ONCE = Config(retries={"total_max_attempts": 1}, read_timeout=5)
SSH = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=3", "-q")
IMDS = "http://169.254.169.254/latest"
SYSTEM_FOLDERS = {"bin", "dev", "etc", "home", "lib", "lib64", "mnt", "opt", "proc", "root", "run", "sbin", "srv"}
SYSTEM_FOLDERS |= {"sys", "tmp", "usr", "var"}
EMPTY = ["/mnt:", "/root:", "/srv:", "/usr/local/lib:"]
GOOGLE = "http://metadata.google.internal/computeMetadata/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostInstance:
    id: str
    public: str
    private: str
    user: str


class Site:
    """A world with an SSH key for its hosts; instances are created and found with the clouds' own clients."""

    def __init__(self, world: World, key: Path) -> None:
        self.world, self.key = world, key
        self.public_key = key.with_suffix(".pub").read_text().strip()

    def aws(self, region: str = "us-east-1", groups: Sequence[str] = (), **more: Any) -> HostInstance:
        script = f"#cloud-config\nusers:\n- name: ubuntu\n  ssh_authorized_keys:\n  - {self.public_key}\n"

        def run() -> str:
            ec2 = boto3.client("ec2", region_name=region, config=ONCE)
            query = {"ImageId": AMI, "InstanceType": "m6i.large", "MinCount": 1, "MaxCount": 1, "UserData": script}
            made = ec2.run_instances(**(query | ({"SecurityGroupIds": list(groups)} if groups else {}) | more))
            return str(made["Instances"][0]["InstanceId"])

        return self._up(self.world.call(run))

    def gcp(self, name: str, zone: str = "us-central1-a", **more: Any) -> HostInstance:
        def insert() -> str:
            self._insert(name, zone, **more).result()
            return str(compute_v1.InstancesClient().get(project=addresses.PROJECT, zone=zone, instance=name).id)

        return self._up(self.world.call(insert))

    def _insert(self, name: str, zone: str, **more: Any) -> Any:
        resource = {
            "name": name,
            "machine_type": f"zones/{zone}/machineTypes/n2-standard-2",
            "metadata": {"items": [{"key": "ssh-keys", "value": f"gcpuser:{self.public_key}"}]},
            "disks": [{"boot": True, "auto_delete": True, "initialize_params": {"source_image": "projects/x/y"}}],
            "network_interfaces": [
                {"network": "global/networks/default", "access_configs": [{"type_": "ONE_TO_ONE_NAT"}]}
            ],
        } | more
        return compute_v1.InstancesClient().insert(
            project=addresses.PROJECT, zone=zone, instance_resource=compute_v1.Instance(resource)
        )

    def _up(self, instance: str) -> HostInstance:
        wait_for(lambda: instance in self.world.hosts())
        host = self.world.hosts()[instance]
        made = HostInstance(id=instance, public=host["public"], private=host["private"], user=host["user"])
        wait_for(lambda: self.on(instance, "ss -ltn | grep -q :22 && echo up", check=False).strip() == "up")
        return made

    def ssh(self, instance: HostInstance, command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        login: list[str | Path] = ["ssh", "-i", self.key, *SSH, f"{instance.user}@{instance.public}", command]
        return self.world.run(login, check=check, timeout=20)

    def on(self, instance: str, command: str, check: bool = True) -> str:
        return self.world.on(instance, ["bash", "-c", command], check=check)

    def listens(self, instance: HostInstance, port: int) -> None:
        serve = f"cd /tmp && (setsid python3 -m http.server {port} >/dev/null 2>&1 &)"
        self.on(instance.id, serve)
        wait_for(lambda: self.on(instance.id, f"ss -ltn | grep -c :{port}", check=False).strip() == "1")

    def reaches(self, source: HostInstance, address: str, port: int) -> bool:
        tried = self.on(source.id, f"curl -s -o /dev/null -m 1 http://{address}:{port}/ && echo yes", check=False)
        return tried.strip() == "yes"

    def end(self, instance: HostInstance) -> None:
        """Terminate an instance of either cloud; it may have ended already."""
        there = next((one for one in self.world.machines() if one["id"] == instance.id), None)
        if there is None:
            return

        def act() -> None:
            if there["cloud"] == "aws":
                boto3.client("ec2", region_name=there["region"]).terminate_instances(InstanceIds=[instance.id])
                return
            where = {"project": addresses.PROJECT, "zone": there["zone"], "instance": there["name"]}
            with suppress(google_exceptions.NotFound):
                compute_v1.InstancesClient().delete(**where).result()

        self.world.call(act)
        wait_for(lambda: instance.id not in self.world.hosts())


def wait_for(holds: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"did not hold within {seconds} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def site(world: World, tmp_path_factory: pytest.TempPathFactory) -> Site:
    key = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return Site(world, key)


@pytest.fixture(scope="module")
def group(site: Site) -> str:
    """Create a security group that allows SSH only from the client."""

    def make() -> str:
        ec2 = boto3.client("ec2")
        made = ec2.create_security_group(GroupName="spotrl-test", Description="of a test")["GroupId"]
        rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": f"{addresses.CLIENT}/32"}]}
        ec2.authorize_security_group_ingress(GroupId=made, IpPermissions=[rule])
        return str(made)

    return site.world.call(make)


@pytest.fixture(scope="module")
def on_aws(site: Site, group: str) -> Iterator[HostInstance]:
    def profile() -> None:
        iam = boto3.client("iam")
        trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
        iam.create_role(RoleName="test-node", AssumeRolePolicyDocument=document)
        iam.create_instance_profile(InstanceProfileName="test-node")
        iam.add_role_to_instance_profile(InstanceProfileName="test-node", RoleName="test-node")

    site.world.call(profile)
    spot = {"MarketType": "spot"}
    instance = site.aws(groups=[group], InstanceMarketOptions=spot, IamInstanceProfile={"Name": "test-node"})
    yield instance
    site.end(instance)


@pytest.fixture(scope="module")
def on_gcp(site: Site) -> Iterator[HostInstance]:
    instance = site.gcp("test-gcp")
    yield instance
    site.end(instance)


# --- hosts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["on_aws", "on_gcp"])
def test_a_host_sees_only_the_system_folders_of_this_computer(
    site: Site, which: str, request: pytest.FixtureRequest
) -> None:
    instance = request.getfixturevalue(which)
    name = f"planted-{os.getpid()}"
    folders = [
        Path.home(),
        Path("/tmp"),
        CHECKOUT / "tests",
        site.world.folder / "home",
        Path("/usr/local"),
        Path("/opt"),
    ]
    try:
        for folder in folders:
            (folder / name).write_text("secret")
        # /usr is that of this computer by design. No secret is planted in these large folders.
        large = " -o ".join(f"-path /{one}" for one in ("proc", "sys", "usr/lib", "usr/share", "usr/include"))
        find = f"sudo find / \\( {large} \\) -prune -o -name {name} -print"
        assert site.ssh(instance, find).stdout == ""
        assert site.ssh(instance, "ls /").stdout.split() == sorted(SYSTEM_FOLDERS)
        assert site.ssh(instance, "sudo ls /root /mnt /srv /usr/local/lib").stdout.split() == EMPTY
        assert site.ssh(instance, "ls /home /opt").stdout.split() == ["/home:", "ubuntu", "/opt:", "spotrl"]
        processes = site.ssh(instance, "ps -eo pid,args").stdout
        assert "pytest" not in processes
        assert "sshd" in processes.splitlines()[1]
    finally:
        for folder in folders:
            (folder / name).unlink(missing_ok=True)


def test_root_on_a_host_cannot_leave_the_host(site: Site, on_aws: HostInstance) -> None:
    for attempt in ("mount -t tmpfs x /mnt", "mknod /tmp/disk b 254 0", "date -s 2020-01-01", "ip link set eth0 down"):
        assert site.ssh(on_aws, f"sudo {attempt}", check=False).returncode != 0, attempt
    assert site.ssh(on_aws, "sudo id -u").stdout.strip() == "0"


def test_a_host_installs_only_from_the_wheels_in_its_image(site: Site, on_gcp: HostInstance) -> None:
    result = site.ssh(
        on_gcp, "uv -q venv /tmp/e && uv pip install -q --python /tmp/e/bin/python pydantic && echo installed"
    )
    assert "installed" in result.stdout
    refused = site.ssh(
        on_gcp, "uv pip install --python /tmp/e/bin/python flask; python3 -m pip download -q flask", check=False
    )
    assert "flask" in refused.stderr
    assert refused.returncode != 0


# --- metadata ----------------------------------------------------------------------------------------


def test_ec2_metadata_needs_a_token_and_describes_the_instance(site: Site, on_aws: HostInstance) -> None:
    assert site.on(on_aws.id, f"curl -s -o /dev/null -w %{{http_code}} {IMDS}/meta-data/instance-id") == "401"
    assert imds(site, on_aws, "meta-data/instance-id") == on_aws.id
    assert imds(site, on_aws, "meta-data/placement/availability-zone") == "us-east-1a"
    assert json.loads(imds(site, on_aws, "dynamic/instance-identity/document"))["region"] == "us-east-1"
    assert "404" in imds(site, on_aws, "meta-data/spot/instance-action", "-w %{http_code}")


def test_google_metadata_needs_its_flavor_header_and_waits_for_changes(site: Site) -> None:
    spot = {"provisioning_model": "SPOT", "instance_termination_action": "DELETE"}
    account = {"email": "node@fake-project.iam.gserviceaccount.com", "scopes": ["cloud-platform"]}
    instance = site.gcp("test-preempted", scheduling=spot, service_accounts=[account])
    try:
        flavor = "-H 'Metadata-Flavor: Google'"
        assert site.on(instance.id, f"curl -s -o /dev/null -w %{{http_code}} {GOOGLE}/instance/id") == "403"
        assert site.on(instance.id, f"curl -s {flavor} {GOOGLE}/instance/id") == instance.id
        token = site.on(instance.id, f"curl -s {flavor} {GOOGLE}/instance/service-accounts/default/token")
        assert json.loads(token)["access_token"]
        assert site.on(instance.id, f"curl -s {flavor} {GOOGLE}/instance/preempted") == "FALSE"
        change = f"{GOOGLE}/instance/preempted?wait_for_change=true&timeout_sec=10"
        wait = f"curl -s {flavor} '{change}' > /tmp/said 2>/dev/null"
        site.on(instance.id, f"({wait} &) ; sleep 0.3")
        site.world.reclaim("test-preempted", seconds=5, notice=True)
        wait_for(lambda: site.on(instance.id, "cat /tmp/said") == "TRUE", 4)
        assert site.world.call(lambda: instance_of("test-preempted").status) == "STOPPING"
        wait_for(lambda: instance.id not in site.world.hosts())
        with pytest.raises(RuntimeError, match="NotFound"):
            site.world.call(lambda: instance_of("test-preempted").status)
        operations = site.world.call(preemptions)
        assert operations.count(instance.id) == 1
    finally:
        site.end(instance)


# --- the clouds' own clients -------------------------------------------------------------------------


def test_a_spot_instance_reports_its_market_and_its_preemption(site: Site, group: str) -> None:
    instance = site.aws(groups=[group], InstanceMarketOptions={"MarketType": "spot"})
    before = site.world.call(lambda: described(instance.id))
    assert before["InstanceLifecycle"] == "spot"
    assert before["SpotInstanceRequestId"].startswith("sir-")
    assert before["PublicIpAddress"] != before["PrivateIpAddress"]
    volume = before["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
    site.world.reclaim(instance.id, seconds=1, notice=True)
    action = json.loads(imds(site, instance, "meta-data/spot/instance-action"))
    assert action["action"] == "terminate"
    assert imds(site, instance, "meta-data/events/recommendations/rebalance")
    wait_for(lambda: instance.id not in site.world.hosts())
    after = site.world.call(lambda: described(instance.id))
    assert (after["State"]["Name"], after["StateReason"]["Code"]) == ("terminated", "Server.SpotInstanceTermination")
    assert not [one for one in site.world.inventory() if one["id"] in (volume, instance.id)]


def test_fis_interrupts_a_spot_instance_if_its_role_allows_it(site: Site, group: str) -> None:
    instance = site.aws(groups=[group], InstanceMarketOptions={"MarketType": "spot"})
    site.world.notice(1)
    site.world.call(remove_fis_role)
    before = site.world.call(lambda: ordered(instance.id))
    assert before == ("failed", "failed: The role cannot be assumed by the Fault Injection Service.")
    site.world.call(make_fis_role)
    assert site.world.call(lambda: ordered(instance.id)) == ("done", "completed: Experiment completed")
    assert json.loads(imds(site, instance, "meta-data/spot/instance-action"))["action"] == "terminate"
    wait_for(lambda: instance.id not in site.world.hosts())
    after = site.world.call(lambda: described(instance.id))
    assert (after["State"]["Name"], after["StateReason"]["Code"]) == ("terminated", "Server.SpotInstanceTermination")
    assert site.world.call(lambda: ordered(instance.id))[0] == "failed", "nothing is left to interrupt"
    site.world.notice(120)


def test_a_simulated_maintenance_event_preempts_a_spot_vm(site: Site) -> None:
    instance = site.gcp(
        "test-maintained", scheduling={"provisioning_model": "SPOT", "instance_termination_action": "STOP"}
    )
    site.world.notice(1)
    site.world.call(maintain)
    wait_for(lambda: instance.id not in site.world.hosts())
    assert instance.id in site.world.call(preemptions)
    site.world.notice(30)
    site.end(instance)


def test_a_repeated_client_token_creates_one_instance(site: Site, group: str) -> None:
    first, again = (site.aws(groups=[group], ClientToken="one") for _ in range(2))
    assert first.id == again.id
    site.end(first)


def test_terminating_an_instance_by_hand_is_not_a_preemption(site: Site, group: str) -> None:
    instance = site.aws(groups=[group])
    site.end(instance)
    assert site.world.call(lambda: described(instance.id))["StateReason"]["Code"] == "Client.UserInitiatedShutdown"


def test_compute_engine_lists_by_label_and_deletes_the_disk_with_its_instance(site: Site) -> None:
    instance = site.gcp("test-labels", labels={"spotrl-run": "a", "spotrl-node": "b"})

    def found(wanted: str) -> list[str]:
        request = compute_v1.AggregatedListInstancesRequest(project=addresses.PROJECT, filter=wanted)
        pages = compute_v1.InstancesClient().aggregated_list(request=request)
        return [instance.name for _, scope in pages for instance in scope.instances]

    assert site.world.call(lambda: found("labels.spotrl-run = a AND labels.spotrl-node:*")) == ["test-labels"]
    assert site.world.call(lambda: found("labels.spotrl-run = b")) == []
    assert [one["id"] for one in site.world.inventory() if one["id"] == "test-labels"] == ["test-labels"] * 2
    site.end(instance)
    assert not [one for one in site.world.inventory() if one["id"] == "test-labels"]


def test_a_guest_shutdown_ends_the_instance_as_on_its_cloud(site: Site, group: str) -> None:
    ends = site.aws(groups=[group], InstanceInitiatedShutdownBehavior="terminate")
    stops = site.gcp("test-shutdown")
    for instance in (ends, stops):
        site.ssh(instance, "sudo shutdown -h now", check=False)
        wait_for(lambda instance=instance: instance.id not in site.world.hosts())  # type: ignore[misc]
    assert site.world.call(lambda: described(ends.id))["State"]["Name"] == "terminated"
    assert site.world.call(lambda: instance_of("test-shutdown").status) == "TERMINATED"
    site.end(stops)


def stores() -> dict[str, Any]:
    return {
        "s3": S3Store(
            "spotrl-runs", credential_provider=Boto3CredentialProvider(), client_options={"allow_http": True}
        ),
        "gs": GCSStore("spotrl-runs"),
    }


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_bucket_is_shared_by_the_client_and_the_hosts(
    site: Site, kind: str, on_aws: HostInstance, on_gcp: HostInstance
) -> None:
    def put() -> str:
        obstore.put(stores()[kind], "from/client", b"hello")
        with pytest.raises(obstore.exceptions.AlreadyExistsError):
            obstore.put(stores()[kind], "from/client", b"again", mode="create")
        obstore.put(stores()[kind], "from/large", b"x" * (6 << 20), chunk_size=5 << 20)
        return str(sorted(one["path"] for page in obstore.list(stores()[kind], "from") for one in page))

    assert site.world.call(put) == "['from/client', 'from/large']"
    if kind == "s3":
        # With only the credentials of the instance profile.
        read = "boto3.client('s3').get_object(Bucket='spotrl-runs', Key='from/client')['Body'].read().decode()"
        result = site.ssh(on_aws, f'~/skypilot-runtime/bin/python -c "import boto3; print({read})"')
        assert result.stdout.strip() == "hello"
    else:
        read = "curl -s -H 'Authorization: Bearer x' https://storage.googleapis.com/spotrl-runs/from/client"
        assert site.ssh(on_gcp, read).stdout == "hello"


def test_s3_refuses_a_request_signed_for_another_region(site: Site) -> None:
    def put(bucket: str, region: str) -> str:
        made = S3Store(
            bucket,
            region=region,
            credential_provider=Boto3CredentialProvider(),
            client_options={"allow_http": True},
        )
        obstore.put(made, "from/there", b"x")
        return str(boto3.client("s3").get_bucket_location(Bucket=bucket)["LocationConstraint"])

    assert site.world.call(lambda: put("spotrl-far", "eu-central-1")) == "eu-central-1"
    for bucket, region in (("spotrl-far", "us-east-1"), ("spotrl-runs", "eu-central-1")):
        with pytest.raises(RuntimeError, match=f"AuthorizationHeaderMalformed.*region '{region}' is wrong"):
            site.world.call(lambda bucket=bucket, region=region: put(bucket, region))  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "cloud"), [("s3", "aws"), ("gs", "gcp")])
def test_a_bucket_can_be_made_unreachable_for_a_time(site: Site, kind: str, cloud: str) -> None:
    def put() -> str:
        once = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
        made = (
            S3Store(
                "spotrl-runs",
                credential_provider=Boto3CredentialProvider(),
                client_options={"allow_http": True},
                retry_config=once,  # type: ignore[arg-type]
            )
            if kind == "s3"
            else GCSStore("spotrl-runs", retry_config=once)  # type: ignore[arg-type]
        )
        obstore.put(made, "try", b"x")
        return "there"

    site.world.fault("store_down", cloud)
    with pytest.raises(RuntimeError, match="503"):
        site.world.call(put)
    site.world.clear()
    assert site.world.call(put) == "there"


def test_spot_prices_change_when_a_test_sets_them(site: Site) -> None:
    def newest() -> float:
        query = [
            {"Name": "instance-type", "Values": ["g6.xlarge"]},
            {"Name": "availability-zone", "Values": ["us-east-1a"]},
        ]
        rows = boto3.client("ec2").describe_spot_price_history(Filters=query)["SpotPriceHistory"]
        rows = [row for row in rows if row["AvailabilityZone"] == "us-east-1a"]
        return float(max(rows, key=lambda row: row["Timestamp"])["SpotPrice"])

    before = site.world.call(newest)
    assert site.world.price("aws/us-east-1", 2) > 0
    assert site.world.call(newest) == pytest.approx(2 * before, abs=0.0002)


# --- the network -------------------------------------------------------------------------------------


def test_only_a_security_group_allows_access_and_a_removed_rule_ends_it(site: Site, group: str) -> None:
    one, other = (site.aws(groups=[group]) for _ in range(2))
    site.listens(other, 8000)
    assert not site.reaches(one, other.private, 8000)
    inside = {"IpProtocol": "tcp", "FromPort": 8000, "ToPort": 8000, "UserIdGroupPairs": [{"GroupId": group}]}
    call = "authorize_security_group_ingress"
    site.world.call(lambda: getattr(boto3.client("ec2"), call)(GroupId=group, IpPermissions=[inside])["Return"])
    wait_for(lambda: site.reaches(one, other.private, 8000))
    assert not site.reaches(
        one, other.public, 8000
    )  # a connection over the public address does not count as a member of the group
    call = "revoke_security_group_ingress"
    site.world.call(lambda: str(getattr(boto3.client("ec2"), call)(GroupId=group, IpPermissions=[inside])))
    wait_for(lambda: not site.reaches(one, other.private, 8000))
    for instance in (one, other):
        site.end(instance)


def test_a_firewall_rule_applies_to_instances_with_its_tag(site: Site, on_gcp: HostInstance) -> None:
    tagged = site.gcp("test-tagged", zone="us-east4-b", tags={"items": ["open"]})
    site.listens(tagged, 9000)
    site.listens(on_gcp, 9000)
    rule = {
        "name": "test-open",
        "network": "global/networks/default",
        "allowed": [{"I_p_protocol": "tcp", "ports": ["9000"]}],
        "source_ranges": [f"{addresses.CLIENT}/32"],
        "target_tags": ["open"],
    }

    def from_client(address: str) -> bool:
        tried = site.world.run(["curl", "-s", "-m", "1", f"http://{address}:9000/"], check=False)
        return tried.returncode == 0

    assert not from_client(tagged.public)
    insert = compute_v1.FirewallsClient
    site.world.call(
        lambda: insert().insert(project=addresses.PROJECT, firewall_resource=rule).result()  # type: ignore[arg-type]
    )
    wait_for(lambda: from_client(tagged.public))
    assert not from_client(on_gcp.public)
    assert site.reaches(on_gcp, tagged.private, 9000)  # one network, two regions
    site.world.call(lambda: insert().delete(project=addresses.PROJECT, firewall="test-open").result())
    wait_for(lambda: not from_client(tagged.public))
    site.end(tagged)


def test_private_addresses_are_unreachable_from_other_clouds_and_regions(
    site: Site, on_aws: HostInstance, on_gcp: HostInstance
) -> None:
    west = site.aws("us-west-2")
    for instance in (on_aws, on_gcp, west):
        site.listens(instance, 22222)
    assert not site.reaches(on_aws, on_gcp.private, 22)
    assert not site.reaches(on_aws, west.private, 22222)
    tried = site.world.run(["curl", "-s", "-m", "1", f"telnet://{on_gcp.private}:22"], check=False)
    assert "SSH" not in tried.stdout
    # Google's default network allows SSH from everywhere, so the public address is reachable.
    banner = site.on(on_aws.id, f"curl -s -m 2 telnet://{on_gcp.public}:22 < /dev/null | head -c 7", check=False)
    assert banner == "SSH-2.0"
    site.end(west)


def test_a_connection_begun_before_the_instance_exists_reaches_it(site: Site, on_gcp: HostInstance) -> None:
    probe = site.gcp("test-probe")
    site.end(probe)
    coming = str(IPv4Address(probe.public) + 1)
    # Like a real instance, a host answers before its sshd listens. A connection in between is refused and retried.
    patience = ("-o", "ConnectTimeout=60", "-o", "ConnectionAttempts=20")
    login: list[str | Path] = ["ssh", "-i", site.key, *SSH[:4], "-q", *patience]
    early = site.world.start([*login, f"gcpuser@{coming}", "echo in"], stdout=subprocess.PIPE)
    time.sleep(0.5)
    instance = site.gcp("test-early")
    try:
        assert instance.public == coming
        assert early.communicate(timeout=90)[0] == "in\n"
    finally:
        site.end(instance)


def test_the_address_service_returns_the_callers_public_address(site: Site, on_aws: HostInstance) -> None:
    call = ["curl", "-s", "https://checkip.amazonaws.com"]
    assert site.world.run(call).stdout.strip() == addresses.CLIENT
    assert site.ssh(on_aws, " ".join(call)).stdout.strip() == on_aws.public


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "zone", "market", "refused"),
    [
        ("aws/us-east-1/us-east-1a", "us-east-1a", "", True),
        ("aws/us-east-1/us-east-1a", "us-east-1b", "", False),
        ("aws/us-east-1", "us-east-1b", "spot", False),
        ("aws", "us-east-1b", "", True),
        ("", "us-east-1b", "", True),
        ("gcp", "us-east-1b", "", False),
    ],
)
def test_capacity_is_unavailable_where_a_test_removes_it(
    site: Site, where: str, zone: str, market: str, refused: bool
) -> None:
    site.world.fault("capacity", where, market=market)

    def launch() -> str:
        ec2 = boto3.client("ec2", config=ONCE)
        try:
            made = ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1, Placement={"AvailabilityZone": zone})
        except ClientError as error:
            return str(error.response["Error"]["Code"])
        ec2.terminate_instances(InstanceIds=[made["Instances"][0]["InstanceId"]])
        return "launched"

    assert site.world.call(launch) == ("InsufficientInstanceCapacity" if refused else "launched")


@pytest.mark.parametrize("code", ["ZONE_RESOURCE_POOL_EXHAUSTED", "QUOTA_EXCEEDED"])
def test_compute_engine_reports_a_refusal_in_the_operation(site: Site, code: str) -> None:
    site.world.fault("capacity", "gcp/us-central1", code=code, times=1)
    with pytest.raises(RuntimeError, match=code):
        site.world.call(lambda: site._insert("test-refused", "us-central1-b").result())
    assert not [one for one in site.world.inventory() if one["id"] == "test-refused"]


@pytest.mark.parametrize("quota", [0, 1])
def test_a_quota_refuses_what_exceeds_it_and_reports_its_size(site: Site, group: str, quota: int) -> None:
    """EC2 does not report how many spot instances it allows."""
    site.world.quota("aws", "L-3819A6DF", quota)
    site.world.quota("gcp/us-east4", "PREEMPTIBLE_CPUS", quota)
    try:
        spot = {"MarketType": "spot"}
        with pytest.raises(RuntimeError, match="MaxSpotInstanceCountExceeded"):
            site.aws(groups=[group], InstanceType="g6.xlarge", InstanceMarketOptions=spot)
        site.end(site.aws(groups=[group], InstanceType="g6.xlarge"))
        site.world.quota("aws", "L-DB2E81BA", quota)
        with pytest.raises(RuntimeError, match=f"VcpuLimitExceeded.*current vCPU limit of {quota} allows"):
            site.aws(groups=[group], InstanceType="g6.xlarge")
        scheduling = {"provisioning_model": "SPOT"}
        with pytest.raises(RuntimeError, match=f"Quota 'PREEMPTIBLE_CPUS' exceeded.  Limit: {quota}.0 in region us-e"):
            site.gcp("test-quota", zone="us-east4-a", scheduling=scheduling)
    finally:
        for code in ("L-3819A6DF", "L-DB2E81BA"):
            site.world.quota("aws", code, 256)
        site.world.quota("gcp/us-east4", "PREEMPTIBLE_CPUS", 256)


def test_a_spot_instance_under_notice_still_counts_against_its_quota(site: Site) -> None:
    site.world.quota("gcp/us-east4", "PREEMPTIBLE_CPUS", 3)
    scheduling = {"provisioning_model": "SPOT", "instance_termination_action": "DELETE"}
    first = site.gcp("test-leaving", zone="us-east4-a", scheduling=scheduling)
    try:
        site.world.reclaim(first.id, seconds=3, notice=True)
        with pytest.raises(RuntimeError, match=r"Limit: 3\.0"):
            site.gcp("test-next", zone="us-east4-a", scheduling=scheduling)
        wait_for(lambda: first.id not in site.world.hosts())
        site.end(site.gcp("test-next", zone="us-east4-a", scheduling=scheduling))
    finally:
        site.world.quota("gcp/us-east4", "PREEMPTIBLE_CPUS", 256)


def test_googles_prices_come_from_its_own_catalog_and_advisor(site: Site) -> None:
    def query() -> tuple[dict[str, str], set[str]]:
        sources = (GcpCatalog, GcpAdvice)
        wanted = [instance_type_of("gcp", "g2-standard-4")]
        catalog, advice = (
            source([one for one in wanted if one], environ=os.environ, regions=["us-central1"]).fetch(now_ms())
            for source in sources
        )
        return {str(row.market): row.price for row in catalog.prices}, {row.zone for row in advice.prices}

    prices, zones = site.world.call(query)
    assert {market: float(price) for market, price in prices.items()} == pytest.approx(
        {"on_demand": 0.706824, "spot": 0.282736}
    )
    assert zones == set(addresses.region("gcp", "us-central1").zones)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("down", "Unavailable"), ("throttled", "RequestLimitExceeded"), ("unreachable", "unreachable")],
)
def test_an_api_can_be_down_or_throttled(site: Site, kind: str, expected: str) -> None:
    def call() -> str:
        try:
            boto3.client("ec2", config=ONCE).describe_instances()
        except ClientError as error:
            return str(error.response["Error"]["Code"])
        except (EndpointConnectionError, HTTPClientError):
            return "unreachable"
        return "answered"

    site.world.fault(kind, "aws", times=1)
    assert site.world.call(call) == expected
    assert site.world.call(call) == "answered"


@pytest.mark.parametrize(("kind", "expected"), [("down", "ServiceUnavailable"), ("throttled", "TooManyRequests")])
def test_googles_api_can_be_down_or_throttled(site: Site, kind: str, expected: str) -> None:
    site.world.fault(kind, "gcp/us-central1")
    with pytest.raises(RuntimeError, match=expected):
        site.world.call(lambda: instance_of("any", retry=None))
    with pytest.raises(RuntimeError, match="NotFound"):
        site.world.call(lambda: instance_of("any", zone="us-east4-a", retry=None))


def test_a_fault_of_one_run_spares_the_instances_of_others(site: Site, group: str) -> None:
    def tagged(run: str) -> dict[str, Any]:
        tags = [{"Key": "spotrl-run", "Value": run}]
        return {"groups": [group], "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}]}

    made = {
        "mine": [site.aws(**tagged("mine")), site.gcp("test-mine", labels={"spotrl-run": "mine"})],
        "other": [site.aws(**tagged("other")), site.gcp("test-other", labels={"spotrl-run": "other"})],
    }
    for cloud, permission in (("aws", "ec2:TerminateInstances"), ("gcp", "compute.instances.delete")):
        site.world.fault("denied", cloud, run="mine", code=permission)
    for instance in made["mine"]:
        with pytest.raises(RuntimeError, match=r"UnauthorizedOperation|compute\.instances\.delete"):
            site.end(instance)
    for instance in made["other"]:
        site.end(instance)
    site.world.clear(run="mine")
    for instance in made["mine"]:
        site.end(instance)


def test_one_call_in_so_many_can_fail(site: Site) -> None:
    def call() -> int:
        ec2, failed = boto3.client("ec2", config=ONCE), 0
        for _ in range(50):
            try:
                ec2.describe_vpcs()
            except ClientError:
                failed += 1
        return failed

    site.world.fault("down", "aws", every=5)
    assert 3 <= site.world.call(call) <= 20


def test_expired_keys_are_refused_by_every_service_of_aws_and_by_no_instance(site: Site) -> None:
    def call(**key: str) -> list[str]:
        session, codes = boto3.Session(**key), []
        for service, method in (("ec2", "describe_vpcs"), ("sts", "get_caller_identity"), ("s3", "list_buckets")):
            try:
                getattr(session.client(service, region_name="us-east-1", config=ONCE), method)()
                codes.append("answered")
            except ClientError as error:
                codes.append(str(error.response["Error"]["Code"]))
        return codes

    of_instance = {"aws_access_key_id": "ASIAFAKETEST", "aws_secret_access_key": "x", "aws_session_token": "y"}
    site.world.fault("expired", "aws")
    assert site.world.call(call) == ["RequestExpired", "ExpiredToken", "ExpiredToken"]
    assert site.world.call(lambda: call(**of_instance)) == ["answered"] * 3
    site.world.clear()
    assert site.world.call(call) == ["answered"] * 3


def test_a_revoked_login_is_refused_by_google_and_no_instance(site: Site, on_gcp: HostInstance) -> None:
    api = f"https://compute.googleapis.com/compute/v1/projects/{addresses.PROJECT}/zones"
    ask = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", api, "-H"]
    store = "https://storage.googleapis.com/storage/v1/b/spotrl-runs/o"
    site.world.fault("expired", "gcp")
    with pytest.raises(RuntimeError, match=r"Unauthorized.*invalid authentication credentials"):
        site.world.call(lambda: instance_of("any", retry=None))
    assert "invalid_grant" in site.world.run(["curl", "-s", "-d", "", "https://oauth2.googleapis.com/token"]).stdout
    assert site.world.run([*ask, "Authorization: Bearer fake-token"]).stdout == "401"
    assert site.world.run([*ask[:6], store, "-H", "Authorization: Bearer fake-token"], check=False).stdout == "401"
    assert site.on(on_gcp.id, f"curl -s {api} -H 'Authorization: Bearer fake-token-of-it' | grep -c us-east4-a")


def test_a_forbidden_region_says_that_a_policy_forbids_it(site: Site) -> None:
    site.world.fault("forbidden", "aws/us-west-2")
    site.world.fault("forbidden", "gcp/us-central1")
    with pytest.raises(RuntimeError, match=r"UnauthorizedOperation.*explicit deny in a service control policy"):
        site.aws("us-west-2")
    site.world.call(lambda: boto3.client("ec2", region_name="us-west-2", config=ONCE).describe_regions())
    with pytest.raises(RuntimeError, match=r"conditionNotMet|violates constraint constraints/gcp\.resourceLocations"):
        site.world.call(lambda: site._insert("test-forbidden", "us-central1-a").result())
    site.end(site.aws())


def test_an_end_can_fail_and_the_bill_ends_with_the_instance(site: Site) -> None:
    made = {"aws": site.aws(), "gcp": site.gcp("test-unending")}
    site.world.fault("ends_fail")
    for instance in made.values():
        with pytest.raises(RuntimeError, match=r"InternalError|INTERNAL_ERROR|Internal error"):
            site.end(instance)
        assert instance.id in site.world.hosts()
    site.world.clear()
    for instance in made.values():
        site.end(instance)
    bill = {one["id"]: one for one in site.world.machines()}
    for instance in made.values():
        assert bill[instance.id]["launched_ms"] <= bill[instance.id]["ended_ms"] <= time.time() * 1000
    told = described_instance("us-east-1", site.world.call(lambda: described(made["aws"].id)))
    assert (told.launched_ms, told.ended_ms) == tuple(
        bill[made["aws"].id][name] for name in ("launched_ms", "ended_ms")
    )
    site.world.call(lambda: boto3.client("ec2").terminate_instances(InstanceIds=[made["aws"].id]))
    assert {one["id"]: one for one in site.world.machines()}[made["aws"].id] == bill[made["aws"].id], "it ended once"


def test_a_client_that_moves_loses_its_connections_and_its_rules(site: Site, on_aws: HostInstance) -> None:
    login: list[str | Path] = ["ssh", "-i", site.key, *SSH, f"ubuntu@{on_aws.public}", "echo in; sleep 2; echo out"]
    session = site.world.start(login, stdout=subprocess.PIPE)
    assert session.stdout is not None
    assert session.stdout.readline() == "in\n"
    site.world.move("192.0.2.9")
    call = ["curl", "-s", "https://checkip.amazonaws.com"]
    try:
        wait_for(lambda: site.world.run(call).stdout.strip() == "192.0.2.9")
        time.sleep(3)
        assert session.poll() is None  # no answer reaches it
        assert site.ssh(on_aws, "true", check=False).returncode == 255, "the group allows the old address"
    finally:
        session.kill()
        site.world.move(addresses.CLIENT)
    wait_for(lambda: site.world.run(call).stdout.strip() == addresses.CLIENT)
    assert site.ssh(on_aws, "echo in").stdout == "in\n"


def test_an_instance_can_be_created_with_a_lost_reply(site: Site) -> None:
    site.world.fault("lost_reply", times=1)
    before = set(site.world.hosts())

    def launch() -> None:
        boto3.client("ec2", config=ONCE).run_instances(ImageId=AMI, MinCount=1, MaxCount=1)

    with pytest.raises(RuntimeError, match="Connection"):
        site.world.call(launch)
    wait_for(lambda: len(set(site.world.hosts()) - before) == 1)
    (made,) = set(site.world.hosts()) - before
    site.end(HostInstance(id=made, public="", private="", user=""))


def test_an_instance_can_be_created_and_never_come_up(site: Site) -> None:
    site.world.fault("no_boot", "aws", times=1)

    def launch() -> str:
        made = boto3.client("ec2").run_instances(ImageId=AMI, MinCount=1, MaxCount=1)
        return str(made["Instances"][0]["InstanceId"])

    instance = site.world.call(launch)
    time.sleep(0.5)
    assert instance not in site.world.hosts()
    assert site.world.call(lambda: described(instance))["State"]["Name"] == "running"
    site.end(HostInstance(id=instance, public="", private="", user=""))


def test_an_instance_preempted_without_notice_closes_no_connection(site: Site, group: str) -> None:
    instance = site.aws(groups=[group], InstanceMarketOptions={"MarketType": "spot"})
    login: list[str | Path] = ["ssh", "-i", site.key, *SSH, f"ubuntu@{instance.public}", "echo in; sleep 60"]
    session = site.world.start(login, stdout=subprocess.PIPE)
    assert session.stdout is not None
    assert session.stdout.readline() == "in\n"
    site.world.reclaim(instance.id)
    wait_for(lambda: instance.id not in site.world.hosts(), 2)
    time.sleep(1)
    assert session.poll() is None  # no socket is closed
    session.kill()
    session.wait()


def test_a_frozen_host_does_nothing_while_its_cloud_reports_it_running(site: Site, on_aws: HostInstance) -> None:
    site.on(on_aws.id, "(setsid sh -c 'while sleep 0.1; do date +%s.%N > /tmp/beat; done' >/dev/null 2>&1 &)")
    wait_for(lambda: site.on(on_aws.id, "grep -c . /tmp/beat", check=False).strip() == "1")
    site.world.freeze(on_aws.id)
    time.sleep(0.3)
    seen = site.on(on_aws.id, "cat /tmp/beat")
    time.sleep(0.5)
    assert site.on(on_aws.id, "cat /tmp/beat") == seen
    assert site.world.call(lambda: described(on_aws.id))["State"]["Name"] == "running"
    site.world.thaw(on_aws.id)
    wait_for(lambda: site.on(on_aws.id, "cat /tmp/beat") != seen)


# --- cleanup -----------------------------------------------------------------------------------------


def test_a_stopped_world_leaves_nothing_and_disturbs_no_other(site: Site) -> None:
    before = set(site.world.hosts())
    with World(cache=site.world.cache).up() as other:
        other.start(["sleep", "600"])
        made = Site(other, site.key).aws()
        Site(other, site.key).listens(made, 8000)
        assert other.leftovers()["processes"] > 1
        folder, spaces = other.folder, other._facts()["namespaces"]
    assert other.leftovers() == {"processes": 0, "namespaces": 0, "mounts": 0}
    assert not folder.exists()
    assert not any(_space(pid, "net") == spaces["net"] for pid in _pids())
    assert set(site.world.hosts()) == before


def test_a_process_begun_after_a_host_ended_is_not_counted_as_its_own(site: Site) -> None:
    """The kernel reuses a namespace's number as soon as it is free."""
    site.end(site.gcp("ended"))
    (pid,) = {json.loads(line)["pid"] for line in (site.world.folder / "namespaces").read_text().splitlines()[-1:]}
    before = site.world.leftovers()
    making = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "sleep", "60"]
    others = [subprocess.Popen(making) for _ in range(20)]
    try:
        wait_for(lambda: all(Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text() for other in others))
        assert not any(_space(int(child), "pid") == pid for child in _pids())
        # A process of the ended host may still have been ending before.
        assert site.world.leftovers()["processes"] <= before["processes"]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_world_ends_when_its_owner_is_killed(site: Site, tmp_path: Path) -> None:
    place = tmp_path / "w"
    script = f"""
import time
from pathlib import Path
from tests.fakes.clouds.world import World
world = World(Path({str(place)!r}), Path({str(site.world.cache)!r})).up()
world.start(["sleep", "600"])
print("up", flush=True)
time.sleep(99)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    spaces = World.at(place)._facts()["namespaces"]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    for kind in ("pid", "net"):
        wait_for(lambda kind=kind: not any(_space(pid, kind) == spaces[kind] for pid in _pids()))  # type: ignore[misc]


def test_every_host_of_these_tests_is_accounted_for(site: Site, on_aws: HostInstance, on_gcp: HostInstance) -> None:
    assert set(site.world.hosts()) == {on_aws.id, on_gcp.id}


# --- helpers -----------------------------------------------------------------------------------------


def imds(site: Site, instance: HostInstance, path: str, more: str = "") -> str:
    token = f"$(curl -s -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' {IMDS}/api/token)"
    return site.on(instance.id, f'curl -s {more} -H "X-aws-ec2-metadata-token: {token}" {IMDS}/{path}')


def described(instance: str) -> dict[str, Any]:
    return dict(boto3.client("ec2").describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0])


def maintain() -> None:
    compute_v1.InstancesClient().simulate_maintenance_event(
        project=addresses.PROJECT, zone="us-central1-a", instance="test-maintained"
    )


def remove_fis_role() -> None:
    iam = boto3.client("iam")
    with suppress(iam.exceptions.NoSuchEntityException):
        iam.delete_role_policy(RoleName=FIS_ROLE, PolicyName="interrupt")
        iam.delete_role(RoleName=FIS_ROLE)


def make_fis_role() -> None:
    iam = boto3.client("iam")
    iam.create_role(RoleName=FIS_ROLE, AssumeRolePolicyDocument=json.dumps(fis_trust()))
    iam.put_role_policy(RoleName=FIS_ROLE, PolicyName="interrupt", PolicyDocument=json.dumps(fis_role_policy()))


def ordered(instance_id: str) -> tuple[str, str]:
    """Order an interruption with spotrl's own calls. Return its state."""
    preempter = AwsPreempter()
    found = described(instance_id)
    state = preempter.state(preempter.preempt(described_instance("us-east-1", found)))
    return state.progress.value, state.text


def instance_of(name: str, zone: str = "us-central1-a", **more: Any) -> Any:
    return compute_v1.InstancesClient().get(project=addresses.PROJECT, zone=zone, instance=name, **more)


def preemptions() -> list[str]:
    request = compute_v1.ListZoneOperationsRequest(
        project=addresses.PROJECT, zone="us-central1-a", filter='operationType = "compute.instances.preempted"'
    )
    return [str(one.target_id) for one in compute_v1.ZoneOperationsClient().list(request=request)]


def now_ms() -> int:
    return int(time.time() * 1000)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _space(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""
