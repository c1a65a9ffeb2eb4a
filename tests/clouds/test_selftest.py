"""`spotrl selftest` on the fake clouds: every step, with SkyPilot, the clouds' own preemption and real training."""

import json
from collections.abc import Iterator

import pytest

from launcher.selftest.steps import Step
from tests.clouds.launched import BUCKETS, Launched
from tests.clouds.selftesting import make_role
from tests.clouds.story import left_in_the_clouds
from tests.fakes.clouds.world import World
from tests.launcher.printed import check

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1500)]

NOTICE_SECONDS = 20.0
"""The clouds give 120 s and 30 s; the run's drain needs a few."""


@pytest.fixture
def user(world: World, request: pytest.FixtureRequest) -> Iterator[Launched]:
    """Give a user with prices, and a world whose preemptions have a short notice."""
    launched = Launched(world=world, name=f"self-{request.param}", home=world.folder / "home" / f"self-{request.param}")
    launched.spotrl("catalog", "refresh")
    world.notice(NOTICE_SECONDS)
    yield launched
    launched.spotrl("down", launched.name, check=False)
    world.notice(120)


def selftest(user: Launched, cloud: str, *more: str):
    words = ["selftest", "--infra", cloud, "--name", user.name, "--store", BUCKETS[cloud], "-y", "--json"]
    words += [
        "--set",
        "ssh_from=192.0.2.1/32",
        "--set",
        "runtime.device=cpu",
        "--set",
        "runtime.step_seconds=0.3",
        "--set",
        "recovery.launches_per_minute=60",
    ]
    done = user.spotrl(*words, "--to", str(user.home / "outcome.json"), *more, check=False)
    (user.home / "selftest.log").write_text(done.stdout + done.stderr)
    return done


@pytest.mark.parametrize(("user", "cloud"), [("aws", "aws"), ("gcp", "gcp")], indirect=["user"])
def test_a_selftest_passes_and_leaves_nothing(world: World, user: Launched, cloud: str) -> None:
    world.call(make_role)
    done = selftest(user, cloud)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = check("selftest", json.loads(done.stdout.splitlines()[-1]))
    assert outcome == json.loads((user.home / "outcome.json").read_text())
    assert [step["step"] for step in outcome["steps"]] == list(Step)
    assert {step["verdict"] for step in outcome["steps"]} <= {"passed", "not tested"}
    assert [step["step"] for step in outcome["steps"] if step["verdict"] == "not tested"] == []
    assert 0 < outcome["spent_micro_usd"] <= 5_000_000
    left = left_in_the_clouds(world)
    assert (left["instances"], left["disks"], left["processes"], left["namespaces"]) == (0, 0, 0, 0)
