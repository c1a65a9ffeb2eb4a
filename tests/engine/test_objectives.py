"""The losses of all algorithms but Flow-GRPO equal the published formulas, written out here plainly."""

import math

import pytest
import torch
from torch import Tensor, nn

from engine.algorithm.awm import matching_log_prob
from engine.algorithm.diffusion_nft import (
    FIRST_NOISE,
    DiffusionNft,
    drawn_levels,
    nft_losses,
    noised_rows,
    reward_share,
)
from engine.algorithm.flow_dppo import dppo_losses
from engine.algorithm.flow_grpo import clipped_loss, outside
from engine.algorithm.grpo_guard import normalised_ratio, step_weights
from engine.algorithm.objective import FinishedGroup, Rows
from engine.algorithm.old_policy import OldPolicy, decay_of
from engine.algorithm.transaction import Trainer
from engine.algorithm_config import AlgorithmConfig, DiffusionNftConfig, GrpoGuardConfig, LevelsConfig
from engine.config import EngineConfig, ModelConfig, SamplerConfig
from engine.diffusion.noise import noise, noise_rows
from engine.diffusion.sampler import advance, batch_plan, initial, log_prob, policy, step_coefficients
from engine.diffusion.trajectory import Trajectory
from engine.models.load import ReferencePolicy, load_adapter, trainable
from engine.models.weights import get_weights, set_weights
from engine.protocol.request import Group, Manifest
from engine.trainer.model import TrainedModel
from engine.trainer.outbox import Outbox

pytestmark = pytest.mark.usefixtures("one_layer")

PROMPTS = ("1234", "5678")
REWARDS = ((0.0, 1.0, 0.5), (0.25, 0.75, 1.0))
MODELS = {"full": ModelConfig(), "lora": ModelConfig(weights="lora", lora_rank=2, lora_alpha=4)}


def config_of(name: str, **algorithm) -> EngineConfig:
    return EngineConfig.model_validate({"sampler": {"steps": 3}, "algorithm": {"name": name, **algorithm}})


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """An adapter, its trained parameters, and the bytes of the first weights."""
    adapter = load_adapter(MODELS[request.param])
    parameters = trainable(adapter)
    return adapter, parameters, get_weights(parameters)


def rolled_out(model, config: EngineConfig) -> tuple[Manifest, list[FinishedGroup]]:
    """Groups made by the model's first weights, with the sampler of the job."""
    adapter, parameters, first = model
    set_weights(parameters, first)
    plan = batch_plan(config, 0)
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


def trainer_of(model, config: EngineConfig, reference=None) -> Trainer:
    adapter, parameters, first = model
    set_weights(parameters, first)
    return Trainer(adapter, parameters, config.algorithm, reference)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in trainer.parameters.items()}
    return {name: torch.zeros_like(trainer.parameters[name]) if g is None else g for name, g in found.items()}


def assert_close(these: dict[str, Tensor], those: dict[str, Tensor], relative: float = 1e-5) -> None:
    largest = max(float(value.abs().max()) for value in those.values())
    assert largest > 0
    for name, value in those.items():
        assert float((these[name] - value).abs().max()) <= relative * largest, name


def nudge(parameters: dict[str, nn.Parameter], size: float = 1e-3) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


# --- GRPO-Guard


def published_guard_loss(
    new: Tensor,
    old: Tensor,
    mean: Tensor,
    old_mean: Tensor,
    sde_std: Tensor,
    dt: Tensor,
    advantage: Tensor,
    clip: float,
) -> Tensor:
    """Equations 8 and 12 of arXiv 2510.22319 as verl-omni uses them. `sde_std`: std per square root of dt."""
    scale = dt.sqrt() * sde_std
    bias = (mean - old_mean).square().flatten(1).mean(dim=1) / (2 * scale**2)
    ratio = ((new - old + bias) * scale).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)) / dt


def test_guard_equals_the_published_formula_without_storing_means(model):
    config = config_of("grpo-guard", grpo_guard={"clip_range": 1e-4})
    _, groups = rolled_out(model, config)
    adapter, parameters, _ = model
    plan = batch_plan(config, 0)
    group, steps = groups[0], torch.tensor(plan.trained_steps)
    x = torch.cat([t.latents[:-1] for t in group.trajectories])
    next_x = torch.cat([t.latents[1:] for t in group.trajectories])
    step = steps.repeat(len(group.seeds))
    conditioning = adapter.encode([group.prompt] * len(x))
    advantage = torch.linspace(-2.0, 2.0, len(x))
    with torch.no_grad():
        old_mean, std = policy(adapter, plan, conditioning, x, step)
    old = log_prob(next_x, old_mean, std)
    dt = torch.tensor([plan.sigmas[k] - plan.sigmas[k + 1] for k in range(plan.steps)])[step]
    noise_of = torch.cat(
        [torch.stack([noise_rows([seed], k + 1, x.shape[1:])[0] for k in steps]) for seed in group.seeds]
    )
    nudge(parameters)
    try:
        mean, _ = policy(adapter, plan, conditioning, x, step)
        new = log_prob(next_x, mean, std)
        published = published_guard_loss(new, old, mean, old_mean, std / dt.sqrt(), dt, advantage, 1e-4)
        ratio = normalised_ratio(mean, next_x, std, noise_of)
        ours = torch.tensor(step_weights(plan))[step] * clipped_loss(ratio, advantage, 1e-4)
        assert (ratio - 1).abs().max() > 1e-4, "some rows must be clipped"
        assert torch.allclose(ours, published, rtol=1e-6, atol=1e-6)
        names = list(parameters.values())
        mine = torch.autograd.grad(ours.sum(), names, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(published.sum(), names, allow_unused=True)
        keyed = [dict(enumerate(torch.zeros(1) if g is None else g for g in found)) for found in (mine, theirs)]
        assert_close(keyed[0], keyed[1], relative=1e-3)  # the published log-probs cancel in fp32
    finally:
        set_weights(parameters, model[2])


def test_guards_ratio_is_exact_in_double_precision():
    generator = torch.Generator().manual_seed(0)
    mean, old_mean, e = (torch.randn(5, 7, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    std = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    next_x = old_mean + std.view(-1, 1, 1) * e
    square = lambda m: (next_x - m).square().flatten(1).mean(dim=1) / (2 * std**2)  # noqa: E731
    bias = (mean - old_mean).square().flatten(1).mean(dim=1) / (2 * std**2)
    published = ((square(old_mean) - square(mean) + bias) * std).exp()
    assert torch.allclose(normalised_ratio(mean, next_x, std, e), published, rtol=1e-12)


@pytest.mark.parametrize("name", ["flow-sde", "dance-sde", "cps"])
def test_guard_weights_undo_the_velocitys_factor_up_to_a_constant(name):
    plan = batch_plan(EngineConfig(sampler=SamplerConfig(name=name, noise_level=0.3)), 0)
    weights = step_weights(plan)
    assert weights[-1] == 0.0
    factors = [w * abs(step_coefficients(plan, k)[1]) for k, w in enumerate(weights[:-1])]
    # flow-sde: the published weight leaves the constant 1 + a^2 / 2 everywhere but at the first step.
    wanted = [1.0, *[1 + 0.3**2 / 2] * (plan.steps - 2)] if name == "flow-sde" else [1.0] * (plan.steps - 1)
    assert factors == pytest.approx(wanted)


def test_guard_has_ratio_1_before_the_first_update(model):
    config = config_of("grpo-guard", updates_per_batch=2, prompts_per_batch=2)
    manifest, groups = rolled_out(model, config)
    trainer = trainer_of(model, config)
    step = trainer.begin(manifest, 0, batch_plan(config, 0))
    step.add(0, groups[0])
    summary = step.commit().summary()
    assert summary["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert summary["clip_share"] < 0.5
    after = trainer.begin(manifest, 1, batch_plan(config, 0))
    after.add(1, groups[1])
    assert after.commit().summary()["ratio_max"] > 1.0


# --- Flow-DPPO


def published_dppo_loss(
    new: Tensor, old: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor, advantage: Tensor, threshold: float
) -> Tensor:
    """Flow-DPPO's loss (arXiv 2606.11025) as UniRL and verl-omni compute it, from log-probs and means, per row."""
    ratio = torch.exp(new - old)
    kl = ((mean - old_mean) ** 2 / (2 * std.view(-1, 1, 1) ** 2)).mean(dim=(1, 2))
    is_far = ~(kl < threshold)
    removed = (is_far & (ratio > 1.0) & (advantage > 0)) | (is_far & (ratio < 1.0) & (advantage < 0))
    return torch.where(removed, torch.zeros_like(ratio), -advantage * ratio)


def test_flow_dppo_equals_the_published_formula_to_1e_12_in_double_precision():
    generator = torch.Generator().manual_seed(0)
    mean, old_mean, e = (torch.randn(40, 7, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    mean = old_mean + 0.05 * torch.rand(40, 1, 1, generator=generator, dtype=torch.float64) * mean
    std = torch.rand(40, generator=generator, dtype=torch.float64) + 0.1
    advantage = torch.randn(40, generator=generator, dtype=torch.float64)
    next_x = old_mean + std.view(-1, 1, 1) * e
    mean.requires_grad_()
    published = published_dppo_loss(
        log_prob(next_x, mean, std), log_prob(next_x, old_mean, std), mean, old_mean, std, advantage, 1e-3
    )
    ours, ratio, divergence, is_masked = dppo_losses(mean, next_x, std, e, advantage, 1e-3)
    assert torch.allclose(ours, published, rtol=1e-12, atol=1e-12)
    is_far = divergence >= 1e-3
    assert 0 < int(is_masked.sum()) < int(is_far.sum()) < 40, "near rows, far ones that lead away, far ones that return"
    assert torch.equal(is_masked, is_far & ((ratio - 1) * advantage > 0))
    (mine,) = torch.autograd.grad(ours.sum(), mean, retain_graph=True)
    (theirs,) = torch.autograd.grad(published.sum(), mean)
    assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)
    assert not mine[is_masked].any()


def test_a_flow_dppo_update_is_the_mean_of_the_published_losses(model):
    """The trainer knows the old means from the noise alone. The published form stores them."""
    config = config_of("flow-dppo", flow_dppo={"kl_limit": 1e-6})
    manifest, groups = rolled_out(model, config)
    adapter, parameters, first = model
    trainer = trainer_of(model, config)
    plan = batch_plan(config, 0)
    nudge(parameters)
    manifest = Manifest(**{**manifest.to_dict(), "groups": manifest.groups, "minibatches": ((0, 1),)})
    step = trainer.begin(manifest, 0, plan)
    for number, group in enumerate(groups):
        step.add(number, group)
    mine = {name: gradient.clone() for name, gradient in gradients(trainer).items()}
    masked = step.health.summary()["clip_share"]
    trainer.optimizer.zero_grad(set_to_none=True)

    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    x, next_x = (torch.cat([t.latents[part] for t in trajectories]) for part in (slice(-1), slice(1, None)))
    at = torch.tensor(plan.trained_steps).repeat(len(trajectories))
    conditioning = adapter.encode([g.prompt for g in groups for _ in g.seeds for _ in plan.trained_steps])
    now = get_weights(parameters)
    set_weights(parameters, first)
    with torch.no_grad():
        old_mean, std = policy(adapter, plan, conditioning, x, at)
    set_weights(parameters, now)
    mean, _ = policy(adapter, plan, conditioning, x, at)
    rewards = torch.tensor(REWARDS)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
    advantage = advantage.flatten().repeat_interleave(len(plan.trained_steps))
    loss = published_dppo_loss(
        log_prob(next_x, mean, std), log_prob(next_x, old_mean, std), mean, old_mean, std, advantage, 1e-6
    )
    assert 0 < masked < 1
    assert masked == pytest.approx(float((loss == 0).float().mean() - (advantage == 0).float().mean()))
    loss.mean().backward()
    assert_close(mine, gradients(trainer), relative=1e-3)  # the published log-probs cancel in fp32
    step.abort()
    set_weights(parameters, first)


def test_flow_dppo_masks_nothing_before_the_first_update(model):
    config = config_of("flow-dppo", updates_per_batch=2, prompts_per_batch=2)
    manifest, groups = rolled_out(model, config)
    trainer = trainer_of(model, config)
    step = trainer.begin(manifest, 0, batch_plan(config, 0))
    step.add(0, groups[0])
    summary = step.commit().summary()
    assert (summary["ratio_mean"], summary["clip_share"]) == (pytest.approx(1.0, abs=1e-6), 0.0)
    assert summary["old_kl_max"] < 1e-9
    after = trainer.begin(manifest, 1, batch_plan(config, 0))
    after.add(1, groups[1])
    assert after.commit().summary()["old_kl"] > 1e-9


# --- AWM


def published_awm_loss(
    v: Tensor,
    v_old: Tensor,
    v_ema: Tensor,
    v_ref: Tensor,
    x0: Tensor,
    e: Tensor,
    t: Tensor,
    advantage: Tensor,
    *,
    power: float | None,
    clip: float,
    ema_beta: float,
    beta: float,
) -> Tensor:
    """The loss of the authors' code (arXiv 2509.25050) per row: exp_first, advantage_max 1, kl_weight Uniform.

    `power`: of the generalised Huber weighting. None: uniform weighting.
    """

    def log_prob_of(velocity: Tensor) -> Tensor:
        log_prob = (-((velocity.double() - (e - x0).double()) ** 2)).mean(dim=tuple(range(1, x0.dim())))
        if power is None:
            return log_prob
        eps = torch.tensor(1e-10, dtype=torch.float64)
        return -(torch.pow(-log_prob + eps, power) - torch.pow(eps, power)) * t / power

    advantage = torch.clamp(advantage, -5.0, 5.0) / 5.0 * 1.0
    ratio = torch.exp(log_prob_of(v) - log_prob_of(v_old).detach())
    policy_loss = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, 1.0 - clip, 1.0 + clip))
    kl, ema_kl = (((v - other) ** 2).mean(dim=tuple(range(1, x0.dim()))) for other in (v_ref, v_ema))
    return policy_loss + beta * kl + ema_beta * ema_kl


@pytest.mark.parametrize(("weighting", "power"), [("ghuber", 0.25), ("ghuber", 0.5), ("uniform", None)])
def test_awms_likelihood_equals_the_published_one_and_so_does_its_gradient(weighting, power):
    generator = torch.Generator().manual_seed(0)
    v, v_old, x0, e = (torch.randn(6, 24, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    t = torch.rand(6, generator=generator, dtype=torch.float64)
    advantage = 3 * torch.randn(6, generator=generator, dtype=torch.float64)
    v = (v_old + 0.5 * v).requires_grad_()
    new, old = (matching_log_prob(one, e - x0, t, weighting, power or 1.0) for one in (v, v_old))
    ratio = (new - old).exp()
    clip = float((ratio.detach() - 1).abs().median())
    assert 0 < int(outside(ratio, clip).sum()) < 6
    settings = {"power": power, "clip": clip, "ema_beta": 0.0, "beta": 0.0}
    published = published_awm_loss(v, v_old, v_old, v_old, x0, e, t, advantage, **settings)
    ours = clipped_loss(ratio, (advantage / 5).clamp(-1, 1), clip)
    assert torch.allclose(ours, published, rtol=1e-10)
    (mine,) = torch.autograd.grad(ours.sum(), v, retain_graph=True)
    (theirs,) = torch.autograd.grad(published.sum(), v)
    assert torch.allclose(mine, theirs, rtol=1e-8)


@pytest.mark.parametrize(("weighting", "weight"), [("ghuber", 0.0), ("uniform", 0.5)])
def test_an_awm_update_is_the_mean_of_the_published_losses(model, weighting, weight):
    awm = {"weighting": weighting, "reference_weight": weight, "old_weight": 0.7, "levels": {"from": "all"}}
    config = config_of("awm", awm=awm)
    manifest, groups = rolled_out(model, config)
    adapter, parameters, first = model
    trainer = trainer_of(model, config, ReferencePolicy.of(adapter) if weight else None)
    trainer.old.keep()
    nudge(parameters)
    manifest = Manifest(**{**manifest.to_dict(), "groups": manifest.groups, "minibatches": ((0, 1),)})
    step = trainer.begin(manifest, 0, batch_plan(config, 0))
    for number, group in enumerate(groups):
        step.add(number, group)
    mine = {name: gradient.clone() for name, gradient in gradients(trainer).items()}
    assert step.planned_rows == 18

    trainer.optimizer.zero_grad(set_to_none=True)
    conditioning, x0, e, sigma = nft_rows(model, config, groups, 3)
    s = sigma.view(-1, 1, 1)
    xt = (1 - s) * x0 + s * e
    now = get_weights(parameters)
    set_weights(parameters, first)
    with torch.no_grad():
        v_old = adapter.velocity(xt, sigma, conditioning, 1.0)
    set_weights(parameters, now)
    v = adapter.velocity(xt, sigma, conditioning, 1.0)
    rewards = torch.tensor(REWARDS)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
    power = 0.25 if weighting == "ghuber" else None
    loss = published_awm_loss(
        *(v, v_old, v_old, v_old, x0, e, sigma, advantage.flatten().repeat_interleave(3)),
        power=power,
        clip=1.0,
        ema_beta=0.7,
        beta=weight,
    )
    loss.mean().backward()
    assert_close(mine, gradients(trainer), relative=1e-4)
    step.abort()
    set_weights(parameters, first)


def test_awm_has_ratio_1_before_the_first_update_and_rolls_out_as_nft(model):
    config = config_of("awm", updates_per_batch=2, prompts_per_batch=2)
    assert (config.sampler.noise_level, batch_plan(config, 0).records) == (0.0, False)
    manifest, groups = rolled_out(model, config)
    trainer = trainer_of(model, config)
    plan = batch_plan(config, 0)
    step = trainer.begin(manifest, 0, plan)
    assert step.planned_rows == 6
    step.add(0, groups[0])
    first = step.commit().summary()
    assert (first["ratio_mean"], first["velocity_change"]) == (pytest.approx(1.0, abs=1e-6), 0.0)
    after = trainer.begin(manifest, 1, plan)
    after.add(1, groups[1])
    assert after.commit().summary()["velocity_change"] > 0.0


# --- DiffusionNFT


def published_nft_loss(
    v: Tensor, v_old: Tensor, x0: Tensor, xt: Tensor, t: Tensor, r: Tensor, beta: float, clip: float
) -> Tensor:
    """The loss of NVlabs/DiffusionNFT, from predicted images, per row."""
    t = t.view((-1,) + (1,) * (x0.dim() - 1))
    losses = []
    for prediction in (beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v):
        x0_hat = xt - t * prediction
        weight = (x0_hat.double() - x0.double()).abs().flatten(1).mean(dim=1).clip(min=1e-5).detach()
        losses.append((x0_hat - x0).square().flatten(1).mean(dim=1) / weight)
    return (r * losses[0] / beta + (1 - r) * losses[1] / beta) * clip


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_nft_losses_from_velocities_equal_the_published_losses_exactly(beta):
    generator = torch.Generator().manual_seed(0)
    v, v_old, x0, e = (torch.randn(6, 24, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    t = torch.rand(6, generator=generator, dtype=torch.float64)
    advantage = 3 * torch.randn(6, generator=generator, dtype=torch.float64)
    s = t.view(-1, 1, 1)
    v.requires_grad_()
    published = published_nft_loss(v, v_old, x0, (1 - s) * x0 + s * e, t, reward_share(advantage, 5.0), beta, 5.0)
    positive, negative = nft_losses(v, v_old, e - x0, t, beta)
    share = reward_share(advantage, 5.0)
    ours = 5.0 / beta * (share * positive + (1 - share) * negative)
    assert torch.allclose(ours, published, rtol=1e-12)
    (mine,) = torch.autograd.grad(ours.sum(), v, retain_graph=True)
    (theirs,) = torch.autograd.grad(published.sum(), v)
    assert torch.allclose(mine, theirs, rtol=1e-10)


def test_the_share_of_the_reward_is_a_half_for_the_mean_and_1_for_the_clip():
    assert reward_share(torch.tensor([-9.0, -5.0, 0.0, 2.5, 5.0, 9.0]), 5.0).tolist() == [0, 0, 0.5, 0.75, 1, 1]


def nft_rows(model, config, groups, levels: int):
    """The rows of all groups at the first levels, as one forward pass, made without the code under test."""
    adapter, _, _ = model
    plan = batch_plan(config, 0)
    conditioning = adapter.encode([g.prompt for g in groups for _ in g.seeds for _ in range(levels)])
    images, noises, sigmas = [], [], []
    for group in groups:
        for seed, trajectory in zip(group.seeds, group.trajectories, strict=True):
            for level, sigma in enumerate(plan.sigmas[:levels]):
                images.append(trajectory.x)
                noises.append(torch.from_numpy(noise(seed, FIRST_NOISE + level, tuple(trajectory.x.shape))))
                sigmas.append(sigma)
    return conditioning, torch.stack(images), torch.stack(noises), torch.tensor(sigmas)


@pytest.mark.parametrize(("weight", "source", "levels"), [(0.0, "all", 3), (0.5, "all", 3), (0.0, "noisier", 2)])
def test_an_nft_update_is_the_mean_of_the_published_losses(model, weight, source, levels):
    nft = {"beta": 0.5, "reference_weight": weight, "levels": {"from": source}}
    config = config_of("diffusion-nft", diffusion_nft=nft)
    manifest, groups = rolled_out(model, config)
    adapter, parameters, first = model
    reference = ReferencePolicy.of(adapter) if weight else None
    trainer = trainer_of(model, config, reference)
    trainer.old.keep()
    nudge(parameters)

    manifest = Manifest(**{**manifest.to_dict(), "groups": manifest.groups, "minibatches": ((0, 1),)})
    step = trainer.begin(manifest, 0, batch_plan(config, 0))
    for number, group in enumerate(groups):
        step.add(number, group)
    mine = {name: gradient.clone() for name, gradient in gradients(trainer).items()}

    trainer.optimizer.zero_grad(set_to_none=True)
    conditioning, x0, e, sigma = nft_rows(model, config, groups, levels)
    s = sigma.view(-1, 1, 1)
    xt = (1 - s) * x0 + s * e
    now = get_weights(parameters)
    set_weights(parameters, first)
    with torch.no_grad():
        v_old = adapter.velocity(xt, sigma, conditioning, 1.0)
    set_weights(parameters, now)
    v = adapter.velocity(xt, sigma, conditioning, 1.0)
    rewards = torch.tensor(REWARDS)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)
    r = reward_share(advantage.flatten(), 5.0).repeat_interleave(levels)
    loss = published_nft_loss(v, v_old, x0, xt, sigma, r, 0.5, 5.0)
    loss = loss + weight * (v - v_old).square().flatten(1).mean(dim=1)  # the reference is the first weights too
    loss.mean().backward()
    assert_close(mine, gradients(trainer), relative=1e-4)
    step.abort()
    set_weights(parameters, first)


def test_a_finite_difference_agrees_with_nfts_gradient():
    generator = torch.Generator().manual_seed(3)
    v, old, target = (torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    sigma = torch.tensor([0.3, 1.0], dtype=torch.float64)
    v.requires_grad_()
    positive, negative = nft_losses(v, old, target, sigma, 0.1)
    (found,) = torch.autograd.grad((0.8 * positive + 0.2 * negative).sum(), v)
    sizes = [
        (sigma.view(-1, 1) * (old + sign * 0.1 * (v.detach() - old) - target)).abs().mean(dim=1) for sign in (1, -1)
    ]

    def plain(at: Tensor) -> float:
        """The loss with the adaptive weights held constant, which is what is differentiated."""
        errors = [sigma.view(-1, 1) * (old + sign * 0.1 * (at - old) - target) for sign in (1, -1)]
        both = [e.square().mean(dim=1) / size for e, size in zip(errors, sizes, strict=True)]
        return float((0.8 * both[0] + 0.2 * both[1]).sum())

    for place in ((0, 0), (1, 3)):
        step = torch.zeros_like(v)
        step[place] = 1e-6
        with torch.no_grad():
            slope = (plain(v + step) - plain(v - step)) / 2e-6
        assert float(found[place]) == pytest.approx(slope, rel=1e-5)


def test_nft_rollouts_record_the_final_latent_only(model):
    config = config_of("diffusion-nft")
    _, groups = rolled_out(model, config)
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.step == 3
            assert len(trajectory.latents) == len(trajectory.log_probs) == 0
            assert Trajectory.from_bytes(trajectory.to_bytes()).x.equal(trajectory.x)


def test_nft_with_a_stochastic_sampler_records_the_final_latent_only(model):
    config = config_of("diffusion-nft").model_copy(update={"sampler": SamplerConfig(steps=3, noise_level=0.7)})
    plan = batch_plan(config, 0)
    assert any(plan.stochastic)
    assert plan.trained_steps == ()
    _, groups = rolled_out(model, config)
    assert len(groups[0].trajectories[0].latents) == 0


def test_nfts_velocities_agree_before_the_first_update_and_differ_after(model):
    config = config_of("diffusion-nft", updates_per_batch=2, prompts_per_batch=2)
    manifest, groups = rolled_out(model, config)
    trainer = trainer_of(model, config)
    plan = batch_plan(config, 0)
    step = trainer.begin(manifest, 0, plan)
    step.add(0, groups[0])
    first = step.commit().summary()
    assert first["velocity_change"] == 0.0
    assert trainer.old.differs
    after = trainer.begin(manifest, 1, plan)
    after.add(1, groups[1])
    assert after.commit().summary()["velocity_change"] > 0.0


def test_equal_rewards_add_nothing_to_an_nft_update(model):
    config = config_of("diffusion-nft")
    manifest, groups = rolled_out(model, config)
    trainer = trainer_of(model, config)
    step = trainer.begin(manifest, 0, batch_plan(config, 0))
    group = groups[0]
    step.add(0, FinishedGroup(**{**group.__dict__, "rewards": (0.5, 0.5, 0.5)}))
    assert not any(gradient.any() for gradient in gradients(trainer).values())
    assert step.health.summary()["zero_variance_share"] == 1.0
    step.abort()


def test_the_noise_of_training_is_no_denoising_steps_noise():
    objective = DiffusionNft(AlgorithmConfig(name="diffusion-nft"), OldPolicy({}))
    plan = batch_plan(config_of("diffusion-nft"), 0)
    group = FinishedGroup(
        prompt="1234", seeds=(7,), trajectories=(Trajectory.begin(torch.zeros(4, 2)),), rewards=(1.0,)
    )
    rows = objective.rows(group, torch.tensor([1.0]), plan)
    used = {row.tobytes() for row in rows["target"].numpy()}
    assert len(used) == objective.rows_per_image(plan) == 2
    assert not used & {noise(7, step, (4, 2)).tobytes() for step in range(plan.steps + 1)}
    assert torch.allclose(rows["x"], rows["sigma"].view(-1, 1, 1) * rows["target"])


def test_levels_are_the_noisier_half_or_all_or_drawn_for_each_image():
    seeds = tuple(range(40))
    assert drawn_levels(seeds, LevelsConfig(), 8).unique(dim=0).tolist() == [[0, 1, 2, 3]]
    assert drawn_levels(seeds, LevelsConfig(), 5).unique(dim=0).tolist() == [[0, 1, 2]]
    assert drawn_levels(seeds, LevelsConfig(out_of="all"), 3).unique(dim=0).tolist() == [[0, 1, 2]]
    drawn = drawn_levels(seeds, LevelsConfig(count=2), 8)
    assert drawn.shape == (40, 2)
    assert sorted(drawn.unique().tolist()) == [0, 1, 2, 3]
    assert (drawn[:, 0] < drawn[:, 1]).all(), "drawn without replacement, the noisiest first"
    assert drawn_levels(seeds[7:9], LevelsConfig(count=2), 8).equal(drawn[7:9]), "a function of the seed alone"


def test_rows_of_drawn_levels_have_the_noise_of_their_level():
    group = FinishedGroup(
        prompt="1234",
        seeds=(7, 8),
        trajectories=tuple(Trajectory.begin(torch.full((4, 2), value)) for value in (1.0, 2.0)),
        rewards=(0.0, 1.0),
    )
    plan = batch_plan(config_of("diffusion-nft").model_copy(update={"sampler": SamplerConfig(steps=8)}), 0)
    levels = LevelsConfig(count=3, out_of="all")
    rows, chosen = noised_rows(group, levels, plan), drawn_levels(group.seeds, levels, plan.steps)
    for row in range(6):
        image, level = row // 3, int(chosen[row // 3, row % 3])
        e = torch.from_numpy(noise(group.seeds[image], FIRST_NOISE + level, (4, 2)))
        clean, s = group.trajectories[image].x, plan.sigmas[level]
        assert rows["sigma"][row] == pytest.approx(s)
        assert rows["x"][row].allclose((1 - s) * clean + s * e, atol=1e-6)
        assert rows["target"][row].allclose(e - clean, atol=1e-6)


# --- the old policy


def test_the_old_policy_is_the_trained_weights_until_the_first_update():
    parameter = nn.Parameter(torch.zeros(2))
    old = OldPolicy({"w": parameter})
    with old.active():
        assert parameter.tolist() == [0.0, 0.0]
    old.keep()
    with torch.no_grad():
        parameter.add_(1.0)
    old.keep()  # the second update of a batch keeps the first copy
    with old.active():
        assert parameter.tolist() == [0.0, 0.0]
    assert parameter.tolist() == [1.0, 1.0]
    old.advance(0.0)
    assert not old.differs


def test_the_trained_weights_return_after_an_error():
    parameter = nn.Parameter(torch.zeros(1))
    old = OldPolicy({"w": parameter})
    old.keep()
    with torch.no_grad():
        parameter.add_(1.0)
    with pytest.raises(KeyboardInterrupt), old.active():
        raise KeyboardInterrupt
    assert parameter.item() == 1.0


def test_an_averaged_old_policy_follows_slowly_and_survives_a_checkpoint():
    parameter = nn.Parameter(torch.zeros(1))
    old = OldPolicy({"w": parameter})
    old.keep()
    with torch.no_grad():
        parameter.add_(1.0)
    old.advance(0.75)
    with old.active():
        kept = parameter.detach().clone()
    assert kept.item() == 0.25
    restored = OldPolicy({"w": parameter})
    restored.restore({"w": kept})
    with restored.active():
        assert parameter.item() == 0.25


def test_weights_of_early_groups_are_kept_for_one_batch():
    parameter = nn.Parameter(torch.zeros(1))
    old = OldPolicy({"w": parameter})

    def before():
        with old.before_active():
            return parameter.item()

    for batch in range(3):
        old.keep()
        with torch.no_grad():
            parameter.add_(1.0)
        old.advance(0.0, keeps_before=batch < 2)
        assert before() == (batch if batch < 2 else 3.0)
    old.advance(0.0, keeps_before=True)
    assert (old.before, before()) == (None, 3.0), "a batch without a step: the version before has the same weights"
    old.restore_before({"w": torch.tensor([7.0])})
    assert before() == 7.0
    old.forget_before()
    assert before() == 3.0
    old.keep()
    with torch.no_grad():
        parameter.add_(1.0)
    assert before() == 3.0, "then they are those of the old policy, which the next step does not change"


def test_weights_of_early_groups_do_not_follow_an_averaged_old_policy():
    parameter = nn.Parameter(torch.zeros(1))
    old = OldPolicy({"w": parameter})
    old.keep()
    with torch.no_grad():
        parameter.add_(1.0)
    old.advance(0.75, keeps_before=True)
    with old.before_active():
        assert parameter.item() == 0.0
    with old.active():
        assert parameter.item() == 0.25
        with old.active():
            assert parameter.item() == 0.25, "a rollout inside a rollout"
        assert parameter.item() == 0.25
    assert parameter.item() == 1.0


def test_the_published_schedules_of_the_old_policy():
    assert [decay_of("none", steps) for steps in (0, 500)] == [0.0, 0.0]
    assert [decay_of("gradual", steps) for steps in (0, 100, 500, 900)] == pytest.approx([0.0, 0.1, 0.5, 0.5])
    assert [decay_of("late", steps) for steps in (0, 75, 79, 500)] == pytest.approx([0.0, 0.0, 0.03, 0.999])


def test_the_schedules_of_the_old_policy_count_optimiser_steps(model, tmp_path):
    """At two steps a batch, `late` begins after batch 37, as in the public code, and not after batch 75."""
    adapter, parameters, first = model
    set_weights(parameters, first)
    algorithm = config_of("diffusion-nft", diffusion_nft={"old_policy_decay": "late"}).algorithm
    assert algorithm.updates_per_batch == 2
    trained = TrainedModel(adapter, algorithm, None, Outbox(tmp_path / "outbox", print))
    name, parameter = next(iter(parameters.items()))
    for batch, kept in ((36, 0.0), (37, 0.0075), (99, 0.0075 * 125)):
        old = trained.trainer.old
        old.advance(0.0)
        old.keep()
        before = parameter.detach().clone()
        nudge(parameters)
        trained.follow(batch)
        now = parameter.detach() if old.tensors is None else old.tensors[name]
        assert torch.allclose(now, kept * before + (1 - kept) * parameter.detach(), atol=1e-7)
        assert old.differs == (kept > 0)
    set_weights(parameters, first)


# --- settings that make no sense


@pytest.mark.parametrize(
    ("job", "remedy"),
    [
        ({"algorithm": {"name": "diffusion-nft", "kl_beta": 0.1}}, "reference_weight"),
        ({"algorithm": {"name": "diffusion-nft"}, "sampler": {"window": {"size": 2}}}, "leave window out"),
        ({"algorithm": {"name": "grpo-guard"}, "sampler": {"noise_level": 0}}, "leaves no random step for grpo-guard"),
        ({"algorithm": {"name": "flow-dppo"}, "sampler": {"noise_level": 0}}, "leaves no random step for flow-dppo"),
        ({"algorithm": {"name": "awm", "kl_beta": 0.1}}, "awm.reference_weight"),
        ({"algorithm": {"name": "awm"}, "early": {"share": 0.25}}, "awm, whose loss compares with the weights that"),
        ({"algorithm": {"name": "diffusion-nft", "awm": {"power": 1}}}, "use name: awm"),
        ({"algorithm": {"name": "flow-grpo", "diffusion_nft": {"beta": 1}}}, "use name: diffusion-nft"),
        ({"algorithm": {"name": "flow-grpo", "grpo_guard": {"clip_range": 1}}}, "use name: grpo-guard"),
        ({"algorithm": {"name": "diffusion-nft", "diffusion_nft": {"old_policy_decay": "x"}}}, "'gradual' or 'late'"),
        ({"algorithm": {"name": "diffusion-nft", "diffusion_nft": {"beta": 0}}}, "greater than 0"),
        (
            {"algorithm": {"name": "diffusion-nft", "diffusion_nft": {"levels": {"count": 5}}}},
            r"a rollout of 8 steps has 4 levels in the noisier half; use 4 or fewer, or levels: \{from: all\}",
        ),
        (
            {"algorithm": {"name": "diffusion-nft", "diffusion_nft": {"levels": {"count": 9, "from": "all"}}}},
            "a rollout of 8 steps has 8 levels; use 8 or fewer",
        ),
        ({"algorithm": "grpo"}, "flow-grpo"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_its_remedy(job, remedy):
    job = {**job, "algorithm": job["algorithm"] if isinstance(job["algorithm"], dict) else {"name": job["algorithm"]}}
    with pytest.raises(ValueError, match=remedy):
        EngineConfig.model_validate(job)


def test_nft_rolls_out_with_the_ode_unless_the_job_says_otherwise():
    nft = {"algorithm": {"name": "diffusion-nft"}}
    assert EngineConfig.model_validate(nft).sampler.noise_level == 0
    assert EngineConfig.model_validate({**nft, "sampler": {"steps": 4}}).sampler.noise_level == 0
    assert EngineConfig.model_validate({**nft, "sampler": {"noise_level": 0.5}}).sampler.noise_level == 0.5
    made = EngineConfig(algorithm=AlgorithmConfig(name="diffusion-nft"), sampler=SamplerConfig(steps=4))
    assert made.sampler.noise_level == 0
    again = EngineConfig.model_validate_json(made.model_dump_json())
    assert again == made
    assert EngineConfig().sampler.noise_level == 0.7


@pytest.mark.parametrize(("name", "guidance"), [("qwen-image", 4.0), ("sd3", 4.5), ("wan", 5.0)])
def test_nft_replaces_guidance_unless_the_job_says_otherwise(name, guidance):
    def made(**more) -> EngineConfig:
        reward = {"name": "ocr", "frames": 3} if name == "wan" else {"name": "ocr"}
        return EngineConfig.model_validate({"model": {"name": name, "path": "there"}, "reward": reward, **more})

    nft = {"name": "diffusion-nft"}
    assert made().sampler.guidance == guidance
    assert made(algorithm=nft).sampler.guidance == 1.0
    assert made(algorithm={"name": "auto"}).sampler.guidance == 1.0
    assert made(algorithm=nft, sampler={"guidance": 2.0}).sampler.guidance == 2.0
    distilled = EngineConfig.model_validate({"model": {"name": "flux", "path": "there"}, "algorithm": nft})
    assert distilled.sampler.guidance == 3.5, "the network takes the scale as an input"


def test_rows_can_be_cut():
    rows = Rows(conditioning={"text": torch.arange(3)}, tensors={"x": torch.arange(6).view(3, 2)})
    cut = rows.at(torch.tensor([2, 0]))
    assert len(rows) == 3
    assert cut["x"].tolist() == [[4, 5], [0, 1]]
    assert cut.conditioning["text"].tolist() == [2, 0]
    assert math.isclose(GrpoGuardConfig().clip_range, 2e-6)
    assert DiffusionNftConfig().beta == 0.1
