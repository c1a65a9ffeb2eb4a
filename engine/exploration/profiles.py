"""Choice of the exploration profile: a bandit over a few profiles. Our own rule.

A cheap profile (bfloat16, fewer steps, a student scorer) tries more seeds but ranks seeds worse. A visit's value is the
monitor's measured rho^2 (V - 1), per GPU-second of exploration. Values drift as the policy learns, and old visits
therefore lose weight: discounted Thompson sampling with a normal posterior (arXiv 2305.10718).

Resolution is not part of a profile. At another resolution a seed draws other noise, and the remaining quality of the
ranking depends on the model. The choice is therefore left to the model family.

The promise: equal measurements give equal choices, after a restart too.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any, Literal

MOST_PROFILES = 6
"""Limit of profiles. With more, each profile's tenth of the visits would be forgotten before giving any information."""
DISCOUNT = 0.9
"""Weight kept by a visit at every later visit: about ten visits count."""
PRIOR_NOISE = 0.3
"""Assumed standard deviation of a visit's value, in units of the best mean, until values are measured."""
PRIOR_VISITS = 2.0
"""Weight of the assumption, in visits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A way to explore. With every profile, the chosen seeds are rolled out and scored in full before training."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    shape: int
    """Images per forward pass."""
    steps: int
    """Denoising steps. With fewer steps than training, the scored image is the network's prediction after the last."""
    scorer: Literal["reward", "student"]
    """The reward itself, or a cheap model that imitates the reward."""


def visit_value(predicted_gain: float, gpu_seconds: float) -> float:
    """Return rho^2 (V - 1) per GPU-second. `predicted_gain`: the monitor's 1 + rho^2 (V - 1) of this visit alone."""
    if not gpu_seconds > 0:
        raise ValueError(f"a visit took {gpu_seconds} GPU-seconds; record only visits that explored something")
    return (predicted_gain - 1) / gpu_seconds


@dataclass(kw_only=True, slots=True)
class _Arm:
    """Discounted count, sum and sum of squares of the values, and the undiscounted number of choices."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    chosen: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.weight

    @property
    def scatter(self) -> float:
        """Return the sum of the squared deviations from the mean. A rounding error below 0 becomes 0."""
        return max(0.0, self.squares - self.total * self.mean)


class ProfileBandit:
    """Chooses the profile of each explored batch. The state is part of the checkpoint."""

    def __init__(self, profiles: Sequence[Profile], *, run_seed: int, discount: float = DISCOUNT) -> None:
        names = [profile.name for profile in profiles]
        if not 1 <= len(names) <= MOST_PROFILES:
            raise ValueError(
                f"{len(names)} exploration profiles; use 1 to {MOST_PROFILES}, because each must be tried again and "
                "again to know what it is worth now"
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"exploration profiles named twice: {', '.join(twice)}; give each a name of its own")
        if not 0 < discount <= 1:
            raise ValueError(f"discount is {discount}; use a share above 0 and up to 1, e.g. {DISCOUNT}")
        self.profiles = {profile.name: profile for profile in profiles}
        self.run_seed = run_seed
        self.discount = discount
        self._arms = {name: _Arm() for name in names}
        self._last: tuple[int, str] | None = None

    def choose(self, batch: int) -> Profile:
        """Return the profile of this batch. A repeated call for the newest batch returns the same profile.

        A profile without a value comes first: the least chosen profile, in the given order. Otherwise, a draw per
        profile from a normal distribution around its mean decides.
        """
        if self._last is None or self._last[0] != batch:
            unknown = [name for name, arm in self._arms.items() if arm.weight == 0]
            name = min(unknown, key=lambda profile: self._arms[profile].chosen) if unknown else self._draw(batch)
            self._arms[name].chosen += 1
            self._last = (batch, name)
        return self.profiles[self._last[1]]

    def record(self, name: str, value: float) -> None:
        """Record the value of a visit with this profile (`visit_value`), in the order of measurement.

        Do not record an unmeasured visit. Record a visit without any gain as 0, because a profile that always fails
        would otherwise be tried forever. Raises ValueError for a value that is not finite or an unknown name.
        """
        if name not in self._arms:
            raise ValueError(f"no exploration profile {name!r}; there are {', '.join(self._arms)}")
        if not math.isfinite(value):
            raise ValueError(f"a visit of profile {name!r} has the value {value}; leave out what was not measured")
        for arm in self._arms.values():
            arm.weight *= self.discount
            arm.total *= self.discount
            arm.squares *= self.discount
        arm = self._arms[name]
        arm.weight += 1
        arm.total += value
        arm.squares += value**2

    def to_dict(self) -> dict[str, Any]:
        """Return the learnt values as JSON values."""
        arms = {name: [arm.weight, arm.total, arm.squares, arm.chosen] for name, arm in self._arms.items()}
        return {"arms": arms, "last": None if self._last is None else list(self._last)}

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], profiles: Sequence[Profile], *, run_seed: int, discount: float = DISCOUNT
    ) -> "ProfileBandit":
        """Return the bandit stored by `to_dict`. Raises ValueError if the stored profiles differ."""
        bandit = cls(profiles, run_seed=run_seed, discount=discount)
        if list(raw["arms"]) != list(bandit._arms):
            raise ValueError(
                f"the state is of the exploration profiles {', '.join(raw['arms'])}, the job has "
                f"{', '.join(bandit._arms)}; go on with the same profiles in the same order, or start a new run"
            )
        for name, (weight, total, squares, chosen) in raw["arms"].items():
            bandit._arms[name] = _Arm(weight=weight, total=total, squares=squares, chosen=chosen)
        bandit._last = None if raw["last"] is None else (raw["last"][0], raw["last"][1])
        return bandit

    def _draw(self, batch: int) -> str:
        digest = blake2b(json.dumps(["profile", self.run_seed, batch]).encode(), digest_size=8).digest()
        gauss = Random(int.from_bytes(digest, "little")).gauss
        noise = self._noise()
        drawn = {name: gauss(arm.mean, noise / math.sqrt(arm.weight)) for name, arm in self._arms.items()}
        # If no visit has any value, all draws are equal: take the profiles in turns.
        return max(drawn, key=lambda name: (drawn[name], -self._arms[name].chosen))

    def _noise(self) -> float:
        """Return the standard deviation of a visit's value, pooled over the profiles."""
        assumed = PRIOR_NOISE * max(abs(arm.mean) for arm in self._arms.values())
        scatter = sum(arm.scatter for arm in self._arms.values())
        weight = sum(arm.weight for arm in self._arms.values())
        return math.sqrt((PRIOR_VISITS * assumed**2 + scatter) / (PRIOR_VISITS + weight))
