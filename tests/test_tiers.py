"""The time limits of the tiers are held against what pytest wrote."""

import pytest

from tests.tiers import REFERENCE_S, TIERS, TOLERANCE, main

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" time="{seconds}">
<testcase classname="tests.a" name="test_quick" time="0.1"/><testcase classname="tests.a" name="test_long" time="9.5"/>
</testsuite></testsuites>"""


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (TOLERANCE - 0.01, 0), (TOLERANCE + 0.01, 1)])
def test_a_tier_fails_when_it_exceeds_its_limit_and_the_tolerance(tmp_path, capsys, share, code):
    tier = TIERS[0]
    (tmp_path / f"{tier.parts[0]}.xml").write_text(JUNIT.format(seconds=share * tier.limit_s))
    assert main(tmp_path, lambda: REFERENCE_S) == code
    out = capsys.readouterr().out
    assert f"{tier.name}: 2 tests, {share * tier.limit_s:.0f} s" in out
    assert out.index("tests.a::test_long") < out.index("tests.a::test_quick")
    assert (f"{tier.name} took more than" in out) == bool(code)


def test_a_slower_computer_gets_more_time(tmp_path):
    tier = TIERS[0]
    (tmp_path / f"{tier.parts[0]}.xml").write_text(JUNIT.format(seconds=1.9 * TOLERANCE * tier.limit_s))
    assert main(tmp_path, lambda: 2 * REFERENCE_S) == 0
    assert main(tmp_path, lambda: 1.5 * REFERENCE_S) == 1
    assert main(tmp_path, lambda: 0.1 * REFERENCE_S) == 1, "a faster computer tightens no limit"


def test_a_tier_that_did_not_run_is_named_and_fails_nothing(tmp_path, capsys):
    assert main(tmp_path, lambda: REFERENCE_S) == 0
    assert capsys.readouterr().out.count("did not run") == len(TIERS)


def test_parallel_parts_take_as_long_as_the_longest(tmp_path, capsys):
    clouds = next(tier for tier in TIERS if len(tier.parts) == 2)
    for part, seconds in zip(clouds.parts, (30, 70), strict=True):
        (tmp_path / f"{part}.xml").write_text(JUNIT.format(seconds=seconds))
    main(tmp_path, lambda: REFERENCE_S)
    assert f"{clouds.name}: 4 tests, 70 s" in capsys.readouterr().out
