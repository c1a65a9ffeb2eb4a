"""Requests to SkyPilot and the meaning of its answers. No test imports SkyPilot, because that takes seconds."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import stamina

from engine.events import Market
from launcher.clouds.base import RegionSetup
from launcher.decide.node_facts import is_quota_used_up
from launcher.job.company import Named
from launcher.placement.placement import Placement
from launcher.provision.sky.our_nodes import (
    TRIES,
    _repeated,
    _start_ray,
    _without_credentials,
    email_of,
    labels_of,
)
from launcher.provision.sky.outcome import Failed, outcome_of
from launcher.provision.sky.sky import is_node_of
from launcher.provision.sky.task import FIRST_OF_ALL, Launch, network_config, task_of


def launch(cloud="aws", zone="us-east-1a", gpus=1, market=Market.SPOT, image=None):
    region = "us-east-1" if cloud == "aws" else "us-central1"
    return Launch(
        name="run-rollout-0-g0",
        want=Placement(
            cloud=cloud,
            region=region,
            zone=zone,
            instance_type="g6.xlarge" if cloud == "aws" else "g2-standard-4",
            gpus=gpus,
            accelerator="L4",
            market=market,
            micro_usd_per_hour=1,
            price_source="test",
            price_observed_at="2026-11-01T00:00:00Z",
        ),
        region_setup=RegionSetup(
            cloud=cloud, region=region, group="spotrl-run", identity="spotrl-run@p.iam.gserviceaccount.com"
        ),
        labels={"spotrl-run": "run"},
        autostop_minutes=90,
        image=image,
    )


def test_a_task_names_exactly_one_resource():
    task = task_of(launch())
    assert task["resources"]["infra"] == "aws/us-east-1/us-east-1a"
    assert task["resources"]["use_spot"] is True
    assert "run" not in task
    assert "ports" not in task["resources"]
    assert task["resources"]["disk_size"] == 100


def test_a_node_has_the_disk_of_its_plan():
    larger = launch()
    larger = replace(larger, want=replace(larger.want, disk_gib=260))
    assert task_of(larger)["resources"]["disk_size"] == 260


def test_a_machine_image_is_passed_on_and_optional():
    assert task_of(launch(image="ami-1"))["resources"]["image_id"] == "ami-1"
    assert "image_id" not in task_of(launch())["resources"]


@pytest.mark.parametrize(
    ("cluster", "ours"),
    [("run-spot-0-g1", True), ("run-trainer-g12", True), ("run-eval", False), ("run-g1", False), ("rerun-a-g1", False)],
)
def test_a_users_other_clusters_are_not_nodes_of_a_run(cluster, ours):
    assert is_node_of(cluster, "run") is ours


def test_without_a_zone_any_zone_of_the_region_is_requested():
    assert task_of(launch(zone="us-east-1, any zone"))["resources"]["infra"] == "aws/us-east-1"


def test_an_instance_terminates_itself_whatever_runs_on_it():
    assert task_of(launch())["resources"]["autostop"] == {"idle_minutes": 90, "down": True, "wait_for": "none"}


def test_a_google_task_names_the_gpu_and_the_service_account():
    task = task_of(launch(cloud="gcp", zone="us-central1-a"))
    assert task["resources"]["accelerators"] == {"L4": 1}
    assert task["resources"]["labels"]["spotrl-identity"] == "spotrl-run"
    assert email_of(task["resources"]["labels"], "mine") == "spotrl-run@p.iam.gserviceaccount.com"
    assert email_of({"spotrl-identity": "a"}, "mine") == "a@mine.iam.gserviceaccount.com"
    assert "accelerators" not in task_of(launch())["resources"]  # the instance type implies the GPU


PRIVATE = Named(network="vpc-1", group="nodes", public_addresses=False, ssh_proxy="ssh -W %h:%p bastion")


def named_place(cloud, named, **more):
    known = {"region": "r", "group": "nodes", "identity": "node", "network": "company", "named": named}
    return RegionSetup(cloud=cloud, **{**known, **more})


def test_skypilot_gets_every_key_of_a_named_network():
    assert network_config(named_place("aws", PRIVATE, subnets=("a", "b"))) == {
        "vpc_name": "company",
        "vpc_names": None,
        "subnet_names": ["a", "b"],
        "use_internal_ips": True,
        "use_ssm": False,
        "ssh_proxy_command": "ssh -W %h:%p bastion",
    }
    assert network_config(named_place("gcp", Named(network="host/company"))) == {
        "vpc_name": "company",
        "subnet_names": None,
        "use_internal_ips": False,
        "ssh_proxy_command": None,
    }


SCHEMA = """
from launcher.clouds.base import RegionSetup
from launcher.provision.sky.task import config_of
from launcher.job.company import Named
from sky.utils import common_utils, schemas

private = Named(network="vpc-1", public_addresses=False, ssh_proxy="ssh -W %h:%p bastion")
for cloud in ("aws", "gcp"):
    for named in (private, Named(network="company")):
        setup = RegionSetup(cloud=cloud, region="r", group="nodes", identity="node", network="company", named=named)
        config = config_of(setup)
        common_utils.validate_schema(config, schemas.get_config_schema(), skip_none=False)
        assert config[cloud]["use_internal_ips"] is not named.public_addresses
        assert config["aws"]["remote_identity"] == ("node" if cloud == "aws" else "NO_UPLOAD")

import inspect
from types import SimpleNamespace
from launcher.provision.sky.our_nodes import OurNodes, _without_ray
from sky import provision
from sky.provision import instance_setup

parameters = list(inspect.signature(instance_setup.start_ray_on_head_node).parameters)
assert parameters == ["cluster_name", "custom_resource", "cluster_info", "ssh_credentials"], parameters
OurNodes().install(None)
OurNodes().install(None)
assert not hasattr(instance_setup.start_ray_on_head_node.args[0], "args"), "wrapped once"
for cloud in ("aws", "gcp"):
    assert provision.get_registered_provisioner(cloud).module.run_instances
from sky.adaptors.gcp import http_error_exception
assert http_error_exception()(SimpleNamespace(status=503, reason=""), b"").status_code == 503
ours, others = ({"labels": {label: "run"}} for label in ("spotrl-run", "team"))
for node_config, has_ray in ((ours, False), (others, True)):
    record = SimpleNamespace(runtime_metadata=SimpleNamespace(has_ray=True))
    found = _without_ray(record, SimpleNamespace(node_config=node_config)).runtime_metadata
    assert found.has_ray is has_ray

from launcher.provision.sky.google_notice import with_notice
from sky.provision import common
from sky.provision.gcp import instance

FIELD = "preemptionNoticeDuration"
asked = []

def run(config, refusal=""):
    asked.append(config["scheduling"])
    if refusal and (refusal != FIELD or FIELD in config["scheduling"]):
        error = common.ProvisionerError("Failed to launch instances.")
        error.errors = [{"code": "badRequest", "message": f"Unknown name {refusal} at resource.scheduling"}]
        raise error
    return "made"

spot, notice = {"provisioningModel": "SPOT"}, {FIELD: {"seconds": 120}}
for refusal, tries in (("", [spot | notice]), (FIELD, [spot | notice, spot])):
    for given in (dict(spot), [dict(spot)]):
        config = {"scheduling": given}
        assert with_notice(lambda: run(config, refusal), config) == "made"
        assert asked == tries, asked
        asked.clear()
config = {"scheduling": dict(spot)}
try:
    with_notice(lambda: run(config, "QUOTA_EXCEEDED"), config)
except common.ProvisionerError as error:
    assert asked == [spot | notice], "another refusal is not asked again"
else:
    raise AssertionError("another refusal is an error")

made = []
def run_instances(region, cluster_name, cluster_name_on_cloud, config):
    made.append(config.node_config["scheduling"])
    return SimpleNamespace(runtime_metadata=None)

instance.run_instances = run_instances
on_google = provision.get_registered_provisioner("gcp").module
for labels, scheduling in (
    ({"spotrl-run": "run"}, spot),
    ({"spotrl-run": "run"}, {}),
    ({"team": "b"}, spot),
):
    on_google.run_instances("r", "c", "c-1", SimpleNamespace(node_config={"labels": labels, "scheduling": scheduling}))
assert made == [spot | notice, {}, spot], made
"""


@pytest.mark.skipif(find_spec("sky") is None, reason="SkyPilot is not installed here")
def test_the_settings_of_a_named_network_and_the_plugin_fit_skypilot(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", SCHEMA], env=environment, check=True)


def test_skypilots_ray_is_started_on_the_instances_of_others_only():
    started = []

    def start(*arguments):
        started.append(arguments[0])

    for name, tags in (("mine", {"spotrl-run": "run"}), ("theirs", {"team": "b"}), ("bare", None)):
        info = SimpleNamespace(get_head_instance=lambda tags=tags: SimpleNamespace(tags=tags))
        _start_ray(start, name, custom_resource=None, cluster_info=info, ssh_credentials={})
    assert started == ["theirs", "bare"]


def test_labels_are_read_from_both_clouds_configurations():
    on_aws = {"TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "spotrl-run", "Value": "a"}]}]}
    assert labels_of(on_aws) == labels_of({"labels": {"spotrl-run": "a"}}) == {"spotrl-run": "a"}


def test_skypilot_copies_nothing_to_a_node_and_runs_no_job_there():
    """A set-up of SkyPilot's is a job of its scheduler, which takes longer to begin than our set-up takes."""
    assert not {"file_mounts", "setup", "run"} & set(task_of(launch()))


def test_no_credential_file_is_uploaded_to_a_node(monkeypatch):
    """SkyPilot's configuration cannot stop uploads for every cloud, so our nodes get its template without uploads."""
    skypilot = SimpleNamespace(provision=SimpleNamespace(TemplateSpec=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "sky", skypilot)

    def template(labels: dict[str, str] | None, cloud: str) -> SimpleNamespace | None:
        machine = SimpleNamespace(labels=labels, cloud=SimpleNamespace(canonical_name=lambda: cloud))
        return _without_credentials(None, machine, _extra_launch_context=None, _is_launched_by_jobs_controller=False)

    for cloud in ("aws", "gcp"):
        assert vars(template({"spotrl-run": "run"}, cloud)) == {
            "template_path": f"{cloud}-ray.yml.j2",
            "variables": {"credentials": {}},
        }
        assert template({"team": "b"}, cloud) is None  # clusters of others are as SkyPilot makes them
        assert template(None, cloud) is None


def test_credentials_uploaded_by_skypilot_are_removed_first():
    assert FIRST_OF_ALL.startswith("rm -rf ~/.aws/credentials")
    assert "huggingface/token" in FIRST_OF_ALL


@pytest.mark.parametrize(
    ("message", "failed"),
    [
        ("An error occurred (InsufficientInstanceCapacity) when calling RunInstances", Failed.NO_CAPACITY),
        ("code: ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", Failed.NO_CAPACITY),
        ("An error occurred (SpotMaxPriceTooLow)", Failed.NO_CAPACITY),
        ("An error occurred (VcpuLimitExceeded): You have requested more vCPU capacity", Failed.DENIED),
        ("QUOTA_EXCEEDED: Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 0.0 in region us-central1.", Failed.DENIED),
        ("Found no quota for g6.xlarge spot instances in region us-east-1", Failed.DENIED),
        ("An error occurred (UnauthorizedOperation)", Failed.DENIED),
        ("An error occurred (InvalidAMIID.NotFound)", Failed.DENIED),
        ("(InvalidParameterValue): Invalid IAM Instance Profile name", Failed.UNKNOWN),
        ("An error occurred (RequestLimitExceeded)", Failed.UNKNOWN),
        ("something else", Failed.REFUSED),
    ],
)
def test_error_codes_of_the_cloud_decide_the_outcome(message, failed):
    assert outcome_of(f"ResourcesUnavailableError\n{message}", "").failed is failed
    assert outcome_of("ResourcesUnavailableError", f"a log\n{message}\nmore").failed is failed


def test_a_zone_without_capacity_outweighs_a_zone_that_refuses():
    log = "(VcpuLimitExceeded) in us-east-1a\n(InsufficientInstanceCapacity) in us-east-1b"
    assert outcome_of("ResourcesUnavailableError", log).failed is Failed.NO_CAPACITY


@pytest.mark.parametrize(
    ("words", "is_used_up"),
    [
        ("(MaxSpotInstanceCountExceeded) when calling RunInstances: Max spot instance count exceeded", True),
        ("(VcpuLimitExceeded): You have requested more vCPU capacity than your current vCPU limit of 96 allows", True),
        ("(VcpuLimitExceeded): You have requested more vCPU capacity than your current vCPU limit of 0 allows", False),
        ("QUOTA_EXCEEDED: Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.  Limit: 8.0 in region us-central1.", True),
        ("QUOTA_EXCEEDED: Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.  Limit: 0.0 in region us-central1.", False),
        ("Found no quota for g6.xlarge spot instances in region us-east-1", False),
        ("(UnauthorizedOperation)", False),
    ],
)
def test_a_used_up_quota_differs_from_a_quota_of_zero(words, is_used_up):
    outcome = outcome_of("ResourcesUnavailableError", words)
    assert outcome.failed is Failed.DENIED
    assert is_quota_used_up(outcome.text) is is_used_up


def test_a_denial_names_where_to_request_quota():
    outcome = outcome_of("ResourcesUnavailableError", "x\n(VcpuLimitExceeded) You have requested more\ny")
    assert outcome.text.startswith("(VcpuLimitExceeded)")
    assert "Service Quotas" in outcome.text
    assert "--print-policy" in outcome_of("x", "(UnauthorizedOperation)").text


VIOLATED = (
    "{'code': 412, 'message': \"Constraint constraints/{name} violated for project 123.\", 'reason': 'conditionNotMet'}"
)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            VIOLATED.replace("{name}", "compute.vmExternalIpAccess"),
            r"constraints/compute.vmExternalIpAccess forbids.*public_addresses: false",
        ),
        (
            VIOLATED.replace("{name}", "compute.trustedImageProjects"),
            r"trustedImageProjects forbids.*image of a trusted project",
        ),
        (VIOLATED.replace("{name}", "compute.requireOsLogin"), r"requireOsLogin forbids.*keys in a machine's metadata"),
        (VIOLATED.replace("{name}", "gcp.resourceLocations"), r"constraints/gcp.resourceLocations forbids.*exception"),
        (
            "Location ZONE:us-east4-a violates constraint constraints/gcp.resourceLocations on the resource projects/p",
            r"constraints/gcp.resourceLocations forbids.*exception",
        ),
        ("HttpError 412: Precondition failed, reason: conditionNotMet", "A policy of the organisation forbids it"),
        ("(UnauthorizedOperation) with an explicit deny in a service control policy", "A policy of the organisation"),
        ("No usable subnets matching availability zone ['us-east-1e'] found.", "create-default-subnet"),
        ("The default VPC in us-east-1 either does not exist or has no subnets.", "create-default-vpc"),
        ("SUBNET_NOT_FOUND_FOR_VPC: No subnet for region us-west8 found", r"`network:`"),
        ("Details: [RuntimeError] Missing `gcloud` cli dependency.", r"`gcloud auth login`"),
        ("Task requires GCP which is not enabled. To enable access, run: sky check gcp", r"`gcloud auth login`"),
    ],
)
def test_an_error_that_only_the_user_can_fix_is_a_denial_with_a_remedy(message, advice):
    outcome = outcome_of(f"ResourcesUnavailableError\n{message}", "a log")
    assert outcome.failed is Failed.DENIED
    assert outcome.text.startswith(message)
    assert re.search(advice, outcome.text.splitlines()[-1])


def test_a_call_that_skypilot_repeated_does_not_decide_the_outcome():
    """The last errors are the evidence, also if they follow a call that was answered at the second try."""
    repeated = "W 11-29 09:58:44.480 PID=16826 common_utils.py:761] Caught <HttpError 503 ... backendError>. Retrying."
    policy = "Location ZONE:us-east4-a violates constraint constraints/gcp.resourceLocations on the resource projects/p"
    outcome = outcome_of("ResourcesUnavailableError", f"{repeated}\n{policy}")
    assert (outcome.failed, outcome.text.splitlines()[0]) == (Failed.DENIED, policy)
    assert outcome_of("ResourcesUnavailableError", f"{repeated}\n<HttpError 503 backendError>").failed is Failed.UNKNOWN


@pytest.mark.parametrize(("status", "answers_at", "tries"), [(503, 3, 3), (429, 3, 3), (503, 9, TRIES), (403, 3, 1)])
def test_the_preparation_of_a_region_on_google_is_repeated_while_it_does_not_answer(status, answers_at, tries):
    class HttpError(Exception):
        status_code = status

    asked = []

    def prepare():
        asked.append(status)
        if len(asked) < answers_at:
            raise HttpError
        return "prepared"

    with stamina.set_testing(True, attempts=TRIES):  # without the gaps
        if tries == answers_at:
            assert _repeated(prepare, HttpError) == "prepared"
        else:
            with pytest.raises(HttpError):
                _repeated(prepare, HttpError)
    assert len(asked) == tries


def test_evidence_is_the_clouds_message_without_log_prefixes():
    log = "W 11-22 14:20:48.164 PID=8078 instance.py:415] create_instances: (InsufficientInstanceCapacity) no m6i.large"
    text = outcome_of("ResourcesUnavailableError", log).text
    assert text == "create_instances: (InsufficientInstanceCapacity) no m6i.large"


def test_a_failed_command_is_a_setup_failure_with_its_log():
    outcome = outcome_of("CommandError\nexit 127", "spotrl set-up, 3 s: failed with 1 while installing")
    assert outcome.failed is Failed.SETUP
    assert "while installing" in outcome.text
