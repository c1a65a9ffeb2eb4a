"""What SkyPilot is asked for, and what its answers mean. Nothing here imports it: that takes seconds."""

import pytest

from engine.events import Market
from launcher.cluster.clouds.base import Place
from launcher.cluster.sky import Failed, Launch, is_node_of, outcome_of, task_of
from launcher.placement.placement import Placement


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
        place=Place(cloud=cloud, region=region, group="spotrl-run", identity="spotrl-run@p.iam.gserviceaccount.com"),
        labels={"spotrl-run": "run"},
        setup="sh set_up.sh",
        files={"~/spotrl/bundle": "/bundle"},
        autostop_minutes=90,
        image=image,
    )


def test_one_resource_and_no_choice():
    task = task_of(launch())
    assert task["resources"]["infra"] == "aws/us-east-1/us-east-1a"
    assert task["resources"]["use_spot"] is True
    assert "run" not in task
    assert "ports" not in task["resources"]


def test_an_image_is_named_and_without_one_skypilot_chooses():
    assert task_of(launch(image="ami-1"))["resources"]["image_id"] == "ami-1"
    assert "image_id" not in task_of(launch())["resources"]


@pytest.mark.parametrize(
    ("cluster", "ours"),
    [("run-spot-0-g1", True), ("run-trainer-g12", True), ("run-eval", False), ("run-g1", False), ("rerun-a-g1", False)],
)
def test_a_users_other_clusters_are_no_nodes_of_a_run(cluster, ours):
    assert is_node_of(cluster, "run") is ours


def test_any_zone_of_a_region_is_asked_for_without_one():
    assert task_of(launch(zone="us-east-1, any zone"))["resources"]["infra"] == "aws/us-east-1"


def test_a_machine_ends_itself_whatever_runs_on_it():
    assert task_of(launch())["resources"]["autostop"] == {"idle_minutes": 90, "down": True, "wait_for": "none"}


def test_google_is_told_the_gpu_and_whom_the_machine_runs_as():
    task = task_of(launch(cloud="gcp", zone="us-central1-a"))
    assert task["resources"]["accelerators"] == {"L4": 1}
    assert task["resources"]["labels"]["spotrl-identity"] == "spotrl-run"
    assert "accelerators" not in task_of(launch())["resources"]  # its type says it


def test_credentials_that_skypilot_may_have_left_are_removed_before_anything_else():
    first, second = task_of(launch())["setup"].splitlines()
    assert first.startswith("rm -rf ~/.aws/credentials")
    assert "huggingface/token" in first
    assert second == "sh set_up.sh"


@pytest.mark.parametrize(
    ("said", "failed"),
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
        ("something else", Failed.UNKNOWN),
    ],
)
def test_the_clouds_own_codes_decide(said, failed):
    assert outcome_of(f"ResourcesUnavailableError\n{said}", "").failed is failed
    assert outcome_of("ResourcesUnavailableError", f"a log\n{said}\nmore").failed is failed


def test_one_zone_without_machines_outweighs_another_that_refuses():
    log = "(VcpuLimitExceeded) in us-east-1a\n(InsufficientInstanceCapacity) in us-east-1b"
    assert outcome_of("ResourcesUnavailableError", log).failed is Failed.NO_CAPACITY


def test_a_denial_says_where_to_ask():
    outcome = outcome_of("ResourcesUnavailableError", "x\n(VcpuLimitExceeded) You have requested more\ny")
    assert outcome.text.startswith("(VcpuLimitExceeded)")
    assert "Service Quotas" in outcome.text
    assert "--print-policy" in outcome_of("x", "(UnauthorizedOperation)").text


def test_evidence_is_the_clouds_sentence_and_not_who_logged_it():
    log = "W 11-22 14:20:48.164 PID=8078 instance.py:415] create_instances: (InsufficientInstanceCapacity) no m6i.large"
    text = outcome_of("ResourcesUnavailableError", log).text
    assert text == "create_instances: (InsufficientInstanceCapacity) no m6i.large"


def test_a_command_that_failed_is_the_set_up_and_its_log_is_kept():
    outcome = outcome_of("CommandError\nexit 127", "spotrl set-up, 3 s: failed with 1 while installing")
    assert outcome.failed is Failed.SETUP
    assert "while installing" in outcome.text
