"""Count the schedules until the simulator finds a planted bug."""

from dataclasses import dataclass

from tests.mutants.catalogue import MUTANTS
from tests.simulation.schedules import broken_by

SCHEDULES = 2000


@dataclass(frozen=True, kw_only=True)
class Found:
    """`after`: schedules played until an invariant broke, or None."""

    mutant: str
    after: int | None
    seed: int | None = None
    text: str = ""


def hunt(name: str) -> Found:
    """Play schedules with this planted bug until one breaks."""
    with MUTANTS[name].planted():
        for seed in range(SCHEDULES):
            text, _ = broken_by(seed)
            if text is not None:
                return Found(mutant=name, after=seed + 1, seed=seed, text=text)
    return Found(mutant=name, after=None)
