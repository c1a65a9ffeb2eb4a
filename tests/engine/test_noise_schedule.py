"""Noise levels: equal to those of diffusers' scheduler as each pipeline calls it."""

import json
import warnings

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from engine.config import SamplerConfig
from engine.diffusion.sampler import evaluation_plan, preview_plan, rollout_plan, step_coefficients
from engine.noise_schedule import EVEN, NoiseSchedule, ScheduleError, UnknownSchedule, model_schedule, read_schedule
from tests.tiny_pipelines import SCHEDULERS, scheduler

TOKENS, SIDE = 1024, 512
STEPS = [1, 2, 10, 50]


def folder_with(tmp_path, config):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    return tmp_path


def saved(tmp_path, family):
    scheduler(family).save_pretrained(tmp_path / "scheduler")
    return tmp_path


def close(ours, theirs):
    assert ours == pytest.approx(theirs.sigmas.tolist(), abs=2e-7)


@pytest.mark.parametrize("steps", STEPS[1:])  # at one step, diffusers divides Qwen-Image's levels by zero
@pytest.mark.parametrize("tokens", [256, 1024, 6400])
@pytest.mark.parametrize("family", ["qwen-image", "flux"])
def test_dynamic_shifting_gives_the_levels_of_the_pipeline(tmp_path, family, tokens, steps):
    theirs = scheduler(family)
    config = theirs.config
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(tokens, *(config[name] for name in names))
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)
    close(read_schedule(saved(tmp_path, family), "even", tokens, SIDE).sigmas(steps), theirs)


@pytest.mark.parametrize("steps", STEPS)
def test_a_pipeline_that_leaves_the_spacing_to_its_scheduler_ends_near_zero(tmp_path, steps):
    theirs = scheduler("sd3")
    theirs.set_timesteps(steps)
    ours = read_schedule(saved(tmp_path, "sd3"), "to-end", TOKENS, SIDE).sigmas(steps)
    close(ours, theirs)
    if steps == 10:
        assert ours[-2] == pytest.approx(0.009, abs=1e-3)


@pytest.mark.parametrize(("side", "shift"), [(240, 3.0), (480, 3.0), (720, 5.0)])
def test_wan_takes_euler_steps_at_the_shift_of_its_size(tmp_path, side, shift):
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.set_timesteps(10)
    close(read_schedule(saved(tmp_path, "wan"), "to-end", TOKENS, side).sigmas(10), theirs)


@pytest.mark.parametrize("steps", STEPS)
def test_sana_takes_euler_steps_at_the_levels_of_its_solver(tmp_path, steps):
    theirs = scheduler("sana")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # diffusers 0.39 reads a tensor in numpy's old way
        theirs.set_timesteps(steps)
    close(read_schedule(saved(tmp_path, "sana"), "even", TOKENS, SIDE).sigmas(steps), theirs)


def test_a_first_level_just_below_1_adds_as_much_noise_as_1():
    config = SamplerConfig(name="flow-sde", steps=10, noise_level=0.7)
    from_1, below = (NoiseSchedule(highest=highest, shift=3.0) for highest in (1.0, 0.999))
    *_, expected = step_coefficients(rollout_plan(config, 0, 0, from_1), 0)
    *_, found = step_coefficients(rollout_plan(config, 0, 0, below), 0)
    assert below.sigmas(10)[0] == pytest.approx(0.99967, abs=1e-5)
    assert found == pytest.approx(expected, rel=0.02)


def test_linear_time_shift_uses_mu_itself(tmp_path):
    config = SCHEDULERS["flux"] | {"time_shift_type": "linear"}
    theirs = FlowMatchEulerDiscreteScheduler(**config)
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / 4, 4).tolist(), mu=calculate_shift(TOKENS))
    theirs.save_pretrained(tmp_path / "scheduler")
    close(read_schedule(tmp_path, "even", TOKENS, SIDE).sigmas(4), theirs)


def test_the_first_level_is_1_and_the_last_is_0_whatever_the_shift():
    for shift in (0.1, 0.3, 1.0, 1.88, 3.0, 7.3):
        levels = NoiseSchedule(shift=shift, terminal=0.02).sigmas(7)
        assert levels[0] == 1.0
        assert levels[-1] == 0.0
        assert levels[-2] == pytest.approx(0.02)
        assert list(levels) == sorted(levels, reverse=True)


def test_one_step_goes_from_noise_to_the_image():
    assert NoiseSchedule(shift=3.0, lowest=0.001, terminal=0.02).sigmas(1) == (1.0, 0.0)


def test_auto_takes_the_models_levels_and_a_number_replaces_them():
    schedule = NoiseSchedule(shift=2.0, lowest=0.001)
    assert evaluation_plan(SamplerConfig(), 8, schedule).sigmas == schedule.sigmas(8)
    assert rollout_plan(SamplerConfig(), 0, 0, schedule).sigmas == schedule.sigmas(8)
    assert preview_plan(rollout_plan(SamplerConfig(), 0, 0, schedule), 4).sigmas == (*schedule.sigmas(8)[:4], 0.0)
    assert evaluation_plan(SamplerConfig(shift=1.0), 8, schedule).sigmas == EVEN.sigmas(8)


def test_a_number_needs_no_scheduler_and_auto_does():
    unknown = UnknownSchedule("no scheduler here; give a number as sampler.shift")
    assert evaluation_plan(SamplerConfig(shift=1.0), 8, unknown).sigmas == EVEN.sigmas(8)
    with pytest.raises(ScheduleError, match="give a number"):
        evaluation_plan(SamplerConfig(), 8, unknown)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (None, "has no scheduler/scheduler_config.json"),
        ({"shift": 3.0}, "cannot be read as a scheduler's configuration"),
        ([1], "cannot be read as a scheduler's configuration"),
        ({"_class_name": "DDIMScheduler"}, "is of a DDIMScheduler"),
        ({"_class_name": "UniPCMultistepScheduler"}, "is of a UniPCMultistepScheduler"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "use_beta_sigmas": True}, "sets use_beta_sigmas"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": "large"}, "has a value that is not a number"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 0}, "has a value that is not a number"),
    ],
)
def test_a_folder_whose_levels_are_unknown_says_what_was_found(tmp_path, config, found):
    folder = tmp_path if config is None else folder_with(tmp_path, config)
    with pytest.raises(ScheduleError, match=found) as error:
        read_schedule(folder, "even", TOKENS, SIDE)
    assert "give a number as sampler.shift" in str(error.value)
    assert isinstance(model_schedule(folder, "even", TOKENS, SIDE), UnknownSchedule)


def test_a_shift_of_another_name_than_auto_is_refused():
    with pytest.raises(ValueError, match="auto"):
        SamplerConfig(shift="dynamic")
    with pytest.raises(ValueError, match="greater than 0"):
        SamplerConfig(shift=0)
