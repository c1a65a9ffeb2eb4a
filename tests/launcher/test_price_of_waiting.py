"""The price of waiting: the age of an outage at which a stand-in pays is where its worth passes its price."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.placement.price_of_waiting import PRIOR_SHARE, Prices, Waiting, prior_share_after

WAITING = Waiting(
    left=60.0,
    full_hours=10.0,
    nodes=2,
    gained=3.0,
    prices=Prices(trainer=55e6, spot=15e6, on_demand=55e6),
)


def test_a_stand_in_by_hand():
    """V = (55 (1.5 + 10 / .5) + 2 x 15 x 10) / 60 = $24.71; times 3, and 1.3 of the 1.5 h that the outage lasts on."""
    assert WAITING.earns(1.0, share=0.5) / 1e6 == pytest.approx(24.708 * 3 * 1.3 / 1.5, rel=1e-3)
    assert WAITING.hours_until_it_pays(4.2, 6.0) == pytest.approx(0.908, abs=0.001)


@given(
    gained=st.floats(0.01, 20),
    trainer=st.floats(1e6, 100e6),
    on_demand=st.floats(1e6, 200e6),
    left=st.floats(1, 1000),
    spot_hours=st.floats(0.5, 40),
    more_hours=st.floats(0, 40),
)
def test_before_that_age_a_stand_in_costs_more_and_after_it_less(
    gained, trainer, on_demand, left, spot_hours, more_hours
):
    prices = Prices(trainer=trainer, spot=0.3 * on_demand, on_demand=on_demand)
    waiting = Waiting(left=left, full_hours=left / 6, nodes=4, gained=gained, prices=prices)
    hours = spot_hours + more_hours
    age = waiting.hours_until_it_pays(spot_hours, hours)

    def earns(out_hours: float) -> float:
        return waiting.earns(out_hours, spot_hours / (hours + out_hours))

    assert earns(age * 1.01 + 0.01) > on_demand
    if age > 0.02:
        assert earns(age * 0.99 - 0.01) < on_demand


def test_a_stand_in_that_adds_nothing_never_pays():
    idle = Waiting(left=60.0, full_hours=10.0, nodes=2, gained=0.0, prices=WAITING.prices)
    assert idle.hours_until_it_pays(4.2, 6.0) == inf


def test_a_stand_in_that_pays_at_once_pays_at_the_age_of_0():
    cheap = replace(WAITING, prices=replace(WAITING.prices, on_demand=1e6))
    assert cheap.earns(0.0, share=0.7) > 1e6
    assert cheap.hours_until_it_pays(4.2, 6.0) == 0.0


def test_the_share_of_time_with_spot_is_between_1_and_100_percent():
    assert prior_share_after(0.0, 0.0) == pytest.approx(PRIOR_SHARE)
    assert prior_share_after(0.0, 1e6) == 0.01
    assert prior_share_after(10.0, 5.0) == 1.0
