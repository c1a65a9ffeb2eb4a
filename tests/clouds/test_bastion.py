"""A node without a public address: the real SkyPilot and our own login reach it through a company's bastion."""

from ipaddress import ip_address, ip_network

import pytest

from tests.clouds.provisioning import COMPANY_RANGE, PRIVATE_RANGE
from tests.clouds.test_sky_provisioner import TIME_OUT, company, inside, left  # noqa: F401 (company is a fixture)

pytestmark = pytest.mark.clouds


@pytest.mark.timeout(TIME_OUT)
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_node_without_a_public_address_works_through_a_bastion(world, company, tmp_path, cloud):  # noqa: F811
    """The fake internet blocks private addresses; the rules allow the bastion in the same network."""
    company(cloud)
    before = left(world)
    seen = inside(world, "private", tmp_path, cloud)
    assert seen["up"]["status"] == "up"
    assert not seen["public_address"]
    assert ip_address(seen["address"]) in ip_network(PRIVATE_RANGE if cloud == "aws" else COMPANY_RANGE)
    assert seen["door"] is not None
    assert seen["proxy"], "`spotrl ssh` goes the same way"
    assert seen["released"]["status"] == "gone"
    assert seen["left"] == []
    assert left(world) == before
