"""A plan in a file: `launch --plan` buys what the dry run showed, or names what changed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import launcher.cli.launch as launch_module
from engine.events import Market
from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from launcher.job.schema import Job
from launcher.ledger.store import find_run, open_ledger
from launcher.market.offers import Offer, read_catalog
from launcher.placement.plan import plan_local, zone_text
from launcher.runs.kept_plan import KeptPlan, at_todays_prices, moved_prices, read_kept_plan
from launcher.settings import ledger_path
from tests.launcher.printed import printed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.setattr(
        launch_module, "preflight", lambda checked, folder, start=None, say=None: {"warnings": ["it is odd"]}
    )
    monkeypatch.setattr(launch_module, "start_controller", lambda sessions, name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: kept\nbudget: {max_total: $10}\n")
    return tmp_path


def test_the_kept_plan_is_bought_from_any_folder(folder, monkeypatch, capsys):
    (folder / "words.txt").write_text("a cat\na dog\n")
    flags = ("--seed", "7", "--set", "prompts=words.txt")
    assert run(["launch", "job.yaml", *flags, "--dry-run", "--json", "--out", "plan.json"]) == ExitCode.OK
    shown = printed("launch", capsys.readouterr().out)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert run(["launch", "--plan", "../plan.json", "-y", "--detach"]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "As planned at 2" in said
    assert "trainer  spot" in said or "trainer  on_demand" in said, "the screen of the dry run"
    with open_ledger(ledger_path())() as session:
        bought = find_run(session, "kept")
    assert (bought.seed, bought.job["prompts"]) == (7, "words.txt")
    assert bought.plan["slots"] == shown["plan"]["slots"]


def test_every_changed_field_of_the_job_is_named_and_nothing_is_started(folder, monkeypatch, capsys):
    assert run(["launch", "job.yaml", "--dry-run", "--out", "plan.json"]) == ExitCode.OK
    capsys.readouterr()
    (folder / "job.yaml").write_text("name: kept\nbudget: {max_total: $80}\nseed: 3\n")
    assert run(["launch", "--plan", "plan.json", "-y", "--detach"]) == ExitCode.PLAN_CHANGED
    said = capsys.readouterr().err
    assert 'budget.max_total: "$10" -> "$80"\n' in said
    assert "seed: 0 -> 3\n" in said
    assert "nothing was started" in said
    assert run(["launch", "--plan", "plan.json", "--seed", "4"]) == ExitCode.USAGE
    assert run(["launch", "--dry-run"]) == ExitCode.USAGE
    assert run(["launch", "job.yaml", "--out", "plan.json"]) == ExitCode.USAGE
    (folder / "plan.json").write_text("{}")
    assert run(["launch", "--plan", "plan.json"]) == ExitCode.FAILURE
    assert "no plan that this spotrl can read" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [None, 80_000_000])
def test_a_file_that_was_edited_lifts_no_limit(folder, capsys, limit):
    assert run(["launch", "job.yaml", "--dry-run", "--out", "plan.json"]) == ExitCode.OK
    kept = json.loads((folder / "plan.json").read_text())
    kept["plan"]["max_total_micro_usd"] = limit
    (folder / "plan.json").write_text(json.dumps(kept))
    assert run(["launch", "--plan", "plan.json", "-y", "--detach"]) == ExitCode.PLAN_CHANGED
    said = capsys.readouterr().err
    assert f"the plan's max_total: {'no limit' if limit is None else '$80.00'} -> $10.00\n" in said
    with open_ledger(ledger_path())() as session, pytest.raises(LookupError):
        find_run(session, "kept")


def test_a_strict_dry_run_ends_with_its_own_code_if_there_are_warnings(folder, monkeypatch, capsys):
    assert run(["launch", "job.yaml", "--dry-run", "--json"]) == ExitCode.OK
    assert printed("launch", capsys.readouterr().out)["warnings"] == ["it is odd"]
    words = ["launch", "job.yaml", "--strict", "--out", "plan.json"]
    assert run([*words, "--dry-run", "--json"]) == ExitCode.WARNINGS == 11
    assert printed("launch", capsys.readouterr().out)["warnings"] == ["it is odd"]
    assert not (folder / "plan.json").exists()
    assert run(["launch", "job.yaml", "--strict", "-y", "--detach"]) == ExitCode.WARNINGS
    assert "it is odd" in capsys.readouterr().err
    monkeypatch.setattr(launch_module, "preflight", lambda checked, folder, start=None, say=None: {})
    assert run([*words, "--dry-run"]) == ExitCode.OK
    assert (folder / "plan.json").exists()


def test_a_cloud_plan_is_kept_with_the_figures_that_were_shown(dry_run, few_replays, tmp_path, capsys):
    words = ("--allow-old-prices", "--set", "store.aws=s3://bucket/runs")
    lines = dry_run("sd3_5", *words, "--out", "plan.json")
    kept = read_kept_plan(tmp_path / "plan.json")
    assert f"at most ${kept.bound_micro_usd / 1e6:.2f}" in lines[1]
    assert f"${kept.expected_micro_usd / 1e6:.2f} (" in lines[0]
    assert run(["launch", "--plan", "plan.json", "--dry-run", "--json"]) == ExitCode.OK
    again = capsys.readouterr()
    assert printed("launch", again.out)["plan"]["slots"] == json.loads(Path("plan.json").read_text())["plan"]["slots"]
    assert lines[0] in again.err
    assert "price of" not in again.err, "the prices are the same"
    assert run(["launch", "sd3_5.yaml", *words, "--dry-run", "--strict"]) == ExitCode.WARNINGS, "the model is not here"


def kept_of(offers: list[Offer]) -> KeptPlan:
    """Return the plan of a job at these prices, which costs $100, and at most $120."""
    job = Job()
    return KeptPlan(
        made_at="2026-11-29T00:00:00+00:00",
        command="spotrl launch job.yaml --dry-run --out plan.json",
        job="job.yaml",
        folder="/",
        flags={},
        values=job.model_dump(mode="json"),
        plan=plan_local(job, offers),
        screen=(),
        longest_ms=None,
        expected_micro_usd=100_000_000,
        high_micro_usd=120_000_000,
    )


@pytest.mark.parametrize(
    ("market", "percent", "changed"),
    [
        (Market.SPOT, 105, []),
        (Market.SPOT, 60, []),
        (Market.SPOT, 300, ["expected cost: up to $120.00 -> $"]),
        (Market.ON_DEMAND, 101, ["all nodes on demand: at most $"]),
    ],
)
def test_prices_may_move_within_the_figures_that_were_shown(market, percent, changed):
    offers = list(read_catalog())
    kept = kept_of(offers)
    moved = [
        replace(offer, micro_usd_per_hour=offer.micro_usd_per_hour * percent // 100)
        if offer.market is market
        else offer
        for offer in offers
    ]
    plan, changes = at_todays_prices(kept, moved)
    assert [str(change)[: len(start)] for change, start in zip(changes, changed, strict=True)] == changed
    assert bool(moved_prices(kept.plan, plan)) == any(slot.placement.market is market for slot in plan.slots)
    assert at_todays_prices(kept, offers) == (kept.plan, [])


def test_a_node_that_is_no_longer_on_offer_is_a_change():
    offers = list(read_catalog())
    kept = kept_of(offers)
    spot = kept.plan.slots[-1]
    gone = [offer for offer in offers if (zone_text(offer), offer.market) != (spot.placement.zone, Market.SPOT)]
    _, changes = at_todays_prices(kept, gone)
    assert {change.field for change in changes} >= {spot.name}
    assert re.fullmatch(rf"{spot.name}: spot \w+ \S+ in .+ -> not on offer", str(changes[-1]))
    # The same zone under the account's own name for it.
    named = [replace(offer, zone=f"{offer.region}-x", zone_id=zone_text(offer)) for offer in offers]
    plan, changes = at_todays_prices(kept, named)
    assert changes == []
    assert plan.slots[-1].placement.zone == f"{spot.placement.region}-x"
