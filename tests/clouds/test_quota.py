"""A run on AWS whose spot node is preempted at a tight quota. The variant on Google Cloud is in test_faults.py.

EC2 does not name the limit when spot vCPUs are used up, and its message is the same for a quota of 0.
"""

import pytest

from tests.clouds.launched import Launched, job, node_of
from tests.fakes.clouds.aws import VCPUS
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1500)]

NAME = "tight"
SPOT_QUOTA, ON_DEMAND_QUOTA, ENOUGH = "L-3819A6DF", "L-DB2E81BA", 256


def test_an_aws_spot_quota_still_used_by_the_lost_node_is_waited_for(world: World) -> None:
    """The node does not need to work: it is preempted as soon as it runs on AWS."""
    run = Launched(world=world, name=NAME, home=world.folder / "home" / NAME)
    world.quota("aws", ON_DEMAND_QUOTA, ENOUGH)
    try:
        run.spotrl("catalog", "refresh")
        run.launch(job(NAME, "aws"))
        run.until("AWS has a spot node", lambda: up_on_spot(run), 600)
        (lost,) = up_on_spot(run)
        world.quota("aws", SPOT_QUOTA, VCPUS[str(lost["instance_type"])])
        world.quota_lag(3600)
        world.reclaim(str(lost["id"]))
        run.until("the quota refuses its successor", lambda: refused(run), 240)
        assert {words for words in refused(run) if "MaxSpotInstanceCountExceeded" not in words} == set()
        assert run.view().status == "running"
        world.quota_lag(0)
        run.until("a spot node is bought again", lambda: spot_instances(run), 240)
        (bought,) = spot_instances(run)
        assert bought["id"] != lost["id"]
        assert "denied" not in run.records()[node_of(bought)].happened
    finally:
        world.quota_lag(0)
        world.quota("aws", SPOT_QUOTA, ENOUGH)
        run.down()


def spot_instances(run: Launched) -> list[dict]:
    return [instance for instance in run.instances() if instance["market"] == "spot"]


def up_on_spot(run: Launched) -> list[dict]:
    """Return the spot instances that are up in the ledger."""
    records = run.records()
    return [one for one in spot_instances(run) if node_of(one) in records and "up" in records[node_of(one)].happened]


def refused(run: Launched) -> list[str]:
    return [record.evidence for record in run.records().values() if "denied" in record.happened]
