"""Reports from accounts whose organisation forbids regions: cleanup ends, looks where it bought, and leaves nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from click.testing import CliRunner

from launcher.cli.panic import panic
from launcher.cli.reap import reap
from launcher.clouds.aws import AwsApi
from launcher.clouds.aws_limits import AwsLimits
from launcher.clouds.base import CloudRefused, CloudUnreachable
from launcher.exit_codes import ExitCode
from launcher.ledger.store import open_ledger, writing
from tests.launcher.cluster.fake_cloud import FakeCloud, instance, resource
from tests.launcher.made_ledger import a_run

REGIONS = ("us-east-1", "us-west-2", "eu-west-1")


class NoSky:
    def cancel_all(self, runs: list[str]) -> list[str]:
        return []


@pytest.fixture
def clean(tmp_path, monkeypatch) -> Callable[..., dict[str, Any]]:
    """Run `reap` or `panic` on this cloud with a ledger that bought in one region, and return its JSON document."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setattr("launcher.cleanup.reaping.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("launcher.cli.panic.Sky", NoSky)
    ledger: Path = tmp_path / "ledger.sqlite"

    def invoke(command: Any, cloud: FakeCloud, bought: str = "us-west-2", broken: bool = False) -> dict[str, Any]:
        with writing(open_ledger(ledger)) as session:
            made = a_run(session, "old", folder=str(tmp_path / "runs" / "old"))
            made.run.infra = "aws"
            made.status("finished", 0)
            node = made.node("trainer", 1)
            node.cloud, node.region = "aws", bought
        if broken:
            ledger.write_bytes(b"no ledger any more" * 1000)
        monkeypatch.setattr("launcher.provision.provide.cloud_apis", lambda names: {"aws": cloud})
        obj = open_ledger(ledger) if command is reap else None
        done = CliRunner().invoke(command, ["-y", "--json", "--timeout", "20"], obj=obj, standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    return invoke


def cloud_of(**more: Any) -> FakeCloud:
    return FakeCloud(home="global", its_regions=REGIONS, **more).add(resource("role", "spotrl-old", "old", region=""))


@pytest.mark.parametrize("command", [reap, panic], ids=["reap", "panic"])
@pytest.mark.parametrize("forbidden", ["eu-west-1", "us-east-1"])
def test_a_forbidden_region_without_purchases_keeps_no_role_and_no_exit_code(clean, command, forbidden):
    cloud = cloud_of(forbidden={forbidden}).add(instance("i-1", run="old", region="us-west-2"))
    done = clean(command, cloud)
    assert done["exit_code"] == ExitCode.OK
    assert (cloud.alive, list(cloud.other)) == ([], [])
    assert [note for note in done["notes"] if f"aws/{forbidden}" in note]


@pytest.mark.parametrize("command", [reap, panic], ids=["reap", "panic"])
def test_a_forbidden_region_with_purchases_is_named_and_does_not_last(clean, command):
    """The role stays: VMs of the region may need it to end themselves."""
    cloud = cloud_of(forbidden={"us-west-2"})
    done = clean(command, cloud)
    assert done["exit_code"] == ExitCode.TEARDOWN_INCOMPLETE
    assert [one["region"] for one in done["unasked"]] == ["us-west-2"]
    assert list(cloud.other) == ["spotrl-old"]
    assert sum(order == "remove spotrl-old" for order in cloud.orders) == 0


def test_a_region_that_the_cloud_does_not_list_is_looked_at_if_it_was_bought_in(clean):
    cloud = cloud_of().add(instance("i-9", run="old", region="ap-south-1"))
    done = clean(reap, cloud, bought="ap-south-1")
    assert done["exit_code"] == ExitCode.OK
    assert cloud.alive == []


def test_without_a_readable_ledger_a_forbidden_region_may_hold_something(clean):
    cloud = cloud_of(forbidden={"eu-west-1"}).add(instance("i-1", run="old", region="us-west-2"))
    done = clean(panic, cloud, broken=True)
    assert done["exit_code"] == ExitCode.TEARDOWN_INCOMPLETE
    assert cloud.alive == []
    assert [one["region"] for one in done["unasked"]] == ["eu-west-1"]


def test_an_account_that_may_read_no_region_is_not_called_empty(clean):
    done = clean(reap, cloud_of(forbidden=set(REGIONS)), bought="us-west-2")
    assert done["exit_code"] == ExitCode.TEARDOWN_INCOMPLETE
    assert {one["region"] for one in done["unasked"]} == set(REGIONS)


@pytest.mark.slow
def test_a_role_in_use_in_a_silent_region_stays(clean):
    cloud = cloud_of(silent={"eu-west-1"})
    done = clean(reap, cloud, bought="us-west-2")
    assert done["exit_code"] == ExitCode.TEARDOWN_INCOMPLETE
    assert list(cloud.other) == ["spotrl-old"]


# --- the list of regions ----------------------------------------------------------------------------------


class Ec2:
    """EC2 in one region of an account: it lists two regions, or answers with an error."""

    def __init__(self, code: str = "", status: int = 403) -> None:
        self.code, self.status = code, status

    def describe_regions(self) -> dict[str, Any]:
        if self.code:
            answer = {"Error": {"Code": self.code}, "ResponseMetadata": {"HTTPStatusCode": self.status}}
            raise ClientError(answer, "DescribeRegions")
        return {"Regions": [{"RegionName": "us-west-2"}, {"RegionName": "us-east-1"}]}


@pytest.mark.parametrize("forbidden", [{"us-east-1"}, {"us-east-1", "us-west-2", "us-east-2"}])
def test_the_regions_are_asked_where_they_may_be(forbidden):
    api = AwsApi(client=lambda service, region: Ec2("UnauthorizedOperation" if region in forbidden else ""))
    assert api.regions() == ["us-east-1", "us-west-2"]


def test_without_any_region_to_ask_the_librarys_own_list_is_used():
    regions = AwsApi(client=lambda service, region: Ec2("UnauthorizedOperation")).regions()
    assert {"us-east-1", "eu-west-3", "ap-south-1"} <= set(regions)
    assert not any(region.startswith(("cn-", "us-gov-")) for region in regions)


def test_a_list_of_regions_that_does_not_answer_is_no_list():
    with pytest.raises(CloudUnreachable):
        AwsApi(client=lambda service, region: Ec2("InternalError", 500)).regions()


# --- launches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "AccessDenied"])
def test_an_account_in_which_skypilot_may_not_list_regions_is_refused_before_a_purchase(tmp_path, monkeypatch, code):
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    limits = AwsLimits(client=lambda service, region: Ec2(code if region == "us-east-1" else ""))
    for check in (limits.check_launches, limits.permissions):
        with pytest.raises(CloudRefused, match=r"allow ec2:DescribeRegions in us-east-1, or leave aws out"):
            check()
    AwsApi(client=lambda service, region: Ec2()).check_launches()


def test_an_account_whose_zones_skypilot_knows_already_needs_no_list_of_regions(tmp_path, monkeypatch):
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    api = AwsApi(client=lambda service, region: Ec2("UnauthorizedOperation"))
    with pytest.raises(CloudRefused, match="allow ec2:DescribeRegions"):
        api.check_launches()
    zones = tmp_path / ".sky" / "catalogs" / "v7" / "aws" / "az_mappings-0a1b.csv"
    zones.parent.mkdir(parents=True)
    zones.touch()
    api.check_launches()
