"""Refusals in words that nobody foresaw, and launches that never leave this machine: the run moves, and never ends.

The texts are those of public reports. The controller, the ledger and the provisioner are real; the clouds, SkyPilot and
the clocks are simulated.
"""

import pytest

from launcher.provision.sky.outcome import Failed, outcome_of
from tests.launcher.cluster.stage import CLOUD_SITES, ledger
from tests.launcher.cluster.test_moving import Stage
from tests.launcher.cluster.test_sky_provisioner import NODE
from tests.launcher.cluster.test_sky_provisioner import Stage as ProvisionerStage

KMS = "Client.InternalError: Client error on launch"

REFUSALS = {
    "type not in zone": (
        "An error occurred (Unsupported) when calling the RunInstances operation: Your requested instance type "
        "(g6.xlarge) is not supported in your requested Availability Zone (us-east-1a).",
        "the run asks other places",
    ),
    "google: type not in zone": (
        "Machine type with name 'a3-highgpu-8g' does not exist in zone 'us-west4-b'.",
        "the run asks other places",
    ),
    "google: type not found": (
        "Invalid value for field 'resource.machineType': 'zones/us-west4-b/machineTypes/g2-standard-4'. The referenced "
        "machineTypes resource was not found",
        "the run asks other places",
    ),
    "new account": (
        "An error occurred (PendingVerification) when calling the RunInstances operation: Your request for accessing "
        "resources in this region is being validated, and you will not be able to launch additional resources in this "
        "region until the validation is complete.",
        "at most four hours",
    ),
    "free plan": (
        "An error occurred (InvalidParameterCombination) when calling the RunInstances operation: The specified "
        "instance type is not eligible for Free Tier.",
        "Upgrade plan",
    ),
    "billing": (
        "HttpError 403: This API method requires billing to be enabled. Please enable billing on project #1.",
        "link the project to an open billing account",
    ),
    "billing account closed": (
        "The billing account for the owning project is disabled in state closed",
        "link the project to an open billing account",
    ),
    "account blocked": (
        "An error occurred (Blocked) when calling the RunInstances operation: This account is currently blocked and "
        "not recognized as a valid account.",
        "AWS support",
    ),
    "API off": (
        "Compute Engine API has not been used in project 123 before or it is disabled. Enable it by visiting "
        "https://console.developers.google.com/apis/api/compute 'reason': 'accessNotConfigured', PERMISSION_DENIED",
        "gcloud services enable compute.googleapis.com",
    ),
    "disk space": (
        "An error occurred (VolumeLimitExceeded) when calling the RunInstances operation: You have exceeded your "
        "maximum gp3 storage limit of 50 TiB in this region.",
        "Amazon EBS",
    ),
    "first spot": (
        "An error occurred (AuthFailure.ServiceLinkedRoleCreationNotPermitted): The provided credentials do not have "
        "permission to create the service-linked role for EC2 Spot Instances.",
        "create-service-linked-role",
    ),
    "key of the disk": (KMS, "kms:CreateGrant"),
    "google: key of the disk": (
        "Cloud KMS error when using key projects/p/locations/l/keyRings/r/cryptoKeys/k: Permission "
        "'cloudkms.cryptoKeyVersions.useToEncrypt' denied",
        "CryptoKey Encrypter",
    ),
    "never seen": ("An error occurred (SomethingNew2027): the moon is in the wrong phase", "the moon"),
}


@pytest.fixture
def sessions(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    return ledger(tmp_path)


@pytest.mark.parametrize(("text", "remedy"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_launch_frees_its_slot_at_once_and_says_the_remedy(tmp_path, text, remedy):
    stage = ProvisionerStage(tmp_path)
    stage.request()
    stage.passes(1)
    stage.sky.finish(NODE, outcome_of(f"ResourcesUnavailableError\n{text}", "the log of SkyPilot"))
    fact = stage.passes(10)[NODE]
    assert fact.status == "gone", "a denial would last for the whole run"
    assert fact.started_ms is None
    assert len(stage.sky.launches) == 1, "the same zone gave its answer"
    assert text[:60] in fact.evidence
    assert remedy in fact.evidence


@pytest.mark.parametrize(("quota", "page"), [("SSD_TOTAL_GB", "resources.disk_gb"), ("IN_USE_ADDRESSES", "addresses")])
def test_a_used_up_quota_beside_gpus_names_its_own_remedy(quota, page):
    outcome = outcome_of("ResourcesUnavailableError", f"QUOTA_EXCEEDED: Quota '{quota}' exceeded.  Limit: 500.0 in r.")
    assert outcome.failed is Failed.DENIED
    assert page in outcome.text.splitlines()[-1]


@pytest.mark.parametrize("text", ["STOCKOUT: the zone is empty", "UnfulfillableCapacity"])
def test_words_for_an_empty_zone_are_a_lack_of_capacity(text):
    assert outcome_of("ResourcesUnavailableError", text).failed is Failed.NO_CAPACITY


@pytest.mark.parametrize("answer", ["odd", "dies"])
@pytest.mark.parametrize("words", [KMS, REFUSALS["type not in zone"][0], "delete", "never heard of"])
def test_a_region_that_gives_no_trainer_in_any_words_is_left(sessions, answer, words):
    stage = Stage(sessions)
    stage.cloud.answers["gcp/g1/"], stage.cloud.words = answer, words
    stage.passes(20, step_ms=20_000)
    assert set(stage.live().values()) == {("gcp", "g2")}
    assert len(stage.live()) == 3
    assert stage.reason()[0] == "running"


def test_a_run_refused_everywhere_waits_and_goes_on_when_a_place_opens(sessions):
    stage = Stage(sessions)
    stage.cloud.answers |= {"gcp/": "odd", "aws/": "odd"}
    stage.passes(90, step_ms=30_000)
    assert stage.reason()[0] == "running"
    assert all("trainer" in name for name in stage.live())
    assert stage.spent() == 0
    stage.cloud.answers = {"gcp/": "odd"}
    stage.passes(60, step_ms=30_000)
    assert set(stage.live().values()) == {("aws", "e1")}
    assert len(stage.live()) == 3


@pytest.mark.parametrize("answer", ["odd", "dies"])
def test_a_zone_that_gives_no_rollout_node_in_any_words_is_left(sessions, answer):
    stage = Stage(sessions, sites=CLOUD_SITES[:1])
    stage.cloud.answers["gcp/g1/g1-a"] = answer
    stage.passes(20, step_ms=20_000)
    zones = {stage.cloud.requested[name][0].zone for name in stage.live() if "spot" in name}
    assert zones == {"g1-b"}
    assert len(stage.live()) == 3
    assert stage.reason()[0] == "running"


def test_the_only_zone_for_rollout_nodes_is_asked_again_after_any_number_of_refusals(sessions):
    stage = Stage(sessions, sites=CLOUD_SITES[:1])
    stage.passes(3)
    stage.cloud.answers["rollouts"] = "odd"
    for name in [name for name in stage.live() if "spot" in name]:
        stage.cloud.preempt(name)
    stage.passes(120, step_ms=30_000)
    assert stage.reason()[0] == "running"
    assert "demo-trainer-g0" in stage.live()
    stage.cloud.answers.clear()
    stage.passes(40, step_ms=30_000)
    assert len(stage.live()) == 3


def test_a_node_whose_own_setup_fails_three_times_alike_still_ends_the_run(sessions):
    """The fault is in the job, so another place would not help."""
    stage = Stage(sessions)
    stage.cloud.answers["trainers"], stage.cloud.words = "dies", "its set-up failed with exit code 1: no wheel"
    stage.passes(30, step_ms=10_000)
    status, reason = stage.reason()
    assert status == "failed"
    assert "lost 3 times in the same way" in reason


def test_an_instance_ended_by_the_cloud_at_once_names_the_key_of_its_disk(tmp_path):
    stage = ProvisionerStage(tmp_path)
    stage.request()
    stage.passes(1)
    stage.cloud.start(NODE, stage.sky.launches[0].want)
    stage.passes(4)
    stage.cloud.vanish(NODE, reason=KMS, ended_ms=stage.time.ms)
    fact = stage.passes(150)[NODE]
    assert fact.status == "gone"
    assert "kms:CreateGrant" in fact.evidence


def test_an_account_that_the_user_can_mend_is_no_denial_before_the_launch_either(tmp_path):
    stage = ProvisionerStage(tmp_path)
    stage.cloud.refuses = "gcp compute network: Google Cloud refused (403 accessNotConfigured: API is off)"
    stage.request()
    assert stage.passes(10)[NODE].status == "gone"
