"""The folders of a run in the buckets of its clouds."""

from launcher.ledger.models import Run
from launcher.storage.stores import run_store


def buckets_of(run: Run) -> tuple[str, ...]:
    """Return the run's folder in each cloud's bucket."""
    store = run.job.get("store") or {}
    return tuple(run_store(store, cloud, run.name) for cloud in run.infra.split(",") if cloud in store)
