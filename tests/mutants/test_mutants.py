"""Every planted bug is found within 2,000 schedules."""

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.hunt import hunt
from tests.simulation.schedules import in_processes


@pytest.fixture(scope="module")
def found():
    return {one.mutant: one for one in in_processes(hunt, list(MUTANTS))}


def test_the_catalogue_has_enough_planted_bugs():
    assert len(MUTANTS) >= 16


@pytest.mark.long
@pytest.mark.parametrize("name", list(MUTANTS))
def test_the_simulator_finds_the_planted_bug(name, found):
    assert found[name].after is not None, f"nothing broke although the queue forgets {MUTANTS[name].forgets}"
