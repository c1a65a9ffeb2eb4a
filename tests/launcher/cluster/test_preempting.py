"""Our own preemptions by the clouds' own means: the calls, the role of AWS, and the permissions."""

import json
from dataclasses import replace
from types import SimpleNamespace

import boto3
import pytest
from moto import mock_aws

from engine.events import Market
from launcher.checks.check import Verdict
from launcher.checks.selftest_needs import selftest_lines
from launcher.cli.main import run
from launcher.clouds.aws_fis import AwsPreempter
from launcher.clouds.base import CloudRefused, Instance, InstanceState, Look
from launcher.clouds.gce_calls import GoogleCalls
from launcher.clouds.gce_maintenance import GcePreempter
from launcher.clouds.gce_services import Answer
from launcher.clouds.limits import Permissions
from launcher.clouds.preempting import Order, Progress, build_preempter
from launcher.clouds.selftest_policies import FIS_ROLE, fis_notes, fis_role_policy, fis_statements, fis_trust
from tests.fakes.clouds import addresses, fis

REGION = "us-east-1"
INSTANCE = Instance(
    cloud="aws",
    region=REGION,
    zone=f"{REGION}a",
    id="i-0123456789abcdef0",
    name="selftest-spot-0-g0",
    run="selftest",
    owner="me",
    state=InstanceState.RUNNING,
    market=Market.SPOT,
    instance_type="g6.xlarge",
)


@pytest.fixture
def aws(monkeypatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        yield AwsPreempter()


def make_role(trust=None, policy=None):
    iam = boto3.client("iam", region_name=REGION)
    iam.create_role(RoleName=FIS_ROLE, AssumeRolePolicyDocument=json.dumps(trust or fis_trust()))
    if policy is not None:
        iam.put_role_policy(RoleName=FIS_ROLE, PolicyName="interrupt", PolicyDocument=json.dumps(policy))


def test_a_preempter_is_built_by_the_name_of_its_cloud():
    assert (build_preempter("aws").cloud, build_preempter("gcp", {}).cloud) == ("aws", "gcp")
    with pytest.raises(ValueError, match="there are aws and gcp"):
        build_preempter("azure")


def test_aws_orders_an_interruption_that_fis_accepts_and_keeps_no_template(aws):
    sent = []
    client = aws._client("fis", REGION)
    client.meta.events.register("before-call.fis.CreateExperimentTemplate", lambda params, **_: sent.append(params))
    order = aws.preempt(INSTANCE)
    (call,) = sent
    fis.check_template(call["body"])  # as the service checks it
    template = json.loads(call["body"])
    (target,) = template["targets"].values()
    assert target["resourceArns"][0].endswith(f":instance/{INSTANCE.id}"), "this instance and no other"
    assert template["tags"] == {"spotrl-run": "selftest"}
    assert client.list_experiment_templates()["experimentTemplates"] == []
    assert (order.region, aws.state(order).progress) == (REGION, Progress.RUNNING)


def test_a_refused_order_names_the_command_that_prints_its_permissions(aws):
    refused = {"Code": "AccessDeniedException", "Message": "no fis:StartExperiment"}
    answer = (SimpleNamespace(status_code=403), {"Error": refused, "ResponseMetadata": {"HTTPStatusCode": 403}})
    aws._client("fis", REGION).meta.events.register("before-call.fis.StartExperiment", lambda **_: answer)
    with pytest.raises(CloudRefused, match=r"no fis:StartExperiment.*`spotrl check --selftest --print-policy aws`"):
        aws.preempt(INSTANCE)
    assert aws._client("fis", REGION).list_experiment_templates()["experimentTemplates"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stopConditions": []}, "stopConditions"),
        ({"actions": {"a": {"actionId": "aws:ec2:stop-instances"}}}, "does not exist"),
        ({"actions": {"a": {"actionId": fis.INTERRUPT, "parameters": {"durationBeforeInterruption": "PT1M"}}}}, "PT2M"),
    ],
    ids=["no stop condition", "another action", "too short a notice"],
)
def test_the_fake_refuses_a_template_that_fis_refuses(change, words):
    template = {"actions": {"a": {}}, "roleArn": "r", "stopConditions": [{}], "description": "d", "clientToken": "t"}
    with pytest.raises(fis.Refused, match=words):
        fis.check_template(json.dumps(template | change).encode())


ARN = f"arn:aws:ec2:{REGION}:{addresses.ACCOUNT}:instance/{INSTANCE.id}"


@pytest.mark.parametrize(
    ("role", "spot", "progress", "words"),
    [
        (None, {ARN: "running"}, Progress.FAILED, "cannot be assumed"),
        ({}, {ARN: "running"}, Progress.FAILED, "Not authorized"),
        ({"policy": fis_role_policy()}, {ARN: "terminated"}, Progress.FAILED, "empty set"),
        ({"policy": fis_role_policy()}, {ARN: "running"}, Progress.DONE, "completed"),
    ],
    ids=["no role", "no permission", "not running", "interrupted"],
)
def test_the_fake_carries_out_an_order_that_fis_would(aws, role, spot, progress, words):
    if role is not None:
        make_role(**role)
    interrupted = []
    order = aws.preempt(INSTANCE)
    fis.carry_out(REGION, order.id, spot, interrupted.append)
    state = aws.state(order)
    assert (state.progress, words in state.text) == (progress, True), state.text
    assert interrupted == ([INSTANCE.id] if progress is Progress.DONE else [])


@pytest.mark.parametrize(
    ("role", "look", "words"),
    [
        (None, Look.WRONG, "there is no role spotrl-selftest"),
        ({"trust": {"Statement": []}, "policy": fis_role_policy()}, Look.WRONG, "may not take the role"),
        ({}, Look.UNSURE, "no policy of its own that allows ec2:SendSpotInstanceInterruptions"),
        ({"policy": fis_role_policy()}, Look.OK, "may be taken by FIS"),
    ],
    ids=["missing", "another trust", "no permission", "complete"],
)
def test_the_role_of_the_experiments_is_checked(aws, role, look, words):
    if role is not None:
        make_role(**role)
    (finding,) = aws.look()
    assert (finding.look, words in finding.text) == (look, True), finding.text


def test_the_roles_commands_are_printed_with_policies_that_parse():
    lines = fis_notes().splitlines()
    assert all(line.startswith("#") for line in lines)
    documents = [json.loads(line.split("'")[1]) for line in lines if "'{" in line]
    assert documents == [fis_trust(), fis_role_policy()]


def test_every_call_of_the_order_is_in_the_printed_permissions():
    actions = {action for statement in fis_statements() for action in statement["Action"]}
    assert actions == {
        *("fis:CreateExperimentTemplate", "fis:StartExperiment", "fis:GetExperiment", "fis:DeleteExperimentTemplate"),
        *("fis:TagResource", "iam:GetRole", "iam:ListRolePolicies", "iam:GetRolePolicy", "iam:PassRole"),
        "iam:CreateServiceLinkedRole",
    }


# --- Google Cloud ---------------------------------------------------------------------------------------


class FakeCalls(GoogleCalls):
    """Answers of Compute Engine, by method and last part of the path."""

    def __init__(self, **answers):
        super().__init__({"SPOTRL_GCP_COMPUTE_ENDPOINT": "http://nowhere", "GOOGLE_CLOUD_PROJECT": "p"})
        self.answers, self.asked = answers, []

    def ask(self, method, where, path, body=None, query=None):
        self.asked.append((method, path))
        answer = self.answers[path.rpartition("/")[2].lstrip(":")]
        if isinstance(answer, Exception):
            raise answer
        return answer


def google(**answers):
    preempter = GcePreempter({"GOOGLE_CLOUD_PROJECT": "p"})
    preempter.calls = FakeCalls(**answers)
    return preempter


def test_google_simulates_a_maintenance_event_of_this_vm_alone():
    cloud = google(simulateMaintenanceEvent={"name": "operation-1"}, **{"operation-1": {"status": "DONE"}})
    vm = replace(INSTANCE, cloud="gcp", region="us-central1", zone="us-central1-a", id="vm-1")
    order = cloud.preempt(vm)
    assert cloud.calls.asked == [("POST", "/zones/us-central1-a/instances/vm-1/simulateMaintenanceEvent")]
    assert cloud.state(order).progress is Progress.DONE
    assert (cloud.notice_ms, cloud.look()) == (None, [])


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ({"status": "RUNNING"}, Progress.RUNNING),
        ({"status": "DONE", "error": {"errors": [{"code": "X", "message": "no"}]}}, Progress.FAILED),
    ],
)
def test_google_tells_how_the_event_goes(answer, state):
    assert google(o=answer).state(Order(region="r", zone="z", id="o")).progress is state


def test_a_missing_permission_of_google_is_named():
    lacks = google(testIamPermissions={"permissions": []})
    assert lacks.permissions_to_preempt().missing == ("compute.instances.simulateMaintenanceEvent",)
    with pytest.raises(CloudRefused, match=r"simulateMaintenanceEvent.*`spotrl check --selftest --print-policy gcp`"):
        google(simulateMaintenanceEvent=Answer(403, "forbidden", "no")).preempt(INSTANCE)


# --- spotrl check --selftest ----------------------------------------------------------------------------


class Unasked(AwsPreempter):
    """moto does not simulate permissions."""

    def permissions_to_preempt(self):
        return Permissions(unchecked=("fis:StartExperiment",), why="you may not simulate")


def test_check_names_the_role_and_what_is_not_allowed(aws):
    role, permissions = selftest_lines(Unasked())
    assert (role.what, role.verdict) == ("aws selftest role", Verdict.FAIL)
    assert FIS_ROLE in role.found
    assert "--selftest --print-policy aws" in role.remedy
    assert (permissions.what, permissions.verdict) == ("aws selftest permissions", Verdict.WARN)
    lacking = selftest_lines(google(testIamPermissions={"permissions": []}))
    assert [(line.what, line.verdict) for line in lacking] == [("gcp selftest permissions", Verdict.FAIL)]
    assert "simulateMaintenanceEvent" in lacking[0].found


def test_the_permissions_of_a_selftest_are_printed_on_request(capsys):
    assert run(["check", "--selftest", "--print-policy", "aws"]) == 0
    printed = capsys.readouterr()
    assert [one["Sid"] for one in json.loads(printed.out)["Statement"]][-4:] == [one["Sid"] for one in fis_statements()]
    assert f"create-role --role-name {FIS_ROLE}" in printed.err
    assert run(["check", "--selftest", "--print-policy", "gcp"]) == 0
    assert capsys.readouterr().out.endswith("- compute.instances.simulateMaintenanceEvent\n")
    assert run(["check", "--print-policy", "gcp"]) == 0
    assert "simulateMaintenanceEvent" not in capsys.readouterr().out
