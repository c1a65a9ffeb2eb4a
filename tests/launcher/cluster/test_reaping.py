"""Cleanup: finding resources on the clouds, deleting them in order with retries, and reporting what is left."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest

from engine.events import Market
from launcher.cleanup.reaping import (
    Cleared,
    Inventory,
    clear_away,
    cloud_runs,
    count_text,
    known_clouds,
    live_runs,
    look,
    only_of,
    price_of,
    removable_resources,
    sign_in,
    split,
    stop_cloud_runs,
    stop_launches,
)
from launcher.clouds.base import CallerIdentity, InstanceState
from launcher.ledger.store import current_status, find_run, open_ledger, writing
from launcher.market.offers import Offer
from launcher.provision.sky.sky import Sky
from tests.launcher.cluster.fake_cloud import ACCOUNT, FakeCloud, instance, resource
from tests.launcher.made_ledger import a_run

OTHER = {"owner": "bob"}


@dataclass
class Stopwatch:
    """A clock that advances only by waiting."""

    s: float = 0.0
    waited: list[float] = field(default_factory=list)
    at: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Function to call at the n-th wait."""

    def now(self) -> float:
        return self.s

    def wait(self, seconds: float) -> None:
        self.s += seconds
        self.waited.append(seconds)
        self.at.pop(len(self.waited), lambda: None)()


def clear(*clouds: FakeCloud, all_owners: bool = False, timeout_s: float = 300.0, **more) -> Cleared:
    watch = more.pop("watch", Stopwatch())
    accounts, refused = sign_in({cloud.cloud: cloud for cloud in clouds}, all_owners=all_owners)
    assert not refused
    may_go = more.pop("may_go", lambda found: found)
    return clear_away(accounts, may_go, timeout_s=timeout_s, now_s=watch.now, wait=watch.wait, **more)


def found_on(*clouds: FakeCloud, all_owners: bool = False) -> Inventory:
    return look(sign_in({cloud.cloud: cloud for cloud in clouds}, all_owners=all_owners)[0])


# --- listing -----------------------------------------------------------------------------------------


def test_every_region_of_every_cloud_is_listed():
    aws = FakeCloud().add(instance("i-1"), instance("i-2", region="us-west-2"))
    gcp = FakeCloud(cloud="gcp", its_regions=("us-central1",)).add(instance("vm-1", cloud="gcp", region="us-central1"))
    assert [one.id for one in found_on(aws, gcp).instances] == ["i-1", "i-2", "vm-1"]


def test_ended_instances_are_not_found_and_others_only_on_request():
    cloud = FakeCloud().add(instance("i-1", state=InstanceState.GONE), instance("i-2"), instance("i-3", **OTHER))
    assert [one.id for one in found_on(cloud).instances] == ["i-2"]
    assert [one.id for one in found_on(cloud, all_owners=True).instances] == ["i-2", "i-3"]


def test_an_unreachable_region_is_named_and_the_others_are_listed():
    cloud = FakeCloud(silent={"us-east-1"}).add(instance("i-1"), instance("i-2", region="us-west-2"))
    found = found_on(cloud)
    assert [one.id for one in found.instances] == ["i-2"]
    assert [(one.place, one.silent) for one in found.unchecked] == [("aws/us-east-1", True)]


def test_missing_credentials_and_a_silent_cloud_are_distinguished():
    accounts, refused = sign_in({"aws": FakeCloud(who=None), "gcp": FakeCloud(cloud="gcp", silent={"caller"})})
    assert accounts == []
    assert [(one.place, one.silent) for one in refused] == [("aws", False), ("gcp", True)]


def test_a_cloud_that_is_silent_for_a_moment_is_retried():
    cloud = FakeCloud(silent={"caller"})
    watch = Stopwatch(at={2: cloud.silent.clear})
    accounts, refused = sign_in({"aws": cloud}, patience_s=30, now_s=watch.now, wait=watch.wait)
    assert ([account.cloud for account in accounts], refused, watch.s) == (["aws"], [], 10.0)


def test_a_cloud_that_stays_silent_is_given_up():
    watch = Stopwatch()
    clouds = {"aws": FakeCloud(silent={"caller"}), "gcp": FakeCloud(cloud="gcp", who=None)}
    accounts, refused = sign_in(clouds, patience_s=12, now_s=watch.now, wait=watch.wait)
    assert (accounts, [one.cloud for one in refused], watch.s) == ([], ["aws", "gcp"], 12.0)


def test_a_resource_listed_by_every_region_is_found_once():
    cloud = FakeCloud().add(resource("role", "spotrl-digits", region=""))
    cloud.home = "us-west-2"
    assert found_on(cloud).ids == ["role spotrl-digits (aws/global)"]


def test_listing_reports_its_progress():
    lines: list[str] = []
    look(sign_in({"aws": FakeCloud()})[0], lines.append)
    assert lines == ["looked at 1 of 2 regions (aws/us-east-1)", "looked at 2 of 2 regions (aws/us-west-2)"]


# --- choosing ----------------------------------------------------------------------------------------


def test_a_live_run_keeps_its_resources_and_the_shared_ones():
    shared = resource("network", "net-1", run="")
    cloud = FakeCloud().add(
        instance("i-1"), resource(), instance("i-2", run="old"), resource("group", "sg-2", "old"), shared
    )
    goes, stays = split(found_on(cloud), {"digits"})
    assert goes.ids == ["machine i-2 (aws/us-east-1)", "group sg-2 (aws/us-east-1)"]
    assert stays.ids == ["machine i-1 (aws/us-east-1)", "disk vol-1 (aws/us-east-1)", "network net-1 (aws/us-east-1)"]


def test_without_a_live_run_shared_resources_are_deleted_too():
    goes, stays = split(found_on(FakeCloud().add(resource("network", "net-1", run=""))), set())
    assert goes.ids == ["network net-1 (aws/us-east-1)"]
    assert stays.is_empty


def test_choosing_resources_keeps_the_unreachable_regions():
    goes, stays = split(found_on(FakeCloud(silent={"us-west-2"})), set())
    assert [one.place for one in only_of(goes, ()).unchecked] == ["aws/us-west-2"]
    assert stays.unchecked == ()


def offer(zone: str, micro_usd: int, **more) -> Offer:
    known = {"cloud": "aws", "region": "us-east-1", "instance_type": "g6.xlarge", "accelerator": "L4", "gpus": 1}
    listed = {"market": Market.SPOT, "source": "made up", "observed_at": "2026-11-22T00:00:00Z"}
    return Offer(**{**known, **listed, "zone": zone, "micro_usd_per_hour": micro_usd, **more})


def test_an_instance_costs_its_zones_price_or_the_dearest_of_its_region():
    offers = [offer("us-east-1a", 300), offer("us-east-1b", 500), offer("us-east-1a", 900, market=Market.ON_DEMAND)]
    assert price_of(instance(), offers) == 300
    assert price_of(instance(zone="us-east-1f"), offers) == 500
    assert price_of(instance(market=Market.ON_DEMAND), offers) == 900
    assert price_of(instance(instance_type="p5.48xlarge"), offers) is None


# --- deleting ----------------------------------------------------------------------------------------


def test_instances_end_before_their_groups_and_roles_are_deleted():
    cloud = FakeCloud().add(
        instance(),
        resource("disk", "vol-1", node="digits-trainer-g1"),
        resource("disk", "vol-2", node="digits-spot-0-g1"),
        resource("group", "sg-1"),
        resource("role", "spotrl-digits", region=""),
    )
    cleared = clear(cloud)
    assert cleared.is_complete
    assert cleared.troubles == ()
    assert len(cleared.ended) == 5
    assert not cloud.alive
    assert not cloud.other
    # The disk without an instance is deleted at once; a boot disk is deleted with its instance.
    assert cloud.orders[:2] == ["end i-1", "remove vol-2"]
    assert cloud.orders[-2:] == ["remove spotrl-digits", "remove sg-1"]
    assert "remove vol-1" not in cloud.orders


def test_an_instance_that_is_listed_late_is_terminated_too():
    cloud = FakeCloud(late={"i-9": (2, instance("i-9"))}).add(instance("i-1"))
    assert clear(cloud).is_complete
    assert {"end i-1", "end i-9"} <= set(cloud.orders)


def test_an_instance_listed_after_the_first_empty_list_is_terminated_too():
    cloud = FakeCloud(late={"i-9": (2, instance("i-9"))})
    assert clear(cloud).ended == ("machine i-9 (aws/us-east-1)",)


def test_an_instance_that_cannot_be_terminated_is_named_with_the_clouds_error():
    cloud = FakeCloud(immortal={"i-2"}).add(instance("i-1", run="old"), instance("i-2"), resource("group", "sg-2"))
    watch = Stopwatch()
    cleared = clear(cloud, watch=watch, timeout_s=60)
    assert not cleared.is_complete
    assert cleared.left.ids == ["machine i-2 (aws/us-east-1)", "group sg-2 (aws/us-east-1)"]
    assert cleared.ended == ("machine i-1 (aws/us-east-1)",)
    assert cleared.troubles == ("i-2 is protected against termination",)
    assert watch.s == 60
    # A running instance needs its security group, so the group is not deleted.
    assert "remove sg-2" not in cloud.orders


def test_a_region_that_comes_back_in_time_is_cleaned_up():
    cloud = FakeCloud(silent={"us-west-2"}).add(instance("i-2", region="us-west-2"))
    watch = Stopwatch(at={3: cloud.silent.clear})
    assert clear(cloud, watch=watch).is_complete
    assert cloud.alive == []


def test_an_error_in_one_region_does_not_stop_the_cleanup_of_others(monkeypatch):
    cloud = FakeCloud().add(instance("i-1"), instance("i-2", region="us-west-2"))
    resources = cloud.resources

    def breaks(region: str, **whose: str) -> object:
        if region == "us-west-2":
            raise ValueError("<html> is no XML")
        return resources(region, **whose)

    monkeypatch.setattr(cloud, "resources", breaks)
    cleared = clear(cloud, timeout_s=40)
    assert cloud.alive == ["i-2"]
    assert [(one.place, one.why) for one in cleared.left.unchecked] == [
        ("aws/us-west-2", "ValueError: <html> is no XML")
    ]


def test_a_silent_region_counts_as_left_and_keeps_its_instances_identity():
    cloud = FakeCloud(silent={"us-west-2"}).add(
        instance("i-1"), instance("i-2", region="us-west-2"), resource("role", "spotrl-digits", region="")
    )
    cleared = clear(cloud, timeout_s=40)
    assert not cleared.is_complete
    assert [one.place for one in cleared.left.unchecked] == ["aws/us-west-2"]
    assert "i-1" not in cloud.alive
    assert "remove spotrl-digits" not in cloud.orders


def test_shared_resources_are_deleted_after_all_instances():
    cloud = FakeCloud().add(instance(), resource("network", "net-1", run=""))
    found = found_on(cloud)
    assert removable_resources("aws", found, found) == []
    cloud.end(found.instances)
    assert clear(cloud).is_complete


def test_an_instance_that_stays_keeps_its_security_group():
    cloud = FakeCloud().add(instance(**OTHER), resource("group", "sg-1"))
    accounts, _ = sign_in({"aws": cloud}, all_owners=True)
    whole = look(accounts)
    mine = Inventory(resources=whole.resources)
    assert removable_resources("aws", mine, whole) == []


def test_a_killed_cleanup_is_finished_by_the_next():
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    cloud = FakeCloud(lingers=6).add(instance("i-1"), instance("i-2", region="us-west-2"), resource("group", "sg-1"))
    for step in range(1, 4):
        with pytest.raises(Killed):
            clear(cloud, watch=Stopwatch(at={step: die}))
    assert clear(cloud).is_complete
    assert not cloud.alive
    assert not cloud.other


def test_the_cleanup_decides_again_at_every_listing():
    """A run that is launched during the cleanup is not touched."""
    cloud = FakeCloud().add(instance("i-1", run="old"))
    live: set[str] = set()
    watch = Stopwatch(at={1: lambda: (cloud.add(instance("i-5", run="new")), live.add("new"))})  # type: ignore[dict-item]
    assert clear(cloud, watch=watch, may_go=lambda found: split(found, live)[0]).is_complete
    assert cloud.alive == ["i-5"]


def test_an_empty_cleanup_ends_after_two_listings():
    watch = Stopwatch()
    assert clear(FakeCloud(), watch=watch).ended == ()
    assert len(watch.waited) == 1


def test_an_inventory_is_summarised_with_counts():
    found = found_on(FakeCloud().add(instance("i-1"), instance("i-2"), resource(), resource("group", "sg-1")))
    assert count_text(found) == "2 x machine, 1 x disk, 1 x group"
    assert count_text(Inventory()) == "nothing"


def test_an_account_knows_whose_resources_are_listed():
    (mine,), _ = sign_in({"aws": FakeCloud()})
    (all_,), _ = sign_in({"aws": FakeCloud()}, all_owners=True)
    assert (mine.owner, all_.owner, mine.caller.account) == ("ada", None, ACCOUNT)
    assert isinstance(mine.caller, CallerIdentity)


# --- the ledger --------------------------------------------------------------------------------------


def a_ledger(path: Path, **runs: tuple[str, str]) -> Path:
    """Create a ledger with these runs: name -> (infra, status)."""
    with writing(open_ledger(path)) as session:
        for name, (infra, status) in runs.items():
            made = a_run(session, name)
            made.run.infra = infra
            made.status(status, 0)
    return path


def test_live_runs_are_all_runs_that_are_not_over(tmp_path):
    path = a_ledger(tmp_path / "ledger.sqlite", digits=("aws", "running"), old=("gcp,aws", "finished"))
    sessions = open_ledger(path)
    assert live_runs(sessions) == {"digits": "running, and no controller looks after it"}
    assert known_clouds(sessions) == {"aws", "gcp"}


def test_runs_on_clouds_are_stopped_and_local_runs_are_not(tmp_path):
    path = a_ledger(
        tmp_path / "ledger.sqlite",
        digits=("aws,gcp", "running"),
        shapes=("gcp", "planned"),
        here=("local", "running"),
        old=("aws", "stopped"),
    )
    assert cloud_runs(path).names == ("digits", "shapes")
    assert stop_cloud_runs(path, "panic").names == ("digits", "shapes")
    with open_ledger(path)() as session:
        how = {name: current_status(session, find_run(session, name)) for name in ("digits", "here", "old")}
    assert {name: (row.status, row.reason) for name, row in how.items() if row} == {
        "digits": ("stopping", "panic"),
        "here": ("running", ""),
        "old": ("stopped", ""),
    }


def test_a_missing_ledger_has_no_run_to_stop_and_is_not_created(tmp_path):
    stopped = stop_cloud_runs(tmp_path / "ledger.sqlite", "panic")
    assert (stopped.names, stopped.trouble) == ((), "")
    assert not list(tmp_path.iterdir())


def test_a_broken_ledger_is_reported(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"this was a database once" * 100)
    stopped = stop_cloud_runs(path, "panic")
    assert stopped.names == ()
    assert "file is not a database" in stopped.trouble


def test_a_locked_ledger_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.ledger.store.BUSY_MS", 50)
    path = a_ledger(tmp_path / "ledger.sqlite", digits=("aws", "running"))
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        stopped = stop_cloud_runs(path, "panic")
    finally:
        holder.close()
    assert stopped.names == ("digits",)
    assert "database is locked" in stopped.trouble


def test_a_hanging_skypilot_is_waited_for_up_to_its_timeout():
    done = Event()

    class Hangs(Sky):
        def cancel_all(self, runs):
            done.wait(30)
            return []

    assert stop_launches(["run"], Hangs(), timeout_s=0.05) == "no answer within 0 s"
    done.set()
    assert stop_launches(["run"], Hangs()) == ""
