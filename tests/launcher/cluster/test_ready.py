"""Checks of a launch on real clouds before it buys anything."""

import json
import time
from dataclasses import replace

import obstore
import pytest
from obstore.store import LocalStore

from engine.events import Market
from launcher.checks import ready
from launcher.checks.gcloud import GcloudMissing
from launcher.checks.ready import (
    CLOSED,
    check_clouds,
    check_here,
    check_job,
    check_prices,
    closed_regions,
    job_problems,
)
from launcher.clouds.base import CallerIdentity, CloudRefused, CloudUnreachable, InstanceState
from launcher.exit_codes import ExitCode, Failure
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.market.offers import CatalogError
from launcher.market.prices import iso
from launcher.money import HOUR_MS
from launcher.placement.placement import Placement
from launcher.placement.plan import Slot
from launcher.storage.store_lease import LEASE_OBJECT, LeaseHeld
from launcher.storage.stores import StoreError
from tests.launcher.cluster.fake_cloud import FakeCloud, instance
from tests.model_folders import write_model

NOW_MS = time.time_ns() // 1_000_000

JOB = """\
name: digits
infra: aws,gcp
store: {aws: s3://runs/ours, gcp: gs://runs}
budget: {max_total: 40, max_hourly: 9}
"""


def slot(name, *, market=Market.SPOT, age_ms=0):
    placement = Placement(
        cloud="aws",
        region="us-east-1",
        zone="us-east-1a",
        instance_type="g6.xlarge",
        gpus=1,
        accelerator="L4",
        market=market,
        micro_usd_per_hour=300_000,
        price_source="the account",
        price_observed_at=iso(NOW_MS - age_ms),
    )
    role = "trainer" if name == "trainer" else "rollout"
    return Slot(name=name, role=role, placement=placement, on_demand_micro_usd_per_hour=800_000)


SLOTS = (slot("trainer", market=Market.ON_DEMAND), slot("spot-0"))


@pytest.fixture
def job(tmp_path):
    def write(text=JOB, **overrides):
        (tmp_path / "job.yaml").write_text(text)
        return load_job(tmp_path / "job.yaml", overrides)

    return write


class Api:
    """A cloud that returns the caller's identity, or refuses."""

    def __init__(self, cloud, refusal=None):
        self.cloud, self._refusal = cloud, refusal

    def caller(self):
        if self._refusal:
            raise CloudRefused(self._refusal)
        return CallerIdentity(account="1234", identity="someone", owner="someone")

    def check_launches(self):
        pass


def test_a_job_with_limits_and_buckets_may_launch(job):
    assert list(job_problems(job(), SLOTS)) == []


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ("budget: {max_total: 40, max_hourly: 9}", "budget.max_total", "--max-total 200"),
        ("store: {aws: s3://runs/ours, gcp: gs://runs}", "store", "no bucket on aws and gcp"),
    ],
)
def test_a_launch_on_a_real_cloud_requires_limits_and_buckets(job, line, field, words):
    with pytest.raises(JobError, match=words) as caught:
        check_job(job(JOB.replace(line, "seed: 0")), SLOTS)
    assert caught.value.field == field
    assert caught.value.exit_code is ExitCode.INVALID_JOB


def test_a_cloud_without_a_bucket_is_named_alone(job):
    with pytest.raises(JobError, match="no bucket on gcp,"):
        check_job(job(JOB.replace(", gcp: gs://runs", "")), SLOTS)


def test_a_run_name_that_is_too_long_is_refused_with_the_length_that_fits(job):
    with pytest.raises(JobError, match="up to 23 characters"):
        check_job(job(name="digits-for-the-whole-team-today"), SLOTS)
    check_job(job(name="a" * 23), SLOTS)


def test_missing_local_weights_are_refused(job, tmp_path):
    checked = job(JOB + "model: {name: qwen-image, path: there}\n")
    with pytest.raises(JobError, match=r"no such folder here.*hf download OWNER/MODEL --local-dir there"):
        check_job(checked, SLOTS)
    (tmp_path / "there").mkdir()
    with pytest.raises(JobError, match=r"a folder without model_index\.json: no node could load qwen-image"):
        check_job(checked, SLOTS)
    write_model(tmp_path / "there", "qwen-image")
    check_job(checked, SLOTS)


def test_divided_full_weights_without_safetensors_are_refused_before_a_purchase(job, tmp_path):
    write_model(tmp_path / "there", "qwen-image")
    model = "model: {name: qwen-image, path: there, weights: full}\n"
    ranks = model + "runtime: {trainer_ranks: 2}\n"
    weights = tmp_path / "there" / "transformer" / "diffusion_pytorch_model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    weights.with_suffix(".bin").write_bytes(b"\x80\x02")
    with pytest.raises(JobError, match=r"not in safetensors.*set runtime\.trainer_ranks to 1") as caught:
        check_job(job(JOB + ranks), SLOTS)
    assert caught.value.field == "model.path"
    check_job(job(JOB + model), SLOTS)
    weights.write_bytes(whole)
    check_job(job(JOB + ranks), SLOTS)


def test_a_model_folder_that_does_not_fit_the_job_is_refused_before_a_purchase(job, tmp_path):
    write_model(tmp_path / "there", "qwen-image")
    model = "model: {name: qwen-image, path: there, height: 500}\n"
    with pytest.raises(JobError, match=r"model\.height is 500, .* multiples of 16 .*; use 496 or 512"):
        check_job(job(JOB + model), SLOTS)
    (tmp_path / "there" / "scheduler" / "scheduler_config.json").unlink()
    model = "model: {name: qwen-image, path: there}\n"
    with pytest.raises(JobError, match=r"sampler\.shift is auto, and .* has no .*; give a number as sampler\.shift"):
        check_job(job(JOB + model), SLOTS)
    check_job(job(JOB + model + "sampler: {shift: 3}\n"), SLOTS)


def test_nothing_is_bought_at_old_prices():
    check_prices([slot("spot-0", age_ms=HOUR_MS)], NOW_MS)
    with pytest.raises(CatalogError, match=r"g6.xlarge in us-east-1a .*--allow-old-prices"):
        check_prices([slot("spot-0", age_ms=30 * HOUR_MS)], NOW_MS)


def test_missing_programs_and_secrets_are_named_before_the_launch(job, monkeypatch):
    checked = job(JOB.replace("aws,gcp", "aws").replace(", gcp: gs://runs", "") + "secrets: [HF_TOKEN]\n")
    with pytest.raises(JobError, match="HF_TOKEN"):
        check_here(checked, {})
    check_here(checked, {"HF_TOKEN": "x"})
    monkeypatch.setattr(ready, "PROGRAMS", ("ssh", "no-such-program"))
    with pytest.raises(Failure, match="no-such-program cannot be found"):
        check_here(checked, {"HF_TOKEN": "x"})


def test_a_launch_on_google_cloud_without_gcloud_is_refused_and_named_as_the_only_lack(job, tmp_path):
    with pytest.raises(GcloudMissing, match=r"gcloud auth login.*Only Google Cloud lacks it: `--infra aws`") as caught:
        check_here(job(), {"HOME": str(tmp_path), "PATH": str(tmp_path)})
    assert caught.value.exit_code is ExitCode.CREDENTIALS


def test_the_credentials_and_bucket_of_every_cloud_are_tried(job):
    tried, checked = [], []

    def unused(url, run):
        checked.append((url, run))

    callers = check_clouds(job(), {"aws": Api("aws"), "gcp": Api("gcp")}, [], tried.append, unused)
    assert {cloud: caller.identity for cloud, caller in callers.items()} == {"aws": "someone", "gcp": "someone"}
    assert sorted(tried) == ["gs://runs/digits", "s3://runs/ours/digits"]
    assert sorted(checked) == [("gs://runs/digits", "digits"), ("s3://runs/ours/digits", "digits")]
    with pytest.raises(CloudRefused, match="no credentials"):
        check_clouds(job(), {"aws": Api("aws", "no credentials")}, [], tried.append)


def test_a_bucket_that_cannot_be_used_stops_the_launch(job):
    def refuse(url):
        raise Failure(f"{url} may not be written in")

    with pytest.raises(Failure, match="may not be written in"):
        check_clouds(job(), {"aws": Api("aws")}, [], refuse)


def test_a_run_name_that_instances_already_have_is_refused(job):
    """Instances of another or a lost ledger with this name would look like instances of this run."""
    looked = []
    cloud, places = FakeCloud(), [("aws", "us-east-1"), ("aws", "us-west-2")]
    cloud.add(instance(state=InstanceState.GONE), instance("i-2", region="us-west-2", owner="grace"))
    with pytest.raises(JobError, match=r"aws us-west-2 already.*i-2 of grace.*--name digits-2.*spotrl reap") as caught:
        check_clouds(job(), {"aws": cloud}, places, lambda url: None, lambda *store: looked.append(store))
    assert (caught.value.field, looked) == ("name", [])
    check_clouds(job(), {"aws": cloud}, places[:1], lambda url: None, lambda *store: looked.append(store))
    assert looked == [("s3://runs/ours/digits", "digits")]


def test_a_region_that_an_organisation_forbids_is_closed_and_a_missing_permission_closes_none(job):
    class Cloud(FakeCloud):
        def instances(self, region, **more):
            words = {
                "us-east-1": CloudRefused("UnauthorizedOperation: an explicit deny in a service control policy"),
                "us-west-1": CloudRefused("UnauthorizedOperation: not authorized to perform ec2:DescribeInstances"),
                "us-east-2": CloudUnreachable("503"),
            }
            if region in words:
                raise words[region]
            return super().instances(region, **more)

    places = [("aws", region) for region in ("us-east-1", "us-west-1", "us-east-2", "us-west-2")]
    assert closed_regions({"aws": Cloud()}, places) == {("aws", "us-east-1"): CLOSED}
    nothing = FakeCloud(no_launch="DescribeRegions was refused; allow it")
    assert closed_regions({"aws": nothing}, places) == dict.fromkeys(places, nothing.no_launch)
    with pytest.raises(CloudRefused, match="allow it"):
        check_clouds(job(), {"aws": nothing}, places, lambda url: None, lambda *store: None)


def test_a_run_name_controlled_by_another_computer_is_refused_first(job, tmp_path, monkeypatch):
    monkeypatch.setattr(ready, "run_store", lambda stores, cloud, run: (tmp_path / "runs" / run).as_uri())
    store = tmp_path / "runs" / "digits"
    obstore.put(LocalStore(store, mkdir=True), "checkpoints/l0001-i000003/manifest.json", b'{"name": "l0001-i000003"}')
    lease = store / LEASE_OBJECT
    lease.write_text(
        json.dumps({"holder": "theirs", "host": "a-laptop", "until_ms": time.time_ns() // 1_000_000 + 60_000})
    )
    with pytest.raises(LeaseHeld, match=r"controlled from another machine \(a-laptop\)"):
        check_clouds(job(), {"aws": Api("aws")}, [])
    lease.unlink()
    with pytest.raises(StoreError, match="l0001-i000003 of an earlier run of this name"):
        check_clouds(job(), {"aws": Api("aws")}, [])
    assert sorted(path.name for path in store.iterdir() if path.is_file()) == []


def test_a_price_may_age_as_long_as_its_capacity_type_allows():
    """On-demand prices rarely change, so they are valid for a month."""
    old = slot("trainer", market=Market.ON_DEMAND, age_ms=48 * HOUR_MS)
    check_prices([old], NOW_MS)
    with pytest.raises(CatalogError):
        check_prices([replace(old, placement=replace(old.placement, market=Market.SPOT))], NOW_MS)
