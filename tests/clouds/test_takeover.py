"""A run whose lease goes to another computer while SkyPilot buys its trainer.

The first computer is suspended (its controller is frozen) before its purchase completes. The second one launches a run
of the same name to the same bucket once the lease has expired. Both use one SkyPilot API server, like a team.
"""

import contextlib
import signal
import time

import pytest

from launcher.ledger.store import writing
from launcher.provision.local.processes import is_alive
from launcher.runs.runs import request_stop
from launcher.storage.store_lease import LEASE_SECONDS
from tests.clouds.launched import Launched, wait_for
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(900)]

NAME = "taken"
NODE = f"{NAME}-trainer-g0"
WHERE = "aws/us-west-2"
JOB = """\
name: taken
infra: aws
store: {aws: s3://spotrl-far/takeover}
ssh_from: 192.0.2.1/32
iterations: 1
model: digits-ocr
runtime: {device: cpu}
resources:
  trainer: {accelerators: L4:1, infra: aws/us-west-2}
  rollout: {accelerators: L4:1, use_spot: true, num_nodes: 0}
budget: {max_total: $40, max_hourly: $90, deadline: 1h}
"""


def test_a_controller_that_lost_its_lease_does_not_end_the_bought_node(world: World) -> None:
    """While it is frozen, its run gets a stop request. It would end the node if it still held the lease."""
    first, second = (
        Launched(world=world, name=NAME, home=world.folder / "home" / f"takeover-{number}") for number in (1, 2)
    )
    first.spotrl("catalog", "refresh")
    world.quota("aws", "L-DB2E81BA", 256)
    world.fault("stalled", WHERE)
    owner = first
    try:
        first.launch(JOB)
        wait_for(lambda: is_stalled(world), 240)
        with writing(first.sessions):  # so that it is not frozen while it locks its ledger
            first.signal(signal.SIGSTOP)
        frozen_at = time.monotonic()
        request_stop(first.sessions, NAME)
        events = first.words()
        second.spotrl("catalog", "refresh")
        time.sleep(max(0.0, frozen_at + LEASE_SECONDS + 2 - time.monotonic()))
        second.launch(JOB)
        owner = second
        wait_for(lambda: (second.home / "runs" / NAME / "nodes" / NODE / "launch.json").exists(), 120)
        world.clear("stalled")
        wait_for(lambda: (second.home / "runs" / NAME / "nodes" / NODE / "machine.json").exists(), 240)
        (bought,) = second.instances()
        first.signal(signal.SIGCONT)
        wait_for(lambda: not is_alive(first.controller(), None), 60)
        assert "is controlled from another machine now" in first.log()
        assert (first.words(), first.view().status) == (events, "stopping"), "it did nothing more"
        assert [one["id"] for one in second.instances()] == [bought["id"]]
        assert (list(second.records()), second.view().status) == ([NODE], "running")
    finally:
        world.clear()
        with contextlib.suppress(ProcessLookupError, LookupError):
            first.signal(signal.SIGKILL)
        owner.down()
    assert not second.instances()


def is_stalled(world: World) -> bool:
    """Return whether a purchase has begun and is stalled."""
    return any(fault["kind"] == "stalled" and fault["met"] for fault in world.ask("told_faults"))
