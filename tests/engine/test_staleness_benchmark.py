"""The staleness benchmark: which weights make a stale rollout, and the figures, calculated by hand."""

import pytest

from tests.benchmarks import staleness
from tests.benchmarks.staleness import ARMS, best_remedy, loss


@pytest.mark.slow
def test_the_loss_is_paired_by_seed():
    found = loss({201: 0.9, 202: 0.8, 203: 0.7}, {201: 0.8, 202: 0.6})
    assert found["mean"] == pytest.approx(0.15)
    assert (found["low"], found["high"], found["pairs"]) == (pytest.approx(0.1), pytest.approx(0.2), 2)


@pytest.mark.slow
def test_the_best_remedy_loses_least():
    losses = {"none": {"mean": 0.2}, "smaller": {"mean": 0.05}}
    assert best_remedy(losses) == {"arm": "smaller", "mean": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stale"), [("diffusion-nft 0", 0), ("old policy of the rollout", 24)])
def test_a_share_of_every_batch_after_the_first_comes_from_the_weights_before(name, stale, monkeypatch):
    monkeypatch.setattr(staleness, "ITERATIONS", 1)
    monkeypatch.setattr(staleness, "EVERY", 1)
    monkeypatch.setattr(staleness, "HELD_OUT", 8)
    made = staleness.run_arm(name, 1)
    assert made.stale == stale
    assert sorted(made.curve) == [1]
    assert ARMS[name].share * 48 == stale
