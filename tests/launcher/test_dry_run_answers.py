"""The stored answers of dry runs: a change of the product's shape leaves them equal."""

import pytest

from tests.golden.dry_runs import differences, dry_run, random_jobs, stored_answers


@pytest.mark.parametrize(
    ("stored", "answer", "said"),
    [
        ({"a": 1}, {"a": 1, "new": 2}, []),
        ({"a": 1}, {}, [".a: 1 -> missing"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, [".a[0].b: 1 -> 2"]),
        ({"a": [1]}, {"a": [1, 2]}, [".a: [1] -> [1, 2]"]),
    ],
)
def test_a_difference_names_its_key_and_new_keys_are_none(stored, answer, said):
    assert list(differences(stored, answer)) == said


@pytest.mark.slow
def test_dry_runs_of_random_jobs_answer_as_stored():
    """Every tenth job of `python -m tests.golden.dry_runs`, which compares all of them."""
    pairs = list(zip(random_jobs(), stored_answers(), strict=True))[::10]
    assert [list(differences(stored, dry_run(job))) for job, stored in pairs] == [[]] * len(pairs)
