"""The real SkyProvisioner with the real SkyPilot on the fake clouds: a node's whole life, and a complete cleanup."""

import json
import sys
from collections.abc import Callable
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from launcher.decide.node_facts import is_quota_used_up
from tests.clouds.provisioning import COMPANY, COMPANY_RANGE
from tests.fakes.clouds.world import World

pytestmark = pytest.mark.clouds

TIME_OUT = 1500


def inside(world: World, story: str, folder: Path, cloud: str, check: bool = True) -> dict:
    command = [sys.executable, "-m", "tests.clouds.provisioning", story, world.folder, folder, cloud]
    done = world.run(command, env={"PYTHONPATH": str(Path(__file__).parents[2])}, check=check, timeout=TIME_OUT)
    return json.loads(done.stdout.splitlines()[-1]) if check else {"code": done.returncode}


def plant_secrets(world: World) -> None:
    """Plant secrets where SkyPilot would read credentials."""
    home = world.folder / "home"
    for path, text in {
        ".config/gcloud/application_default_credentials.json": '{"type": "authorized_user", "x": "planted-gcp-secret"}',
        ".cache/huggingface/token": "planted-hf-secret",
        ".cloudflare/r2.credentials": "[r2]\naws_secret_access_key = planted-aws-secret\n",
    }.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    credentials, other = home / ".aws" / "credentials", "[other]\naws_secret_access_key = planted-aws-secret\n"
    credentials.write_text(credentials.read_text().removesuffix(other) + other)


def left(world: World) -> set[str]:
    """Return all resources except the role shared by all runs; a deleted role's name stays taken for weeks."""
    return {json.dumps(one, sort_keys=True) for one in world.inventory() if one["id"] != "spotrlNode"}


@pytest.mark.timeout(TIME_OUT)
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_the_life_of_a_node_on_each_cloud(world, tmp_path, cloud):
    plant_secrets(world)
    before = left(world)
    assert inside(world, "dies_before_the_request", tmp_path, cloud, check=False) == {"code": 8}
    assert inside(world, "dies_after_the_request", tmp_path, cloud, check=False) == {"code": 9}
    seen = inside(world, "life", tmp_path, cloud)
    (tmp_path.parent / f"provisioner-{cloud}.json").write_text(json.dumps(seen, indent=2))
    print(json.dumps(seen, indent=2))
    assert seen["machines"] == 1  # the request of the dead process
    assert seen["up"]["zone"] in ("us-east-1a", "us-central1-a")
    assert seen["spotted"].strip() == ""
    assert seen["door"] is not None
    assert seen["while_down"] == "up"  # an unreachable API proves nothing
    assert (seen["gone"]["status"], seen["gone"]["reclaimed"]) == ("gone", True)
    if cloud == "gcp":
        assert seen["gone"]["notice"]
    assert seen["refused"]["status"] == "no_capacity"
    assert len(seen["refused"]["tried"]) == 1
    assert seen["denied"]["status"] == "denied"
    assert "quota" in seen["denied"]["evidence"]
    assert is_quota_used_up(seen["denied"]["evidence"]), "by words that came through SkyPilot"
    assert seen["unbooted"]["status"] == seen["shut"]["status"] == "gone"
    assert "did not come up within 45 s" in seen["unbooted"]["evidence"]
    assert "lacks the" in seen["shut"]["evidence"]
    assert "tcp 22 (SSH) from 192.0.2.1/32" in seen["shut"]["evidence"]
    assert seen["released"]["status"] == "gone"
    assert seen["left"] == []
    assert left(world) - before == set()
    assert not (world.folder / "home/.sky/config.yaml").exists()  # the configuration was sent with the requests


@pytest.fixture(scope="module")
def company(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Create a company administrator's resources on a cloud, if they do not exist yet."""

    @cache
    def make(cloud: str) -> None:
        inside(world, "administrator", tmp_path_factory.mktemp("administrator"), cloud)

    return make


@pytest.mark.long
@pytest.mark.timeout(TIME_OUT)
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_node_is_bought_in_named_resources_and_nothing_else_is_created(world, company, tmp_path, cloud):
    company(cloud)
    before = left(world)
    seen = inside(world, "named", tmp_path, cloud)
    assert seen["identity"] == COMPANY[cloud].identity
    assert ip_address(seen["address"]) in ip_network("172.31.0.0/16" if cloud == "aws" else COMPANY_RANGE)
    assert seen["left"] == []
    assert left(world) == before
