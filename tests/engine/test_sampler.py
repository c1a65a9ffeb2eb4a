"""The sampler's formulas, its log-probs, and which steps are random."""

import json
import math
from typing import Any

import pytest
import torch

from engine.config import SamplerConfig, WindowConfig
from engine.diffusion.noise import noise_rows
from engine.diffusion.sampler import (
    Plan,
    advance,
    denoise,
    evaluation_plan,
    initial,
    log_prob,
    plan_from_dict,
    plan_to_dict,
    preview_plan,
    replay,
    rollout_plan,
    step_coefficients,
    transition,
)
from engine.models.digits import ByteText, DigitsAdapter, build_transformer
from engine.noise_schedule import EVEN, NoiseSchedule

SDE = rollout_plan(SamplerConfig(name="flow-sde", noise_level=0.7), run_seed=0, batch=0)
DANCE = rollout_plan(SamplerConfig(name="dance-sde", noise_level=0.3), run_seed=0, batch=0)
CPS = rollout_plan(SamplerConfig(name="cps", noise_level=0.7), run_seed=0, batch=0)
RANDOM = ["flow-sde", "dance-sde", "cps"]
every_plan = pytest.mark.parametrize("plan", [SDE, DANCE, CPS], ids=RANDOM)


@pytest.fixture(scope="module")
def adapter():
    torch.manual_seed(0)
    return DigitsAdapter(build_transformer().eval(), ByteText())


def some_rows(count=4, seed=0):
    x = noise_rows(range(seed, seed + count), 0, (24, 16))
    velocity = noise_rows(range(seed, seed + count), 99, (24, 16))
    return x, velocity


def steps_of(step, count=4):
    return torch.full((count,), step, dtype=torch.long)


# --- schedules and plans


def test_noise_levels_fall_evenly_from_1_to_0():
    assert EVEN.sigmas(4) == (1.0, 0.75, 0.5, 0.25, 0.0)


def test_shift_keeps_both_ends_and_moves_the_middle_towards_noise():
    assert NoiseSchedule(shift=3.0).sigmas(4) == pytest.approx((1.0, 0.9, 0.75, 0.5, 0.0))


def test_every_step_but_the_last_is_random_without_a_window():
    assert SDE.stochastic == (True,) * 7 + (False,)
    assert SDE.trained_steps == tuple(range(7))


def test_noise_level_0_is_an_ode_plan():
    plan = rollout_plan(SamplerConfig(noise_level=0.0), run_seed=0, batch=0)
    assert plan.name == "ode"
    assert plan.trained_steps == ()


def test_a_window_visits_every_place_it_may_and_repeats_for_the_same_batch():
    config = SamplerConfig(window=WindowConfig(size=2, first=1, last=6))
    windows = [rollout_plan(config, run_seed=3, batch=batch).trained_steps for batch in range(64)]
    assert set(windows) == {(1, 2), (2, 3), (3, 4), (4, 5)}
    assert windows == [rollout_plan(config, run_seed=3, batch=batch).trained_steps for batch in range(64)]
    assert windows != [rollout_plan(config, run_seed=4, batch=batch).trained_steps for batch in range(64)]


def test_a_window_never_holds_the_final_step():
    config = SamplerConfig(steps=4, window=WindowConfig(size=3))
    assert rollout_plan(config, run_seed=0, batch=0).trained_steps == (0, 1, 2)


def starts(config, batches):
    return [rollout_plan(config, run_seed=3, batch=batch).trained_steps[0] for batch in range(batches)]


def test_a_sliding_window_moves_towards_the_picture_and_begins_again():
    window = WindowConfig(size=2, order="sliding", iterations_per_position=2)
    assert starts(SamplerConfig(steps=6, window=window), 10) == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]


def test_a_sliding_window_keeps_its_stride_and_its_bounds():
    window = WindowConfig(size=2, first=1, last=7, order="sliding", stride=3)
    assert starts(SamplerConfig(steps=10, window=window), 4) == [1, 4, 1, 4]


def test_a_random_window_keeps_its_place_for_as_many_iterations_as_a_sliding_one():
    config = SamplerConfig(window=WindowConfig(stride=2, iterations_per_position=4))
    found = starts(config, 64)
    assert all(len(set(found[batch : batch + 4])) == 1 for batch in range(0, 64, 4))
    assert set(found) == {0, 2, 4}


def test_evaluation_has_no_random_step():
    plan = evaluation_plan(SamplerConfig(shift=3.0), steps=5)
    assert plan.stochastic == (False,) * 5
    assert plan.sigmas == NoiseSchedule(shift=3.0).sigmas(5)


def test_a_plan_survives_json_with_its_signature():
    plan = rollout_plan(SamplerConfig(shift=1.7, noise_level=0.3, steps=11), run_seed=1, batch=2)
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan)))) == plan


def test_a_plan_made_by_other_rules_is_refused():
    raw = {**plan_to_dict(SDE), "signature": "flow-sde-8-n2-000000000000"}
    with pytest.raises(ValueError, match="same version of spotrl"):
        plan_from_dict(raw)


def test_whatever_decides_a_ranking_changes_the_signature():
    changes: list[dict[str, Any]] = [
        {},
        {"name": "cps"},
        {"name": "dance-sde"},
        {"steps": 9},
        {"noise_level": 0.6},
        {"shift": 1.1},
        {"guidance": 2.0},
        {"window": WindowConfig(size=2, first=0, last=2)},
    ]
    signatures = {rollout_plan(SamplerConfig(**change), run_seed=0, batch=0).signature for change in changes}
    assert len(signatures) == len(changes)
    assert SDE.signature.startswith("flow-sde-8-n1-")


def test_cps_cannot_draw_more_than_all_of_the_noise_anew():
    with pytest.raises(ValueError, match=r"noise_level is 1\.2, but cps"):
        SamplerConfig(name="cps", noise_level=1.2)


# --- one step


@pytest.mark.parametrize("name", RANDOM)
def test_noise_level_0_reproduces_euler_exactly(name):
    plan = rollout_plan(SamplerConfig(name=name, noise_level=0.0), run_seed=0, batch=0)
    x, velocity = some_rows()
    for step in range(plan.steps):
        mean, std = transition(plan, x, velocity, steps_of(step))
        dt = torch.tensor(plan.sigmas[step + 1] - plan.sigmas[step])
        assert torch.equal(mean, x + velocity * dt)
        assert not std.any()


@pytest.mark.parametrize("name", RANDOM)
def test_little_noise_is_close_to_euler(name):
    plan = rollout_plan(SamplerConfig(name=name, noise_level=1e-4), run_seed=0, batch=0)
    x, velocity = some_rows()
    mean, std = transition(plan, x, velocity, steps_of(3))
    torch.testing.assert_close(mean, x - velocity / 8, atol=1e-6, rtol=0)
    assert std.max() < 1e-4


def test_flow_sde_step_is_that_of_the_paper():
    x, velocity = some_rows()
    mean, std = transition(SDE, x, velocity, steps_of(2))
    s, dt, a = 0.75, -0.125, 0.7
    g2 = a**2 * s / (1 - s)
    score = -(x - (1 - s) * (x - s * velocity)) / s**2
    # Reverse SDE of dx = v dt with diffusion g: the drift gains -g^2/2 times the score.
    torch.testing.assert_close(mean, x + (velocity - g2 / 2 * score) * dt, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(std, torch.full((4,), math.sqrt(g2 * 0.125)))


def test_the_first_flow_sde_step_borrows_the_second_noise_level():
    x, velocity = some_rows()
    mean, std = transition(SDE, x, velocity, steps_of(0))
    g2 = 0.49 * 1.0 / (1 - 0.875)
    torch.testing.assert_close(std, torch.full((4,), math.sqrt(g2 * 0.125)))
    torch.testing.assert_close(mean, x * (1 - g2 / 2 * 0.125) - velocity * 0.125)


def test_dance_sde_step_by_hand():
    # s = 0.5, dt = -0.125, eta = 0.3: g^2 / (2 s) = 0.09.
    assert step_coefficients(DANCE, 4) == pytest.approx((1 - 0.09 / 8, -(1 + 0.09 / 2) / 8, 0.3 * math.sqrt(1 / 8)))


@pytest.mark.parametrize("step", range(7))
def test_dance_sde_step_is_that_of_the_paper(step):
    x, velocity = some_rows()
    mean, std = transition(DANCE, x, velocity, steps_of(step))
    s, dt, eta = DANCE.sigmas[step], -0.125, 0.3
    score = -(x - (1 - s) * (x - s * velocity)) / s**2
    torch.testing.assert_close(mean, x + velocity * dt - eta**2 / 2 * score * dt, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(std, torch.full((4,), eta * math.sqrt(0.125)))


@every_plan
def test_the_final_step_is_eulers(plan):
    assert step_coefficients(plan, 7) == (1.0, -0.125, 0.0)


@pytest.mark.parametrize("step", range(7))
def test_cps_keeps_the_noise_level_of_the_schedule(step):
    # With the true velocity x is (1 - s) data + s noise; what is not data must keep the size s' of the next level.
    data, eps = torch.zeros(1, 24, 16), noise_rows([1], 0, (24, 16))
    s, s_next = CPS.sigmas[step], CPS.sigmas[step + 1]
    mean, std = transition(CPS, s * eps, eps - data, steps_of(step, 1))
    kept = (mean / eps).mean().item()
    assert math.hypot(kept, std.item()) == pytest.approx(s_next, rel=1e-5)


def test_cps_keeps_the_data_of_the_schedule():
    data, eps = noise_rows([2], 0, (24, 16)), torch.zeros(1, 24, 16)
    mean, _ = transition(CPS, (1 - CPS.sigmas[3]) * data, eps - data, steps_of(3, 1))
    torch.testing.assert_close(mean, (1 - CPS.sigmas[4]) * data)


@every_plan
def test_many_steps_have_the_mean_and_std_of_the_formula(plan):
    class Still:
        """A network whose velocity is x."""

        def velocity(self, x, sigma, conditioning, guidance):
            return x

    count = 20_000
    x = torch.full((count, 1, 2), 0.5)
    mean, std = transition(plan, x[:1], x[:1], steps_of(4, 1))
    still: Any = Still()
    next_x, _ = advance(still, plan, {}, range(count), x, 4)
    assert next_x.mean().item() == pytest.approx(mean.mean().item(), abs=4 * std.item() / math.sqrt(2 * count))
    assert next_x.std().item() == pytest.approx(std.item(), rel=0.02)


@every_plan
def test_rows_at_mixed_steps_equal_the_same_rows_at_uniform_steps(plan):
    x, velocity = some_rows(8)
    mixed = torch.arange(8)
    mean, std = transition(plan, x, velocity, mixed)
    for row in range(8):
        alone_mean, alone_std = transition(plan, x, velocity, steps_of(row, 8))
        assert torch.equal(mean[row], alone_mean[row])
        assert torch.equal(std[row], alone_std[row])


def test_half_precision_velocities_are_worked_with_in_fp32():
    x, velocity = some_rows()
    mean, std = transition(SDE, x, velocity.bfloat16(), steps_of(1))
    assert mean.dtype == std.dtype == torch.float32


# --- what many steps make of noise


def variance_error(name, noise_level, steps, spread):
    """Relative error of the pictures' variance, where data are normal around 0.5 with variance `spread`.

    Exact: the velocity of such data is linear in x, so mean and variance follow from step to step.
    """
    plan = rollout_plan(SamplerConfig(name=name, noise_level=noise_level, steps=steps), run_seed=0, batch=0)
    mean, variance = 0.0, 1.0
    for step, s in enumerate(plan.sigmas[:-1]):
        # v = E[noise - data | x] = slope (x - (1 - s) 0.5) - 0.5
        slope = (s - (1 - s) * spread) / (s**2 + (1 - s) ** 2 * spread)
        keep, move, std = step_coefficients(plan, step)
        velocity = slope * (mean - (1 - s) * 0.5) - 0.5
        mean, variance = keep * mean + move * velocity, (keep + move * slope) ** 2 * variance + std**2
    assert mean == pytest.approx(0.5)
    return variance / spread - 1


@pytest.mark.parametrize("spread", [0.25, 1.0])
@pytest.mark.parametrize(("name", "noise_level"), [("dance-sde", 0.3), ("dance-sde", 0.7), ("flow-sde", 1.2)])
def test_small_sde_steps_keep_the_distribution_of_the_ode(name, noise_level, spread):
    coarse, fine = (abs(variance_error(name, noise_level, steps, spread)) for steps in (50, 800))
    assert fine < 0.004
    assert fine < coarse / 4


def test_flow_sde_gets_there_slowly_because_its_first_step_is_never_small():
    # The first step adds noise of a^2 however many there are; what it does is forgotten as steps^(-a^2).
    errors = [variance_error("flow-sde", 0.7, steps, 1.0) for steps in (400, 1600, 6400)]
    assert 0.01 > errors[0] > errors[1] > errors[2] > 0


def test_cps_keeps_the_distribution_if_its_noise_shrinks_with_the_steps():
    errors = [abs(variance_error("cps", 2 / math.sqrt(steps), steps, 0.25)) for steps in (50, 800)]
    assert errors[1] < 0.01
    assert errors[1] < errors[0] / 4


def test_cps_at_a_fixed_level_narrows_data_that_are_spread():
    # It treats the predicted picture as the true one; where pictures of one prompt differ, they come out too alike.
    assert variance_error("cps", 0.7, 1600, 0.25) == pytest.approx(-0.28, abs=0.01)


# --- log-probs


def test_log_prob_is_the_mean_log_density_of_the_gaussian():
    mean, std = torch.zeros(2, 3, 4), torch.tensor([0.5, 2.0])
    next_x = noise_rows([1, 2], 0, (3, 4))
    expected = torch.distributions.Normal(mean, std[:, None, None]).log_prob(next_x).mean(dim=(1, 2))
    torch.testing.assert_close(log_prob(next_x, mean, std), expected)


def test_an_ode_step_has_log_prob_0_and_no_gradient():
    mean = torch.ones(1, 2, 2, requires_grad=True)
    value = log_prob(torch.zeros(1, 2, 2), mean, torch.zeros(1))
    value.sum().backward()
    assert value.item() == 0.0
    assert mean.grad is not None
    assert not mean.grad.any()


def test_log_prob_gradient_agrees_with_finite_differences():
    mean = noise_rows([1, 2], 0, (2, 3)).double().requires_grad_()
    next_x, std = noise_rows([3, 4], 0, (2, 3)).double(), torch.tensor([0.3, 1.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda m: log_prob(next_x, m, std), (mean,))


# --- with a network


@every_plan
def test_the_ratio_is_1_before_the_weights_change(adapter, plan):
    conditioning = adapter.encode(["1234", "5678"])
    x = initial([7, 8], adapter.latent_shape())
    for step in range(plan.steps):
        next_x, old = advance(adapter, plan, conditioning, [7, 8], x, step)
        new = replay(adapter, plan, conditioning, x, next_x, steps_of(step, 2))
        torch.testing.assert_close((new - old).exp(), torch.ones(2), atol=1e-5, rtol=0)
        x = next_x


def test_several_steps_of_a_trajectory_go_through_one_forward_pass(adapter):
    prompts, seeds = ["1234", "5678"], [7, 8]
    x, xs, old = initial(seeds, adapter.latent_shape()), [], []
    for step in range(SDE.steps):
        next_x, log_probs = advance(adapter, SDE, adapter.encode(prompts), seeds, x, step)
        xs.append((x, next_x))
        old.append(log_probs)
        x = next_x
    packed = replay(
        adapter,
        SDE,
        adapter.encode(prompts * SDE.steps),
        torch.cat([before for before, _ in xs]),
        torch.cat([after for _, after in xs]),
        torch.arange(SDE.steps).repeat_interleave(2),
    )
    torch.testing.assert_close(packed, torch.cat(old), atol=1e-5, rtol=0)


@pytest.mark.parametrize("plan", [SDE, evaluation_plan(SamplerConfig(), 8)], ids=["flow-sde", "ode"])
def test_a_row_does_not_depend_on_its_neighbours_at_equal_shape(adapter, plan):
    first = denoise(adapter, plan, adapter.encode(["1234", "5678", "9012"]), [1, 2, 3])
    second = denoise(adapter, plan, adapter.encode(["1234", "0000", "4321"]), [1, 20, 30])
    moved = denoise(adapter, plan, adapter.encode(["0000", "4321", "1234"]), [20, 30, 1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], moved[2])


def test_going_on_from_a_committed_step_gives_the_same_picture(adapter):
    conditioning, seeds = adapter.encode(["1234", "5678"]), [1, 2]
    whole = denoise(adapter, SDE, conditioning, seeds)
    x = initial(seeds, adapter.latent_shape())
    for step in range(3):
        x, _ = advance(adapter, SDE, conditioning, seeds, x, step)
    committed = torch.frombuffer(bytearray(x.numpy().tobytes()), dtype=torch.float32).reshape(x.shape)
    for step in range(3, SDE.steps):
        committed, _ = advance(adapter, SDE, conditioning, seeds, committed, step)
    assert torch.equal(whole, committed)


@every_plan
@pytest.mark.parametrize("steps", [2, 6, 7])
def test_a_preview_is_what_the_network_foresees_on_the_same_noise_path(adapter, plan, steps):
    conditioning, seeds = adapter.encode(["1234", "5678"]), [1, 2]
    x = initial(seeds, adapter.latent_shape())
    for step in range(steps - 1):
        x, _ = advance(adapter, plan, conditioning, seeds, x, step)
    sigma = plan.sigmas[steps - 1]
    with torch.no_grad():
        foreseen = x - sigma * adapter.velocity(x, torch.full((2,), sigma), conditioning, 1.0)
    preview = preview_plan(plan, steps)
    assert preview.steps == steps
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(preview)))) == preview
    torch.testing.assert_close(denoise(adapter, preview, conditioning, seeds), foreseen)


def test_a_preview_of_all_steps_is_the_plan_itself():
    assert preview_plan(SDE, SDE.steps) is SDE


def test_an_ode_plan_with_random_steps_is_a_mistake():
    plan = Plan("ode", (1.0, 0.5, 0.0), (True, False), 0.7, 1.0, "broken")
    with pytest.raises(ValueError, match="no stochastic steps"):
        step_coefficients(plan, 0)
