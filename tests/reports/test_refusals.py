"""Refusals in words that nobody foresaw, and launches that never leave this machine: the run moves, and never ends.

The texts are those of public reports. The controller, the ledger and the provisioner are real; the clouds, SkyPilot and
the clocks are simulated.
"""

import re
import shutil
from dataclasses import replace
from importlib.resources import files

import pytest

from engine.events import Market
from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from launcher.market.offers import buyable, read_catalog
from launcher.provision.sky.outcome import Failed, outcome_of
from launcher.replay import of_plan
from tests.launcher.cluster.stage import CLOUD_SITES, ledger
from tests.launcher.cluster.test_moving import MINUTE, Stage
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


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["odd", "dies"])
@pytest.mark.parametrize("words", [KMS, REFUSALS["type not in zone"][0], "delete", "never heard of"])
def test_a_region_that_gives_no_trainer_in_any_words_is_left(sessions, answer, words):
    stage = Stage(sessions)
    stage.cloud.answers["gcp/g1/"], stage.cloud.words = answer, words
    stage.passes(20, step_ms=20_000)
    assert set(stage.live().values()) == {("gcp", "g2")}
    assert len(stage.live()) == 3
    assert stage.reason()[0] == "running"


@pytest.mark.slow
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


@pytest.mark.parametrize("answer", ["odd", pytest.param("dies", marks=pytest.mark.slow)])
def test_a_zone_that_gives_no_rollout_node_in_any_words_is_left(sessions, answer):
    stage = Stage(sessions, sites=CLOUD_SITES[:1])
    stage.cloud.answers["gcp/g1/g1-a"] = answer
    stage.passes(20, step_ms=20_000)
    zones = {stage.cloud.requested[name][0].zone for name in stage.live() if "spot" in name}
    assert zones == {"g1-b"}
    assert len(stage.live()) == 3
    assert stage.reason()[0] == "running"


@pytest.mark.slow
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


# --- launches that SkyPilot's client does not take ---------------------------------------------------------------


UNTAKEN = [
    ValueError("Invalid zone 'us-east-1-lax-1a'"),
    ValueError("Invalid region 'us-moon-1'"),
    ValueError("Instance type 'g99.xlarge' not found"),
    ValueError("Image 'ami-0' not found in AWS region"),
    TypeError("unexpected keyword"),
]


class Refusing:
    """Counts the launches that a SkyPilot whose client raises `error` was asked for."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def start(self, launch):
        self.asked += 1
        raise self.error


@pytest.mark.parametrize("restarts", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("error", UNTAKEN, ids=str)
def test_a_launch_that_skypilot_does_not_take_is_denied_after_five_tries(tmp_path, error, restarts):
    stage, refusing = ProvisionerStage(tmp_path), Refusing(error)
    stage.sky.start = refusing.start
    stage.request()
    for _ in range(20):
        fact = stage.passes(30)[NODE]
        if restarts:
            stage.process()
    assert refusing.asked == 5
    assert fact.status == "denied"
    assert str(error) in fact.evidence


def test_a_client_that_fails_after_it_sent_the_launch_leaves_no_launch_behind(tmp_path):
    stage = ProvisionerStage(tmp_path)
    plain = stage.sky.start

    def start(launch):
        plain(launch)
        raise ValueError("the answer cannot be read")

    stage.sky.start = start
    stage.request()
    stage.passes(30)
    assert len(stage.sky.launches) == 1, "the launch that is under way is adopted"
    stage.provisioner.release([NODE])
    stage.passes(30)
    assert stage.sky.cancelled == ["request-0"]


def test_a_denied_launch_ends_although_skypilot_fails_in_every_call(tmp_path):
    stage, refusing = ProvisionerStage(tmp_path), Refusing(ValueError("not this version"))
    stage.sky.start = refusing.start

    def pending(prefix):
        if refusing.asked == 5:
            raise ValueError("not this version")
        return {}

    stage.sky.pending = pending
    stage.request()
    assert stage.passes(400)[NODE].status == "denied"


def test_a_silent_skypilot_is_asked_again_without_a_denial(tmp_path):
    stage = ProvisionerStage(tmp_path)
    stage.sky.down_for_good = True
    stage.request()
    assert stage.passes(1200, step=5)[NODE].status == "unknown"
    stage.sky.down_for_good = False
    stage.passes(120)
    assert len(stage.sky.launches) == 1


def test_a_launch_that_skypilot_takes_at_last_is_bought_once(tmp_path):
    stage = ProvisionerStage(tmp_path)
    plain, stage.sky.start = stage.sky.start, Refusing(ValueError("its catalog is being written")).start
    stage.request()
    stage.passes(15)
    stage.sky.start = plain
    stage.passes(60)
    stage.sky.finish(NODE)
    assert stage.passes(10)[NODE].status in ("pending", "up")
    assert len(stage.sky.launches) == 1


def test_a_zone_that_skypilot_does_not_take_says_nothing_about_the_regions_other_zone(sessions):
    stage = Stage(sessions, sites=CLOUD_SITES[:1])
    stage.cloud.answers["gcp/g1/g1-a"] = "untaken"
    stage.passes(10)
    zones = {stage.cloud.requested[name][0].zone for name in stage.live() if "spot" in name}
    assert zones == {"g1-b"}
    assert len(stage.live()) == 3


# --- no trainer, no other paid node --------------------------------------------------------------------------------


def node_minutes(stage: Stage) -> float:
    """Return the minutes for which rollout nodes were up so far."""
    spans = [
        (record.happened["up"], stage.clock.now_ms() if record.ended_ms is None else record.ended_ms)
        for record in stage.records().values()
        if record.role == "rollout" and "up" in record.happened
    ]
    return sum(end - start for start, end in spans) / MINUTE


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["odd", "refuse", "unsent", "dies"])
def test_a_run_whose_trainer_never_comes_pays_rollout_nodes_for_minutes_only(sessions, answer):
    stage = Stage(sessions)
    stage.cloud.answers["trainers"] = answer
    stage.passes(90, step_ms=45_000)
    assert not any("spot" in name for name in stage.live())
    assert node_minutes(stage) <= 2 * 6
    status, reason = stage.reason()
    assert status == "running"
    assert "trainer" in reason
    if answer == "odd":
        assert stage.cloud.words in reason
    stage.cloud.answers.clear()
    stage.passes(45, step_ms=45_000)
    assert len(stage.live()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["odd", "refuse", "unsent"])
def test_a_lost_trainer_that_cannot_be_replaced_frees_the_rollout_nodes(sessions, answer):
    stage = Stage(sessions)
    stage.passes(60, step_ms=30_000)
    before = node_minutes(stage)
    stage.cloud.answers["trainers"] = answer
    stage.cloud.end("demo-trainer-g0", "the machine is gone")
    stage.passes(60, step_ms=30_000)
    assert 2 * 4 <= node_minutes(stage) - before <= 2 * 6.5, "five minutes of patience, and not the rest of the run"
    assert stage.reason()[0] == "running"


@pytest.mark.slow
def test_a_trainer_that_is_replaced_in_time_keeps_its_rollout_nodes(sessions):
    stage = Stage(sessions)
    stage.passes(30)
    stage.cloud.answers["trainers"] = "refuse"
    stage.cloud.end("demo-trainer-g0", "the machine is gone")
    stage.passes(2)
    stage.cloud.answers.clear()
    stage.passes(20)
    assert {"demo-spot-0-g0", "demo-spot-1-g0"} <= set(stage.live())
    assert len(stage.live()) == 3


# --- places that cannot be launched -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "zone_id"),
    [
        ("us-west-2-lax-1a", "usw2-lax1-az1"),
        ("us-west-2-lax-1a", "usw2-az1"),
        ("us-west-2-wl1-las-wlz-1", "usw2-wl1-las-wlz1"),
        ("us-west-2-wl1-las-wlz-1", ""),
        ("", "usw2-lax1-az1"),
        ("us-west-2-phx-2a", "usw2-phx2-az1"),
    ],
)
@pytest.mark.parametrize("market", Market)
def test_a_local_zone_is_no_offer(zone, zone_id, market):
    offer = next(one for one in read_catalog() if one.cloud == "aws" and one.market is market)
    known = replace(offer, region="us-west-2", zone="us-west-2a", zone_id="usw2-az1")
    assert buyable([known]) == (known,)
    assert buyable([replace(known, zone=zone, zone_id=zone_id)]) == ()


@pytest.fixture
def plan_of_a_model(tmp_path, monkeypatch, capsys):
    """Print the plan of the reference recipe, beside SkyPilot's catalogs without some regions."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(of_plan, "NODE_HOURS", 0)
    monkeypatch.setattr(of_plan, "LEAST_STARTS", 2)
    for name in ("qwen_image_ocr.yaml", "qwen_image_ocr_prompts.txt", "qwen_image_ocr_test_prompts.txt"):
        shutil.copy(str(files("sky_yamls") / name), tmp_path / name)

    def printed_without(lacks) -> str:
        for cloud in ("aws", "gcp"):
            file = tmp_path / ".sky" / "catalogs" / "v8" / cloud / "vms.csv"
            file.parent.mkdir(parents=True, exist_ok=True)
            pools = {
                (o.instance_type, o.region, o.zone_id if cloud == "aws" else o.zone) for o in listed if o.cloud == cloud
            }
            rows = [",".join(pool) for pool in sorted(pools) if not lacks(cloud, *pool)]
            file.write_text("\n".join(["InstanceType,Region,AvailabilityZone", *rows, ""]))
        assert (
            run(["launch", str(tmp_path / "qwen_image_ocr.yaml"), "--dry-run", "--explain", "--prices", "recorded"])
            == ExitCode.OK
        )
        return " ".join(capsys.readouterr().out.split())

    listed = buyable(read_catalog())
    return printed_without


@pytest.mark.slow
def test_a_plan_leaves_out_what_skypilots_catalog_does_not_know(plan_of_a_model):
    plain = plan_of_a_model(lambda *pool: False)
    assert "SkyPilot's catalog" not in plain
    place = re.search(r"trainer on_demand H100:1 .*?(?P<region>[a-z]+-[a-z]+-?[0-9])", plain)
    assert place is not None, plain
    moved = plan_of_a_model(lambda cloud, kind, region, zone: region == place["region"])
    assert "SkyPilot's catalog does not know it" in moved
    again = re.search(r"trainer on_demand H100:1 .*?(?P<region>[a-z]+-[a-z]+-?[0-9])", moved)
    assert again is not None
    assert again["region"] != place["region"]
