"""Noise levels of a denoising run, equal to those of the model's diffusers pipeline.

    scheduler/scheduler_config.json + family + image tokens -> NoiseSchedule -> noise levels of any number of steps

The formulas are those of diffusers' `FlowMatchEulerDiscreteScheduler.set_timesteps` (0.39) and of the `sigmas` that
each pipeline passes to the scheduler. The module imports no torch: the launcher reads a model's folder before a
purchase.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Literal

CONFIG = Path("scheduler", "scheduler_config.json")
"""Place of the scheduler's configuration in a diffusers folder."""

Spacing = Literal["even", "to-end", "flux2"]
"""Spacing of a pipeline's noise levels before the shift. `even`: 1, 1 - 1/n, ..., 1/n. `to-end`: n levels from 1 to the
lowest level of the scheduler's training levels. `flux2`: even, with a shift that depends on image tokens and steps."""

UNSUPPORTED = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")
"""Options of diffusers' scheduler that move the noise levels in other ways. No published model here uses them."""

WAN_720P_SIDE, WAN_720P_SHIFT = 720, 5.0
"""Shortest side from which Wan's model card uses another shift (Wan2.1: 5 for 720p, 3 for 480p)."""


@dataclass(frozen=True, kw_only=True)
class NoiseSchedule:
    """Noise levels for any number of steps: spaced, shifted towards noise, then stretched to end at `terminal`."""

    highest: float = 1.0
    """Level of noise, before the shift. Below 1 for solvers that divide by 1 - s there."""
    shift: float = 1.0
    """A level s becomes shift s / (1 + (shift - 1) s). 1: no shift."""
    lowest: float | None = None
    """Lowest level above 0, before the shift. None: levels are even, and the lowest is 1 / steps."""
    terminal: float | None = None
    """Lowest level above 0, after the shift. None: the level that the shift gives."""
    flux2_tokens: int | None = None
    """Image tokens of a FLUX.2, whose shift also depends on the steps (`flux2_shift`). None: the shift is `shift`."""

    def sigmas(self, steps: int) -> tuple[float, ...]:
        """Return `steps + 1` noise levels, from noise (1, or a little less with `highest`) down to 0 (image)."""
        if self.lowest is None or steps == 1:
            spaced = [self.highest * (1.0 - step / steps) for step in range(steps)]
        else:
            spaced = [1.0 - (1.0 - self.lowest) * step / (steps - 1) for step in range(steps)]
        shift = self.shift if self.flux2_tokens is None else flux2_shift(self.flux2_tokens, steps)
        levels = [shifted(s, shift) for s in spaced]
        if self.terminal is not None and steps > 1:
            scale = (1.0 - levels[-1]) / (1.0 - self.terminal)
            levels = [1.0 - (1.0 - s) / scale for s in levels]
        # The first level is exactly 1: the SDE formulas treat level 1 apart, and rounding may give 1 - 1e-16.
        return (1.0 if self.highest == 1.0 else levels[0], *levels[1:], 0.0)


@dataclass(frozen=True)
class UnknownSchedule:
    """The place of a schedule that could not be read. A job with a number as `sampler.shift` needs no schedule."""

    problem: str

    def sigmas(self, steps: int) -> tuple[float, ...]:
        """Raise ScheduleError."""
        raise ScheduleError(self.problem)


ModelSchedule = NoiseSchedule | UnknownSchedule

EVEN = NoiseSchedule()
"""Even noise levels without a shift: the schedule of the shipped models."""


class ScheduleError(ValueError):
    """A model folder whose noise levels are unknown. The text ends with the remedy."""


def shifted(s: float, shift: float) -> float:
    """Return a noise level after the timestep shift: shift s / (1 + (shift - 1) s)."""
    return shift * s / (1.0 + (shift - 1.0) * s)


def flux2_shift(tokens: int, steps: int) -> float:
    """Return the shift of FLUX.2's pipelines (`compute_empirical_mu`): exp of a line in the steps, for 10 steps and
    200 fitted to the image tokens. Above 4300 tokens, the steps no longer count."""
    at_200, at_10 = 0.00016927 * tokens + 0.45666666, 8.73809524e-05 * tokens + 1.89833333
    if tokens > 4300:
        return exp(at_200)
    slope = (at_200 - at_10) / 190.0
    return exp(slope * steps + at_200 - 200.0 * slope)


def model_schedule(folder: Path, spacing: Spacing, tokens: int, shortest_side: int) -> ModelSchedule:
    """Return the schedule of a model folder, or the problem with the folder's scheduler.

    tokens         image tokens of the transformer, for dynamic shifting
    shortest_side  the smaller of an image's height and width in pixels
    """
    try:
        return read_schedule(folder, spacing, tokens, shortest_side)
    except ScheduleError as error:
        return UnknownSchedule(str(error))


def read_schedule(folder: Path, spacing: Spacing, tokens: int, shortest_side: int) -> NoiseSchedule:
    """Return the schedule of a model folder. Raises ScheduleError if the folder has none that spotrl can follow."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        kind = str(config["_class_name"])
    except FileNotFoundError:
        raise _error(f"{folder} has no {CONFIG}, which holds the model's noise levels") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _error(f"{folder / CONFIG} cannot be read as a scheduler's configuration ({error!r})") from None
    if asked := [name for name in UNSUPPORTED if config.get(name)]:
        raise _error(f"{folder / CONFIG} sets {asked[0]}, which spotrl does not implement")
    try:
        if kind == "UniPCMultistepScheduler" and config.get("use_flow_sigmas"):
            # UniPC is a multistep ODE solver without log-probs, so the levels are those of its flow-match Euler twin.
            return _euler({"shift": _wan_shift(float(config.get("flow_shift", 1.0)), shortest_side)}, spacing, tokens)
        if kind == "DPMSolverMultistepScheduler" and config.get("use_flow_sigmas"):
            # The same holds for DPM-Solver++, whose levels begin below 1. Euler steps are taken at these levels.
            highest = 1.0 - 1.0 / float(config.get("num_train_timesteps", 1000))
            return replace(_euler({"shift": float(config.get("flow_shift", 1.0))}, "even", tokens), highest=highest)
        if kind == "FlowMatchEulerDiscreteScheduler":
            return _euler(config, spacing, tokens)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise _error(f"{folder / CONFIG} has a value that is not a number, or not one above 0 ({error})") from None
    raise _error(f"{folder / CONFIG} is of a {kind}, and spotrl follows FlowMatchEulerDiscreteScheduler only")


def _wan_shift(flow_shift: float, shortest_side: int) -> float:
    return max(flow_shift, WAN_720P_SHIFT) if shortest_side >= WAN_720P_SIDE else flow_shift


def _euler(config: Mapping[str, object], spacing: Spacing, tokens: int) -> NoiseSchedule:
    """Return the levels of a `FlowMatchEulerDiscreteScheduler` in a pipeline with this spacing."""

    def number(name: str, default: float) -> float:
        value = config.get(name)
        return default if value is None else float(value)  # type: ignore[arg-type]

    if spacing == "flux2" and config.get("use_dynamic_shifting"):
        return NoiseSchedule(flux2_tokens=tokens)
    shift, lowest = number("shift", 1.0), 1.0 / number("num_train_timesteps", 1000)
    if config.get("use_dynamic_shifting"):
        # A straight line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift).
        first, last = number("base_image_seq_len", 256), number("max_image_seq_len", 4096)
        base, most = number("base_shift", 0.5), number("max_shift", 1.15)
        mu = base + (most - base) * (tokens - first) / (last - first)
        shift = mu if config.get("time_shift_type") == "linear" else exp(mu)
    else:
        # The scheduler shifts its training levels once, takes their lowest as the end of the spacing, and shifts again.
        lowest = shifted(lowest, shift)
    if shift <= 0:
        raise ValueError(f"a shift of {shift:g}")
    terminal = number("shift_terminal", 0.0)
    return NoiseSchedule(
        shift=shift, lowest=lowest if spacing == "to-end" else None, terminal=terminal if terminal else None
    )


def _error(fault: str) -> ScheduleError:
    return ScheduleError(
        f"{fault}; give a number as sampler.shift (flow-matching models are trained with 1 to 7), or use the whole "
        "folder that the model was published as"
    )
