"""Self-termination: an instance deletes itself through its cloud, and shuts down only if that fails."""

from datetime import UTC, datetime

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.server import ThreadedMotoServer

from engine.node import self_termination
from engine.node.self_termination import signed, terminate_instance
from engine.storage.metadata import GCE_HOST, IMDS_URL
from tests.engine.fake_metadata import FakeCompute, FakeGceMetadata, FakeImds

KEYS = {"AccessKeyId": "ASIA0", "SecretAccessKey": "secret", "Token": "session"}


@pytest.fixture
def log_lines(monkeypatch, tmp_path):
    """Return the log lines; the shutdown command leaves a file."""
    monkeypatch.setenv("SPOTRL_SHUTDOWN", f"touch {tmp_path}/shut-down")
    monkeypatch.setattr(self_termination, "GAP_SECONDS", 0.01)
    return []


@pytest.fixture
def imds(monkeypatch):
    service = FakeImds()
    monkeypatch.setenv(IMDS_URL, service.url)
    yield service
    service.close()


@pytest.fixture
def google(monkeypatch):
    metadata, compute = FakeGceMetadata(), FakeCompute()
    metadata.is_instance("a-machine")
    monkeypatch.setenv(GCE_HOST, metadata.address)
    monkeypatch.setenv("SPOTRL_GCP_COMPUTE_ENDPOINT", compute.url)
    yield compute
    metadata.close()
    compute.close()


@pytest.fixture(scope="module")
def ec2():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield boto3.client(
        "ec2",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-west-2",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    server.stop()


def state_of(ec2, instance):
    return ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0]["State"]["Name"]


def test_the_request_signature_equals_that_of_botocore():
    endpoint, body = "https://ec2.us-west-2.amazonaws.com", b"Action=TerminateInstances&InstanceId.1=i-1"
    ours = signed(endpoint, body, "us-west-2", KEYS, datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC))
    content_type = {"Content-Type": ours["content-type"], "X-Amz-Date": ours["x-amz-date"]}
    request = AWSRequest("POST", f"{endpoint}/", headers=content_type, data=body)
    signer = SigV4Auth(Credentials("ASIA0", "secret", "session"), "ec2", "us-west-2")
    request.context["timestamp"] = ours["x-amz-date"]
    request.headers["X-Amz-Security-Token"] = "session"
    to_sign = signer.string_to_sign(request, signer.canonical_request(request))
    theirs = signer.signature(to_sign, request)
    assert ours["authorization"].endswith(f"Signature={theirs}")
    assert "Credential=ASIA0/20300102/us-west-2/ec2/aws4_request" in ours["authorization"]


@pytest.mark.slow
def test_an_aws_instance_terminates_itself_with_its_role(imds, ec2, log_lines, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", ec2.meta.endpoint_url)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    made = ec2.run_instances(ImageId=image, MinCount=2, MaxCount=2, InstanceType="m6i.large")["Instances"]
    this, other = (instance["InstanceId"] for instance in made)
    imds.is_instance(this, region="us-west-2")
    terminate_instance("aws", log_lines.append, still_here_seconds=0)
    assert (state_of(ec2, this), state_of(ec2, other)) == ("terminated", "running")
    assert log_lines[0] == f"ending this instance: EC2 terminates {this} in us-west-2"
    assert (tmp_path / "shut-down").exists()  # the instance of this test still existed


def test_a_google_instance_deletes_itself_with_its_service_account(google, log_lines):
    terminate_instance("gcp", log_lines.append, still_here_seconds=0)
    assert google.deleted == ["/compute/v1/projects/a-project/zones/us-central1-a/instances/a-machine"]
    assert log_lines[0] == "ending this instance: Compute Engine deletes a-machine in us-central1-a"


def test_a_failing_cloud_api_is_called_again(google, log_lines):
    google.refusing = 2
    terminate_instance("gcp", log_lines.append, still_here_seconds=0)
    assert len(google.deleted) == 1
    assert ["try 1 of 3" in log_lines[0], "503" in log_lines[0], "try 2 of 3" in log_lines[1]] == [True, True, True]


def test_an_instance_that_cannot_delete_itself_shuts_down(google, log_lines, tmp_path):
    google.refusing = 3
    terminate_instance("gcp", log_lines.append)
    assert google.deleted == []
    assert (tmp_path / "shut-down").exists()


def test_an_instance_without_identity_shuts_down_and_logs_what_is_missing(imds, log_lines, tmp_path):
    terminate_instance("aws", log_lines.append)
    assert "knows no identity document of this instance" in log_lines[0]
    assert (tmp_path / "shut-down").exists()


def test_a_failed_shutdown_is_logged(google, log_lines, monkeypatch):
    monkeypatch.setenv("SPOTRL_SHUTDOWN", "/no/such/program now")
    google.refusing = 3
    terminate_instance("gcp", log_lines.append)
    assert "No such file" in log_lines[-1]


@pytest.mark.parametrize("cloud", ["local", ""])
def test_a_local_node_terminates_no_instance(log_lines, tmp_path, cloud):
    terminate_instance(cloud, log_lines.append)
    assert len(log_lines) == 1
    assert not (tmp_path / "shut-down").exists()
