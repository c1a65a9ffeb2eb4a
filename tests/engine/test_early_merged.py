"""Early groups of workers that merge adapters: the trainer computes their log-probs, with the weights that made them.

Models are loaded as a run loads them: from a folder, in bfloat16, with low-rank adapters.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from engine.algorithm import flow_grpo
from engine.algorithm.advantages import group_advantages
from engine.algorithm.grpo_guard import step_weights
from engine.algorithm.transaction import Trainer, Transaction
from engine.clock import ScaledClock
from engine.config import CandidateBudget, EngineConfig, ModelConfig
from engine.diffusion.sampler import batch_plan, policy
from engine.entrypoints.inproc import build_inproc
from engine.models.adapter import rows
from engine.models.load import load_adapter, trainable
from engine.models.merge import MergedAdapters, merges
from engine.protocol.request import Kind
from tests.engine.test_early_groups import EARLY, stale_shares
from tests.engine.test_loop import Killed, brightness, manifests, newest
from tests.engine.test_merge import half, one_thread, rolled_out, set_version  # noqa: F401  a fixture
from tests.engine.test_objectives import REWARDS, config_of
from tests.tiny_pipelines import make_sd3

pytestmark = pytest.mark.usefixtures("one_layer")


def weights_of(adapter):
    return {name: value.detach().clone() for name, value in trainable(adapter).items()}


def with_weights(adapter, weights):
    with torch.no_grad():
        for name, parameter in trainable(adapter).items():
            parameter.copy_(weights[name])
    return adapter


def sampled_by(adapter, config):
    """Return a manifest and its groups, sampled by a worker that merges the adapters."""
    worker = deepcopy(adapter)
    MergedAdapters(worker.transformer).merge()
    return rolled_out(worker, config)


# --- the loss, written out


def gradients_of(config, groups, *, now, made_by):
    """Return the gradients of a step: the published loss, with the log-probs of the weights that made each group."""
    plan, adapter, parts = batch_plan(config, 0), half(), []
    for number, group in enumerate(groups):
        steps = torch.tensor(plan.trained_steps).repeat(len(group.seeds))
        x = torch.cat([one.latents[:-1] for one in group.trajectories])
        next_x = torch.cat([one.latents[1:] for one in group.trajectories])
        conditioning = rows(adapter.encode([group.prompt]), torch.zeros(len(steps), dtype=torch.long))
        with torch.no_grad():
            old, _ = policy(with_weights(adapter, made_by[number]), plan, conditioning, x, steps)
        rewards = torch.tensor([group.rewards])
        advantages = group_advantages(rewards, "group", clip=config.algorithm.advantage_clip)[0]
        parts.append((x, next_x, steps, old, advantages.repeat_interleave(len(plan.trained_steps))))
    x, next_x, steps, old, advantages = map(torch.cat, zip(*parts, strict=True))
    whose = torch.tensor([number for number, part in enumerate(parts) for _ in part[0]])
    conditioning = rows(adapter.encode([group.prompt for group in groups]), whose)
    mean, std = policy(with_weights(adapter, now), plan, conditioning, x, steps)
    scale = std.view(-1, *(1 for _ in mean.shape[1:]))
    if config.algorithm.name == "flow-grpo":
        change = ((next_x - old).square() - (next_x - mean).square()) / (2 * scale.square())
        clip, weight = config.algorithm.clip_range, torch.ones_like(std)
    else:
        change = (next_x - old) / scale * (mean - old)
        clip, weight = config.algorithm.grpo_guard.clip_range, torch.tensor(step_weights(plan))[steps]
    ratio = change.flatten(1).mean(dim=1).exp()
    loss = weight * torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
    found = torch.autograd.grad(loss.sum() / len(loss), list(trainable(adapter).values()))
    return dict(zip(trainable(adapter), found, strict=True))


def apart(these, those):
    """Return the largest difference of two gradients, relative to the largest value of the second."""
    largest = max(float(value.abs().max()) for value in those.values())
    return max(float((these[name] - value).abs().max()) for name, value in those.items()) / largest


SAME = 2e-3
"""Largest difference of equal gradients. Processors with bf16 units round passes of two shapes apart: by 5e-4 on one,
by less than 1e-5 on another. The gradient of the wrong weights differs by more than 1e-2."""


@pytest.mark.parametrize("name", ["flow-grpo", "grpo-guard"])
def test_the_gradient_compares_each_group_with_the_weights_that_made_it(name):
    """Two steps with an early and a fresh group: before the first, the old policy still is the trained weights."""
    clip = {"clip_range": 0.5} if name == "flow-grpo" else {"grpo_guard": {"clip_range": 0.5}}
    config = config_of(name, learning_rate=1e-2, **clip)
    adapter, plan = half(), batch_plan(config, 0)
    set_version(adapter, 1)
    trainer = Trainer(adapter, trainable(adapter), config.algorithm)
    first, (manifest, made) = weights_of(adapter), sampled_by(adapter, config)
    step = trainer.begin(manifest, 0, plan)
    step.add(0, made[0])
    step.commit()
    trainer.old.advance(0.0, keeps_before=True)

    second = weights_of(adapter)
    _, fresh = sampled_by(adapter, config)
    groups = (replace(made[0], is_early=True, rewards=REWARDS[0]), fresh[1])
    manifest = replace(manifest, batch=1, version=1, minibatches=((0, 1), (0, 1)), early=(0,))
    for minibatch in (0, 1):
        now = weights_of(adapter)
        step = trainer.begin(manifest, minibatch, plan)
        for number, group in enumerate(groups):
            step.add(number, group)
        gradients = {name: parameter.grad.clone() for name, parameter in trainer.parameters.items()}
        health = step.commit()
        right = gradients_of(config, groups, now=now, made_by=(first, second))
        wrong = gradients_of(config, groups, now=now, made_by=(second, second))
        assert apart(gradients, right) < SAME
        assert apart(gradients, wrong) > 1e-2
        assert health.early_rows == len(made[0].seeds) * len(plan.trained_steps)


# --- runs


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A job with a tiny SD3 from a folder, low-rank adapters and otherwise the defaults of a model folder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sd3")
    make_sd3().save_pretrained(folder)
    model = ModelConfig(
        name="sd3", path=str(folder), weights="lora", lora_rank=2, height=16, width=16, max_text_tokens=20
    )
    algorithm = EARLY.algorithm.model_copy(update={"name": "flow-grpo", "learning_rate": 0.02})
    sampler = EARLY.sampler.model_copy(update={"guidance": 1.0})
    exploration = EARLY.exploration.model_copy(update={"budget": CandidateBudget(candidates=8)})
    changes = {"model": model, "algorithm": algorithm, "sampler": sampler, "exploration": exploration}
    config = EARLY.model_copy(update=changes)
    return EngineConfig.model_validate(config.model_dump())


def build(config, folder):
    """Return a run whose spot worker makes all rollouts: the trainer's own would have other roundings."""
    clock = ScaledClock(origin_ms=0)
    run = build_inproc(config, folder, run="run", clock=clock, reward=brightness, workers=1)
    run.loop.worker.kinds = (Kind.EVALUATE,)
    return run


def trained(folder):
    """Return the last checkpoint's files and the manifests. Evaluations may be the trainer's."""
    last = newest(folder)
    return last.iteration, dict(last.files), last.std, manifests(folder)


@pytest.fixture(scope="module")
def straight(lora, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert build(lora, folder).loop.run().reason == "iterations"
    return trained(folder)


def watched(run, monkeypatch):
    """Return the published weights by version, and (batch, pass, mean of the rollout's weights) of each pass."""
    versions, passes, batch = {}, [], []
    loop, publish, backward, old_mean = run.loop, run.loop._publish, Transaction._backward, flow_grpo.old_mean

    def watched_publish(file):
        versions[loop.state.iteration] = {k: v.detach().clone() for k, v in loop.model.parameters.items()}
        publish(file)

    def watched_backward(step, groups):
        batch[:] = [(step._manifest.batch, groups)]
        return backward(step, groups)

    def watched_mean(batch_rows, mean):
        found = old_mean(batch_rows, mean)
        passes.append((*batch[0], batch_rows, found))
        return found

    loop._publish = watched_publish
    monkeypatch.setattr(Transaction, "_backward", watched_backward)
    monkeypatch.setattr(flow_grpo, "old_mean", watched_mean)
    return versions, passes


@pytest.mark.long
def test_a_run_with_merged_workers_compares_early_groups_with_the_version_before(lora, tmp_path, monkeypatch):
    run = build(lora, tmp_path)
    assert merges(run.workers[0].adapter.transformer)
    versions, passes = watched(run, monkeypatch)
    assert run.loop.run().reason == "iterations"
    assert stale_shares(tmp_path) == [0.0, 0.5, 0.5]
    reference, early = load_adapter(lora.model), []
    for batch, groups, batch_rows, mean in passes:
        (group,) = groups
        early += [batch] * group.is_early
        plan = batch_plan(lora, batch, reference.schedule)
        for version in (batch, max(0, batch - 1)):
            with torch.no_grad():
                expected, _ = policy(
                    with_weights(reference, versions[version]),
                    plan,
                    batch_rows.conditioning,
                    batch_rows["x"],
                    batch_rows["step"],
                )
            is_own = version == (batch - 1 if group.is_early else batch)
            assert torch.equal(mean, expected) == is_own, f"batch {batch}, early {group.is_early}, version {version}"
    assert early == [1, 2]
    assert run.loop.model.trainer.old.before is None, "nothing follows the last batch"


class Stop:
    """Kills a run in the middle: at the nth call of a method."""

    def __init__(self, where, name, monkeypatch, *, at):
        inner, calls = getattr(where, name), []

        def deadly(*arguments, **named):
            calls.append(name)
            found = inner(*arguments, **named)
            if len(calls) == at:
                raise Killed
            return found

        monkeypatch.setattr(where, name, deadly)


@pytest.mark.long
@pytest.mark.parametrize("commits", [3, 5], ids=["first", "second"])
def test_a_killed_run_compares_early_groups_with_the_same_weights(lora, straight, tmp_path, monkeypatch, commits):
    with monkeypatch.context() as patch:
        Stop(Transaction, "commit", patch, at=commits)
        with pytest.raises(Killed):
            build(lora, tmp_path).loop.run()
    last = newest(tmp_path)
    assert last is None or ("before" in last.files) == bool(last.next_batch.early)
    assert build(lora, tmp_path).loop.run().reason == "iterations"
    assert trained(tmp_path) == straight
