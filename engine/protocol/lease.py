"""The facts of a lease as a journal record."""

from collections.abc import Mapping
from typing import Any

from engine.protocol.request import (
    request_from_list,
    request_to_list,
)
from engine.protocol.task import LeaseRecord
from engine.protocol.wire import (
    weights_from_list,
    weights_to_list,
)

Head = dict[str, Any]


def lease_to_dict(record: LeaseRecord) -> Head:
    return {
        "op": "lease",
        "number": record.number,
        "worker": record.worker,
        "node": record.node,
        "boot": record.boot,
        "seq": record.seq,
        "weights": weights_to_list(record.weights),
        "requests": [request_to_list(request) for request in record.requests],
        "lease_ms": record.lease_ms,
        "copy": record.copy,
    }


def lease_from_dict(raw: Mapping[str, Any]) -> LeaseRecord:
    requests = tuple(request_from_list(request) for request in raw["requests"])
    fields = {name: value for name, value in raw.items() if name not in ("op", "requests", "weights")}
    return LeaseRecord(**fields, requests=requests, weights=weights_from_list(raw["weights"]))
