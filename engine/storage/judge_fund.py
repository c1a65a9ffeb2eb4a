"""The budget of a run's paid judges in the run's store: how much of it coordinators have taken.

A coordinator takes parts of the budget, and spends what it took. The object in the store is written before any of the
part is spent. A coordinator on a new machine, whose journal is lost, finds the object and takes from what is left: a
lost part counts as spent. The promise: all coordinators of a run together never take more than the budget.
"""

import json

from engine.storage.checkpoint import CheckpointStore

OBJECT = "judges/taken.json"

PARTS = 50
"""Parts of a budget. A lost machine loses at most one part, and a run writes the object about so many times."""


class JudgeFund:
    """Budget of a run in micro-dollars, in the store at an obstore URL."""

    def __init__(self, url: str, limit: int) -> None:
        self._url, self.limit = url, limit

    def take(self, least: int) -> int:
        """Take at least `least` from the budget, or what is left, and return the amount. 0: nothing is left.

        Raises OSError if the store does not answer or is full, and then took nothing that anybody may spend.
        """
        store = CheckpointStore(self._url)
        before = self._taken(store)
        after = min(self.limit, before + max(least, -(-self.limit // PARTS)))
        if after <= before:
            return 0
        store.put(OBJECT, json.dumps({"micro_usd": after}).encode())
        return after - before

    def _taken(self, store: CheckpointStore) -> int:
        """Return the taken part of the budget. An object that cannot be read counts as the whole budget."""
        try:
            data = store.get(OBJECT)
        except FileNotFoundError:
            return 0
        try:
            return int(json.loads(data)["micro_usd"])
        except (ValueError, KeyError, TypeError) as error:
            print(f"{OBJECT} in {self._url} cannot be read ({error}), so no money of the judges is left", flush=True)
            return self.limit
