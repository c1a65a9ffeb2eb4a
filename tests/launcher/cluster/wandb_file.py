"""Read what W&B's client wrote offline: the file that `wandb sync` uploads.

The client has no reader of its own any more (0.31). The file is a log of records in LevelDB's format, which is public:
after 7 bytes of a header, blocks of 32 KiB with parts of records, each with its checksum, length and kind.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER = 7
BLOCK = 32768
PART_HEADER = 7  # 4 bytes of checksum, 2 of length, 1 of kind
WHOLE, LAST = 1, 4


def record_bytes(data: bytes) -> Iterator[bytes]:
    """Return each record of the log. Its parts follow one another; what is too short for a header is left empty."""
    assert data.startswith(b":W&B"), data[:FILE_HEADER]
    at, parts = FILE_HEADER, b""
    while at + PART_HEADER <= len(data):
        if BLOCK - at % BLOCK < PART_HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + PART_HEADER : at + PART_HEADER + length]
        at += PART_HEADER + length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
    assert not parts, "the last record is not whole"


def read_history(file: Path) -> tuple[str, dict[int, dict[str, Any]]]:
    """Return the run's id, and the row of each step. Raises AssertionError if a step was written twice."""
    from wandb.proto import wandb_internal_pb2 as messages

    rows: dict[int, dict[str, Any]] = {}
    name = ""
    for data in record_bytes(file.read_bytes()):
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
