"""Plans for a trainer of several nodes on clouds: equal slots, the money of all of them, and as many ranks on each."""

import json
from dataclasses import replace
from random import Random

import pytest

import spotrl
from engine.trainer_ranks import RankLimits
from launcher.checks.quotas import need_of, quotas
from launcher.cli.main import run
from launcher.cli.plan_text import pool_name, pools_of
from launcher.decide.actions import Buy
from launcher.decide.launch_history import MoveRules
from launcher.exit_codes import BudgetError, ExitCode
from launcher.job.checked import JobError
from launcher.job.gpu_checks import check_ranks
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from launcher.money import HOUR_MS
from launcher.placement.cloud_plan import CloudPlan, cloud_plan_json
from launcher.placement.plan import PlacementError, Plan, plan_json, slots_from
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import CloudRequirements, NodeRequirements, cloud_requirements
from launcher.replay.optimum import optimum
from launcher.replay.replay import replay
from launcher.replay.simulate import POLICIES
from launcher.replay.world import World
from tests.launcher.cluster.test_checks import FakeLimits, enough, site
from tests.launcher.cluster.test_checks import plan as checked_plan
from tests.launcher.reference_recipe import verl_omni
from tests.launcher.replay.markets import ON_DEMAND, market, option, work
from tests.launcher.replay.markets import plan as replayed_plan
from tests.launcher.test_cloud_plan import EAST, offer, requirements, view, where
from tests.launcher.test_plan_screen import is_one_screen

NOTE = "the network between the trainer's nodes is not in the predicted time; several nodes have never run on GPUs"

EIGHT, RULES = RankLimits(most=8), MoveRules()


def needs(nodes: int, gpus: int, **more: object) -> CloudRequirements:
    """Return needs of a trainer with 8 ranks on `nodes` nodes, of which one rank samples."""
    recipe = replace(verl_omni(limits=EIGHT), asked_ranks=8, trainer_nodes=nodes)
    trainer = NodeRequirements(accelerator="H100", gpus=gpus)
    return requirements(recipe=recipe, trainer=trainer, trainer_gpus_named=gpus, **more)


def with_ranks(tmp_path, trainer: str, ranks: int, more: str = ""):
    path = tmp_path / "job.yaml"
    path.write_text(
        f"infra: aws\nruntime: {{trainer_ranks: {ranks}}}\nresources:\n  trainer: {{{trainer}}}\n"
        "  rollout: {num_nodes: 0}\n"
        f"algorithm: {{prompts_per_batch: 32, updates_per_batch: 2}}\n{more}"
    )
    return load_job(path)


# --- slots and money ----------------------------------------------------------------------------------


def test_a_trainer_of_two_nodes_has_two_slots_of_the_same_placement():
    plan = plan_cloud(needs(2, 4), view(*EAST))
    first, second, *rollout = plan.slots
    assert [(slot.name, slot.role) for slot in (first, second)] == [("trainer", "trainer"), ("trainer-1", "ranks")]
    assert first.placement == second.placement
    assert first.placement.zone == "east, any zone", "the offer names no zone"
    assert {slot.role for slot in rollout} == {"rollout"}
    assert slots_from(json.loads(json.dumps(plan_json(plan.as_plan())))) == plan.slots


def test_two_nodes_cost_twice_a_node_for_the_time_of_all_ranks():
    """4 x 107 GPU-s of rollouts on one rank, 4 x 253 GPU-s of training on eight: 554.5 s, at 2 x $28 an hour."""
    plan = plan_cloud(needs(2, 4, max_rollout_nodes=0), view(*EAST))
    assert plan.seconds_per_iteration == pytest.approx(428 + 1012 / 8)
    assert plan.listed_micro_usd_per_hour == plan.maximum_micro_usd_per_hour == 56_000_000
    assert plan.cost.expected / 1e6 == pytest.approx(300 * 554.5 / 3600 * 56)
    one = plan_cloud(needs(1, 8, max_rollout_nodes=0), view(offer("", 28, gpus=8)))
    assert plan.cost.expected == pytest.approx(2 * one.cost.expected)
    assert plan.time == one.time


def figures(plan: CloudPlan) -> tuple[object, ...]:
    alternatives = [(other.what, other.why_not, other.micro_usd, other.ms) for other in plan.alternatives]
    return (
        (plan.cost, plan.time, plan.iterations, plan.factors, plan.spot_pays, plan.stand_ins),
        (plan.listed_micro_usd_per_hour, plan.expected_micro_usd_per_hour, plan.maximum_micro_usd_per_hour),
        (plan.pools, plan.pace_ms, plan.seconds_per_iteration_alone, plan.exploration, where(plan), alternatives),
    )


@pytest.mark.parametrize("policy", ["ours", "all-on-demand", "one-zone", "spread"])
def test_two_nodes_are_planned_like_one_node_with_twice_the_gpus_and_price(policy):
    limits = {"policy": policy, "max_hourly_micro_usd": 75_000_000, "max_rollout_nodes": 4}
    two = plan_cloud(needs(2, 4, **limits), view(*EAST))
    one = plan_cloud(needs(1, 8, **limits), view(offer("", 56, gpus=8), *EAST[1:]))
    assert sum(where(two).values()) > 0
    assert figures(two) == figures(one)


def test_the_hourly_limit_holds_all_nodes_of_the_trainer():
    """$28 an hour hold one node. Two nodes need $56."""
    held = {"max_rollout_nodes": 0, "max_hourly_micro_usd": 55_999_999}
    assert plan_cloud(needs(1, 8, **held), view(offer("", 28, gpus=8)))
    with pytest.raises(BudgetError, match=r"\$56.00/h is above max_hourly \$56.00/h; raise --max-hourly to \$56.00/h"):
        plan_cloud(needs(2, 4, **held), view(*EAST))
    plan = plan_cloud(needs(2, 4, **held | {"max_hourly_micro_usd": 56_000_000}), view(*EAST))
    assert len(plan.slots) == 2


def test_regions_whose_nodes_are_together_above_the_limit_are_no_site():
    west = tuple(replace(each, region="west", micro_usd_per_hour=each.micro_usd_per_hour * 2) for each in EAST)
    held = {"max_rollout_nodes": 0, "max_hourly_micro_usd": 100_000_000}
    assert [site.region for site in plan_cloud(needs(2, 4, **held), view(*EAST, *west)).sites] == ["east"]
    free = plan_cloud(needs(2, 4, max_rollout_nodes=0), view(*EAST, *west))
    assert [site.region for site in free.sites] == ["east", "west"]
    assert free.alternatives[0].what == "gcp west, 2 x h100-4: 0 rollout nodes"


def test_regions_are_in_the_order_of_the_price_of_the_whole_cluster():
    """Two nodes and a spot node: 2 x $10 + $5 in west, 2 x $11.50 + $3 in north. With one node, north is cheaper."""
    east, west, north = (
        (offer("", trainer, gpus=4, region=region), offer("", 7, region=region), offer("a", spot, region=region))
        for region, trainer, spot in (("east", 5, 1), ("west", 10, 5), ("north", 11.5, 3))
    )
    wanted = {"max_rollout_nodes": 1, "min_rollout_nodes": 1}
    plan = plan_cloud(needs(2, 4, **wanted), view(*east, *west, *north))
    assert [site.region for site in plan.sites] == ["east", "west", "north"]
    four = replace(needs(1, 4, **wanted), recipe=replace(verl_omni(limits=EIGHT), asked_ranks=4))
    assert [site.region for site in plan_cloud(four, view(*east, *west, *north)).sites] == ["east", "north", "west"]


def test_a_region_without_such_nodes_is_named_with_the_number_of_nodes():
    with pytest.raises(PlacementError, match="offers a trainer with 2 nodes of 4 x H100 or more on demand"):
        plan_cloud(needs(2, 4), view(*EAST[1:]))


# --- ranks --------------------------------------------------------------------------------------------


def test_each_node_has_its_part_of_the_ranks_and_the_smallest_node_is_taken():
    sizes = [offer("", 7.0 * gpus, gpus=gpus) for gpus in (1, 2, 4, 8)]
    plan = plan_cloud(needs(2, 4, max_rollout_nodes=0), view(*sizes))
    trainer = plan.trainer
    assert (trainer.nodes, trainer.gpus, trainer.ranks, trainer.idle, trainer.waiting) == (2, 4, 8, 0, 7)
    assert trainer.text().startswith("2 nodes, 8 of 8 GPUs train; ")
    assert cloud_plan_json(plan)["trainer"]["nodes"] == 2
    assert NOTE in plan.notes
    assert NOTE not in plan_cloud(needs(1, 8), view(*sizes)).notes


def test_gpus_that_do_not_train_are_counted_over_all_nodes():
    plan = plan_cloud(needs(2, 4, max_rollout_nodes=0), view(offer("", 55, gpus=8)))
    assert (plan.trainer.gpus, plan.trainer.idle) == (8, 8)
    assert any("has 8 GPUs, and the trainer has 2 nodes: 8 are paid for idle" in note for note in plan.notes)


def test_a_job_looks_for_nodes_with_as_many_gpus_as_each_has_ranks(tmp_path):
    job = with_ranks(tmp_path, "accelerators: 'H100:8', num_nodes: 2", 4).job
    wanted = cloud_requirements(resolve(job))
    assert (wanted.trainer.gpus, wanted.recipe.trainer_nodes, wanted.recipe.ranks(2)) == (2, 2, 4)
    plan = plan_cloud(wanted, view(*(offer("", 7.0 * gpus, gpus=gpus, cloud="aws") for gpus in (1, 2, 8)), EAST[1]))
    assert plan.trainer.gpus == 2
    named = "the job names 8 x H100 for each of the trainer's 2 nodes; runtime.trainer_ranks is 4"
    assert any(note.startswith(named) and note.endswith("counts 4 and looks for a node with 2") for note in plan.notes)


def test_ranks_over_two_nodes_share_full_weights_like_ranks_on_one(tmp_path):
    full = "model: {name: qwen-image, path: there, weights: full}\n"
    two, one = (
        resolve(with_ranks(tmp_path, trainer, 8, full).job).memory.trainer
        for trainer in ("accelerators: 'H100:4', num_nodes: 2", "accelerators: 'H100:8'")
    )
    assert two == one


def test_scorers_are_on_the_gpus_of_one_node(tmp_path):
    """8 processes on the 4 GPUs of a node: 2 on each. On the 8 GPUs of a single node: 1 on each."""
    scored = (
        "model: {name: qwen-image, path: there}\n"
        "reward: {name: pickscore, model: {path: /scorer}, placed: pool, pool: {processes: 8}}\n"
    )
    two, one = (
        resolve(with_ranks(tmp_path, trainer, 8, scored).job).memory.trainer.parts["scorers"]
        for trainer in ("accelerators: 'H100:4', num_nodes: 2", "accelerators: 'H100:8'")
    )
    assert two == 2 * one


@pytest.mark.parametrize(("trainer", "ranks", "words"), [
    ("accelerators: 'H100:8', num_nodes: 2", 16,
     ["runtime.trainer_ranks is 16", "8 ranks at most, on all nodes together", "use 8, 4 on each of the 2 nodes"]),
    ("accelerators: 'H100:2', num_nodes: 2", 8,
     ["2 trainer nodes with H100:2", "have 4 GPUs", "use 4, 2 on each of the 2 nodes", "accelerators: H100:4"]),
    ("accelerators: 'H100:1', num_nodes: 18", 18,
     ["an optimiser step has 16 groups", "use 16 or fewer, and resources.trainer.num_nodes: 16 or fewer"]),
    ("accelerators: 'H100:1', num_nodes: 3", 9, ["use 3, 1 on each of the 3 nodes;", "accelerators: H100:3"]),
])  # fmt: skip
def test_ranks_that_the_nodes_cannot_train_are_refused_with_what_is_allowed(tmp_path, trainer, ranks, words):
    with pytest.raises(JobError) as caught:
        check_ranks(with_ranks(tmp_path, trainer, ranks))
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- quotas -------------------------------------------------------------------------------------------


def with_trainers(plan: Plan, nodes: int) -> Plan:
    first = plan.slots[0]
    more = (replace(first, name=f"trainer-{number}", role="ranks") for number in range(1, nodes))
    return replace(plan, slots=(first, *more, *plan.slots[1:]))


def test_quotas_count_every_node_of_the_trainer():
    """A node needs 4 vCPUs."""
    need = need_of(site(), 3, FakeLimits().draws_on, trainers=2)
    assert (need.trainer, need.whole) == ({"vcpus-on_demand": 8}, {"vcpus-on_demand": 8, "vcpus-spot": 12})


def test_a_quota_for_one_node_of_two_starts_no_trainer():
    limits = {"aws": FakeLimits(has={"us-east-2": enough(on_demand=7)})}
    assert [line.verdict.value for line in quotas(checked_plan(), limits)] == ["OK"]
    line, end = quotas(with_trainers(checked_plan(), 2), limits)
    assert line.found == "Running G (vcpus-on_demand) needs 8, has 7 free of 7: no trainer can start"
    assert end.found == "the trainer fits into no quota of 1 regions"


# --- replays ------------------------------------------------------------------------------------------


def test_a_replayed_trainer_works_only_while_all_of_its_nodes_work():
    plan = with_trainers(replayed_plan("a", 0), 2)
    world = World(
        trace=market({"a": [4] * 600}), start_ms=0, work=work(0), random=Random(0), trainer_nodes=2,
    )  # fmt: skip
    for number, slot in enumerate(plan.slots):
        world.advance(number * HOUR_MS)
        world.buy(Buy(slot=slot, option=slot.option, generation=0, name=f"n-{slot.name}", reserved_micro_usd=0))
        assert world.done == 0.0, "one of two nodes does no work"
    world.advance(2 * HOUR_MS)
    ready_ms = max(one.ready_ms for one in world.instances.values())
    assert HOUR_MS < ready_ms < 2 * HOUR_MS
    assert world.done == pytest.approx((2 * HOUR_MS - ready_ms) / work(0).iteration_ms[0])
    assert {record.zone for record in world.records()} == {"one zone of us-test-1"}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_node_of_a_replayed_trainer_is_bought_and_paid(policy):
    plan = with_trainers(replayed_plan("a", 2), 2)
    trace = market({"a": [4] * 6 * 40})
    result = replay(plan, RULES, work(2), trace, 0, 1, deadline_ms=20 * HOUR_MS, policy=POLICIES[policy])
    trainers = [node for node in result.nodes if node.role != "rollout"]
    assert [node.slot for node in trainers] == ["trainer", "trainer-1"]
    assert result.reached
    rate = ON_DEMAND + plan.slots[0].placement.side_micro_usd_per_hour
    paid_ms = sum(result.ms - node.happened["up"] for node in trainers)
    assert result.by_market["trainer"] == pytest.approx(rate * paid_ms / HOUR_MS)
    assert paid_ms > 1.95 * result.ms
    whole_ms = max(node.requested_ms for node in trainers)
    assert min(node.requested_ms for node in result.nodes if node.role == "rollout") >= whole_ms


def test_the_least_that_a_policy_could_pay_has_every_node_of_the_trainer():
    """A second node works as long as the first: beside rollout nodes on demand alone, 10 hours at $55 and its disk."""
    found = replayed_plan("a", 2)
    bounds = [
        optimum(found.sites, 2, work(2), market({"a": [0] * 6 * 40}), 0, 10 * HOUR_MS + 2_400_000, trainers).micro_usd
        for trainers in (1, 2)
    ]
    rate = ON_DEMAND + option("", found.slots[0].placement.market, ON_DEMAND).placement.side_micro_usd_per_hour
    assert bounds[1] - bounds[0] == pytest.approx(10 * rate, rel=0.05)


# --- the screen ---------------------------------------------------------------------------------------


TWO = ("--set", "runtime.name=local", "--set", "resources.trainer.num_nodes=2", "--set", "runtime.trainer_ranks=2")


@pytest.mark.parametrize("command", [("launch", "--dry-run"), ("simulate",)])
def test_sixteen_ranks_are_refused_by_launch_and_simulate(command, dry_run, capsys):
    name, *more = command
    sixteen = [*TWO[:4], "--set", "runtime.trainer_ranks=16", "--set", "resources.trainer.accelerators=H100:8"]
    assert run([name, "qwen_image_ocr.yaml", *more, *sixteen]) == ExitCode.INVALID_JOB
    assert "is 16, and this version trains model.weights lora with 8 ranks at most" in capsys.readouterr().err


def test_sixteen_ranks_are_refused_by_the_python_interface(dry_run):
    fields = {"runtime__name": "local", "runtime__trainer_ranks": 16, "resources__trainer__num_nodes": 2}
    with pytest.raises(JobError, match=r"8 ranks at most, on all nodes together; use 8, 4 on each of the 2 nodes"):
        spotrl.plan("qwen_image_ocr.yaml", resources__trainer__accelerators="H100:8", **fields)


def test_a_dry_run_shows_the_nodes_of_the_trainer_on_one_line(dry_run):
    lines = dry_run("qwen_image_ocr", *TWO)
    assert is_one_screen(lines)
    (row,) = [line for line in lines if " x trainer " in line]
    assert row.split()[:6] == ["2", "x", "trainer", "on_demand", "H100:1", "p5.4xlarge"]
    assert any(line.startswith("  aws ") and ", 2 x p5.4xlarge: " in line for line in lines)


def test_equal_nodes_share_a_line_and_a_single_one_keeps_its_name():
    """Of three trainer nodes the first has another role, and rollout nodes are apart even if they are alike."""
    one, three = (with_trainers(replayed_plan("a", 2), nodes).slots for nodes in (1, 3))
    assert [pool_name(pool) for pool in pools_of(one)] == ["trainer", "2 x spot"]
    assert [pool_name(pool) for pool in pools_of(three)] == ["3 x trainer", "2 x spot"]
    alike = [replace(slot, placement=three[0].placement) for slot in three[:-1]]
    assert [pool_name(pool) for pool in pools_of(alike)] == ["3 x trainer", "spot-0"]


def test_explain_and_json_tell_the_nodes_and_what_is_not_predicted(dry_run, capsys):
    text = " ".join(" ".join(dry_run("qwen_image_ocr", *TWO, "--explain")).split())
    assert "trainer: 2 nodes, 2 of 2 GPUs train; " in text
    assert "the network between the trainer's nodes is not in the predicted time" in text
    assert run(["launch", "qwen_image_ocr.yaml", "--dry-run", "--json", *TWO]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)["plan"]
    first, second = (slot for slot in plan["slots"] if slot["role"] != "rollout")
    assert first["placement"] == second["placement"]
    assert plan["trainer"]["nodes"] == 2
    rollout = sum(slot["placement"]["micro_usd_per_hour"] for slot in plan["slots"] if slot["role"] == "rollout")
    assert plan["listed_micro_usd_per_hour"] == 2 * first["placement"]["micro_usd_per_hour"] + rollout
