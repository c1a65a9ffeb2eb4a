"""The printed policies allow every cloud call of our code (from its source or recorded) and of SkyPilot's source.

A missing permission would show only on a real account, on a user's first launch.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name
from ruamel.yaml import YAML

from engine.events import Market
from launcher.clouds.base import Instance, InstanceState, Resource
from launcher.clouds.gce import GceApi
from launcher.clouds.gce_calls import GoogleCalls
from launcher.clouds.gce_identity import ROLE_PERMISSIONS
from launcher.clouds.gce_limits import GceLimits
from launcher.clouds.gce_services import Answer
from launcher.clouds.policies import aws_policy, gcp_permissions, gcp_role
from launcher.job.company import NOTHING_NAMED, Named
from launcher.market.sources.aws import PERMISSIONS

ROOT = Path(__file__).parents[3]
SERVICES = {"ec2": "ec2", "iam": "iam", "sts": "sts", "service-quotas": "servicequotas", "pricing": "pricing"}
"""The prefix of a client's actions, by its name."""

OURS = [
    "launcher/clouds/aws.py",
    "launcher/clouds/aws_group.py",
    "launcher/clouds/aws_role.py",
    "launcher/clouds/aws_limits.py",
    "launcher/clouds/aws_named.py",
    "launcher/market/sources/aws.py",
]


def skypilot_folder() -> Path:
    """Return the folder of SkyPilot's source without importing it."""
    spec = find_spec("sky")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def statements() -> list[Mapping[str, Any]]:
    return list(aws_policy("123456789012", ["s3://bucket/folder", "gs://other"])["Statement"])


def allowed(named: Named = NOTHING_NAMED) -> set[str]:
    policy = aws_policy("123456789012", ["s3://bucket/folder", "gs://other"], named)
    return {action for statement in policy["Statement"] for action in statement["Action"]}


# --- AWS ---------------------------------------------------------------------------------------------


@cache
def actions_by_method() -> dict[str, set[str]]:
    """Return the action that each client method needs."""
    session, found = botocore.session.get_session(), {}
    for service, prefix in SERVICES.items():
        for operation in session.get_service_model(service).operation_names:
            found.setdefault(xform_name(operation), set()).add(f"{prefix}:{operation}")
    return found


def calls_in(path: Path) -> Iterator[str]:
    """Return the names of methods that a file calls or passes on, and of paginators, resources and waiters."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def needed_by(path: Path) -> set[str]:
    known = actions_by_method()
    return {action for name in calls_in(path) for action in known.get(name, ())}


@pytest.mark.parametrize("file", OURS)
def test_the_aws_policy_allows_our_own_calls(file):
    needed = needed_by(ROOT / file)
    assert needed
    assert needed <= allowed() | allowed(IDENTITY)


IDENTITY, NETWORK = Named(identity="node-profile"), Named(network="vpc-1", group="nodes")
OF_ROLES = {
    "iam:AddRoleToInstanceProfile",
    "iam:CreateInstanceProfile",
    "iam:CreateRole",
    "iam:DeleteInstanceProfile",
    "iam:DeleteRole",
    "iam:DeleteRolePolicy",
    "iam:PutRolePolicy",
    "iam:RemoveRoleFromInstanceProfile",
    "iam:TagInstanceProfile",
    "iam:TagRole",
}
OF_GROUPS = {
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:CreateSecurityGroup",
    "ec2:DeleteSecurityGroup",
    "ec2:RevokeSecurityGroupIngress",
}


def test_the_aws_policy_omits_creating_named_resources():
    assert allowed() - allowed(IDENTITY) == OF_ROLES
    assert allowed(IDENTITY) <= allowed()
    assert allowed() - allowed(NETWORK) == OF_GROUPS
    assert allowed(NETWORK) <= allowed()
    text = json.dumps(aws_policy(named=replace(NETWORK, identity="node-profile")))
    assert "security-group" in text, "instances are started in the group"
    assert "CreateSecurityGroup" not in text


@pytest.mark.parametrize(
    ("role", "passed"),
    [("", "arn:aws:iam::1:role/node-profile"), ("arn:aws:iam::1:role/x/r", "arn:aws:iam::1:role/x/r")],
)
def test_the_aws_policy_passes_only_the_role_of_a_named_profile(role, passed):
    policy = aws_policy("1", named=IDENTITY, role=role)
    (passing,) = [one for one in policy["Statement"] if "iam:PassRole" in one["Action"]]
    assert passing["Resource"] == [passed]
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


def test_the_aws_policy_allows_price_queries():
    assert set(PERMISSIONS) <= allowed()


SKYPILOT_NEVER = {
    # Only for a group that SkyPilot made, for volumes, for images, for stopping, or for more than one node with EFA:
    # sky/provision/aws/config.py (`managed_by_skypilot`, placement groups) and instance.py.
    "ec2:AuthorizeSecurityGroupEgress",
    "ec2:CreatePlacementGroup",
    "ec2:DeletePlacementGroup",
    "ec2:ModifyInstanceAttribute",
    # Only without our identity (`_configure_iam_role`), whose calls are the rest of this list.
    "iam:AttachRolePolicy",
    # Only with reservations, which a user configures: sky/clouds/utils/aws_utils.py.
    "ec2:DescribeCapacityReservations",
    # Names in those files that are not calls of a client.
    "ec2:StartInstances",
    "ec2:StopInstances",
    "ec2:DescribeInstanceTypeOfferings",
}
SKYPILOT_FILES = ["provision/aws/config.py", "provision/aws/instance.py", "clouds/aws.py", "clouds/utils/aws_utils.py"]


@pytest.mark.skipif(find_spec("sky") is None, reason="SkyPilot is not installed here")
@pytest.mark.parametrize("file", SKYPILOT_FILES)
def test_the_aws_policy_allows_skypilots_named_calls(file):
    needed = needed_by(skypilot_folder() / file)
    makes_roles = {action for action in needed if action.startswith("iam:")}
    assert needed - SKYPILOT_NEVER - makes_roles <= allowed()


def test_the_aws_policy_allows_skypilots_resource_calls():
    """SkyPilot's calls through boto3 resources do not name the action: `ec2.instances.filter`, `create_instances`."""
    assert {
        "ec2:RunInstances",
        "ec2:TerminateInstances",
        "ec2:CreateTags",
        "ec2:DescribeInstances",
        "ec2:DescribeSubnets",
        "ec2:DescribeVpcs",
        "ec2:DescribeSecurityGroups",
        "ec2:DescribeRouteTables",
        "iam:PassRole",
        "servicequotas:GetServiceQuota",
    } <= allowed()


def test_terminating_or_changing_an_instance_requires_our_label():
    for statement in statements():
        ending = {"ec2:TerminateInstances", "ec2:DeleteVolume", "ec2:DeleteSecurityGroup"} & set(statement["Action"])
        if ending:
            assert statement["Condition"] == {"Null": {"aws:ResourceTag/spotrl-run": "false"}}
            assert statement["Resource"] != "*"


def test_an_instance_may_be_started_only_with_our_label():
    starts = [one for one in statements() if "ec2:RunInstances" in one["Action"]]
    of_instances = [one for one in starts if any(fnmatchcase(arn, "*:instance/*") for arn in one["Resource"])]
    assert [one["Condition"] for one in of_instances] == [{"Null": {"aws:RequestTag/spotrl-run": "false"}}]


def test_only_our_roles_may_be_created_and_passed():
    for statement in statements():
        if any(action.startswith("iam:") and action != "iam:ListRoles" for action in statement["Action"]):
            resources = statement["Resource"]
            is_ours = resources != "*" and all("/spotrl/*" in arn for arn in resources)
            assert is_ours or statement["Sid"] in ("See", "FirstSpotInstance")
    (passing,) = [one for one in statements() if "iam:PassRole" in one["Action"]]
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


def test_a_policy_names_each_bucket():
    resources = [arn for one in statements() for arn in one["Resource"] if arn.startswith("arn:aws:s3")]
    assert resources == ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/folder/*"]
    assert not [one for one in aws_policy()["Statement"] if "s3:GetObject" in one["Action"]]


def test_a_policy_fits_into_the_size_limit_of_iam():
    """The limit of a managed policy is 6,144 characters without white space."""
    assert len(re.sub(r"\s", "", json.dumps(aws_policy("123456789012", ["s3://bucket/folder"])))) < 6144


# --- Google Cloud ------------------------------------------------------------------------------------

NEEDS = {
    ("GET", r"/regions"): "compute.regions.list",
    ("GET", r"/regions/[^/]+"): "compute.regions.get",
    ("GET", r""): "compute.projects.get",
    ("GET", r"/aggregated/(instances|disks|subnetworks)"): "compute.{0}.list",
    ("GET", r"/zones/[^/]+/operations"): "compute.zoneOperations.list",
    ("GET", r"/zones/[^/]+/operations/[^/]+"): "compute.zoneOperations.get",
    ("GET", r"/regions/[^/]+/operations/[^/]+"): "compute.regionOperations.get",
    ("GET", r"/global/operations/[^/]+"): "compute.globalOperations.get",
    ("DELETE", r"/zones/[^/]+/(instances|disks)/[^/]+"): "compute.{0}.delete",
    ("GET", r"/regions/[^/]+/subnetworks"): "compute.subnetworks.list",
    ("GET", r"/regions/[^/]+/subnetworks/[^/]+"): "compute.subnetworks.get",
    ("POST", r"/regions/[^/]+/subnetworks"): "compute.subnetworks.create",
    ("DELETE", r"/regions/[^/]+/subnetworks/[^/]+"): "compute.subnetworks.delete",
    ("GET", r"/global/(networks|firewalls)"): "compute.{0}.list",
    ("GET", r"/global/(networks|firewalls)/[^/]+"): "compute.{0}.get",
    ("POST", r"/global/(networks|firewalls)"): "compute.{0}.create",
    ("PATCH", r"/global/(firewalls)/[^/]+"): "compute.{0}.update",
    ("DELETE", r"/global/(networks|firewalls)/[^/]+"): "compute.{0}.delete",
    ("GET", r"/serviceAccounts"): "iam.serviceAccounts.list",
    ("GET", r"/serviceAccounts/[^/]+"): "iam.serviceAccounts.get",
    ("POST", r"/serviceAccounts"): "iam.serviceAccounts.create",
    ("DELETE", r"/serviceAccounts/[^/]+"): "iam.serviceAccounts.delete",
    ("GET", r"/roles/[^/]+"): "iam.roles.get",
    ("POST", r":getIamPolicy"): "resourcemanager.projects.getIamPolicy",
    ("POST", r":setIamPolicy"): "resourcemanager.projects.setIamPolicy",
    ("POST", r":testIamPermissions"): None,
}
"""The path of a call after the project, and its permission in Google's reference."""

ENVIRON = {
    "SPOTRL_GCP_COMPUTE_ENDPOINT": "http://compute",
    "SPOTRL_GCP_IAM_ENDPOINT": "http://iam",
    "SPOTRL_GCP_RESOURCE_MANAGER_ENDPOINT": "http://projects",
    "GOOGLE_CLOUD_PROJECT": "mine",
}


class RecordedCalls(GoogleCalls):
    """Records every call, and answers like a project with only the resources just created."""

    def __init__(self) -> None:
        super().__init__(ENVIRON)
        self.all: list[tuple[str, str]] = []
        self.new: set[str] = set()

    def call(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        path = url.replace("/projects/-/", "/projects/mine/").partition("/projects/mine")[2]
        self.all.append((method, path))
        if method == "POST" and body and "name" in body:
            self.new.add(f"{path}/{body['name']}")
        if method == "GET" and re.fullmatch(r"/(global|regions/[^/]+)/(networks|subnetworks|firewalls)/[^/]+", path):
            if path not in self.new:
                raise Answer(404, "notFound", "nothing of that name")
            return {"name": path.rpartition("/")[2], "selfLink": path, "sourceRanges": ["0.0.0.0/0"]}
        if path == "/roles/spotrlNode":
            return {"includedPermissions": list(ROLE_PERMISSIONS)}
        if method in ("POST", "DELETE", "PATCH") and not path.startswith(":"):
            where = re.match(r"/(global|regions/[^/]+|zones/[^/]+)/", path)
            return {"status": "PENDING", "selfLink": f"x/projects/mine/{where[1]}/operations/op"} if where else {}
        return {"status": "DONE"} if "/operations/" in path else {}


def permission_of(method: str, path: str) -> str | None:
    for (of_method, pattern), permission in NEEDS.items():
        found = re.fullmatch(pattern, path)
        if method == of_method and found:
            return permission and permission.format(*found.groups())
    raise AssertionError(f"it is unknown which permission {method} {path} needs; add it to NEEDS, and to the policy")


def test_the_google_role_allows_every_call(monkeypatch):
    monkeypatch.setattr("launcher.clouds.gce_calls.time.sleep", lambda seconds: None)
    calls = RecordedCalls()
    cloud = GceLimits(calls=calls)
    cloud.caller()
    cloud.regions()
    cloud.instances("us-central1", owner="ada", run="digits")
    instance = Instance(
        cloud="gcp", region="us-central1", zone="us-central1-a", id="vm", name="vm", run="digits", owner="ada",
        state=InstanceState.RUNNING, market=Market.SPOT, instance_type="g2-standard-4",
    )  # fmt: skip
    cloud.end_of(instance)
    cloud.end([instance])
    cloud.resources("us-central1", owner="ada")
    resources = [
        Resource(cloud="gcp", region="us-central1", kind=kind, id=id)
        for kind, id in (
            ("disk", "us-central1-a/d"),
            ("firewall", "f"),
            ("subnet", "s"),
            ("network", "n"),
            ("identity", "a@mine.iam.gserviceaccount.com"),
        )
    ]
    assert cloud.remove(resources) == []
    for _ in range(2):  # the second call finds existing resources, with another address
        place = cloud.prepare("us-central1", run="digits", owner="ada", ssh_from="203.0.113.7/32", buckets=["gs://b/f"])
    cloud.open_rules(place)
    cloud.permissions()
    cloud.quotas("us-central1", ["NVIDIA_L4_GPUS", "GPUS_ALL_REGIONS"])
    needed = {permission_of(*call) for call in calls.all} - {None}
    assert len(needed) > 20
    assert needed <= set(gcp_permissions())
    assert isinstance(cloud, GceApi)


def test_the_google_role_omits_creating_named_resources():
    account = "node@mine.iam.gserviceaccount.com"
    identity = set(gcp_permissions()) - set(gcp_permissions(Named(identity=account)))
    assert identity == {
        "iam.serviceAccounts.create",
        "iam.serviceAccounts.delete",
        "resourcemanager.projects.setIamPolicy",
    }
    network = set(gcp_permissions()) - set(gcp_permissions(Named(network="nodes")))
    assert {one.rpartition(".")[2] for one in network} == {"create", "delete", "update", "updatePolicy"}
    assert {one.split(".")[1] for one in network} == {"firewalls", "networks", "subnetworks"}
    role = YAML(typ="safe").load(gcp_role(Named(identity=account)))
    assert role["includedPermissions"] == gcp_permissions(Named(identity=account))
    assert account in gcp_role(Named(identity=account))


def test_the_google_role_allows_every_call_about_named_resources():
    calls = RecordedCalls()
    cloud = GceLimits(calls=calls)
    named = Named(identity="node@mine.iam.gserviceaccount.com", network="nodes")
    calls.new.add("/global/networks/nodes")
    cloud.check_identity(named)
    cloud.check_network("us-central1", named, "203.0.113.7/32")
    needed = {permission_of(*call) for call in calls.all} - {None}
    assert len(needed) == 4
    assert needed <= set(gcp_permissions(named))


@pytest.mark.skipif(find_spec("sky") is None, reason="SkyPilot is not installed here")
def test_the_google_role_allows_the_permissions_that_skypilot_tests():
    tree = ast.parse((skypilot_folder() / "provision/gcp/constants.py").read_text("utf-8"))
    lists = {"VM_MINIMAL_PERMISSIONS", "GCP_MINIMAL_PERMISSIONS", "FIREWALL_PERMISSIONS"}
    required = [
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in lists
        for name in ast.literal_eval(node.value)
    ]
    assert len(required) > 20
    assert set(required) <= set(gcp_permissions())


def test_the_printed_google_role_is_valid_yaml():
    role = YAML(typ="safe").load(gcp_role())
    assert role["includedPermissions"] == gcp_permissions()
    assert role["stage"] == "GA"
