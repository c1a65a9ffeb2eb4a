"""Plans for a scoring pool with GPUs of its own: fewer workers, the same price, memory that is checked."""

from dataclasses import replace

import pytest

from launcher.cli.plan_text import pool_text
from launcher.controller.node_specs import node_spec
from launcher.job.checked import JobError
from launcher.job.gpu_checks import degrees_of
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from launcher.placement.forecast import Choice, on_demand_outlook, outlook, sums
from launcher.placement.memory import check_pool
from launcher.placement.plan import PlacementError
from launcher.placement.plan_cloud import plan_cloud
from launcher.placement.requirements import NodeRequirements, cloud_requirements, sites_of
from tests.launcher.made_ledger import HOUR_MS, a_run, a_session
from tests.launcher.test_cloud_plan import TRAINER, USD, offer, requirements, view
from tests.model_folders import write_model

JOB = """
infra: gcp
model: {{name: sd3, path: ./sd3.5-medium, height: 512, width: 512}}
prompts: digits
reward: {{name: hpsv3, model: {{path: ./hpsv3}}, placed: pool, pool: {pool}}}
resources: {{rollout: {{accelerators: "{gpus}", num_nodes: 2}}}}
"""


@pytest.fixture
def job(tmp_path):
    def job(pool: str, gpus: str = "H100:2", **fields: str):
        write_model(tmp_path / "sd3.5-medium", "sd3")
        (tmp_path / "hpsv3").mkdir(exist_ok=True)
        path = tmp_path / "job.yaml"
        path.write_text(JOB.format(pool=pool, gpus=gpus))
        return load_job(path, fields).job

    return job


def test_a_gpu_that_only_scores_has_no_worker(job):
    plain, own = job("{processes: 2}"), job("{processes: 2, gpus: 1}")
    assert (plain.rollout_workers, own.rollout_workers) == (2, 1)
    assert (degrees_of(plain), degrees_of(own)) == ((1, 2), (1,))
    with a_session() as session:
        made = a_run(session, folder="/nowhere")
        nodes = [made.node(slot, up=0, end=HOUR_MS) for slot in ("trainer", "spot-0")]
        for node in nodes:
            node.gpus = 2
        found = [
            node_spec(made.run, own, node, is_cloud=False, money_deadline_ms=None, money_longest_ms=None).workers
            for node in nodes
        ]
    assert found == [2, 1]


def test_a_pool_that_leaves_no_worker_is_refused(job):
    with pytest.raises(
        JobError, match=r"reward.pool.gpus is 1, but .* is H100:1, which leaves no GPU .* use nodes with"
    ):
        job("{gpus: 1}", "H100:1")
    with pytest.raises(JobError, match="use at most 1, or nodes with more GPUs"):
        job("{processes: 2, gpus: 2}", "H100:2")
    with pytest.raises(JobError, match=r"runtime\.name is ray, which gives workers all GPUs of a node"):
        job("{gpus: 1}", "H100:2", **{"runtime.name": "ray"})


def test_the_models_of_the_pool_leave_the_workers_and_must_fit_their_own_gpus(job):
    shared, own = job("{processes: 2}"), job("{processes: 2, gpus: 1}")
    assert "scorers" in resolve(shared).memory.rollout.parts
    assert "scorers" not in resolve(own).memory.rollout.parts
    check_pool(resolve(own))
    with pytest.raises(PlacementError, match=r"need 28.9 GiB of each GPU of the pool, where .* use fewer reward.pool"):
        check_pool(resolve(job("{processes: 2, gpus: 1}", "L4:2")))
    check_pool(resolve(job("{processes: 1, gpus: 1}", "L4:2")))


def test_a_plan_counts_fewer_workers_at_the_same_price(job):
    market = view(TRAINER, offer("", 12, gpus=2), offer("a", 4, gpus=2), offer("b", 4.4, gpus=2))
    nodes = NodeRequirements(accelerator="H100", gpus=2)
    shared, own = requirements(rollout=nodes), requirements(rollout=replace(nodes, pool_gpus=1))
    both = []
    for needs in (shared, own):
        (site,), _ = sites_of(needs, market)
        both.append(Choice(site=site, spot=(2, 1), on_demand=1))
    (gpus, rate, copies), (own_gpus, own_rate, own_copies) = map(sums, both)
    assert (own_gpus.mean, own_gpus.fewest) == pytest.approx((gpus.mean / 2, gpus.fewest / 2))
    assert own_gpus.most == pytest.approx(gpus.most / 2)
    assert own_gpus.variance == pytest.approx(gpus.variance / 4)
    assert (own_rate, own_copies) == (rate, copies)
    for forecast in (outlook, on_demand_outlook):
        before, after = map(forecast, both)
        assert after.seconds_per_iteration > before.seconds_per_iteration
        assert after.micro_usd > before.micro_usd
    assert plan_cloud(own, market).time.expected > plan_cloud(shared, market).time.expected
    assert cloud_requirements(resolve(job("{processes: 2, gpus: 1}"))).rollout.workers == 1


def test_a_plan_says_what_the_gpus_of_the_pool_cost(job):
    market = view(TRAINER, offer("", 12, gpus=2), offer("a", 4, gpus=2))
    needs = requirements(rollout=NodeRequirements(accelerator="H100", gpus=2, pool_gpus=1), min_rollout_nodes=2)
    plan = plan_cloud(needs, market)
    rollout = [slot for slot in plan.slots if slot.role == "rollout"]
    half = sum(slot.placement.micro_usd_per_hour for slot in rollout) // 2
    (line,) = pool_text(job("{processes: 2, gpus: 1}"), plan.slots)
    assert line == (
        "  pool: 1 of the 2 GPUs of each rollout node only score, with models of 28.9 GiB on each; "
        f"${half / USD:.2f}/h of the nodes' price"
    )
    assert list(pool_text(job("{processes: 2}"), plan.slots)) == []
