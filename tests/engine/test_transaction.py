"""The streamed update is the one-shot update: in any order, over any abort, through any checkpoint."""

import itertools
import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.algorithm import flow_grpo, transaction
from engine.algorithm.advantages import group_advantages
from engine.algorithm.average import Average
from engine.algorithm.flow_grpo import clipped_loss, gaussian_kl
from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import Trainer
from engine.algorithm_config import AlgorithmConfig
from engine.config import ModelConfig, SamplerConfig
from engine.diffusion.sampler import advance, initial, log_prob, policy, rollout_plan
from engine.diffusion.trajectory import Trajectory
from engine.models.load import ReferencePolicy, load_adapter, trainable
from engine.models.weights import get_weights, set_weights
from engine.protocol.request import Group, Manifest

pytestmark = pytest.mark.usefixtures("one_layer")

PLAN = rollout_plan(SamplerConfig(steps=3), run_seed=0, batch=0)
PROMPTS = ("1234", "5678", "9012")
REWARDS = ((0.0, 1.0, 0.5), (0.25, 0.75, 1.0), (1.0, 0.0, 0.0))
MANIFEST = Manifest(
    run="run",
    lineage=1,
    batch=0,
    version=0,
    sampler=PLAN.signature,
    groups=tuple(Group(prompt=prompt, seeds=(10 * i, 10 * i + 1, 10 * i + 2)) for i, prompt in enumerate(PROMPTS)),
    minibatches=((0, 1, 2),),
)
MODELS = {"full": ModelConfig(), "lora": ModelConfig(weights="lora", lora_rank=2, lora_alpha=4)}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """An adapter, its trained parameters, and their bytes as they were at first."""
    adapter = load_adapter(MODELS[request.param])
    parameters = trainable(adapter)
    return adapter, parameters, get_weights(parameters)


@pytest.fixture(scope="module")
def groups(model):
    """Rollouts of every group, made by the model itself."""
    adapter, parameters, first = model
    set_weights(parameters, first)
    made = []
    for group, rewards in zip(MANIFEST.groups, REWARDS, strict=True):
        trajectories = [Trajectory.begin(x) for x in initial(group.seeds, adapter.latent_shape())]
        conditioning = adapter.encode([group.prompt] * len(group.seeds))
        x = torch.stack([trajectory.x for trajectory in trajectories])
        for step in range(PLAN.steps):
            x, log_probs = advance(adapter, PLAN, conditioning, group.seeds, x, step)
            trajectories = [t.then(PLAN, row, p) for t, row, p in zip(trajectories, x, log_probs, strict=True)]
        made.append(
            FinishedGroup(prompt=group.prompt, seeds=group.seeds, trajectories=tuple(trajectories), rewards=rewards)
        )
    return made


def trainer_of(model, *, reference=None, **config):
    """A trainer with a fresh optimiser on the model as it was at first."""
    adapter, parameters, first = model
    set_weights(parameters, first)
    return Trainer(adapter, parameters, AlgorithmConfig(**config), reference)


def gradients(trainer):
    found = {name: p.grad for name, p in trainer.parameters.items()}
    return {name: torch.zeros_like(trainer.parameters[name]) if g is None else g for name, g in found.items()}


def added(trainer, groups, order=(0, 1, 2), *, manifest=MANIFEST, std=None):
    step = trainer.begin(manifest, 0, PLAN, std=std)
    for number in order:
        step.add(number, groups[number])
    return step


def one_shot_gradients(trainer, groups, *, kl_beta=0.0, reference=None, shares=None):
    """All rows of the batch in one forward pass and one mean, written down plainly."""
    trainer.optimizer.zero_grad(set_to_none=True)
    config = trainer.config
    flat = [(g.prompt, t) for g in groups for t in g.trajectories]
    advantages = torch.cat(
        [group_advantages(torch.tensor([g.rewards]), config.std, clip=config.advantage_clip)[0] for g in groups]
    )
    n = len(PLAN.trained_steps)
    conditioning = trainer.adapter.encode([prompt for prompt, _ in flat for _ in range(n)])
    x = torch.cat([t.latents[:-1] for _, t in flat])
    to = torch.cat([t.latents[1:] for _, t in flat])
    old = torch.cat([t.log_probs for _, t in flat])
    steps = torch.tensor(PLAN.trained_steps).repeat(len(flat))
    mean, std = policy(trainer.adapter, PLAN, conditioning, x, steps)
    ratio = (log_prob(to, mean, std) - old).exp()
    loss = clipped_loss(ratio, advantages.repeat_interleave(n), config.clip_range)
    if kl_beta:
        with reference.active():
            base, _ = policy(trainer.adapter, PLAN, conditioning, x, steps)
        if config.kl_form == "flow-grpo":  # published: over 2 g^2, where the step's variance is g^2 |dt|
            dt = torch.tensor([PLAN.sigmas[step] - PLAN.sigmas[step + 1] for step in steps.tolist()])
            loss = loss + kl_beta * (mean - base).square().flatten(1).mean(dim=1) / (2 * std.square() / dt)
        else:
            loss = loss + kl_beta * gaussian_kl(mean, base, std)
    loss.mean().backward()
    return {name: gradient.clone() for name, gradient in gradients(trainer).items()}


def assert_close(these, those, rtol=1e-6):
    largest = max(float(value.abs().max()) for value in those.values())
    assert largest > 0
    for name, value in those.items():
        assert float((these[name] - value).abs().max()) <= rtol * max(1.0, largest), name


# --- streamed is one-shot


def test_the_streamed_gradient_is_the_one_shot_gradient(model, groups):
    expected = one_shot_gradients(trainer_of(model), groups)
    trainer = trainer_of(model)
    added(trainer, groups)
    assert_close(gradients(trainer), expected)


def test_a_group_cut_into_several_forward_passes_gives_the_same_gradient(model, groups):
    expected = one_shot_gradients(trainer_of(model), groups)
    trainer = trainer_of(model, rows_per_forward=4)
    added(trainer, groups)
    assert_close(gradients(trainer), expected)


@pytest.fixture
def parts_of_two_rows(monkeypatch):
    """Two threads, and rows enough for both in every batch of more than three."""
    monkeypatch.setattr(transaction, "LEAST_ROWS_OF_A_THREAD", 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_parts_on_threads_of_their_own_give_the_one_shot_gradient_and_the_same_numbers(
    model, groups, kl_beta, parts_of_two_rows
):
    reference = ReferencePolicy.of(trainer_of(model).adapter)
    expected = one_shot_gradients(trainer_of(model), groups, kl_beta=kl_beta, reference=reference)
    trainer = trainer_of(model, reference=reference, kl_beta=kl_beta)
    step = added(trainer, groups)
    assert_close(gradients(trainer), expected)
    assert step.health.rows == sum(len(g.trajectories) for g in groups) * len(PLAN.trained_steps)
    assert torch.get_num_threads() == 2


@pytest.mark.slow
def test_parts_on_threads_of_their_own_give_the_same_bits_every_time(model, groups, parts_of_two_rows):
    runs = []
    for _ in range(4):
        trainer = trainer_of(model)
        added(trainer, groups)
        runs.append({name: gradient.clone() for name, gradient in gradients(trainer).items()})
    assert all(torch.equal(run[name], value) for run in runs for name, value in runs[0].items())


def test_parts_are_really_run_side_by_side(model, groups, monkeypatch, parts_of_two_rows):
    both = threading.Barrier(2)
    plain, places = flow_grpo.policy, []

    def policy_that_meets(*args):
        places.append(both.wait(timeout=20.0))
        return plain(*args)

    monkeypatch.setattr(flow_grpo, "policy", policy_that_meets)
    added(trainer_of(model), groups)
    assert set(places) == {0, 1}, "every part met another one"


def test_a_gradient_that_lies_otherwise_in_memory_makes_the_same_step(model, groups, monkeypatch):
    """Fused AdamW does not look at strides: a transposed gradient would be added to the wrong weights."""
    expected = trainer_of(model)
    added(expected, groups).commit()
    wanted = get_weights(expected.parameters)
    plain = torch.autograd.grad

    def transposed(*args, **kwargs):
        found = plain(*args, **kwargs)
        return [g.t().contiguous().t() if g is not None and g.dim() == 2 else g for g in found]

    monkeypatch.setattr(torch.autograd, "grad", transposed)
    trainer = trainer_of(model)
    added(trainer, groups).commit()
    assert get_weights(trainer.parameters) == wanted


def test_a_gradient_that_two_parameters_share_is_added_and_clipped_once_for_each():
    """Autograd hands out one tensor for both terms of a sum."""
    shared = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    class Sums:
        transformer = nn.Module()

        def encode(self, prompts):
            return {"text": torch.zeros(len(prompts), 1)}

        def velocity(self, x, sigma, conditioning, guidance):
            return x + (shared[0] + shared[1])

    trainer = Trainer(
        Sums(), dict(zip("ab", shared, strict=True)), AlgorithmConfig(rows_per_forward=2, gradient_clip=1e-3)
    )
    made = []
    for group, rewards in zip(MANIFEST.groups, REWARDS, strict=True):
        generator = torch.Generator().manual_seed(group.seeds[0])
        trajectories = []
        for x in torch.randn(len(group.seeds), 3, generator=generator):
            trajectory = Trajectory.begin(x)
            for _ in range(PLAN.steps):
                x = x + torch.randn(3, generator=generator)
                trajectory = trajectory.then(PLAN, x, torch.tensor(-1.0))
            trajectories.append(trajectory)
        made.append(
            FinishedGroup(prompt=group.prompt, seeds=group.seeds, trajectories=tuple(trajectories), rewards=rewards)
        )
    step = trainer.begin(MANIFEST, 0, PLAN)
    for number in range(3):
        step.add(number, made[number])
    assert shared[0].grad.data_ptr() != shared[1].grad.data_ptr()
    assert shared[0].grad.abs().max() > 0
    assert torch.equal(shared[0].grad, shared[1].grad)
    norm = float(torch.cat([p.grad for p in shared]).norm())
    assert step.commit().gradient_norm == pytest.approx(norm)


def test_in_fixed_order_every_order_of_arrival_gives_the_same_bits(model, groups):
    weights = set()
    for order in itertools.permutations(range(3)):
        trainer = trainer_of(model, order="fixed")
        added(trainer, groups, order).commit()
        weights.add(get_weights(trainer.parameters))
    assert len(weights) == 1


@pytest.mark.parametrize(
    "rows", [pytest.param(1, marks=pytest.mark.slow), 6, pytest.param(12, marks=pytest.mark.slow), 168]
)
def test_in_exact_order_every_order_of_arrival_gives_the_same_bits(model, groups, rows):
    """Units of one, one, two and three groups (6 rows each)."""
    found = []
    for order in itertools.permutations(range(3)):
        trainer = trainer_of(model, order="exact", rows_per_forward=rows)
        added(trainer, groups, order).commit()
        found.append(get_weights(trainer.parameters))
    assert len(set(found)) == 1


def test_in_exact_order_a_unit_trains_before_the_groups_of_earlier_units_are_there(model, groups):
    step = trainer_of(model, order="exact", rows_per_forward=6).begin(MANIFEST, 0, PLAN)
    step.add(2, groups[2])
    assert step.health.groups == 1
    fixed = trainer_of(model, order="fixed", rows_per_forward=6).begin(MANIFEST, 0, PLAN)
    fixed.add(2, groups[2])
    assert fixed.health.groups == 0


def test_the_exact_gradient_is_the_fixed_gradient_but_for_rounding(model, groups):
    found = []
    for order in ("fixed", "exact"):
        trainer = trainer_of(model, order=order, rows_per_forward=6)
        health = added(trainer, groups).commit()
        found.append(health.gradient_norm)
    assert found[0] > 0
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_an_aborted_exact_step_leaves_no_trace(model, groups):
    trainer = trainer_of(model, order="exact", rows_per_forward=6)
    before = get_weights(trainer.parameters)
    added(trainer, groups, order=(0, 1)).abort()
    assert get_weights(trainer.parameters) == before
    added(trainer, groups).commit()
    after = get_weights(trainer.parameters)
    again = trainer_of(model, order="exact", rows_per_forward=6)
    added(again, groups).commit()
    assert get_weights(again.parameters) == after


def test_in_order_of_arrival_the_gradient_is_equal_but_for_rounding(model, groups):
    expected = one_shot_gradients(trainer_of(model), groups)
    trainer = trainer_of(model, order="arrival")
    added(trainer, groups, (2, 0, 1))
    assert_close(gradients(trainer), expected)


@pytest.mark.parametrize(("kl_form", "kl_beta"), [("flow-grpo", 4.0), ("gaussian", 0.5)])
def test_with_a_kl_penalty_the_gradient_pulls_towards_the_reference(model, groups, kl_form, kl_beta):
    reference = ReferencePolicy.of(trainer_of(model).adapter)
    trainer = trainer_of(model, kl_beta=kl_beta, kl_form=kl_form, reference=reference)
    _nudge(trainer.parameters)
    health = added(trainer, groups).health
    mine = {name: gradient.clone() for name, gradient in gradients(trainer).items()}
    assert health.sums["kl"] > 0
    assert_close(mine, one_shot_gradients(trainer, groups, kl_beta=kl_beta, reference=reference))
    without = one_shot_gradients(trainer, groups)
    assert max(float((mine[name] - without[name]).abs().max()) for name in mine) > 1e-3


def _nudge(parameters):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in parameters.values():
            value.add_(torch.randn(value.shape, generator=generator), alpha=3e-3)


def test_before_the_first_update_every_ratio_is_one(model, groups):
    summary = added(trainer_of(model), groups).commit().summary()
    assert summary["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert summary["clip_share"] == 0.0
    assert summary["dlogp_abs_mean"] == pytest.approx(0.0, abs=1e-5)
    assert summary["gradient_norm"] > 0


# --- what a group contributes


def flat(group):
    return replace(group, rewards=(0.5, 0.5, 0.5))


def test_a_group_without_variance_adds_nothing_but_stays_in_the_denominator(model, groups):
    one = replace(MANIFEST, groups=MANIFEST.groups[:1], minibatches=((0,),))
    alone = trainer_of(model)
    added(alone, groups, (0,), manifest=one)
    diluted = trainer_of(model)
    expected = {name: gradient / 3 for name, gradient in gradients(alone).items()}
    step = added(diluted, [groups[0], flat(groups[1]), flat(groups[2])])
    assert_close(gradients(diluted), expected)
    assert step.commit().summary()["zero_variance_share"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_group_with_a_reward_that_is_not_finite_is_skipped_and_counted(model, groups, reward):
    expected = trainer_of(model)
    added(expected, [groups[0], flat(groups[1]), groups[2]])
    wanted = {name: gradient.clone() for name, gradient in gradients(expected).items()}
    trainer = trainer_of(model)
    step = added(trainer, [groups[0], replace(groups[1], rewards=(1.0, reward, 0.0)), groups[2]])
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(trainer).items())
    assert step.commit().skipped == [1]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 4])
@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_group_whose_loss_is_not_finite_leaves_neither_gradient_nor_numbers(
    model, groups, rows, kl_beta, threads, parts_of_two_rows
):
    """Also when the bad row comes after others of its group were backpropagated; health must stay writable as JSON."""
    torch.set_num_threads(threads)
    config = {"kl_beta": kl_beta, "rows_per_forward": rows}
    reference = ReferencePolicy.of(trainer_of(model).adapter)
    expected = trainer_of(model, reference=reference, **config)
    one = replace(MANIFEST, minibatches=((0, 2),))
    step = added(expected, groups, (0, 2), manifest=one)
    wanted = {name: gradient * (2 / 3) for name, gradient in gradients(expected).items()}
    step.abort()
    last = groups[1].trajectories[-1]
    broken = replace(last, latents=last.latents * math.nan)
    bad = replace(groups[1], trajectories=(*groups[1].trajectories[:-1], broken))
    trainer = trainer_of(model, reference=reference, **config)
    step = added(trainer, [groups[0], bad, groups[2]])
    assert_close(gradients(trainer), wanted)
    health = step.commit()
    assert health.skipped == [1]
    assert all(math.isfinite(value) for value in health.summary().values())


def test_a_ratio_that_overflows_is_skipped_though_clipping_hides_it_from_the_loss(model, groups):
    far = replace(groups[0].trajectories[1], log_probs=groups[0].trajectories[1].log_probs - 1000.0)
    bad = replace(groups[0], trajectories=(groups[0].trajectories[0], far, groups[0].trajectories[2]))
    health = added(trainer_of(model), [bad, groups[1], groups[2]]).commit()
    assert health.skipped == [0]
    assert all(math.isfinite(value) for value in health.summary().values())
    assert health.gradient_norm > 0


def test_a_gradient_that_is_not_finite_takes_no_step_and_skips_all_groups(model, groups):
    trainer = trainer_of(model)
    before = get_weights(trainer.parameters)
    step = added(trainer, groups)
    next(iter(trainer.parameters.values())).grad.fill_(math.inf)
    assert step.commit().skipped == [0, 1, 2]
    assert get_weights(trainer.parameters) == before
    assert trainer.optimizer_state() == {}


def test_the_jobs_clip_and_std_of_advantages_are_used(model, groups):
    """Three rewards: their std with correction 1 is larger by the square root of 3/2."""
    found = {}
    for name, config in {"plain": {}, "clip": {"advantage_clip": 0.5}, "corrected": {"std_correction": 1}}.items():
        trainer = trainer_of(model, **config)
        added(trainer, groups)
        found[name] = {key: value.clone() for key, value in gradients(trainer).items()}
    assert_close(found["corrected"], {key: value * (2 / 3) ** 0.5 for key, value in found["plain"].items()}, rtol=1e-3)
    clipped = one_shot_gradients(trainer_of(model, advantage_clip=0.5), groups)
    assert_close(found["clip"], clipped)
    assert max(float((found["plain"][key] - value).abs().max()) for key, value in clipped.items()) > 1e-4, "not clipped"


def test_a_rank_trains_its_part_of_a_unit_and_a_gradient_of_all_ranks_skips_the_groups_of_all(model, groups):
    """Units of two groups over three ranks: each rank trains one at a time. Gradients are added before the step."""
    trainer = trainer_of(model)
    step = trainer.begin(replace(MANIFEST, unit=2), 0, PLAN, share=(1,))
    assert (step.missing, step.groups_of_unit) == ([1], 1)
    step.add(1, groups[1])
    next(iter(trainer.parameters.values())).grad.fill_(math.inf)
    assert step.commit().skipped == [0, 1, 2]


# --- all or nothing


def test_commit_before_all_groups_are_in_is_refused(model, groups):
    step = added(trainer_of(model), groups, (0, 2))
    assert step.missing == [1]
    with pytest.raises(ValueError, match=r"groups \[1\] of batch 0 have not been added"):
        step.commit()


def test_a_group_counts_once(model, groups):
    step = added(trainer_of(model), groups, (1,))
    with pytest.raises(ValueError, match="not wanted"):
        step.add(1, groups[1])


def test_a_group_of_another_step_is_refused(model, groups):
    two = replace(MANIFEST, minibatches=((0, 1), (2,)))
    with pytest.raises(ValueError, match="not wanted"):
        added(trainer_of(model), groups, (2,), manifest=two)


@pytest.mark.parametrize("before_abort", [(), (0,), (1, 2), (0, 1, 2)])
def test_abort_leaves_no_trace(model, groups, before_abort):
    trainer = trainer_of(model)
    added(trainer, groups).commit()
    weights, moments = get_weights(trainer.parameters), trainer.optimizer_state()
    moments = {name: value.clone() for name, value in moments.items()}
    added(trainer, groups, before_abort).abort()
    assert get_weights(trainer.parameters) == weights
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    assert all(torch.equal(value, moments[name]) for name, value in trainer.optimizer_state().items())


def test_an_aborted_step_then_the_same_step_gives_the_bits_of_the_step_alone(model, groups):
    ends = []
    for aborts in (0, 2):
        trainer = trainer_of(model)
        for _ in range(aborts):
            added(trainer, groups, (2, 0)).abort()
        added(trainer, groups).commit()
        ends.append(get_weights(trainer.parameters))
    assert ends[0] == ends[1]


def test_the_optimisers_state_goes_through_a_checkpoint_bit_for_bit(model, groups):
    trainer = trainer_of(model)
    added(trainer, groups).commit()
    weights, moments = get_weights(trainer.parameters), trainer.optimizer_state()
    moments = {name: value.clone() for name, value in moments.items()}
    added(trainer, groups).commit()
    straight = get_weights(trainer.parameters)

    again = trainer_of(model)
    set_weights(again.parameters, weights)
    again.load_optimizer_state(moments)
    added(again, groups).commit()
    assert get_weights(again.parameters) == straight

    fresh = trainer_of(model)
    set_weights(fresh.parameters, weights)
    added(fresh, groups).commit()
    assert get_weights(fresh.parameters) != straight

    used = trainer_of(model)
    added(used, groups).commit()
    used.load_optimizer_state({})
    assert used.optimizer_state() == {}, "a checkpoint from before the first step has no moments"
    set_weights(used.parameters, weights)
    added(used, groups).commit()
    assert get_weights(used.parameters) == get_weights(fresh.parameters)


def test_a_step_without_any_variance_still_moves_every_parameter_by_its_moments(model, groups):
    """The step of a parameter must not depend on which groups happened to have variance."""
    by_hand = trainer_of(model)
    added(by_hand, groups).commit()
    before = get_weights(by_hand.parameters)
    for parameter in by_hand.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    by_hand.optimizer.step()
    wanted = get_weights(by_hand.parameters)
    assert wanted != before
    trainer = trainer_of(model)
    added(trainer, groups).commit()
    assert get_weights(trainer.parameters) == before
    added(trainer, [flat(group) for group in groups]).commit()
    assert get_weights(trainer.parameters) == wanted


@pytest.mark.parametrize(("std", "scale"), [("batch", 0.25), ("ema", 0.25)])
def test_a_given_std_scales_the_advantages_of_every_group(model, groups, std, scale):
    one, two = (trainer_of(model, std=std, clip_range=0.2) for _ in range(2))
    added(one, groups, std=scale)
    wanted = {name: gradient / 2 for name, gradient in gradients(one).items()}
    added(two, groups, std=2 * scale + 1e-4)  # the 1e-4 that is added to a std is doubled too
    assert_close(gradients(two), wanted)


def test_the_average_moves_towards_the_live_weights_by_its_share(model):
    trainer = trainer_of(model)
    average = Average(trainer.parameters, 0.75)
    name, parameter = next(iter(trainer.parameters.items()))
    before = average.tensors[name].clone()
    with torch.no_grad():
        parameter.add_(1.0)
    average.follow(500)
    assert torch.allclose(average.tensors[name], before + 0.25, atol=1e-6)


def test_the_average_warms_up_as_published(model):
    """min((1 + n) / (10 + n), decay), with n the number of the move: flow_grpo's EMAModuleWrapper."""
    trainer = trainer_of(model)
    average = Average(trainer.parameters, 0.7)
    name, parameter = next(iter(trainer.parameters.items()))
    wanted = average.tensors[name].clone()
    for batch, kept in enumerate((2 / 11, 3 / 12, 4 / 13)):
        with torch.no_grad():
            parameter.add_(1.0)
        wanted = kept * wanted + (1 - kept) * parameter.detach()
        average.follow(batch)
        assert torch.allclose(average.tensors[name], wanted, atol=1e-6)


def test_log_probs_that_the_trainer_computes_again_are_those_of_the_rollout(model, groups):
    trainer = trainer_of(model)
    for group in groups:
        for trajectory in group.trajectories:
            forgotten = replace(trajectory, log_probs=torch.zeros_like(trajectory.log_probs))
            again = trainer.with_own_log_probs(group.prompt, forgotten, PLAN)
            assert torch.allclose(again.log_probs, trajectory.log_probs, atol=1e-5)
            assert torch.equal(again.latents, trajectory.latents)
