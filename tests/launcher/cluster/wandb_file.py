"""Read what W&B's client wrote offline: the file that `wandb sync` uploads."""

import json
from pathlib import Path
from typing import Any


def read_history(file: Path) -> tuple[str, dict[int, dict[str, Any]]]:
    """Return the run's id, and the row of each step. Raises AssertionError if a step was written twice."""
    from wandb.proto import wandb_internal_pb2 as messages
    from wandb.sdk.internal.datastore import DataStore

    store, rows, name = DataStore(), {}, ""
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            name = record.run.run_id
        if record.WhichOneof("record_type") == "history":
            step = record.history.step.num
            assert step not in rows, f"step {step} is there twice"
            rows[step] = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
    return name, rows
