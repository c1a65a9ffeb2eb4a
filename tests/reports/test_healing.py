"""Answers of clouds that heal within seconds are asked again. A used up quota is not the same as "exists already".

AWS is moto, whose clients first give the answers of a test. Google Cloud is a fake over HTTP.
"""

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from launcher.clouds import gce_calls
from launcher.clouds.aws import AwsApi
from launcher.clouds.aws_calls import clients
from launcher.clouds.base import CloudRefused, CloudUnreachable
from launcher.clouds.gce import GceApi
from launcher.clouds.gce_calls import GoogleCalls
from launcher.clouds.gce_services import Answer
from launcher.provision.sky.outcome import outcome_of
from tests.fakes.clouds.addresses import PROJECT
from tests.launcher.cluster.test_cloud_apis import GoogleServer
from tests.launcher.cluster.test_sky_provisioner import NODE
from tests.launcher.cluster.test_sky_provisioner import Stage as ProvisionerStage

REGION, FROM = "us-east-1", "203.0.113.7/32"

HEALING = [
    ("authorize_security_group_ingress", "InvalidGroup.NotFound"),
    ("describe_security_groups", "InvalidGroupId.NotFound"),
    ("put_role_policy", "NoSuchEntity"),
    ("put_role_policy", "ConcurrentModification"),
    ("add_role_to_instance_profile", "NoSuchEntity"),
    ("add_role_to_instance_profile", "EntityTemporarilyUnmodifiable"),
    ("create_instance_profile", "ConcurrentModification"),
    ("create_role", "ConcurrentModificationException"),
    ("describe_vpcs", "InvalidVpcID.NotFound"),
]

HEALING_TEXTS = [
    "An error occurred (InvalidGroup.NotFound) when calling the RunInstances operation: The security group 'sg-1' does "
    "not exist",
    "An error occurred (InvalidInstanceID.NotFound) when calling the CreateTags operation: i-1 does not exist",
    "An error occurred (ConcurrentModification) when calling the PutRolePolicy operation",
    "An error occurred (EntityTemporarilyUnmodifiable): Entity is temporarily unmodifiable",
    "{'code': 'RESOURCE_NOT_READY', 'message': \"The resource 'networks/spotrl-run' is not ready\"}",
    "HttpError 400 reason: resourceNotReady",
]


class Answering:
    """A client of AWS whose method `method` gives the answers with these codes first."""

    def __init__(self, client, method: str, codes: list[str]) -> None:
        self.client, self.method, self.codes = client, method, codes

    def __getattr__(self, name):
        if name == self.method and self.codes:
            code = self.codes.pop(0)

            def refuse(**_):
                error = {"Code": code, "Message": "made up"}
                raise ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": 400}}, name)

            return refuse
        return getattr(self.client, name)


@pytest.fixture
def account(monkeypatch):
    """An account of AWS, and a way to make an API that first meets these answers."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    plain = clients()

    def answers(method: str = "", *codes: str) -> AwsApi:
        left = list(codes)
        return AwsApi(lambda service, region: Answering(plain(service, region), method, left))

    with mock_aws():
        yield answers


def prepare(api, owner="me", run="run"):
    return api.prepare(REGION, run=run, owner=owner, ssh_from=FROM, buckets=["s3://bucket/runs/run"])


@pytest.mark.parametrize(
    ("method", "code"), [*HEALING[:4], *(pytest.param(*answer, marks=pytest.mark.slow) for answer in HEALING[4:])]
)
def test_an_answer_that_heals_is_asked_again(account, method, code):
    api = account(method, code)
    with pytest.raises(CloudUnreachable, match="it is asked again"):
        prepare(api)
    assert prepare(api).identity == "spotrl-run"
    assert api.open_rules(prepare(api)) == []


@pytest.mark.parametrize(
    ("method", "quota"),
    [("create_role", "Roles per account"), ("create_instance_profile", "Instance profiles per account")],
)
def test_a_used_up_quota_of_iam_is_refused_by_its_name(account, method, quota):
    with pytest.raises(CloudRefused, match=f'{quota}" is used up.*Service Quotas, IAM'):
        prepare(account(method, "LimitExceeded"))
    iam = boto3.client("iam")
    assert iam.list_instance_profiles()["InstanceProfiles"] == [], "nothing else was made"


def test_a_profile_that_has_its_role_already_is_no_error(account):
    prepare(account())
    boto3.client("iam")
    assert prepare(account("add_role_to_instance_profile", "LimitExceeded")).identity == "spotrl-run"


TAGS = [{"Key": "spotrl-run", "Value": "run"}, {"Key": "spotrl-owner", "Value": "me"}]


@pytest.mark.parametrize(
    "tags", [[], [{"Key": "team", "Value": "b"}], [TAGS[1]], [TAGS[0], {**TAGS[1], "Value": "you"}]]
)
@pytest.mark.parametrize("what", ["role", "profile"])
def test_a_role_or_profile_of_our_name_that_is_not_ours_is_refused(account, what, tags):
    iam = boto3.client("iam")
    if what == "role":
        iam.create_role(RoleName="spotrl-run", AssumeRolePolicyDocument="{}", Tags=tags)
    else:
        iam.create_instance_profile(InstanceProfileName="spotrl-run", Tags=tags)
    with pytest.raises(CloudRefused, match=f"{what} spotrl-run is there already"):
        prepare(account())
    if what == "role":
        assert iam.list_role_policies(RoleName="spotrl-run")["PolicyNames"] == []
    else:
        assert iam.get_instance_profile(InstanceProfileName="spotrl-run")["InstanceProfile"]["Roles"] == []


def test_a_profile_of_ours_with_another_role_is_refused(account):
    """Its nodes would get that role's rights."""
    prepare(account())
    iam = boto3.client("iam")
    iam.create_role(RoleName="administrator", AssumeRolePolicyDocument="{}")
    iam.remove_role_from_instance_profile(InstanceProfileName="spotrl-run", RoleName="spotrl-run")
    iam.add_role_to_instance_profile(InstanceProfileName="spotrl-run", RoleName="administrator")
    with pytest.raises(CloudRefused, match="has the role administrator"):
        prepare(account())


def test_a_security_group_of_our_name_that_is_not_ours_is_refused(account):
    ec2 = boto3.client("ec2")
    group = ec2.create_security_group(GroupName="spotrl-run", Description="a colleague's")["GroupId"]
    with pytest.raises(CloudRefused, match="security group spotrl-run in us-east-1 is there already"):
        prepare(account())
    [found] = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    assert found["IpPermissions"] == []


# --- Google Cloud ---------------------------------------------------------------------------------------------------


class Unsettled(GoogleCalls):
    """Calls of which the first to a path that ends with `path` is answered as given."""

    def __init__(self, environ, path: str, answer: Answer) -> None:
        super().__init__(environ)
        self.path, self.answers = path, [answer]

    def call(self, method, url, body=None, query=None):
        if method == "POST" and url.endswith(self.path) and self.answers:
            raise self.answers.pop()
        return super().call(method, url, body, query)


@pytest.fixture
def google(monkeypatch):
    monkeypatch.setattr(gce_calls, "POLL_SECONDS", 0.01)
    server = GoogleServer()
    names = ("COMPUTE", "IAM", "RESOURCE_MANAGER")
    yield {f"SPOTRL_GCP_{name}_ENDPOINT": server.url for name in names} | {"GOOGLE_CLOUD_PROJECT": PROJECT}
    server.close()


def prepare_on_google(api, owner="me"):
    return api.prepare("us-central1", run="run", owner=owner, ssh_from=FROM, buckets=["gs://b/run"])


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/firewalls", "/subnetworks", "/serviceAccounts"])
@pytest.mark.parametrize(
    "answer",
    [
        Answer(400, "resourceNotReady", "The resource 'projects/p/global/networks/spotrl-run' is not ready"),
        Answer(400, "RESOURCE_NOT_READY", "not yet"),
        Answer(404, "notFound", "The resource 'projects/p/global/networks/spotrl-run' was not found"),
    ],
    ids=str,
)
def test_a_google_resource_that_is_not_ready_is_asked_again(google, path, answer):
    api = GceApi(google, Unsettled(google, path, answer))
    with pytest.raises(CloudUnreachable, match="it is asked again"):
        prepare_on_google(api)
    place = prepare_on_google(api)
    assert place.network == "spotrl-run"
    assert api.open_rules(place) == []


def test_a_google_service_account_of_our_name_that_is_not_ours_is_refused(google):
    prepare_on_google(GceApi(google))
    assert prepare_on_google(GceApi(google)).identity.startswith("spotrl-run@")
    api = GceApi(google)
    api.remove([*api.resources("us-central1", run="run"), *api.resources(api.home, run="run")])
    where = ("SPOTRL_GCP_IAM_ENDPOINT", "", "/v1/projects/{project}")
    body = {"accountId": "spotrl-run", "serviceAccount": {"displayName": "a colleague's"}}
    api.calls.ask("POST", where, "/serviceAccounts", body)
    with pytest.raises(CloudRefused, match=r"service account spotrl-run@.* is there already"):
        prepare_on_google(api)


# --- a node meanwhile -----------------------------------------------------------------------------------------------


def test_a_node_waits_while_its_region_settles_and_starts_then(tmp_path, account):
    stage = ProvisionerStage(tmp_path)
    unsettled = account("describe_regions", *["InvalidGroup.NotFound"] * 9)
    plain, tries = stage.cloud.prepare, []

    def prepare(region, **more):
        tries.append(region)
        if unsettled is not None and len(tries) < 9:
            unsettled.regions()
        return plain(region, **more)

    stage.cloud.prepare = prepare
    stage.request()
    stage.passes(240)
    assert len(tries) == 9
    assert len(stage.sky.launches) == 1


def test_a_region_that_never_settles_is_left_and_not_denied(tmp_path, account):
    stage = ProvisionerStage(tmp_path)
    unsettled = account("describe_regions", *["InvalidGroup.NotFound"] * 1000)
    stage.cloud.prepare = lambda *_, **__: unsettled.regions()
    stage.request()
    stage.passes(200, step=2)
    assert stage.passes(1)[NODE].status == "unknown"
    assert stage.passes(200, step=2)[NODE].status == "gone"


@pytest.mark.parametrize("text", HEALING_TEXTS)
def test_a_healing_answer_in_skypilots_log_sends_the_launch_again(tmp_path, text):
    stage = ProvisionerStage(tmp_path)
    stage.request()
    stage.passes(1)
    stage.sky.finish(NODE, outcome_of("ResourcesUnavailableError", f"a log\n{text}"))
    stage.passes(30)
    assert len(stage.sky.launches) == 2
    stage.sky.finish(NODE)
    assert stage.passes(10)[NODE].status == "pending"
