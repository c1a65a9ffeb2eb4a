"""The time limits of the tiers are held against what pytest wrote."""

import time

import pytest

from tests import tiers
from tests.tiers import REFERENCE_LOAD_S, TIERS, TOLERANCE, LoadWatch, load_file, main

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" time="{seconds}">
<testcase classname="tests.a" name="test_quick" time="0.1"/><testcase classname="tests.a" name="test_long" time="9.5"/>
</testsuite></testsuites>"""


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (TOLERANCE - 0.01, 0), (TOLERANCE + 0.01, 1)])
def test_a_tier_fails_when_it_exceeds_its_limit_and_the_tolerance(tmp_path, capsys, share, code):
    tier = TIERS[0]
    (tmp_path / f"{tier.parts[0]}.xml").write_text(JUNIT.format(seconds=share * tier.limit_s))
    assert main(tmp_path) == code
    out = capsys.readouterr().out
    assert f"{tier.name}: 2 tests, {share * tier.limit_s:.0f} s" in out
    assert out.index("tests.a::test_long") < out.index("tests.a::test_quick")
    assert (f"{tier.name} took more than" in out) == bool(code)


@pytest.mark.parametrize(("factor", "code"), [(2.0, 0), (1.5, 1), (0.1, 1)])
def test_a_machine_that_was_slow_beside_the_tier_gets_more_time(tmp_path, capsys, factor, code):
    part = tmp_path / f"{TIERS[0].parts[0]}.xml"
    part.write_text(JUNIT.format(seconds=1.9 * TOLERANCE * TIERS[0].limit_s))
    load_file(part).write_text(str(factor * REFERENCE_LOAD_S))
    assert main(tmp_path) == code, "a quicker machine tightens no limit"
    assert f"factor of this machine: {factor:.2f}" in capsys.readouterr().out


def test_the_load_beside_a_tier_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "LOAD_EVERY_S", 0.01)
    watch = LoadWatch(tmp_path / "results" / "test.load")
    time.sleep(1.5)
    watch.end()
    assert 0.02 < float((tmp_path / "results" / "test.load").read_text()) < 30.0


def test_a_tier_that_did_not_run_is_named_and_fails_nothing(tmp_path, capsys):
    assert main(tmp_path) == 0
    assert capsys.readouterr().out.count("did not run") == len(TIERS)


def test_parallel_parts_take_as_long_as_the_longest(tmp_path, capsys):
    clouds = next(tier for tier in TIERS if len(tier.parts) == 2)
    for part, seconds in zip(clouds.parts, (30, 70), strict=True):
        (tmp_path / f"{part}.xml").write_text(JUNIT.format(seconds=seconds))
    main(tmp_path)
    assert f"{clouds.name}: 4 tests, 70 s" in capsys.readouterr().out
