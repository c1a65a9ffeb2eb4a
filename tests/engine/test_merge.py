"""Workers merge adapters into half-precision weights, exactly and for every version; the trainer computes log-probs."""

import json
from copy import deepcopy
from dataclasses import replace

import psutil
import pytest
import torch

from engine.algorithm.flow_grpo import FlowGrpo
from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import Trainer
from engine.clock import ScaledClock
from engine.config import ModelConfig
from engine.diffusion.sampler import advance, batch_plan, initial
from engine.diffusion.trajectory import Trajectory
from engine.entrypoints.inproc import build_inproc
from engine.models.load import freeze_but_trained, trainable
from engine.models.merge import MergedAdapters, merges
from engine.protocol.request import Group, Kind, Manifest, Score
from tests.engine.test_families import FAMILIES
from tests.engine.test_objectives import REWARDS, config_of

pytestmark = pytest.mark.usefixtures("one_layer")

LORA = ModelConfig(weights="lora", lora_rank=2)
PROMPTS = ("1234", "5678")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def half(name="sd3"):
    """A tiny family with low-rank adapters on bfloat16 weights."""
    torch.manual_seed(0)
    adapter = FAMILIES[name].build()
    adapter.transformer.to(torch.bfloat16)
    freeze_but_trained(adapter, LORA)
    return adapter


def set_version(adapter, version):
    """Give the adapters the values of a version."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in trainable(adapter).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def velocity(adapter):
    x = initial([1, 2], adapter.latent_shape())
    with torch.no_grad():
        return adapter.velocity(x, torch.tensor([0.3, 0.9]), adapter.encode(["12", "34"]), 1.0)


@pytest.mark.parametrize("name", ["qwen-image", "sd3", "flux-dev", "wan", "hunyuan-video"])
def test_a_merged_pass_is_the_pass_with_adapters_up_to_rounding(name):
    adapter = half(name)
    base = velocity(adapter)
    set_version(adapter, 1)
    beside = velocity(adapter)
    MergedAdapters(adapter.transformer).merge()
    merged = velocity(adapter)
    moved, apart = (beside - base).square().mean().sqrt(), (merged - beside).square().mean().sqrt()
    assert moved > 0.1 * base.square().mean().sqrt()
    assert 0 < apart < 0.1 * moved


def test_a_version_gives_the_same_bits_after_any_other_version():
    first = half()
    set_version(first, 3)
    MergedAdapters(first.transformer).merge()
    later = half()
    merged = MergedAdapters(later.transformer)
    for version in (1, 2, 3):
        set_version(later, version)
        merged.merge()
    these, those = first.transformer.state_dict(), later.transformer.state_dict()
    assert all(torch.equal(value, those[name]) for name, value in these.items())


def test_only_adapters_on_half_precision_weights_are_merged():
    assert merges(half().transformer)
    full, single = FAMILIES["sd3"].build(), FAMILIES["sd3"].build()
    freeze_but_trained(full, ModelConfig(weights="full"))
    freeze_but_trained(single, LORA)
    assert not merges(full.transformer)
    assert not merges(single.transformer)


def test_without_room_for_a_copy_adapters_stay_beside_the_weights(monkeypatch, capsys):
    adapter = half()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    merged = MergedAdapters(adapter.transformer)
    for version in (1, 2):
        set_version(adapter, version)
        beside = velocity(adapter)
        merged.merge()
        assert torch.equal(velocity(adapter), beside)
    assert capsys.readouterr().out.count("adapters stay unmerged") == 1


# --- the trainer's own log-probs


def rolled_out(worker, config):
    """Groups made by a worker's network."""
    plan, adapter = batch_plan(config, 0), worker
    groups = tuple(Group(prompt=p, seeds=(10 * i, 10 * i + 1, 10 * i + 2)) for i, p in enumerate(PROMPTS))
    made = []
    for group, rewards in zip(groups, REWARDS, strict=True):
        trajectories = [Trajectory.begin(x) for x in initial(group.seeds, adapter.latent_shape())]
        conditioning = adapter.encode([group.prompt] * len(group.seeds))
        x = torch.stack([trajectory.x for trajectory in trajectories])
        for step in range(plan.steps):
            x, log_probs = advance(adapter, plan, conditioning, group.seeds, x, step)
            trajectories = [t.then(plan, row, p) for t, row, p in zip(trajectories, x, log_probs, strict=True)]
        made.append(
            FinishedGroup(prompt=group.prompt, seeds=group.seeds, trajectories=tuple(trajectories), rewards=rewards)
        )
    manifest = Manifest(
        run="run", lineage=1, batch=0, version=0, sampler=plan.signature, groups=groups, minibatches=((0,), (1,))
    )
    return manifest, made


@pytest.mark.parametrize("name", ["flow-grpo", "grpo-guard"])
def test_ratios_of_merged_rollouts_compare_the_trainers_weights_only(name):
    """Both steps of a batch: in the second, the old policy differs from the trained weights."""
    config = config_of(name, learning_rate=1e-3)
    adapter = half()
    set_version(adapter, 1)
    worker = deepcopy(adapter)
    MergedAdapters(worker.transformer).merge()
    manifest, made = rolled_out(worker, config)
    trainer = Trainer(adapter, trainable(adapter), config.algorithm)
    plan, health = batch_plan(config, 0), []
    for number in (0, 1):
        step = trainer.begin(manifest, number, plan)
        step.add(number, made[number])
        gradients = {name: p.grad.clone() for name, p in trainer.parameters.items()}
        health.append(step.commit().summary())
    assert health[0]["ratio_mean"] == health[0]["ratio_max"] == 1.0
    assert abs(health[1]["ratio_max"] - 1.0) > 0
    assert all(0 < one["worker_dlogp_abs_mean"] <= one["worker_dlogp_abs_max"] < 0.1 for one in health)

    # The second step written out: the log-probs of the old policy, computed beforehand, as if the worker had sent them.
    if name == "flow-grpo":
        plain = half()
        set_version(plain, 1)
        own = Trainer(plain, trainable(plain), config.algorithm)
        own.objective = FlowGrpo(config.algorithm)
        exact = [
            replace(
                group, trajectories=tuple(own.with_own_log_probs(group.prompt, t, plan) for t in group.trajectories)
            )
            for group in made
        ]
        for number in (0, 1):
            step = own.begin(manifest, number, plan)
            step.add(number, exact[number])
            expected = {name: p.grad.clone() for name, p in own.parameters.items()}
            step.commit()
        largest = max(float(value.abs().max()) for value in expected.values())
        assert all(float((gradients[name] - value).abs().max()) < 0.02 * largest for name, value in expected.items())


@pytest.mark.parametrize("algorithm", ["flow-grpo", "grpo-guard", "diffusion-nft"])
def test_a_run_with_merged_workers_reports_how_far_their_log_probs_are(tmp_path, algorithm):
    config = config_of(algorithm, prompts_per_batch=2, images_per_prompt=2, learning_rate=0.02).model_copy(
        update={"iterations": 2}
    )
    quick = {
        "exploration": config.exploration.model_copy(update={"mode": "none"}),
        "evaluation": config.evaluation.model_copy(update={"prompts": 2, "every": 2, "steps": 2}),
        "runtime": config.runtime.model_copy(update={"name": "inproc", "shape": 2, "lease_seconds": 60.0}),
    }
    config = config.model_copy(update=quick)

    def reward(images, prompts):
        return [Score(reward=float(image.mean()), metrics={}) for image in images]

    clock = ScaledClock(origin_ms=0)
    run = build_inproc(config, tmp_path, run="run", clock=clock, reward=reward, workers=1, make_adapter=half)
    run.loop.worker.kinds = (Kind.EVALUATE,)  # the spot worker makes all rollouts
    assert run.loop.run().reason == "iterations"
    lines = [json.loads(line) for line in (tmp_path / "progress" / "trainer.jsonl").read_text().splitlines()]
    done = [line["event"] for line in lines if line["kind"] == "iteration_done"]
    assert all(list(one["made_by"]) == ["spot-0"] for one in done)
    health = [one["health"] for one in done]
    assert len(health) == 2
    for one in health:
        assert one["skipped_groups"] == 0
        if algorithm == "diffusion-nft":
            assert "worker_dlogp_abs_max" not in one
        else:
            assert 0 <= one["worker_dlogp_abs_mean"] <= one["worker_dlogp_abs_max"] < 0.1
    if algorithm == "flow-grpo":
        assert health[1]["dlogp_before_update"] == 0.0
        assert health[1]["worker_dlogp_abs_max"] > 0
