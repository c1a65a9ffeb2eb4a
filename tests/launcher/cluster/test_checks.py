"""`spotrl check`: one line for each check, and an exit code for scripts."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Thread
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from engine.events import Market
from launcher.checks.buckets import bucket
from launcher.checks.check import Check, Verdict, ending, failed, run_checks
from launcher.checks.cloud_account import clock, cloud_lines, permissions
from launcher.checks.job_and_prices import job_lines, prices
from launcher.checks.named import identity, networks
from launcher.checks.quotas import need_of, quotas
from launcher.checks.ready import check_named
from launcher.checks.spotrl_check import of_job, one_will_do
from launcher.checks.this_machine import programs, skypilot, skypilot_config
from launcher.clouds.aws_limits import AwsLimits, quota_code
from launcher.clouds.base import CloudRefused, CloudUnreachable, Finding, Look
from launcher.clouds.gce_limits import GceLimits
from launcher.clouds.limits import Permissions, Quota
from launcher.exit_codes import ExitCode, Failure
from launcher.job.company import NOTHING_NAMED, AwsNetwork, Identity, Named, Network
from launcher.job.load import load_job
from launcher.job.schema import Job
from launcher.market.instance_types import INSTANCE_TYPES, instance_type_of
from launcher.placement.options import Option, SiteOptions
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan, Slot
from tests.launcher.cluster.fake_cloud import FakeCloud

NOW_MS = 1_795_000_000_000
MINUTE_MS = 60_000


def placement(**more: object) -> Placement:
    known = {"cloud": "aws", "region": "us-east-2", "zone": "us-east-2a", "instance_type": "g6.xlarge", "gpus": 1}
    priced = {"accelerator": "L4", "market": Market.ON_DEMAND, "micro_usd_per_hour": 800_000, "price_source": "made up"}
    seen = datetime.fromtimestamp(NOW_MS / 1000, UTC).isoformat()
    return Placement(**{**known, **priced, "price_observed_at": seen, **more})  # type: ignore[arg-type]


def option(**more: object) -> Option:
    return Option(placement=placement(**more), on_demand_micro_usd_per_hour=800_000)


def site(cloud: str = "aws", region: str = "us-east-2", **more: object) -> SiteOptions:
    where = {"cloud": cloud, "region": region, "zone": f"{region}a", **more}
    spot = option(**where, market=Market.SPOT)
    return SiteOptions(cloud=cloud, region=region, trainer=(option(**where),), rollout=(spot,))


def plan(*sites: SiteOptions, spot_nodes: int = 2) -> Plan:
    spot = placement(market=Market.SPOT)
    slots = [Slot(name="trainer", role="trainer", placement=placement(), on_demand_micro_usd_per_hour=800_000)]
    slots += [
        Slot(name=f"spot-{number}", role="rollout", placement=spot, on_demand_micro_usd_per_hour=800_000)
        for number in range(spot_nodes)
    ]
    return Plan(
        region="us-east-2",
        slots=tuple(slots),
        max_total_micro_usd=100_000_000,
        max_hourly_micro_usd=10_000_000,
        sites=sites or (site(),),
    )


@dataclass
class FakeLimits:
    """Cloud limits set by the test. A quota that is no key of `has` is unknown."""

    cloud: str = "aws"
    off_ms: int = 0
    permissions_answer: Permissions = field(default_factory=Permissions)
    has: dict[str, dict[str, Quota]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    where: str = "us-east-2"
    doubts: Sequence[str] | None = ()

    def clock_ms(self) -> int:
        return NOW_MS + self.off_ms

    def permissions(self, named: Named = NOTHING_NAMED) -> Permissions:
        return self.permissions_answer

    def draws_on(self, want: Placement, named: Named = NOTHING_NAMED) -> Mapping[str, int]:
        return {} if want.instance_type == "odd" else {f"vcpus-{want.market.value}": 4}

    def draws_on_once(self, named: Named = NOTHING_NAMED) -> Mapping[str, int]:
        return {}

    def quotas(self, region: str, names: Collection[str]) -> Mapping[str, Quota]:
        if region in self.silent:
            raise CloudUnreachable(f"{region} did not answer; it is asked again")
        return {name: quota for name, quota in self.has.get(region, {}).items() if name in names}

    def bucket_doubts(self, url: str) -> Sequence[str]:
        if self.doubts is None:
            raise CloudRefused("you may not ask")
        return self.doubts

    def bucket_region(self, url: str) -> str:
        if not self.where:
            raise CloudRefused("you may not ask")
        return self.where


def enough(on_demand: int = 8, spot: int = 8, used: int = 0) -> dict[str, Quota]:
    return {
        "vcpus-on_demand": Quota(name="vcpus-on_demand", title="Running G", limit=on_demand, used=used),
        "vcpus-spot": Quota(name="vcpus-spot", title="Spot G", limit=spot, used=used),
    }


def verdicts(checks: Sequence[Check]) -> list[str]:
    return [check.verdict.value for check in checks]


# --- lines -------------------------------------------------------------------------------------------


def test_every_check_runs_and_a_failing_one_hides_no_other():
    def breaks() -> list[Check]:
        raise Failure("the bucket is not there; make it")

    good = Check(what="job", verdict=Verdict.OK, found="fine")
    checks = run_checks([("bucket", breaks), ("job", lambda: [good])])
    assert checks[0] == Check(what="bucket", verdict=Verdict.FAIL, found="the bucket is not there", remedy="make it")
    assert checks[1] == good


def test_a_check_that_raises_is_reported_and_hides_no_other():
    def breaks() -> list[Check]:
        raise KeyError("quota")

    checks = run_checks([("quotas", breaks), ("programs", programs)])
    assert checks[0].found == "this check itself failed (KeyError: 'quota')"
    assert checks[1].what == "programs"


def test_a_silent_cloud_is_reported_without_a_promise_to_retry():
    line = failed("aws clock", CloudUnreachable("aws did not answer; it is asked again"))
    assert (line.found, line.remedy) == ("aws did not answer", "see that it can be reached from here, then check again")


def fail(code: ExitCode, verdict: Verdict = Verdict.FAIL) -> Check:
    return Check(what="x", verdict=verdict, found="", code=code)


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([fail(ExitCode.FAILURE, Verdict.OK), fail(ExitCode.CREDENTIALS, Verdict.WARN)], ExitCode.OK),
        ([fail(ExitCode.FAILURE), fail(ExitCode.INVALID_JOB), fail(ExitCode.CREDENTIALS)], ExitCode.CREDENTIALS),
        ([fail(ExitCode.STALE_CATALOG), fail(ExitCode.INVALID_JOB)], ExitCode.INVALID_JOB),
        ([fail(ExitCode.STALE_CATALOG)], ExitCode.FAILURE),
        ([], ExitCode.OK),
    ],
)
def test_the_exit_code_is_that_of_the_most_severe_fault(checks, code):
    assert ending(checks) is code


# --- this computer -----------------------------------------------------------------------------------


def test_check_looks_for_ssh_and_rsync(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs()[0].found == "no ssh and no rsync here"
    for name in ("ssh", "rsync"):
        (tmp_path / name).touch(0o755)
    assert verdicts(programs()) == ["OK"]


def test_an_untested_skypilot_is_a_warning_and_a_missing_one_a_fault():
    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    assert verdicts(skypilot(lambda name: "0.14.1")) == ["OK"]
    assert verdicts(skypilot(lambda name: "0.15.0")) == ["WARN"]
    assert verdicts(skypilot(none)) == ["FAIL"]


def test_a_conflicting_skypilot_configuration_of_the_user_is_a_warning(tmp_path):
    (tmp_path / ".sky").mkdir()
    (tmp_path / ".sky" / "config.yaml").write_text("aws:\n  vpc_name: ours\n  remote_identity: LOCAL_CREDENTIALS\n")
    (tmp_path / ".sky.yaml").write_text("admin_policy: our.policy\n")
    checks = skypilot_config({"HOME": str(tmp_path)}, tmp_path)
    assert verdicts(checks) == ["WARN"] * 3
    assert [check.found.partition(":")[0] for check in checks] == [
        "aws.vpc_name is 'ours'",
        "aws.remote_identity is 'LOCAL_CREDENTIALS'",
        "admin_policy is 'our.policy'",
    ]
    assert checks[0].remedy.startswith("take it out of")
    assert checks[1].remedy == ""  # our setting overrides it, so there is nothing to do


@pytest.mark.parametrize(
    ("text", "verdict"), [("", "OK"), ("kubernetes: {ports: ingress}\n", "OK"), ("a: [\n", "WARN")]
)
def test_other_skypilot_configuration_gives_no_warning(tmp_path, text, verdict):
    (tmp_path / "other.yaml").write_text(text)
    environ = {"HOME": str(tmp_path), "SKYPILOT_GLOBAL_CONFIG": str(tmp_path / "other.yaml")}
    assert verdicts(skypilot_config(environ, tmp_path)) == [verdict]


# --- a cloud -----------------------------------------------------------------------------------------


def test_a_cloud_that_accepts_our_credentials_gets_every_check():
    lines = cloud_lines(FakeCloud(), FakeLimits(), lambda: NOW_MS)
    assert [line.what for line in lines] == ["aws credentials", "aws clock", "aws permissions"]
    assert verdicts(lines) == ["OK"] * 3
    assert "user/ada in 123456789012" in lines[0].found


def test_missing_credentials_skip_other_checks_and_set_the_exit_code():
    (line,) = cloud_lines(FakeCloud(who=None), FakeLimits(), lambda: NOW_MS)
    assert (line.verdict, line.code) == (Verdict.FAIL, ExitCode.CREDENTIALS)


def test_a_clock_skew_that_breaks_signatures_is_reported():
    lines = cloud_lines(FakeCloud(who=None), FakeLimits(off_ms=-6 * MINUTE_MS), lambda: NOW_MS)
    assert [line.what for line in lines] == ["aws credentials", "aws clock"]
    assert lines[1].found == "6m away from ours"


@pytest.mark.parametrize(
    ("off_ms", "verdict"), [(30_000, "OK"), (-30_000, "OK"), (4 * MINUTE_MS, "WARN"), (-301_000, "FAIL")]
)
def test_a_clock_more_than_five_minutes_off_is_a_fault(off_ms, verdict):
    assert clock(FakeLimits(off_ms=off_ms), lambda: NOW_MS).verdict.value == verdict


def test_missing_permissions_are_listed_up_to_one_line():
    many = Permissions(missing=tuple(f"ec2:Do{number}" for number in range(8)))
    line = permissions(FakeLimits(permissions_answer=many))
    assert line.code is ExitCode.CREDENTIALS
    assert line.found == "not allowed: ec2:Do0, ec2:Do1, ec2:Do2, ec2:Do3, ec2:Do4, ec2:Do5 and 2 more"
    assert "--print-policy aws" in line.remedy


def test_unknown_permissions_are_a_warning():
    line = permissions(
        FakeLimits(permissions_answer=Permissions(unchecked=("iam:PassRole",), why="you may not simulate"))
    )
    assert line.verdict is Verdict.WARN
    assert "1 could not be asked about (you may not simulate)" in line.found


def test_an_unnamed_cloud_may_lack_credentials_if_another_has_them():
    lines = [
        *cloud_lines(FakeCloud(), FakeLimits(), lambda: NOW_MS),
        *cloud_lines(FakeCloud(cloud="gcp", who=None), FakeLimits(cloud="gcp"), lambda: NOW_MS),
    ]
    assert ending(lines) is ExitCode.CREDENTIALS
    assert ending(one_will_do(lines)) is ExitCode.OK
    assert ending(one_will_do(lines[3:])) is ExitCode.CREDENTIALS


# --- quotas ------------------------------------------------------------------------------------------


def test_a_run_needs_the_quota_of_all_its_nodes():
    need = need_of(site(), 3, FakeLimits().draws_on)
    assert (need.trainer, need.whole) == ({"vcpus-on_demand": 4}, {"vcpus-on_demand": 4, "vcpus-spot": 12})


def test_enough_quota_is_shown_as_needed_of_free():
    (line,) = quotas(plan(), {"aws": FakeLimits(has={"us-east-2": enough(spot=16, used=4)})})
    assert line.verdict is Verdict.OK
    assert line.found == "Running G: 4 of 4, Spot G: 8 of 12"


def test_too_little_spot_quota_leaves_a_run_without_its_spot_nodes():
    (line,) = quotas(plan(), {"aws": FakeLimits(has={"us-east-2": enough(spot=4)})})
    assert line.verdict is Verdict.WARN
    assert line.found == "Spot G (vcpus-spot) needs 8, has 4 free of 4: spot nodes would be missing"
    assert line.remedy.endswith("quotas?region=us-east-2")


def test_a_trainer_without_quota_is_a_warning_if_it_fits_elsewhere():
    sites = [site(), site(region="us-west-2")]
    none, some = {"us-east-2": enough(on_demand=0)}, {"us-west-2": enough()}
    here = quotas(plan(*sites), {"aws": FakeLimits(has={**none, **some})})
    assert verdicts(here) == ["WARN", "OK"]
    nowhere = quotas(plan(*sites), {"aws": FakeLimits(has={**none, "us-west-2": enough(on_demand=3)})})
    assert verdicts(nowhere) == ["WARN", "WARN", "FAIL"]
    assert nowhere[-1].found == "the trainer fits into no quota of 2 regions"


def test_unknown_quotas_do_not_count_as_zero():
    odd = plan(site(instance_type="odd"), site(region="us-west-2"), site(region="eu-west-1"))
    lines = quotas(odd, {"aws": FakeLimits(silent={"us-west-2"})})
    assert verdicts(lines) == ["WARN"] * 3
    assert lines[0].found == "not told for on_demand odd, spot odd"
    assert "did not answer" in lines[1].found
    assert lines[2].found == "not told for vcpus-on_demand, vcpus-spot"


def test_quotas_are_checked_only_on_clouds_of_the_plan():
    assert quotas(plan(site("gcp", "us-central1")), {"aws": FakeLimits()}) == []


@pytest.mark.parametrize("instance", [m for m in INSTANCE_TYPES if m.cloud == "aws"], ids=lambda m: m.instance_type)
@pytest.mark.parametrize("market", Market)
def test_every_known_aws_instance_type_has_a_quota_of_its_family(instance, market):
    spot = market is Market.SPOT
    by_family = {
        "g": "L-3819A6DF" if spot else "L-DB2E81BA",
        "p": "L-7212CCBC" if spot else "L-417A185B",
    }
    expected: str | None = by_family[instance.instance_type[0]]
    if spot and instance.instance_type.startswith("p5"):
        expected = "L-C4BD4855"
    if spot and instance.instance_type.startswith("p6"):
        expected = None  # the cloud's lists do not contain this quota, so it stays unknown
    assert quota_code(instance.instance_type, market) == expected


def test_types_without_a_gpu_have_the_standard_quota():
    assert quota_code("m6i.large", Market.ON_DEMAND) == "L-1216C47A"
    assert quota_code("t3.large", Market.SPOT) == "L-34B43A08"
    assert quota_code("trn1.2xlarge", Market.SPOT) is None
    assert quota_code("inf2.xlarge", Market.SPOT) is None


@pytest.mark.parametrize(
    ("instance_type", "market", "draws"),
    [
        ("g2-standard-48", Market.ON_DEMAND, {"NVIDIA_L4_GPUS": 4, "GPUS_ALL_REGIONS": 4, "CPUS": 48}),
        ("g2-standard-4", Market.SPOT, {"PREEMPTIBLE_NVIDIA_L4_GPUS": 1, "GPUS_ALL_REGIONS": 1, "PREEMPTIBLE_CPUS": 4}),
        (
            "a2-ultragpu-1g",
            Market.SPOT,
            {"PREEMPTIBLE_NVIDIA_A100_80GB_GPUS": 1, "GPUS_ALL_REGIONS": 1, "PREEMPTIBLE_CPUS": 12},
        ),
        (
            "a2-ultragpu-1g",
            Market.ON_DEMAND,
            {"NVIDIA_A100_80GB_GPUS": 1, "GPUS_ALL_REGIONS": 1, "A2_CPUS": 12},
        ),
        ("a3-highgpu-8g", Market.SPOT, {"PREEMPTIBLE_NVIDIA_H100_GPUS": 8, "GPUS_ALL_REGIONS": 8}),
        ("a3-highgpu-8g", Market.ON_DEMAND, None),
        ("a4-highgpu-8g", Market.SPOT, None),
    ],
)
def test_google_counts_gpus_cpus_disks_and_addresses(instance_type, market, draws):
    instance = instance_type_of("gcp", instance_type)
    assert instance is not None
    want = placement(
        cloud="gcp", instance_type=instance_type, market=market, gpus=instance.gpus, accelerator=instance.accelerator
    )
    every = {"CPUS_ALL_REGIONS": instance.vcpus, "SSD_TOTAL_GB": want.disk_gib, "IN_USE_ADDRESSES": 1}
    assert GceLimits({}).draws_on(want) == ({} if draws is None else {**draws, **every})
    private = GceLimits({}).draws_on(want, Named(network="nodes", public_addresses=False))
    assert private.get("IN_USE_ADDRESSES", 0) == 0


# --- buckets, prices, the job ------------------------------------------------------------------------


def test_a_bucket_in_another_region_is_a_warning_because_traffic_is_paid_for():
    near = partial(bucket, "aws", "s3://mine/runs", plan(), try_it=lambda url: None)
    assert verdicts(near(FakeLimits())) == ["OK"]
    far = near(FakeLimits(where="eu-west-1"))
    assert verdicts(far) == ["OK", "WARN"]
    assert "is in eu-west-1, and the run would begin in us-east-2" in far[1].found
    assert verdicts(near(FakeLimits(where=""))) == ["OK", "WARN"]


def test_a_bucket_of_a_continent_is_near_all_its_regions():
    look = partial(bucket, "gcp", "gs://mine", plan(site("gcp", "us-central1")), try_it=lambda url: None)
    assert verdicts(look(FakeLimits(where="us"))) == ["OK"]
    assert verdicts(look(FakeLimits(where="eu"))) == ["OK", "WARN"]


def test_a_bucket_that_only_the_user_may_use_is_a_warning():
    look = partial(bucket, "aws", "s3://mine", plan(), try_it=lambda url: None)
    (usable, doubt) = look(FakeLimits(doubts=["s3://mine has a key of your own"]))
    assert (usable.verdict, doubt.verdict, doubt.found) == (Verdict.OK, Verdict.WARN, "s3://mine has a key of your own")
    (_, not_tried) = look(FakeLimits(doubts=None))
    assert "whether nodes can use s3://mine too was not tried (you may not ask)" in not_tried.found


@pytest.mark.parametrize(
    ("key", "doubted"),
    [
        ("arn:aws:kms:us-east-1:123456789012:key/0a1b", True),
        ("alias/ours", True),
        ("", False),
        ("arn:aws:kms:us-east-1:123456789012:alias/aws/s3", False),
    ],
)
def test_a_bucket_with_a_customers_key_is_doubted(monkeypatch, key, doubted):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        s3 = boto3.client("s3", region_name="us-east-1")
        s3.create_bucket(Bucket="mine")
        rule = {"SSEAlgorithm": "aws:kms", **({"KMSMasterKeyID": key} if key else {})}
        s3.put_bucket_encryption(
            Bucket="mine",
            ServerSideEncryptionConfiguration={"Rules": [{"ApplyServerSideEncryptionByDefault": rule}]},
        )
        doubts = AwsLimits().bucket_doubts("s3://mine/runs")
        assert [key in one for one in doubts] == ([True] if doubted else [])
        s3.delete_bucket_encryption(Bucket="mine")
        assert AwsLimits().bucket_doubts("s3://mine/runs") == []


@pytest.mark.parametrize("answer", [{}, {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": False}}}])
def test_a_google_bucket_with_object_access_lists_is_doubted(monkeypatch, answer):
    limits = GceLimits({"SPOTRL_GCP_COMPUTE_ENDPOINT": "http://127.0.0.1:9", "GOOGLE_CLOUD_PROJECT": "mine"})
    monkeypatch.setattr(limits.calls, "call", lambda *_, **__: answer)
    assert "--uniform-bucket-level-access" in limits.bucket_doubts("gs://mine/runs")[0]
    enabled = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}
    monkeypatch.setattr(limits.calls, "call", lambda *_, **__: enabled)
    assert limits.bucket_doubts("gs://mine/runs") == []


def test_a_bucket_that_cannot_be_written_is_a_fault():
    def no(url: str) -> None:
        raise Failure(f"{url} may not be written; ask its owner")

    look = partial(bucket, "aws", "s3://mine", plan(), FakeLimits(), no)
    assert run_checks([("aws bucket", look)])[0].remedy == "ask its owner"


@pytest.mark.parametrize(("days", "verdict"), [(0, "OK"), (10, "WARN"), (40, "FAIL")])
def test_the_oldest_price_counts(days, verdict):
    seen = datetime.fromtimestamp((NOW_MS - days * 86_400_000) / 1000, UTC).isoformat()
    whole = plan()
    old = replace(whole.slots[0], placement=placement(price_observed_at=seen))
    assert verdicts(prices(replace(whole, slots=(old, *whole.slots[1:])), NOW_MS)) == [verdict]


JOB = """
name: digits
infra: aws
iterations: 30
model: digits-ocr
prompts: digits
reward: ocr
secrets: [HF_TOKEN]
store: {aws: s3://mine/runs}
budget: {max_total: $100, max_hourly: $10}
"""


def a_job(folder: Path, text: str = JOB):
    (folder / "job.yaml").write_text(text)
    return load_job(folder / "job.yaml")


def test_a_complete_job_is_one_line(tmp_path):
    (line,) = job_lines(a_job(tmp_path), plan(), {"HF_TOKEN": "x"}, tmp_path)
    assert line.verdict is Verdict.OK
    assert "secrets HF_TOKEN set" in line.found


def test_all_missing_parts_of_a_job_are_listed_at_once(tmp_path):
    job = a_job(tmp_path, JOB.replace("budget: {max_total: $100, max_hourly: $10}", "budget: {max_total: $100}"))
    lines = job_lines(job, plan(), {}, tmp_path)
    assert verdicts(lines) == ["FAIL", "FAIL"]
    assert ending(lines) is ExitCode.INVALID_JOB
    assert "max_hourly" in lines[0].found
    assert "HF_TOKEN" in lines[1].found


def test_a_job_is_checked_from_end_to_end(tmp_path):
    named_checks = of_job(
        a_job(tmp_path),
        plan(),
        {"aws": FakeLimits(has={"us-east-2": enough()})},
        apis={"aws": FakeCloud()},
        runs=tmp_path,
        now_ms=lambda: NOW_MS,
        ssh_from=lambda: "203.0.113.7/32",
        environ={"HF_TOKEN": "x"},
        try_bucket=lambda url: None,
    )
    checks = run_checks(named_checks)
    assert [check.what for check in checks] == ["job", "prices", "ssh from", "aws bucket", "quota aws/us-east-2"]
    assert ending(checks) is ExitCode.OK


# --- named resources ---------------------------------------------------------------------------------

NAMED = Job(
    infra="aws",
    identity=Identity(aws="node"),
    network=Network(
        aws={
            region: AwsNetwork(vpc="vpc-1", security_group="nodes", public_addresses=region != "us-west-1")
            for region in ("us-east-2", "us-west-1")
        }
    ),
)
GONE = Finding(look=Look.WRONG, text="aws has no VPC vpc-1; correct network.aws.us-east-2.vpc")


def test_a_named_identity_and_network_are_a_line_each():
    cloud = FakeCloud(findings=[Finding(look=Look.OK, text="there")])
    assert [(one.what, one.verdict) for one in identity(cloud, NAMED.named_on("aws"))] == [("aws identity", Verdict.OK)]
    checks = networks(NAMED, plan(site(), site(region="us-west-1")), {"aws": cloud}, lambda: "203.0.113.7/32")
    assert [one.what for one in checks] == ["network aws/us-east-2", "network aws/us-west-1"]
    assert sorted(cloud.looked) == [("us-east-2", "203.0.113.7/32"), ("us-west-1", "203.0.113.7/32")]


def test_without_named_resources_there_is_no_line_and_no_address_lookup():
    def not_called() -> str:
        raise AssertionError

    assert identity(FakeCloud(), Job().named_on("aws")) == []
    assert networks(Job(infra="aws"), plan(), {"aws": FakeCloud()}, not_called) == []


def test_an_unusable_network_is_a_fault_only_if_no_other_is_usable():
    (line,) = networks(NAMED, plan(), {"aws": FakeCloud(findings=[GONE])}, str)
    assert (line.verdict, line.remedy) == (Verdict.FAIL, "correct network.aws.us-east-2.vpc")

    class OneGone(FakeCloud):
        def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
            return [GONE] if region == "us-east-2" else [Finding(look=Look.UNSURE, text="cannot be seen")]

    both = plan(site(), site(region="us-west-1"))
    assert verdicts(networks(NAMED, both, {"aws": OneGone()}, str)) == ["WARN", "WARN"]
    places = [("aws", "us-east-2"), ("aws", "us-west-1")]
    check_named(NAMED, {"aws": OneGone()}, places, str)
    with pytest.raises(CloudRefused, match=r"no VPC vpc-1; correct .*\(the job names it"):
        check_named(NAMED, {"aws": OneGone()}, places[:1], str)


def test_no_permission_is_required_to_create_named_resources():
    limits, client = aws()
    limits.permissions(NAMED.named_on("aws"))
    requests = {action for one in client.requests for action in one.get("ActionNames", ())}
    assert "ec2:RunInstances" in requests
    assert not requests & {"iam:CreateRole", "ec2:CreateSecurityGroup"}
    (passing,) = [one for one in client.requests if "iam:PassRole" in one.get("ActionNames", ())]
    assert passing["ResourceArns"] == ["arn:aws:iam::123456789012:role/x/node-role"]


# --- AWS's answers -----------------------------------------------------------------------------------


def refused(code: str, operation: str = "Any") -> ClientError:
    metadata: Any = {"HTTPHeaders": {"date": "Sun, 22 Nov 2026 13:00:00 GMT"}, "HTTPStatusCode": 403}
    return ClientError({"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": metadata}, operation)


@dataclass
class FakeAws:
    """The parts of a boto3 client that the checks use: permissions, quotas, instances."""

    denied: set[str] = field(default_factory=set)
    may_simulate: bool = True
    may_sign: bool = True
    limits: dict[str, int] = field(default_factory=dict)
    defaults: dict[str, int] = field(default_factory=dict)
    instances: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    arn: str = "arn:aws:sts::123456789012:assumed-role/launcher/session"
    roles: dict[str, str] = field(default_factory=dict)
    """ARNs of roles that the caller may look at."""

    def get_caller_identity(self) -> dict[str, Any]:
        if not self.may_sign:
            raise refused("SignatureDoesNotMatch")
        metadata = {"HTTPHeaders": {"date": "Sun, 22 Nov 2026 13:00:00 GMT"}}
        return {"Account": "123456789012", "Arn": self.arn, "ResponseMetadata": metadata}

    def get_paginator(self, name: str) -> "FakeAws":
        return self

    def paginate(self, **requests: Any) -> list[dict[str, Any]]:
        self.requests.append(requests)
        if "ActionNames" not in requests:
            return [{"Reservations": [{"Instances": self.instances}]}]
        if not self.may_simulate:
            raise refused("AccessDenied")
        results = [
            {"EvalActionName": name, "EvalDecision": "implicitDeny" if name in self.denied else "allowed"}
            for name in requests["ActionNames"]
        ]
        return [{"EvaluationResults": results}]

    def get_role(self, *, RoleName: str) -> dict[str, Any]:
        if RoleName not in self.roles:
            raise refused("AccessDenied")
        return {"Role": {"Arn": self.roles[RoleName]}}

    def describe_regions(self) -> dict[str, Any]:
        if "ec2:DescribeRegions" in self.denied:
            raise refused("UnauthorizedOperation")
        return {"Regions": [{"RegionName": "us-east-1"}]}

    def get_instance_profile(self, *, InstanceProfileName: str) -> dict[str, Any]:
        return {"InstanceProfile": {"Roles": [{"Arn": f"arn:aws:iam::123456789012:role/x/{InstanceProfileName}-role"}]}}

    def get_service_quota(self, *, ServiceCode: str, QuotaCode: str) -> dict[str, Any]:
        return self._quota(self.limits, QuotaCode)

    def get_aws_default_service_quota(self, *, ServiceCode: str, QuotaCode: str) -> dict[str, Any]:
        return self._quota(self.defaults, QuotaCode)

    def _quota(self, known: dict[str, int], code: str) -> dict[str, Any]:
        if code not in known:
            raise refused("NoSuchResourceException")
        return {"Quota": {"Value": float(known[code])}}

    def _dry(self, action: str) -> None:
        raise refused("UnauthorizedOperation" if action in self.denied else "DryRunOperation")

    def run_instances(self, **asked: Any) -> None:
        self._labelled("ec2:RunInstances", {"instance", "volume"}, asked)

    def create_security_group(self, **asked: Any) -> None:
        self._labelled("ec2:CreateSecurityGroup", {"security-group"}, asked)

    def _labelled(self, action: str, kinds: set[str], asked: dict[str, Any]) -> None:
        """Answer as an account with the printed policy: without our label nothing may be made."""
        labelled = {
            one["ResourceType"]
            for one in asked.get("TagSpecifications", ())
            if "spotrl-run" in {tag["Key"] for tag in one["Tags"]}
        }
        if kinds - labelled:
            raise refused("UnauthorizedOperation")
        self._dry(action)

    def describe_instances(self, **_: Any) -> None:
        self._dry("ec2:DescribeInstances")

    def describe_volumes(self, **_: Any) -> None:
        self._dry("ec2:DescribeVolumes")


def aws(**more: Any) -> tuple[AwsLimits, FakeAws]:
    client = FakeAws(**more)
    return AwsLimits(lambda service, region: client), client


def test_iam_simulates_the_role_on_the_resources_of_the_policy():
    limits, client = aws(denied={"iam:PassRole"})
    assert limits.permissions() == Permissions(missing=("iam:PassRole",))
    assert {requests["PolicySourceArn"] for requests in client.requests} == {"arn:aws:iam::123456789012:role/launcher"}
    (passing,) = [requests for requests in client.requests if "iam:PassRole" in requests["ActionNames"]]
    assert passing["ResourceArns"] == ["arn:aws:iam::123456789012:role/spotrl/*"]


SSO_ROLE, SSO_PATH = "AWSReservedSSO_Ml_0a", "arn:aws:iam::123456789012:role/aws-reserved/sso.amazonaws.com"


@pytest.mark.parametrize(
    ("roles", "source"),
    [
        ({SSO_ROLE: f"{SSO_PATH}/eu-west-1/{SSO_ROLE}"}, f"{SSO_PATH}/eu-west-1/{SSO_ROLE}"),
        ({}, f"{SSO_PATH}/{SSO_ROLE}"),
    ],
    ids=["may look", "may not look"],
)
def test_iam_simulates_a_role_of_identity_center_with_its_path(roles, source):
    limits, client = aws(arn=f"arn:aws:sts::123456789012:assumed-role/{SSO_ROLE}/ada", roles=roles)
    assert limits.permissions() == Permissions()
    assert {requests["PolicySourceArn"] for requests in client.requests} == {source}


def test_the_dry_runs_pass_with_exactly_the_printed_policy():
    limits, _ = aws(may_simulate=False)
    assert limits.permissions().missing == ()


def test_permissions_that_iam_does_not_simulate_get_a_dry_run():
    limits, _ = aws(may_simulate=False, denied={"ec2:RunInstances"})
    permissions_answer = limits.permissions()
    assert permissions_answer.missing == ("ec2:RunInstances",)
    assert {"iam:PassRole", "ec2:TerminateInstances"} <= {*permissions_answer.unchecked}
    assert "SimulatePrincipalPolicy" in permissions_answer.why


def test_the_clock_is_read_even_from_a_refusal():
    at_ms = round(datetime(2026, 11, 22, 13, tzinfo=UTC).timestamp() * 1000)
    for may_sign in (True, False):
        limits, _ = aws(may_sign=may_sign)
        assert limits.clock_ms() == at_ms


def instance(type_: str, vcpus: int, **more: Any) -> dict[str, Any]:
    return {"InstanceType": type_, "CpuOptions": {"CoreCount": vcpus // 2, "ThreadsPerCore": 2}, **more}


def test_running_vcpus_reduce_the_quota_of_their_family_and_market():
    limits, _ = aws(
        limits={"L-DB2E81BA": 16},
        defaults={"L-3819A6DF": 0},
        instances=[
            instance("g5.2xlarge", 8),
            instance("g6.xlarge", 4, InstanceLifecycle="spot"),
            instance("m6i.large", 2),
        ],
    )
    found = limits.quotas("us-east-2", ["L-DB2E81BA", "L-3819A6DF", "L-C4BD4855"])
    assert {code: (quota.limit, quota.used, quota.free) for code, quota in found.items()} == {
        "L-DB2E81BA": (16, 8, 8),
        "L-3819A6DF": (0, 4, 0),
    }
    assert limits.draws_on(placement(instance_type="g6.12xlarge")) == {"L-DB2E81BA": 48}


# --- Google's answers --------------------------------------------------------------------------------


@pytest.fixture
def google():
    """Serve a project over HTTP, with its quotas and every permission except one."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _send(self, answer: Mapping[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def do_GET(self) -> None:
            of_region = {"NVIDIA_L4_GPUS": (1.0, 1.0), "PREEMPTIBLE_CPUS": (0.0, 0.0), "CPUS": (24.0, 4.0)}
            metrics = of_region if "/regions/" in self.path else {"GPUS_ALL_REGIONS": (4.0, 1.0)}
            rows = [{"metric": name, "limit": limit, "usage": used} for name, (limit, used) in metrics.items()]
            self._send({"quotas": rows})

        def do_POST(self) -> None:
            requests = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["permissions"]
            self._send({"permissions": [name for name in requests if name != "compute.instances.create"]})

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield GceLimits(
        {
            "SPOTRL_GCP_COMPUTE_ENDPOINT": url,
            "SPOTRL_GCP_RESOURCE_MANAGER_ENDPOINT": url,
            "GOOGLE_CLOUD_PROJECT": "mine",
        }
    )
    server.shutdown()
    server.server_close()
    thread.join()


NEW_PROJECT = {"SSD_TOTAL_GB": 500, "IN_USE_ADDRESSES": 4, "CPUS": 24, "PREEMPTIBLE_CPUS": 0, "CPUS_ALL_REGIONS": 12}


@pytest.mark.parametrize("name", [*NEW_PROJECT, "NETWORKS"])
def test_a_new_google_project_is_warned_before_a_node_is_refused(name):
    """Everything else is plenty. Eight nodes of 140 GB, of four CPUs each."""

    class NewProject(GceLimits):
        def quotas(self, region: str, names: Collection[str]) -> Mapping[str, Quota]:
            limit = {**dict.fromkeys(names, 10_000), name: NEW_PROJECT.get(name, 5)}
            used = {"NETWORKS": 5}
            return {each: Quota(name=each, title=each, limit=limit[each], used=used.get(each, 0)) for each in names}

    where = site("gcp", "us-central1", instance_type="g2-standard-4", accelerator="L4", disk_gib=140)
    lines = quotas(plan(where, spot_nodes=7), {"gcp": NewProject({})})
    if name == "CPUS":
        assert verdicts(lines) == ["OK"]  # the trainer alone is on demand
    else:
        assert lines[0].verdict is Verdict.WARN
        assert f"{name} needs" in lines[0].found


def test_without_a_preemptible_quota_spot_vms_count_as_ordinary_ones(google):
    found = google.quotas("us-central1", ["PREEMPTIBLE_CPUS"])
    assert (found["PREEMPTIBLE_CPUS"].title, found["PREEMPTIBLE_CPUS"].free) == ("CPUS", 20)


def test_google_reports_missing_permissions(google):
    assert google.permissions() == Permissions(missing=("compute.instances.create",))


def test_google_quotas_are_read_for_the_region_and_all_regions(google):
    found = google.quotas("us-central1", ["NVIDIA_L4_GPUS", "GPUS_ALL_REGIONS"])
    assert {name: (quota.limit, quota.free) for name, quota in found.items()} == {
        "NVIDIA_L4_GPUS": (1, 0),
        "GPUS_ALL_REGIONS": (4, 3),
    }


def test_the_clock_of_google_is_read(google):
    assert abs(google.clock_ms() - datetime.now(UTC).timestamp() * 1000) < 60_000
