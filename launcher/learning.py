"""The sentence about a run whose last batches taught nothing."""

from collections.abc import Mapping

from engine.events import LEARNS_NOTHING_AFTER, UNLEARNED


def learns_nothing(health: Mapping[str, float]) -> str:
    """Return a sentence if the last batches of a run taught nothing. `health`: of its newest batch."""
    batches = int(health.get(UNLEARNED, 0))
    if batches < LEARNS_NOTHING_AFTER:
        return ""
    return f"the last {batches} batches taught nothing; `spotrl events` says why"
