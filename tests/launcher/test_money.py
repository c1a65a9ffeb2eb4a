import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.money import (
    LONGEST_MS,
    dollars,
    duration,
    exact_dollars,
    exact_duration,
    hourly,
    parse_duration,
    parse_hourly,
    parse_money,
)


@pytest.mark.parametrize(
    ("text", "micro_usd"),
    [
        ("$40", 40_000_000),
        ("40", 40_000_000),
        ("$1,250.50", 1_250_500_000),
        ("$0.000001", 1),
        ("-$5", -5_000_000),
        ("-5", -5_000_000),
    ],
)
def test_money_is_read_to_the_micro_dollar(text, micro_usd):
    assert parse_money(text) == micro_usd


@pytest.mark.parametrize(
    "text", ["", "$", "forty", "$1.2.3", "$1,25", "1e3", "nan", "inf", "$40/h", "$0.0000001", "€40", "40 USD"]
)
def test_invalid_amounts_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"write it like \$40|at most 6 decimals"):
        parse_money(text)


def test_a_price_may_end_in_per_hour():
    assert parse_hourly("$1.25/h") == parse_hourly("$1.25") == 1_250_000
    assert hourly(1_539_200) == "$1.54/h"


@pytest.mark.parametrize(
    ("micro_usd", "text"),
    [(0, "$0.00"), (1_234_567_890, "$1,234.57"), (4_200, "$0.0042"), (-5_000_000, "-$5.00"), (10_000, "$0.01")],
)
def test_dollars_are_short_and_a_small_price_is_not_shown_as_0(micro_usd, text):
    assert dollars(micro_usd) == text


@given(st.integers(min_value=-(10**15), max_value=10**15))
def test_exact_dollars_are_exact(micro_usd):
    assert parse_money(exact_dollars(micro_usd)) == micro_usd


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("12h30m", 45_000_000),
        ("90s", 90_000),
        ("2m", 120_000),
        ("500ms", 500),
        ("1d 2h", 93_600_000),
        ("1m500ms", 60_500),
    ],
)
def test_durations_are_read(text, ms):
    assert parse_duration(text) == ms


@pytest.mark.parametrize("text", ["", "90", "1.5h", "30m12h", "h", "-2m", "1 week"])
def test_a_duration_has_units_largest_first(text):
    with pytest.raises(ValueError, match="12h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("ms", "text"), [(45_000_000, "12h 30m"), (90_000, "1m 30s"), (3_600_000, "1h"), (3_605_000, "1h"), (450, "450ms")]
)
def test_durations_are_printed_in_two_units(ms, text):
    assert duration(ms) == text


@given(st.integers(min_value=0, max_value=LONGEST_MS))
def test_exact_durations_are_exact(ms):
    assert parse_duration(exact_duration(ms)) == ms
