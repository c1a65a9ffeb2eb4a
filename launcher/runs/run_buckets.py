"""The folders of a run in the buckets of its clouds."""

from launcher.ledger.models import Run
from launcher.storage.stores import run_folders


def buckets_of(run: Run) -> tuple[str, ...]:
    """Return the run's folder in each cloud's bucket."""
    return tuple(run_folders(run.infra, run.job.get("store") or {}, run.name).values())
