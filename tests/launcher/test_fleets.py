"""The fleet of a job that leaves its GPUs open: which are compared, which is chosen, and what is refused."""

import shutil
from dataclasses import replace
from importlib.resources import files
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

import spotrl
from launcher.cli.main import run
from launcher.cli.plan_screen import cloud_screen
from launcher.exit_codes import BudgetError, ExitCode
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from launcher.ledger.store import find_run, open_ledger
from launcher.market.offers import read_catalog
from launcher.placement import fleets
from launcher.placement.forecast import outlook
from launcher.placement.memory import check_memory
from launcher.placement.plan import PlacementError, front_from
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import cloud_requirements, market_view
from launcher.runs.kept_plan import read_kept_plan
from launcher.services import fleets as service
from launcher.services.fleets import choose_fleet
from launcher.services.planning import CurrentMarket
from tests.launcher.printed import printed

NOW_MS = 1_795_348_800_000
KINDS = {
    "A100-80GB:1",
    "V100:1",
    "H100:8",
    "H200:8",
    "B200:8",
    "A100-80GB:8",
    "H100:1",
    "L40S:4",
    "L4:1",
    "A10G:1",
    "T4:1",
}
REGIONS = {"us-east-1", "us-east-2", "us-west-2", "us-east4", "us-central1", "ap-south-1"}
OFFERS = [offer for offer in read_catalog() if f"{offer.accelerator}:{offer.gpus}" in KINDS and offer.region in REGIONS]
"""A part of what is sold: with all of it each choice would take seconds."""
MARKET = CurrentMarket(view=market_view(OFFERS, now_ms=NOW_MS), unknown=(), closed={})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the example of Qwen-Image without its resources, for a trainer that may be on spot."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setattr(service, "STARTS", 2)
    monkeypatch.setattr(service, "FIRST_STARTS", 1)
    monkeypatch.setattr(service, "CONFIRMED_STARTS", 2)
    for name in ("qwen_image_ocr_prompts.txt", "qwen_image_ocr_test_prompts.txt"):
        shutil.copy(str(files("sky_yamls") / name), tmp_path / name)
    job = YAML(typ="safe").load((files("sky_yamls") / "qwen_image_ocr.yaml").read_text())
    del job["resources"]
    job["runtime"]["name"], job["checkpoint"]["every"] = "local", "auto"
    YAML(typ="safe").dump(job, tmp_path / "job.yaml")
    return tmp_path


@pytest.fixture
def checked(folder):
    def checked(**fields):
        return load_job(folder / "job.yaml", {"recovery.controller_stays_up": True, **fields})

    return checked


def compared(job_file):
    return fleets.candidates(job_file.job, job_file.workdir, OFFERS, MARKET.view)


# --- what is compared -----------------------------------------------------------------------------------


def test_the_candidates_are_those_of_trying_every_job(checked):
    """For each fleet and number of nodes, the plan of a job that names them costs as much."""
    job_file = checked(**{"resources.trainer.accelerators": "[H100:8, A100-80GB:8]", "resources.rollout.num_nodes": 2})
    candidates, _ = compared(job_file)
    tried = {}
    for trainer in ("H100:8", "A100-80GB:8"):
        for on_spot in (False, True):
            for rollout in sorted({f"{offer.accelerator}:{offer.gpus}" for offer in OFFERS}):
                for nodes in (0, 1, 2):
                    fleet = fleets.Fleet(trainer=trainer, trainer_on_spot=on_spot, rollout=rollout if nodes else None)
                    try:
                        resolved = resolve(fleets.with_fleet(job_file.job, fleet, nodes), job_file.workdir)
                        check_memory(resolved)
                        needs = replace(cloud_requirements(resolved), replays_decide=True, min_rollout_nodes=nodes)
                        plan = plan_cloud(needs, MARKET.view)
                    except (PlacementError, BudgetError, ValueError):
                        continue
                    tried[trainer, on_spot, fleet.rollout, nodes] = plan.cost.expected
    ours = {candidate.key: outlook(candidate.choice).micro_usd for candidate in candidates}
    assert ours == tried
    assert len(ours) > 30


def test_what_cannot_hold_the_model_is_not_compared(checked):
    candidates, unfit = compared(checked())
    small = {"L4", "T4", "A10G", "L40S"}
    assert not {candidate.fleet.trainer.partition(":")[0] for candidate in candidates} & small
    assert small <= {refusal.fleet.trainer.partition(":")[0] for refusal in unfit}


def test_a_given_field_is_kept(checked):
    given = {
        "resources.trainer.accelerators": "H100:4",
        "resources.trainer.use_spot": False,
        "resources.rollout.num_nodes": 1,
    }
    candidates, _ = compared(checked(**given))
    assert {candidate.fleet.trainer for candidate in candidates} == {"H100:4"}
    assert not any(candidate.fleet.trainer_on_spot for candidate in candidates)
    assert {candidate.choice.nodes for candidate in candidates} == {0, 1}


def test_the_trainer_is_on_spot_only_where_it_can_be_replaced(checked):
    stays, sleeps = (compared(checked(**{"recovery.controller_stays_up": up}))[0] for up in (True, False))
    assert {candidate.fleet.trainer_on_spot for candidate in stays} == {True, False}
    assert {candidate.fleet.trainer_on_spot for candidate in sleeps} == {False}


def test_the_trainer_alone_costs_as_much_beside_any_rollout_gpu(checked):
    costs = set()
    for rollout in ("H100:8", "A100-80GB:8", "B200:8"):
        fields = {"resources.trainer.accelerators": "H100:8", "resources.rollout.accelerators": rollout}
        needs = cloud_requirements(resolve(checked(**fields).job))
        plan = plan_cloud(replace(needs, max_rollout_nodes=0, deadline_ms=None), MARKET.view)
        costs.add(plan.cost.expected)
    assert len(costs) == 1


# --- what is chosen -------------------------------------------------------------------------------------


def test_the_three_plans_are_replayed_and_the_cheapest_in_time_is_chosen(checked):
    found = choose_fleet(checked().job, MARKET)
    assert found.chosen == found.in_time
    assert found.cheapest.replays.usd <= found.in_time.replays.usd
    assert found.quickest.replays.hours <= found.in_time.replays.hours
    assert [row.number for row in found.front] == list(range(1, len(found.front) + 1))
    assert found.chosen.resolved.job.resources.trainer.accelerators == found.chosen.fleet.trainer
    chosen = found.chosen.resolved.job
    assert chosen.runtime.trainer_ranks == chosen.resources.trainer.gpus, "every GPU of the trainer trains"
    assert not fleets.chooses_fleet(found.chosen.resolved.job), "the chosen job is a job like any other"
    quickest = choose_fleet(checked().job, MARKET, goal="time")
    assert quickest.chosen.number == quickest.quickest.number
    assert quickest.usd_per_hour_saved is None


def test_a_front_of_one_fleet(checked):
    fields = {"resources.trainer.accelerators": "[H100:8, L4:1]", "resources.trainer.use_spot": True}
    found = choose_fleet(checked(**fields, **{"resources.rollout.num_nodes": 0}).job, MARKET)
    assert (len(found.front), found.fleets, found.chosen.fleet.trainer) == (1, 1, "H100:8")
    assert found.cheapest == found.in_time == found.quickest


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"budget.deadline": "2h"}, BudgetError, r"no fleet .* in time for the deadline of 2h: the quickest takes"),
        (
            {"budget.max_total": 60},
            BudgetError,
            r"the cheapest by forecast, .*, takes \$.*; raise --max-total or",
        ),
        ({"budget.max_hourly": 1}, BudgetError, r"the cheapest hour is that of .* on spot alone, .* --max-hourly 3"),
        (
            {"resources.trainer.accelerators": "[L4:1, T4:1]"},
            PlacementError,
            r"no GPU .* and the job allows can run it",
        ),
    ],
)
def test_what_no_fleet_can_do_is_refused_with_what_would_be_enough(checked, fields, error, words):
    with pytest.raises(error, match=words):
        choose_fleet(checked(**fields).job, MARKET)


def test_a_gpu_that_nobody_knows_is_refused_among_several(checked):
    with pytest.raises(JobError, match=r"is NOSUCH:8, and spotrl knows no such GPU on aws or gcp; use one of A100"):
        checked(**{"resources.trainer.accelerators": "[L4:1, NOSUCH:8]"})


def test_a_gpu_that_torch_cannot_use_is_not_compared(checked):
    offered = fleets.fleets_of(checked().job, OFFERS)
    assert any(offer.accelerator == "V100" for offer in OFFERS)
    assert not any("V100" in f"{fleet.trainer} {fleet.rollout}" for fleet in offered)


def test_a_number_that_no_plan_has_is_refused(checked):
    with pytest.raises(PlacementError, match=r"--choose is 99, and the plans are numbered 1 to \d+"):
        choose_fleet(checked().job, MARKET, choose=99)


def test_what_fails_its_further_replays_is_not_shown(checked, monkeypatch):
    """A fleet that was lucky in its first replays, and then ends too seldom, is no plan."""
    whole, first = service.replays_of, set()

    def replays_of(plan, rules, confidence, starts, known):
        replays = whole(plan, rules, confidence, starts, known)
        if plan.slots in first:
            return replace(replays, enough_ms=None)
        first.add(plan.slots)
        return replays

    monkeypatch.setattr(service, "replays_of", replays_of)
    with pytest.raises(BudgetError, match="no fleet reaches the target within the limits"):
        choose_fleet(checked().job, MARKET)


def test_runs_that_are_too_long_to_replay_are_refused_with_nodes_to_name(checked):
    fields = {"iterations": 3_000, "budget.deadline": None, "budget.max_hourly": 8}
    with pytest.raises(BudgetError, match=r"runs of over 100 h are not replayed, .* name the nodes, like --set resour"):
        choose_fleet(checked(**fields).job, MARKET)


def test_a_dominated_plan_is_kept_if_it_alone_is_in_time(checked):
    rows = [
        service.FleetRow(number=0, candidate=None, plan=None, replays=replays(usd, hours), in_time=in_time, why_not="")
        for usd, hours, in_time in ((10, 5, False), (12, 6, True), (13, 5.5, True), (14, 4, True))
    ]
    front = service._front(rows, rows[1], checked().job)
    assert [(row.number, row.replays.usd) for row in front] == [(1, 10), (2, 12), (3, 14)]
    assert [row.why_not for row in front] == [
        "past the deadline of 3d (2 of 10 replays meet it)",
        "",
        "$2.00 more than the cheapest in time",
    ]


def replays(usd, hours):
    return SimpleNamespace(usd=usd, hours=hours, met=2, starts=10)


# --- commands -------------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_plans_on_one_screen_and_keeps_the_chosen(folder, capsys):
    arguments = ["--dry-run", "--set", "recovery.controller_stays_up=true"]
    assert run(["launch", str(folder / "job.yaml"), *arguments, "--out", str(folder / "plan.json")]) == ExitCode.OK
    screen, _, _ = capsys.readouterr().out.partition("  !! store")
    assert max(map(len, screen.splitlines())) <= 80
    assert len(screen.splitlines()) <= 24
    assert "1 cheapest" in screen
    assert "quickest" in screen
    assert run(["launch", "--plan", str(folder / "plan.json"), "--dry-run"]) == ExitCode.OK
    assert screen.splitlines()[0] in capsys.readouterr().out
    assert read_kept_plan(folder / "plan.json").plan.fleets.front, "the run of this plan keeps what it was chosen from"


def test_the_front_is_in_the_json(folder, capsys):
    arguments = ["--dry-run", "--json", "--choose", "1", "--set", "recovery.controller_stays_up=true"]
    assert run(["launch", str(folder / "job.yaml"), *arguments]) == ExitCode.OK
    fleets = printed("launch", capsys.readouterr().out)["plan"]["fleets"]
    assert fleets["chosen"] == 1
    assert {"number", "nodes", "usd", "hours", "why_not"} <= fleets["front"][0].keys()


def test_a_simulation_shows_the_front_of_a_job_that_leaves_its_gpus_open(folder, capsys):
    page, arguments = folder / "page.html", ["--starts", "1", "--set", "recovery.controller_stays_up=true"]
    written = ["--html", str(page), "--ledger", str(folder / "replays"), "--json"]
    assert run(["simulate", str(folder / "job.yaml"), *arguments, *written]) == ExitCode.OK
    found = printed("simulate", capsys.readouterr().out)
    assert found["prices"].startswith("prices of ")
    assert f"{found['fleets']['chosen']}: chosen" in page.read_text()
    with open_ledger(folder / "replays" / "ledger.sqlite")() as session:
        kept = front_from(find_run(session, "ours-0").plan)
    assert kept.chosen == found["fleets"]["chosen"], "a replay is a run, and keeps what it was chosen from"
    named = [f"--set=resources.{role}.accelerators=H100:8" for role in ("trainer", "rollout")]
    assert run(["simulate", str(folder / "job.yaml"), *arguments, *named, "--html", str(page), "--json"]) == ExitCode.OK
    assert printed("simulate", capsys.readouterr().out)["fleets"] is None
    assert "chosen from" not in page.read_text()


def test_explain_names_what_was_not_searched(folder, capsys):
    assert run(["launch", str(folder / "job.yaml"), "--dry-run", "--explain"]) == ExitCode.OK
    words = " ".join(capsys.readouterr().out.split())
    assert "fleets compared by forecast" in words
    assert "not searched: trainers of several nodes" in words


def test_python_plans_the_chosen_fleet(folder):
    planned = spotrl.plan(folder / "job.yaml", recovery__controller_stays_up=True)
    assert planned.slots[0].placement.accelerator != "L4", "which cannot hold the model, and is the default"


def test_recorded_prices_are_not_bought_by(folder, capsys):
    assert run(["launch", str(folder / "job.yaml"), "-y", "--prices", "recorded"]) == ExitCode.USAGE
    assert "--prices recorded is to compare with, and not to buy by; add --dry-run" in capsys.readouterr().err


def test_several_kinds_on_this_machine_are_refused(folder, capsys):
    arguments = ["--infra", "local", "--dry-run", "--set", "resources.trainer.accelerators=[H100:8, L4:1]"]
    assert run(["launch", str(folder / "job.yaml"), *arguments]) == ExitCode.INVALID_JOB
    assert "names 2 nodes to choose from, H100:8, L4:1, but infra is local" in " ".join(capsys.readouterr().err.split())


def test_choosing_is_refused_for_a_job_that_names_its_gpus(folder, capsys):
    named = ["--set", "resources.trainer.accelerators=H100:8", "--set", "resources.rollout.num_nodes=0"]
    assert run(["launch", str(folder / "job.yaml"), "--dry-run", "--choose", "1", *named]) == ExitCode.USAGE
    assert "for a job on clouds that leaves its GPUs open" in " ".join(capsys.readouterr().err.split())


def test_the_plan_says_what_the_other_way_beside_its_trainer_came_to(checked):
    """Both in replays: the trainer alone, and with the best rollout nodes."""
    found = choose_fleet(checked().job, MARKET)
    assert found.other_way is not None
    assert found.other_way.fleet.trainer == found.chosen.fleet.trainer
    assert (found.other_way.fleet.rollout is None) is not (found.chosen.fleet.rollout is None)
    screen = "\n".join(cloud_screen(checked().job, found.chosen.plan, 0, NOW_MS, found))
    assert f"${found.other_way.replays.usd:,.2f}" in screen
    assert "the trainer alone" not in screen, "its closed form is no replay"


@pytest.fixture
def rounds(monkeypatch):
    """Return the starts asked of each fleet, and replay each at most twice. A fleet in `late` is late in the last."""
    asked, late, replayed = [], set(), service._row

    def row(candidate, plan, starts, known=None):
        asked.append((candidate.key, starts))
        made = replayed(candidate, plan, min(starts, 2))
        made = replace(made, replays=replace(made.replays, starts=starts))
        return replace(made, in_time=False) if starts == service.CONFIRMED_STARTS and candidate.key in late else made

    monkeypatch.setattr(service, "_row", row)
    for name, value in (("FIRST_STARTS", 4), ("STARTS", 10), ("CONFIRMED_STARTS", 30), ("NODE_HOURS_OF_START", 10_000)):
        monkeypatch.setattr(service, name, value)
    return asked, late


def test_a_fleet_that_more_replays_find_late_is_not_bought(checked, rounds):
    _, late = rounds
    first = choose_fleet(checked().job, MARKET).in_time
    late.add(first.key)
    found = choose_fleet(checked().job, MARKET)
    assert found.chosen == found.in_time
    assert found.in_time.key != first.key
    assert found.in_time.replays.starts == service.CONFIRMED_STARTS


def test_the_cheapest_in_time_and_those_near_it_are_replayed_most(checked, rounds):
    asked, _ = rounds
    found = choose_fleet(checked().job, MARKET)
    most = {key for key, starts in asked if starts == service.CONFIRMED_STARTS}
    assert found.chosen.key in most
    near = [row for row in found.front if row.in_time and row.replays.usd <= service.NEAR * found.chosen.replays.usd]
    assert {row.key for row in near} <= most
    assert {row.key for row in found.front} - most, "the quickest is dearer, and its dollars need not be as exact"


def test_replays_go_on_where_they_ended(checked):
    """A start is replayed once, however many rounds a fleet takes part in."""
    row = choose_fleet(checked().job, MARKET).chosen
    assert len(row.known) == row.replays.starts
    again = service._row(row.candidate, row.plan, row.replays.starts)
    assert again.replays == row.replays


def test_all_fleets_of_a_round_are_replayed_equally_often(checked, rounds):
    """Starts that are hard for one fleet are hard for the others."""
    asked, _ = rounds
    choose_fleet(checked(**{"budget.deadline": "30d"}).job, MARKET)
    assert len(asked) > 4
    assert {starts for _, starts in asked} == {service.FIRST_STARTS, service.STARTS, service.CONFIRMED_STARTS}
