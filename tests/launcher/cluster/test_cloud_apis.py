"""The cloud APIs: find by label, read why an instance ended, create a run's resources and delete all of them.

AWS is moto in this process; Google Cloud is our own fake (tests/fakes/clouds), over HTTP on loopback.
"""

import json
import re
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import boto3
import pytest
from moto import mock_aws

from engine.events import Market
from launcher.clouds.aws import AwsApi, owner_of
from launcher.clouds.aws_named import look_at_profile
from launcher.clouds.aws_role import node_policy
from launcher.clouds.base import CloudRefused, CloudUnreachable, InstanceState, Look
from launcher.clouds.build import build_cloud_api
from launcher.clouds.gce import GceApi
from launcher.clouds.gce_identity import NodeIdentity, node_conditions
from launcher.clouds.gce_named import GoogleNames
from launcher.clouds.gce_services import COMPUTE, Answer
from launcher.clouds.labels import run_name, slug
from launcher.job.company import Named
from launcher.job.schema import Job
from tests.fakes.clouds.addresses import PROJECT, Pool
from tests.fakes.clouds.faults import Faults
from tests.fakes.clouds.gce import Gce, LostReply, Refused

FROM = "203.0.113.7/32"


# --- names ----------------------------------------------------------------------------------------------


def test_resource_names_fit_every_cloud():
    assert slug("Alice.Smith@Example.com") == "alice-smith-example-com"
    assert run_name("ocr-1") == "spotrl-ocr-1"
    long = [run_name(f"a-run-with-quite-a-long-name-{n}", limit=30) for n in range(3)]
    assert [len(name) for name in long] == [30, 30, 30]
    assert len(set(long)) == 3


def test_a_cloud_is_built_by_its_name():
    assert (build_cloud_api("aws").cloud, build_cloud_api("gcp", {}).cloud) == ("aws", "gcp")
    with pytest.raises(ValueError, match="there are aws and gcp"):
        build_cloud_api("azure")


# --- AWS ------------------------------------------------------------------------------------------------

REGION = "us-east-1"


@pytest.fixture
def aws(monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": REGION,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        yield AwsApi()


def buy(node="run-rollout-0-g0", run="run", owner="me", region=REGION):
    """Launch an instance like SkyPilot, with tags on the instance and on its volume."""
    tags = [
        {"Key": f"spotrl-{key}", "Value": value} for key, value in {"run": run, "node": node, "owner": owner}.items()
    ]
    ec2 = boto3.client("ec2", region_name=region)
    made = ec2.run_instances(
        ImageId="ami-12c6146b",  # a fixed image of moto, because listing all takes a second
        InstanceType="m6i.large",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
    )
    return made["Instances"][0]["InstanceId"]


def test_aws_instances_are_found_by_label_in_their_region(aws):
    ours, _, _ = buy(), buy(run="other"), buy(region="us-west-2")
    (instance,) = aws.instances(REGION, run="run")
    assert (instance.id, instance.name, instance.run, instance.owner) == (ours, "run-rollout-0-g0", "run", "me")
    assert (instance.state, instance.market) == (InstanceState.RUNNING, Market.ON_DEMAND)
    assert instance.address
    assert abs(instance.launched_ms - time.time() * 1000) < 60_000
    assert len(aws.instances(REGION)) == 2
    assert aws.instances(REGION, owner="somebody-else") == []


def test_aws_terminates_instances_and_reports_why_they_ended(aws):
    buy()
    aws.end(aws.instances(REGION, run="run"))
    (instance,) = aws.instances(REGION, run="run")
    assert instance.state in (InstanceState.STOPPING, InstanceState.GONE)
    assert "User initiated" in instance.reason
    assert not instance.reclaimed
    aws.end([instance])  # a second call is no error
    assert aws.end_of(instance).reason


def test_aws_reports_the_preemption_of_a_spot_instance(aws, monkeypatch):
    buy()
    described = boto3.client("ec2", region_name=REGION).describe_instances()
    described["Reservations"][0]["Instances"][0] |= {
        "State": {"Code": 48, "Name": "terminated"},
        "InstanceLifecycle": "spot",
        "StateReason": {"Code": "Server.SpotInstanceTermination", "Message": "Spot instance termination"},
        "StateTransitionReason": "Service initiated (2026-03-04 05:06:07 GMT)",
    }

    class Client:
        def describe_instances(self, InstanceIds):
            return described

    (instance,) = aws.instances(REGION, run="run")
    end = AwsApi(client=lambda service, region: Client()).end_of(instance)
    assert (end.state, end.reclaimed, end.market) == (InstanceState.GONE, True, Market.SPOT)
    assert end.reason.startswith("Server.SpotInstanceTermination")
    assert end.ended_ms == 1772600767000


def test_aws_creates_one_group_and_one_role_for_a_run_and_deletes_them(aws):
    place = aws.prepare(REGION, run="run", owner="me", ssh_from=FROM, buckets=["s3://bucket/runs/run"])
    again = aws.prepare(REGION, run="run", owner="me", ssh_from=FROM, buckets=["s3://bucket/runs/run"])
    assert place == again
    assert (place.group, place.identity) == ("spotrl-run", "spotrl-run")
    assert aws.open_rules(place) == []
    policy = boto3.client("iam").get_role_policy(RoleName="spotrl-run", PolicyName="node")["PolicyDocument"]
    ends = next(one for one in policy["Statement"] if "ec2:TerminateInstances" in one["Action"])
    assert ends["Condition"] == {"StringEquals": {"ec2:ResourceTag/spotrl-run": "run"}}
    kinds = {(one.kind, one.id if one.kind == "role" else "") for one in everything(aws, REGION, run="run")}
    assert kinds == {("group", ""), ("role", "spotrl-run")}
    assert aws.remove(everything(aws, REGION, run="run")) == []
    assert everything(aws, REGION, run="run") == []
    assert everything(aws, REGION, run="run", owner="me") == []


def test_aws_does_not_touch_another_owners_run_of_the_same_name(aws):
    aws.prepare(REGION, run="run", owner="you", ssh_from=FROM, buckets=["s3://yours/run"])
    before = boto3.client("iam").get_role_policy(RoleName="spotrl-run", PolicyName="node")["PolicyDocument"]
    with pytest.raises(CloudRefused, match="role spotrl-run is there already and belongs to you"):
        aws.prepare(REGION, run="run", owner="me", ssh_from="198.51.100.1/32", buckets=["s3://mine/run"])
    assert boto3.client("iam").get_role_policy(RoleName="spotrl-run", PolicyName="node")["PolicyDocument"] == before
    aws.remove([one for one in everything(aws, REGION, run="run") if one.kind == "role"])
    with pytest.raises(CloudRefused, match="security group spotrl-run in us-east-1 is there already"):
        aws.prepare(REGION, run="run", owner="me", ssh_from="198.51.100.1/32", buckets=[])
    (group,) = boto3.client("ec2").describe_security_groups(GroupNames=["spotrl-run"])["SecurityGroups"]
    assert FROM in str(group)
    assert "198.51.100.1" not in str(group)


def test_aws_allows_ssh_from_the_controllers_current_address(aws):
    aws.prepare(REGION, run="run", owner="me", ssh_from="198.51.100.1/32", buckets=[])
    place = aws.prepare(REGION, run="run", owner="me", ssh_from=FROM, buckets=[])
    (group,) = boto3.client("ec2").describe_security_groups(GroupNames=["spotrl-run"])["SecurityGroups"]
    ssh = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
    assert [one["CidrIp"] for rule in ssh for one in rule["IpRanges"]] == [FROM]
    assert aws.open_rules(place) == []


def test_aws_names_the_missing_firewall_rule(aws):
    place = aws.prepare(REGION, run="run", owner="me", ssh_from=FROM, buckets=[])
    ec2 = boto3.client("ec2")
    (group,) = ec2.describe_security_groups(GroupNames=["spotrl-run"])["SecurityGroups"]
    inside = next(rule for rule in group["IpPermissions"] if rule["IpProtocol"] == "-1")
    ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[inside])
    assert aws.open_rules(place) == ["security group spotrl-run (us-east-1) lacks the rule: all traffic from itself"]
    ec2.delete_security_group(GroupId=group["GroupId"])
    assert "is not there" in aws.open_rules(place)[0]


def test_aws_disks_are_found_by_label_and_deleted(aws):
    buy()
    (disk,) = [one for one in everything(aws, REGION, run="run") if one.kind == "disk"]
    assert (disk.node, disk.size_gib) == ("run-rollout-0-g0", 8)
    assert aws.remove([disk]) == [disk]  # its instance still uses it
    aws.end(aws.instances(REGION, run="run"))
    assert aws.remove([disk]) == []


def test_aws_caller_fits_in_a_label(aws):
    assert aws.caller().account == "123456789012"
    assert aws.caller().owner == slug(aws.caller().owner)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("RequestLimitExceeded", 503, CloudUnreachable),
        ("InternalError", 500, CloudUnreachable),
        ("UnauthorizedOperation", 403, CloudRefused),
        ("AuthFailure", 401, CloudRefused),
    ],
)
def test_an_unreachable_aws_is_not_a_refusal(code, status, kind):
    from botocore.exceptions import ClientError

    class Client:
        def get_caller_identity(self):
            raise ClientError(
                {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetCallerIdentity"
            )

    with pytest.raises(kind, match=code):
        AwsApi(client=lambda service, region: Client()).caller()


def test_an_aws_node_can_access_only_its_own_prefix():
    policy = node_policy("run", ["s3://bucket/runs/run", "gs://elsewhere/x"])
    resources = [one["Resource"] for one in policy["Statement"] if one["Sid"].startswith(("Keep", "List"))]
    assert resources == ["arn:aws:s3:::bucket/runs/run/*", "arn:aws:s3:::bucket"]


def test_a_node_may_read_its_model_but_not_change_it():
    models = ["s3://bucket/runs/weights/w1", "gs://bucket/runs/weights/w1"]
    aws_may = [one for one in node_policy("run", [], models)["Statement"] if "weights" in str(one["Resource"])]
    assert [(one["Action"], one["Resource"]) for one in aws_may] == [
        (["s3:GetObject"], "arn:aws:s3:::bucket/runs/weights/w1/*")
    ]
    assert node_conditions("run", "projects/p/roles/spotrlNode", [], models)["read-0"] == (
        "roles/storage.objectViewer",
        'resource.name.startsWith("projects/_/buckets/bucket/objects/runs/weights/w1/")',
    )


# --- AWS resources that a job names ---------------------------------------------------------------------


class Company:
    """An account with a VPC, two public subnets, a private one, a group and a profile made by its administrator."""

    def __init__(self):
        self.ec2, self.iam = boto3.client("ec2", region_name=REGION), boto3.client("iam")
        self.vpc = self.ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
        self.subnets = [
            self.ec2.create_subnet(VpcId=self.vpc, CidrBlock=f"10.7.{n}.0/24")["Subnet"]["SubnetId"] for n in range(2)
        ]
        self.tag(self.vpc, "company-vpc")
        for number, subnet in enumerate(self.subnets):
            self.tag(subnet, f"company-subnet-{number}")
        self.private = self.ec2.create_subnet(VpcId=self.vpc, CidrBlock="10.7.2.0/24")["Subnet"]["SubnetId"]
        self.tag(self.private, "company-private")
        self.gateway = self.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        self.ec2.attach_internet_gateway(InternetGatewayId=self.gateway, VpcId=self.vpc)
        of_vpc = [{"Name": "vpc-id", "Values": [self.vpc]}]
        (main,) = self.ec2.describe_route_tables(Filters=of_vpc)["RouteTables"]
        self.lead_out(main["RouteTableId"])
        self.table = self.ec2.create_route_table(VpcId=self.vpc)["RouteTable"]["RouteTableId"]
        self.ec2.associate_route_table(RouteTableId=self.table, SubnetId=self.private)
        self.group = self.ec2.create_security_group(GroupName="nodes", Description="x", VpcId=self.vpc)["GroupId"]
        self.inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": self.group}]}
        self.ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.0/24"}]}
        self.ec2.authorize_security_group_ingress(GroupId=self.group, IpPermissions=[self.inside, self.ssh])
        self.iam.create_instance_profile(InstanceProfileName="node-profile")
        self.iam.create_role(RoleName="node-role", AssumeRolePolicyDocument="{}")
        self.iam.add_role_to_instance_profile(InstanceProfileName="node-profile", RoleName="node-role")

    def lead_out(self, table):
        self.ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=self.gateway)

    def tag(self, resource, name):
        self.ec2.create_tags(Resources=[resource], Tags=[{"Key": "Name", "Value": name}])

    def named(self, **more):
        return replace(
            Named(identity="node-profile", network=self.vpc, group="nodes", subnets=(self.subnets[0],)), **more
        )

    def everything(self):
        groups = self.ec2.describe_security_groups()["SecurityGroups"]
        roles = [one["RoleName"] for one in self.iam.list_roles()["Roles"]]
        return json.dumps([groups, roles, self.ec2.describe_vpcs()["Vpcs"]], default=str)


@pytest.fixture
def company(aws):
    return Company()


def prepare_in(aws, named, ssh_from=FROM):
    return aws.prepare(REGION, run="run", owner="me", ssh_from=ssh_from, buckets=["s3://b/run"], named=named)


def test_resources_that_an_aws_job_names_are_used_and_not_deleted(aws, company):
    before = company.everything()
    place = prepare_in(aws, company.named())
    assert (place.identity, place.group, place.network, place.subnets) == (
        "node-profile", "nodes", "company-vpc", ("company-subnet-0",)
    )  # fmt: skip
    assert aws.open_rules(place) == []
    assert everything(aws, REGION, run="run") == []
    assert aws.remove(everything(aws, REGION)) == []
    assert company.everything() == before


def test_aws_resources_can_be_named_by_id_or_name(aws, company):
    by_name = company.named(network="company-vpc", group=company.group, subnets=("company-subnet-0",))
    assert replace(prepare_in(aws, by_name), named=company.named()) == prepare_in(aws, company.named())


def test_a_job_may_name_only_an_identity_or_only_a_network(aws, company):
    place = prepare_in(aws, Named(identity="node-profile"))
    assert (place.group, place.identity) == ("spotrl-run", "node-profile")
    assert [one.kind for one in everything(aws, REGION, run="run")] == ["group"]
    aws.remove(everything(aws, REGION, run="run"))
    place = prepare_in(aws, company.named(identity=""))
    assert (place.group, place.identity) == ("nodes", "spotrl-run")
    assert [one.kind for one in everything(aws, REGION, run="run")] == ["role"]


@pytest.mark.parametrize(
    ("change", "named", "words"),
    [
        ("", {"network": "vpc-9"}, r"no VPC vpc-9 in us-east-1; correct network.aws.us-east-1.vpc"),
        ("", {"group": "others"}, r"has no security group others; name one"),
        ("", {"subnets": ("subnet-9",)}, r"has no subnet subnet-9; name subnets of this VPC"),
        ("", {"identity": "nobody"}, r"no instance profile nobody; correct identity.aws"),
        ("no role", {}, r"node-profile has no role; `aws iam add-role-to-instance-profile"),
        ("no vpc name", {}, r"has no Name tag, and SkyPilot finds a VPC by it; `aws ec2 create-tags"),
        ("no subnet name", {}, r"has no Name tag, and SkyPilot finds a subnet by it"),
        ("same subnet names", {}, r"more than one subnet has the Name tag company-subnet-0"),
        (
            "no ssh",
            {},
            r"security group nodes \(us-east-1\) lacks the rule: tcp 22 \(SSH\) from 203.0.113.7/32; add it",
        ),
        ("no inside", {}, r"lacks the rule: all traffic from itself; add it"),
        ("no egress", {}, r"security group nodes lets nothing out"),
        ("ours", {}, r"was made by spotrl for a run, and goes with it"),
        ("public subnet", {"public_addresses": False}, r"gives public addresses; name a private one"),
        ("", {"public_addresses": False}, r"has a route to an internet gateway, so SkyPilot takes it for public; name"),
        (
            "",
            {"subnets": ("company-private",)},
            r"subnet company-private has no route to an internet gateway; name a public one, or set public_addr",
        ),
        (
            "all public",
            {"subnets": (), "public_addresses": False},
            r"every subnet of VPC vpc-\w+ has a route to an internet gateway",
        ),
    ],
)
def test_unusable_aws_resources_are_refused_before_anything_is_created(aws, company, change, named, words):
    match change:
        case "no role":
            company.iam.remove_role_from_instance_profile(InstanceProfileName="node-profile", RoleName="node-role")
        case "no vpc name":
            company.ec2.delete_tags(Resources=[company.vpc], Tags=[{"Key": "Name"}])
        case "no subnet name":
            company.ec2.delete_tags(Resources=[company.subnets[0]], Tags=[{"Key": "Name"}])
        case "same subnet names":
            company.tag(company.subnets[1], "company-subnet-0")
        case "no ssh":
            company.ec2.revoke_security_group_ingress(GroupId=company.group, IpPermissions=[company.ssh])
        case "no inside":
            company.ec2.revoke_security_group_ingress(GroupId=company.group, IpPermissions=[company.inside])
        case "no egress":
            out = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
            company.ec2.revoke_security_group_egress(GroupId=company.group, IpPermissions=[out])
        case "ours":
            company.ec2.create_tags(Resources=[company.group], Tags=[{"Key": "spotrl-run", "Value": "other"}])
        case "all public":
            company.lead_out(company.table)
        case "public subnet":
            company.ec2.modify_subnet_attribute(SubnetId=company.subnets[0], MapPublicIpOnLaunch={"Value": True})
    before = company.everything()
    with pytest.raises(CloudRefused, match=words):
        prepare_in(aws, company.named(**named))
    assert company.everything() == before


def test_an_unusable_network_leaves_no_role_behind(aws, company):
    before = company.everything()
    with pytest.raises(CloudRefused, match="no VPC vpc-9"):
        prepare_in(aws, company.named(identity="", network="vpc-9"))
    assert company.everything() == before


def test_ssh_through_a_proxy_may_come_from_any_address(aws, company):
    company.ec2.revoke_security_group_ingress(GroupId=company.group, IpPermissions=[company.ssh])
    from_bastion = {**company.ssh, "IpRanges": [{"CidrIp": "10.7.1.5/32"}]}
    company.ec2.authorize_security_group_ingress(GroupId=company.group, IpPermissions=[from_bastion])
    with pytest.raises(CloudRefused, match="tcp 22"):
        prepare_in(aws, company.named())
    assert prepare_in(aws, company.named(ssh_proxy="ssh -W %h:%p bastion")).ssh_from == ""
    place = prepare_in(aws, company.named(public_addresses=False, subnets=("company-private",)))
    company.ec2.revoke_security_group_ingress(GroupId=company.group, IpPermissions=[from_bastion])
    assert aws.open_rules(place) == []  # a bastion may be in the group, whose members can reach each other
    company.ec2.revoke_security_group_ingress(GroupId=company.group, IpPermissions=[company.inside])
    assert "tcp 22 (SSH) from where ssh_proxy, or this machine, connects" in aws.open_rules(place)[1]


def test_a_profile_that_may_not_be_read_is_reported_as_unsure(aws, company):
    from botocore.exceptions import ClientError

    class Iam:
        def get_instance_profile(self, InstanceProfileName):
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "GetInstanceProfile")

    finding = look_at_profile(Iam(), "node-profile")
    assert (finding.look, "allow iam:GetInstanceProfile" in finding.text) == (Look.UNSURE, True)


# --- Google Cloud ---------------------------------------------------------------------------------------

ZONE = "us-central1-a"


class GoogleServer:
    """Our fake Google Cloud behind one port; the path selects the service."""

    def __init__(self):
        self.gce = Gce(Faults(), Pool(), lambda *_: b"{}", lambda text: None)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self):
                url = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if url.path.startswith("/compute/"):
                    host = "compute.googleapis.com"
                elif "/serviceAccounts" in url.path or "/roles" in url.path:
                    host = "iam.googleapis.com"
                else:
                    host = "cloudresourcemanager.googleapis.com"
                try:
                    status, content = (
                        200,
                        server.gce.answer(host, self.command, url.path, dict(parse_qsl(url.query)), body),
                    )
                except Refused as refused:
                    reasons = [{"reason": refused.reason}]
                    status, content = refused.status, {"error": {"message": str(refused), "errors": reasons}}
                except LostReply:
                    self.connection.close()
                    return
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def google():
    server = GoogleServer()
    yield server
    server.close()


@pytest.fixture
def gcp(google):
    endpoints = ("COMPUTE", "IAM", "RESOURCE_MANAGER")
    return GceApi({f"SPOTRL_GCP_{name}_ENDPOINT": google.url for name in endpoints} | {"GOOGLE_CLOUD_PROJECT": PROJECT})


def everything(api, region, **whose):
    """Return the resources of a region, and those of no region."""
    return [*api.resources(region, **whose), *api.resources(api.home, **whose)]


def insert(gcp, node="run-rollout-0-g0", run="run", zone=ZONE, spot=True, owner="me", more=None):
    labels = {"spotrl-run": run, "spotrl-node": node, "spotrl-owner": owner}
    scheduling = {"provisioningModel": "SPOT", "preemptible": True, "instanceTerminationAction": "DELETE"}
    body = {
        "name": f"{node}-head",
        "machineType": f"zones/{zone}/machineTypes/n2-standard-2",
        "labels": labels,
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"labels": labels, "diskSizeGb": 100}}],
        "scheduling": (scheduling if spot else {}) | (more or {}),
        "networkInterfaces": [{"network": "default", "accessConfigs": [{}]}],
        "serviceAccounts": [{"email": "spotrl-run@p.iam.gserviceaccount.com", "scopes": []}],
    }
    gcp.calls.finish(gcp.calls.ask("POST", COMPUTE, f"/zones/{zone}/instances", body))


def test_gcp_instances_are_found_by_label_in_their_region(gcp):
    insert(gcp)
    insert(gcp, node="other-rollout-0-g0", run="other", spot=False)
    insert(gcp, node="run-rollout-1-g0", zone="us-east4-b")
    (instance,) = gcp.instances("us-central1", run="run")
    assert (instance.id, instance.name, instance.zone) == ("run-rollout-0-g0-head", "run-rollout-0-g0", ZONE)
    assert (instance.state, instance.market, instance.instance_type) == (
        InstanceState.RUNNING,
        Market.SPOT,
        "n2-standard-2",
    )
    assert instance.address.startswith("10.128.")
    assert instance.identity == "spotrl-run@p.iam.gserviceaccount.com"
    assert instance.public_address.startswith("203.0.113.")
    assert abs(instance.launched_ms - time.time() * 1000) < 60_000
    assert len(gcp.instances("us-central1")) == 2
    assert gcp.instances("us-central1", run="run", owner="you") == []


def test_gcp_operations_distinguish_a_preemption_from_a_deletion(gcp, google):
    insert(gcp)
    insert(gcp, node="run-rollout-1-g0")
    first, second = gcp.instances("us-central1", run="run")
    (found,) = [one for one in google.gce._instances() if one["name"] == first.id]
    google.gce._preempt(found["id"], datetime.now(UTC))
    stopping = next(one for one in gcp.instances("us-central1", run="run") if one.id == first.id)
    assert stopping.state is InstanceState.STOPPING
    google.gce._preempted(found["id"], datetime.now(UTC))
    gcp.end([second])
    gcp.end([second])
    assert gcp.instances("us-central1", run="run") == []
    taken, ended = gcp.end_of(first), gcp.end_of(second)
    assert (taken.state, taken.reclaimed) == (InstanceState.GONE, True)
    assert taken.reason.startswith("compute.instances.preempted")
    assert (ended.reclaimed, ended.reason) == (False, "delete")
    assert taken.ended_ms is not None


LONGER = {"preemptionNoticeDuration": {"seconds": 120}}


def test_gcp_reads_back_the_notice_that_was_granted(gcp, google):
    insert(gcp, more=LONGER)
    insert(gcp, node="run-rollout-1-g0")
    longer, usual = gcp.instances("us-central1", run="run")
    assert (longer.notice_ms, usual.notice_ms) == (120_000, None)
    ends = []
    for instance in (longer, usual):
        (found,) = [one for one in google.gce._instances() if one["name"] == instance.id]
        google.gce._preempt(found["id"], datetime.now(UTC))
        google.gce._preempted(found["id"], datetime.now(UTC))
        ends.append(gcp.end_of(instance).ended_ms - time.time() * 1000)
    assert 149_000 < ends[0] <= 150_000  # the latest end: the notice, and then the shutdown
    assert 29_000 < ends[1] <= 30_000


def test_a_gcp_machine_that_is_deleted_in_its_notice_ends_then(gcp, google):
    insert(gcp, more=LONGER)
    (instance,) = gcp.instances("us-central1", run="run")
    (found,) = google.gce._instances()
    google.gce._preempt(found["id"], datetime.now(UTC))
    gcp.end([instance])
    ended_ms = gcp.end_of(instance).ended_ms
    assert gcp.end_of(instance).reclaimed
    assert abs(ended_ms - time.time() * 1000) < 10_000, "not at the end of the notice, in 150 s"
    assert ended_ms == google.gce.ended_ms[found["id"]], "as the cloud's own meter"


@pytest.mark.parametrize(("spot", "is_known"), [(False, True), (True, False)])
def test_gcp_refuses_a_notice_with_the_name_of_its_field(gcp, google, spot, is_known):
    if not is_known:
        google.gce.faults.add("no_notice", "gcp/us-central1")
    with pytest.raises(Answer, match="preemptionNoticeDuration"):
        insert(gcp, spot=spot, more=LONGER)
    assert gcp.instances("us-central1", run="run") == []


def test_gcp_creates_a_network_and_an_identity_for_a_run_and_deletes_them(gcp, google):
    place = gcp.prepare("us-central1", run="run", owner="me", ssh_from=FROM, buckets=["gs://bucket/runs/run"])
    gcp.prepare("us-east4", run="run", owner="me", ssh_from=FROM, buckets=["gs://bucket/runs/run"])
    assert gcp.prepare("us-central1", run="run", owner="me", ssh_from=FROM, buckets=["gs://bucket/runs/run"]) == place
    assert (place.network, place.identity) == ("spotrl-run", f"spotrl-run@{PROJECT}.iam.gserviceaccount.com")
    assert gcp.open_rules(place) == []
    member = f"serviceAccount:{place.identity}"
    bound = [one for one in google.gce.policy["bindings"] if member in one["members"]]
    assert {one["role"] for one in bound} == {f"projects/{PROJECT}/roles/spotrlNode", "roles/storage.objectAdmin"}
    assert all("condition" in one for one in bound)
    ranges = [one["ipCidrRange"] for one in google.gce._all_of("subnetworks") if one["name"] == "spotrl-run"]
    assert len(set(ranges)) == 2
    assert gcp.remove(gcp.resources("us-east4", run="run")) == []
    assert gcp.remove(everything(gcp, "us-central1", run="run")) == []
    for region in ("us-east4", "us-central1"):
        assert everything(gcp, region, run="run") == []
    assert not any(member in one["members"] for one in google.gce.policy["bindings"])


def test_gcp_does_not_touch_another_owners_run_of_the_same_name(gcp, google):
    gcp.prepare("us-central1", run="run", owner="you", ssh_from=FROM, buckets=["gs://yours/run"])
    rule, policy = google.gce.resources["global", "firewalls", "spotrl-run-ssh"], google.gce.policy["bindings"]
    before = json.dumps([rule, policy])
    with pytest.raises(CloudRefused, match="network spotrl-run is there already and belongs to you"):
        gcp.prepare("us-central1", run="run", owner="me", ssh_from="198.51.100.1/32", buckets=["gs://mine/run"])
    assert json.dumps([rule, google.gce.policy["bindings"]]) == before


def test_gcp_keeps_the_bindings_of_others(gcp, google):
    theirs = {"role": "roles/owner", "members": ["user:boss@example.com"]}
    google.gce.policy["bindings"] = [theirs]
    place = gcp.prepare("us-central1", run="run", owner="me", ssh_from=FROM, buckets=[])
    assert theirs in google.gce.policy["bindings"]
    NodeIdentity(gcp.calls).bind(place.identity, None)
    assert google.gce.policy["bindings"] == [theirs]


def test_gcp_names_the_missing_firewall_rule(gcp, google):
    place = gcp.prepare("us-central1", run="run", owner="me", ssh_from=FROM, buckets=[])
    google.gce.resources.pop(("global", "firewalls", "spotrl-run-ssh"))
    missing = "network spotrl-run lacks the firewall rule spotrl-run-ssh: tcp 22 (SSH) from 203.0.113.7/32"
    assert gcp.open_rules(place) == [missing]


def test_gcp_allows_ssh_from_the_controllers_current_address(gcp, google):
    gcp.prepare("us-central1", run="run", owner="me", ssh_from="198.51.100.1/32", buckets=[])
    place = gcp.prepare("us-central1", run="run", owner="me", ssh_from=FROM, buckets=[])
    assert gcp.open_rules(place) == []
    assert google.gce.resources["global", "firewalls", "spotrl-run-ssh"]["sourceRanges"] == [FROM]


def test_gcp_disks_are_found_by_label_and_a_network_in_use_stays(gcp):
    insert(gcp)
    (disk,) = [one for one in everything(gcp, "us-central1", run="run") if one.kind == "disk"]
    assert (disk.node, disk.size_gib) == ("run-rollout-0-g0", 100)
    gcp.prepare("us-central1", run="run", owner="me", ssh_from=FROM, buckets=[])
    networks = [one for one in everything(gcp, "us-central1", run="run") if one.kind == "network"]
    assert gcp.remove(networks) == networks  # its subnet still exists


@pytest.mark.parametrize(("kind", "error"), [("down", CloudUnreachable), ("throttled", CloudUnreachable)])
def test_an_unreachable_gcp_is_not_a_refusal(gcp, google, kind, error):
    google.gce.faults.add(kind)
    with pytest.raises(error):
        gcp.instances("us-central1", run="run")


def test_a_refused_list_of_service_accounts_is_shown_as_a_refusal(gcp, monkeypatch):
    call = gcp.calls.ask

    def refuse(method, service, path, body=None, query=None):
        if path == "/serviceAccounts":
            raise Answer(403, "forbidden", "iam.serviceAccounts.list denied")
        return call(method, service, path, body, query)

    monkeypatch.setattr(gcp.calls, "ask", refuse)
    with pytest.raises(CloudRefused, match=r"serviceAccounts.list: Google Cloud refused .*check --print-policy gcp"):
        everything(gcp, "us-central1", run="run")


def test_gcp_needs_a_project(google):
    with pytest.raises(CloudRefused, match="GOOGLE_CLOUD_PROJECT"):
        GceApi({"SPOTRL_GCP_COMPUTE_ENDPOINT": google.url}).regions()


def test_gcp_lists_its_regions(gcp):
    assert gcp.regions() == ["us-central1", "us-east4"]


# --- Google resources that a job names ------------------------------------------------------------------


class GoogleCompany:
    """A project with a network, a subnet, firewall rules and a service account made by its administrator."""

    ACCOUNT = f"node@{PROJECT}.iam.gserviceaccount.com"

    def __init__(self, gce):
        self.gce = gce
        gce._put("global", "networks", {"name": "company"})
        gce._subnetwork("us-central1", "company-central", "company", "10.9.0.0/20")
        self.rule("inside", sourceRanges=["10.9.0.0/16"], allowed=[{"IPProtocol": "tcp", "ports": ["0-65535"]}])
        self.rule("ssh", sourceRanges=["203.0.113.0/24"], allowed=[{"IPProtocol": "tcp", "ports": ["22"]}])
        gce._add_account("node", {})

    def rule(self, name, **rule):
        self.gce._firewall({"name": name, "network": "global/networks/company", **rule})

    def named(self, **more):
        return replace(Named(identity=self.ACCOUNT, network="company", subnets=("company-central",)), **more)

    def everything(self):
        return json.dumps([list(self.gce.resources.values()), self.gce.accounts, self.gce.policy, self.gce.roles])


@pytest.fixture
def google_company(google):
    return GoogleCompany(google.gce)


def prepare_on_google(gcp, named, region="us-central1"):
    return gcp.prepare(region, run="run", owner="me", ssh_from=FROM, buckets=["gs://b/run"], named=named)


def test_resources_that_a_google_job_names_are_used_and_not_deleted(gcp, google_company):
    before = google_company.everything()
    place = prepare_on_google(gcp, google_company.named())
    assert (place.identity, place.network, place.subnets) == (GoogleCompany.ACCOUNT, "company", ("company-central",))
    assert gcp.open_rules(place) == []
    assert everything(gcp, "us-central1") == []
    assert google_company.everything() == before


def test_a_google_job_may_name_only_an_identity_or_only_a_network(gcp, google_company):
    place = prepare_on_google(gcp, Named(identity=GoogleCompany.ACCOUNT))
    assert (place.network, place.identity) == ("spotrl-run", GoogleCompany.ACCOUNT)
    assert "identity" not in {one.kind for one in everything(gcp, "us-central1", run="run")}
    gcp.remove(everything(gcp, "us-central1", run="run"))
    place = prepare_on_google(gcp, google_company.named(identity=""))
    assert place.identity == f"spotrl-run@{PROJECT}.iam.gserviceaccount.com"
    assert {one.kind for one in everything(gcp, "us-central1", run="run")} == {"identity"}


@pytest.mark.parametrize(
    ("change", "named", "words"),
    [
        ("", {"network": "nowhere"}, r"gcp has no network nowhere.*correct network.gcp"),
        ("", {"subnets": ("elsewhere",)}, r"network company has no subnet elsewhere in us-central1"),
        ("", {"identity": f"x@{PROJECT}.iam.gserviceaccount.com"}, r"no service account x@.*correct identity.gcp"),
        ("account disabled", {}, r"is disabled; `gcloud iam service-accounts enable"),
        ("ssh gone", {}, r"network company lacks an ingress rule: tcp 22 \(SSH\) from 203.0.113.7/32.*; add it"),
        ("ssh disabled", {}, r"lacks an ingress rule: tcp 22"),
        ("ssh for others", {}, r"lacks an ingress rule: tcp 22"),
        ("inside of one port", {}, r"lacks an ingress rule: all TCP ports from 10.9.0.0/20"),
    ],
)
def test_unusable_google_resources_are_refused_before_anything_is_created(gcp, google_company, change, named, words):
    rules = {name: google_company.gce.resources["global", "firewalls", name] for name in ("ssh", "inside")}
    match change:
        case "account disabled":
            google_company.gce.accounts[GoogleCompany.ACCOUNT]["disabled"] = True
        case "ssh gone":
            google_company.gce.resources.pop(("global", "firewalls", "ssh"))
        case "ssh disabled":
            rules["ssh"]["disabled"] = True
        case "ssh for others":
            rules["ssh"]["targetTags"] = ["web"]
        case "inside of one port":
            rules["inside"]["allowed"] = [{"IPProtocol": "tcp", "ports": ["8080"]}]
    before = google_company.everything()
    with pytest.raises(CloudRefused, match=words):
        prepare_on_google(gcp, google_company.named(**named))
    assert google_company.everything() == before


def test_an_unusable_service_account_leaves_no_network_behind(gcp, google_company):
    before = google_company.everything()
    with pytest.raises(CloudRefused, match="no service account"):
        prepare_on_google(gcp, Named(identity=f"x@{PROJECT}.iam.gserviceaccount.com"))
    assert google_company.everything() == before


def test_rules_by_service_account_count_for_nodes_that_run_as_it(gcp, google_company):
    rules = {name: google_company.gce.resources["global", "firewalls", name] for name in ("ssh", "inside")}
    rules["ssh"]["targetServiceAccounts"] = [GoogleCompany.ACCOUNT]
    rules["inside"] |= {"sourceRanges": [], "sourceServiceAccounts": [GoogleCompany.ACCOUNT]}
    assert gcp.open_rules(prepare_on_google(gcp, google_company.named())) == []


def test_google_resources_that_may_not_be_read_are_reported_as_unsure(gcp, google_company, monkeypatch):
    called = []

    def call(method, where, path, body=None, query=None):
        called.append(where[2] + path)
        raise Answer(403, "forbidden", "you may not look")

    names = GoogleNames(call)
    (finding,) = names.look_at_network("us-central1", google_company.named(network="host/company"), FROM)
    assert (finding.look, "you may not look" in finding.text) == (Look.UNSURE, True)
    assert called == ["/compute/v1/projects/host/global/networks/company"]
    assert names.look_at_account(GoogleCompany.ACCOUNT).look is Look.UNSURE


def test_a_private_google_subnet_without_google_access_is_reported(gcp, google_company):
    private = google_company.named(public_addresses=False)
    (finding,) = gcp.check_network("us-central1", private, FROM)
    assert (finding.look, "no Private Google Access" in finding.text) == (Look.UNSURE, True)
    subnet = google_company.gce.resources["regions/us-central1", "subnetworks", "company-central"]
    subnet["privateIpGoogleAccess"] = True
    assert [one.look for one in gcp.check_network("us-central1", private, FROM)] == [Look.OK]


def may_end(condition, instance):
    """Evaluate the condition of a role for an instance. `extract` returns the value of the braces."""
    terms = condition.removeprefix('resource.type != "compute.googleapis.com/Instance" || ').split(" || ")
    for term in terms:
        before, after, wanted = re.fullmatch(r'resource.name.extract\("(.*)\{run\}(.*)"\) == "(.*)"', term).groups()
        name = f"projects/p/zones/us-central1-a/instances/{instance}".partition(before)[2]
        if after in name and name.partition(after)[0] == wanted:
            return True
    return False


def test_nodes_may_not_end_those_of_a_run_with_the_same_name_prefix():
    """A bug allowed nodes of `exp` to delete instances of `exp-2`."""
    nodes = ("trainer-g0-1a2b-head", "spot-0-g3-1a2b-head", "spot-11-g0-1a2b-head")
    for run in ("exp", "exp-2", "exp-2-b", "e"):
        condition = node_conditions(run, "projects/p/roles/spotrlNode", [])["end-our-own"][1]
        for other in ("exp", "exp-2", "exp-2-b", "e"):
            for node in nodes:
                assert may_end(condition, f"{other}-{node}") == (run == other), (run, other, node)


@pytest.mark.parametrize("name", ["exp-spot-lr", "exp-spot", "exp-trainer-g1"])
def test_a_run_name_may_not_look_like_a_node_name(name):
    with pytest.raises(ValueError, match="nodes could be taken for this run's"):
        Job(name=name)


def test_the_role_of_nodes_is_made_once_and_never_changed(gcp, google):
    """A principal that may change the role could give a node any permission, or take permissions away."""
    roles = google.gce.roles
    NodeIdentity(gcp.calls).prepare_role()
    made = dict(roles["spotrlNode"])
    NodeIdentity(gcp.calls).prepare_role()
    roles["spotrlNode"]["includedPermissions"] = [*made["includedPermissions"], "compute.instances.setMetadata"]
    with pytest.raises(CloudRefused, match=r"differs in compute.instances.setMetadata\).*gcloud iam roles update"):
        NodeIdentity(gcp.calls).prepare_role()
    assert "compute.instances.setMetadata" in roles["spotrlNode"]["includedPermissions"]
    roles["spotrlNode"] = {**made, "deleted": True}
    with pytest.raises(CloudRefused, match="gcloud iam roles undelete spotrlNode --project"):
        NodeIdentity(gcp.calls).prepare_role()


def test_a_role_that_may_not_be_created_is_left_to_an_administrator(gcp, monkeypatch):
    def refuse(method, api, path, body=None, query=None):
        raise Answer(404 if method == "GET" else 403, "x", "no")

    monkeypatch.setattr(gcp.calls, "ask", refuse)
    with pytest.raises(CloudRefused, match=r"gcloud iam roles create spotrlNode --project .* --permissions compute"):
        NodeIdentity(gcp.calls).prepare_role()


def test_binding_a_new_service_account_is_retried_until_google_knows_it(gcp, monkeypatch):
    """Right after the account was created, setIamPolicy answers 400."""
    now = [1000.0]
    monkeypatch.setattr("launcher.clouds.gce_identity.time.monotonic", lambda: now[0])

    def answer(method, api, path, body=None, query=None):
        if path == ":setIamPolicy":
            raise Answer(400, "badRequest", "Service account new@p.iam.gserviceaccount.com does not exist.")
        return {"bindings": []}

    monkeypatch.setattr(gcp.calls, "ask", answer)
    identity = NodeIdentity(gcp.calls)
    wanted = {"end-our-own": ("projects/p/roles/spotrlNode", "true")}
    for _ in range(3):
        with pytest.raises(CloudUnreachable, match=r"does not know new@p.iam.gserviceaccount.com yet"):
            identity.bind("new@p.iam.gserviceaccount.com", wanted)
        now[0] += 39.0
    now[0] += 39.0
    with pytest.raises(Answer):
        identity.bind("new@p.iam.gserviceaccount.com", wanted)


def test_a_gcp_node_can_access_only_its_own_instances_and_prefix():
    grants = node_conditions("run", "projects/p/roles/spotrlNode", ["gs://bucket/runs/run", "s3://x/y"])
    assert may_end(grants["end-our-own"][1], "run-trainer-g0-1a2b-head")
    assert grants["keep-0"] == (
        "roles/storage.objectAdmin",
        'resource.name == "projects/_/buckets/bucket" || '
        'resource.name.startsWith("projects/_/buckets/bucket/objects/runs/run/")',
    )


@pytest.mark.parametrize(
    ("arn", "owner"),
    [
        ("arn:aws:iam::123456789012:user/ann", "ann"),
        ("arn:aws:iam::123456789012:user/team/ann", "ann"),
        ("arn:aws:iam::123456789012:root", "root"),
        ("arn:aws:sts::123456789012:assumed-role/ci-launcher/build-4711", "ci-launcher"),
        ("arn:aws:sts::123456789012:assumed-role/ci-launcher/build-4712", "ci-launcher"),
        ("arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Admin_0a1b/ann@example.com", "ann@example.com"),
        ("arn:aws:sts::123456789012:federated-user/ann", "ann"),
    ],
)
def test_the_owner_label_is_the_same_in_every_session(arn, owner):
    """A bug changed the owner with each session of an assumed role, so `reap` ignored its own instances."""
    assert owner_of(arn) == owner
