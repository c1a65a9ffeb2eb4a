"""The phase of a cloud node is computed from its files alone."""

import json

import pytest

from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.node_files import NodeFiles
from launcher.provision.sky.phase import Phase, phase_of

REQUESTED = {"want", "spec"}
SET_UP = {"want", "spec", "launch", "login"}


@pytest.mark.parametrize(
    ("readable", "damaged", "phase"),
    [
        (set(), set(), Phase.UNFINISHED),
        ({"want"}, set(), Phase.UNFINISHED),
        (REQUESTED, set(), Phase.REQUESTED),
        (REQUESTED, {"launch"}, Phase.REQUESTED),
        ({"want"}, {"spec"}, Phase.REQUESTED),
        ({*REQUESTED, "launch"}, set(), Phase.LAUNCHED),
        ({*REQUESTED, "launch"}, {"login"}, Phase.LAUNCHED),
        (SET_UP, set(), Phase.SET_UP),
        ({*SET_UP, "stopping"}, set(), Phase.SET_UP),
        ({*SET_UP, "release"}, set(), Phase.ENDING),
        ({"release"}, set(), Phase.ENDING),
        (SET_UP, {"release"}, Phase.ENDING),
        ({*SET_UP, "ending"}, set(), Phase.ENDING),
        (SET_UP, {"ended"}, Phase.ENDING),
        ({*SET_UP, "ended"}, set(), Phase.ENDED),
        ({*SET_UP, "ended"}, {"cleared"}, Phase.ENDED),
        (SET_UP, {"ended", "cleared"}, Phase.ENDING),
        ({*SET_UP, "ended", "cleared"}, set(), Phase.CLEARED),
    ],
)
def test_the_phase_follows_from_the_readable_and_damaged_files(tmp_path, readable, damaged, phase):
    for name in readable:
        (tmp_path / f"{name}.json").write_text(json.dumps({"at_ms": 1}))
    for name in damaged:
        (tmp_path / f"{name}.json").write_text("")
    assert phase_of(CloudNode(files=NodeFiles(tmp_path))) is phase


def test_the_region_is_known_from_a_placement_of_an_older_form(tmp_path):
    """A node must be terminated even if nothing else of its placement can be read."""
    (tmp_path / "want.json").write_text(json.dumps({"cloud": "aws", "region": "us-east-1"}))
    assert NodeFiles(tmp_path).region == ("aws", "us-east-1")
