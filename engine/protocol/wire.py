"""Wire format of requests, tasks and replies: a JSON head, with raw bytes beside the head for tensors.

No pickle: bytes from a worker are only data. `pack` and `unpack` frame a message as
[8 bytes: length of the head][head: JSON][blobs, one after another].
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, assert_never

from engine.protocol.request import (
    Attempt,
    Drain,
    Exit,
    Fenced,
    Finished,
    LoadWeights,
    Regroup,
    Reply,
    Score,
    Wait,
    WeightsKey,
    Work,
    request_from_list,
    request_to_list,
)
from engine.queue.task import Task

Blobs = Mapping[str, bytes]
_LENGTH = struct.Struct("<Q")


def pack(head: Mapping[str, Any], blobs: Blobs | None = None) -> bytes:
    """Return a message as bytes."""
    blobs = blobs or {}
    sizes = [[name, len(data)] for name, data in blobs.items()]
    text = json.dumps({"head": head, "blobs": sizes}, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs.values()])


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the message in these bytes. Raises ValueError if the bytes are truncated or not a spotrl message."""
    if len(body) < _LENGTH.size:
        raise ValueError(f"message of {len(body)} bytes has no head")
    (length,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + length
    raw = json.loads(body[_LENGTH.size : start])
    blobs: dict[str, bytes] = {}
    try:
        head, sizes = dict(raw["head"]), raw["blobs"]
        for name, size in sizes:
            blobs[name] = body[start : start + size]
            start += size
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a message of ours: {error}") from error
    if start != len(body):
        raise ValueError(f"message of {len(body)} bytes should have {start}")
    return head, blobs


def weights_to_list(key: WeightsKey) -> list[Any]:
    return [key.version, key.average]


def weights_from_list(raw: list[Any]) -> WeightsKey:
    return WeightsKey(version=raw[0], average=raw[1])


def task_to_dict(task: Task) -> dict[str, Any]:
    return {
        "requests": [request_to_list(request) for request in task.requests],
        "weights": weights_to_list(task.weights),
        "sampler": task.sampler,
        "steps": task.steps,
        "shape": task.shape,
        "dtype": task.dtype,
        "pictures": task.pictures,
        "scorer": task.scorer,
    }


def task_from_dict(raw: Mapping[str, Any]) -> Task:
    requests = tuple(request_from_list(request) for request in raw["requests"])
    return Task(**{**raw, "requests": requests, "weights": weights_from_list(raw["weights"])})


def finished_to_dict(result: Finished) -> dict[str, Any]:
    """Return the wire form of a result. A non-finite reward becomes null, because JSON has no NaN or infinity."""
    score = {name: _or_null(value) for name, value in result.score.metrics.items()}
    return {
        "request": request_to_list(result.request),
        "reward": _or_null(result.score.reward),
        "metrics": score,
        "trajectory": result.trajectory,
        "node": result.node,
    }


def finished_from_dict(raw: Mapping[str, Any]) -> Finished:
    metrics = {name: _or_nan(value) for name, value in raw["metrics"].items()}
    score = Score(reward=_or_nan(raw["reward"]), metrics=metrics)
    request, node = request_from_list(raw["request"]), raw.get("node", "")  # earlier versions wrote no node
    return Finished(request=request, score=score, trajectory=raw["trajectory"], node=node)


def reply_to_dict(reply: Reply) -> dict[str, Any]:
    match reply:
        case Wait():
            return {"do": "wait"}
        case Work():
            attempts = [
                [request_to_list(a.request), weights_to_list(a.weights), a.step, a.state] for a in reply.attempts
            ]
            return {
                "do": "work",
                "lease": reply.lease,
                "attempts": attempts,
                "sampler": reply.sampler,
                "shape": reply.shape,
                "dtype": reply.dtype,
                "expires_ms": reply.expires_ms,
                "commit_every": reply.commit_every,
                "pictures": list(reply.pictures),
                "scorer": reply.scorer,
            }
        case LoadWeights():
            return {"do": "load_weights", "weights": weights_to_list(reply.weights), "digest": reply.digest}
        case Regroup():
            return {"do": "regroup", **asdict(reply), "members": list(reply.members)}
        case Drain():
            return {"do": "drain", "deadline_ms": reply.deadline_ms}
        case Fenced():
            return {"do": "fenced", "lease": reply.lease}
        case Exit():
            return {"do": "exit", "reason": reply.reason}
        case _:
            assert_never(reply)


def reply_from_dict(raw: Mapping[str, Any]) -> Reply:
    """Return the reply in this wire form. Raises ValueError for an unknown order."""
    body = {name: value for name, value in raw.items() if name != "do"}
    match raw["do"]:
        case "wait":
            return Wait()
        case "work":
            attempts = tuple(
                Attempt(request=request_from_list(r), weights=weights_from_list(w), step=step, state=state)
                for r, w, step, state in body["attempts"]
            )
            return Work(**{**body, "attempts": attempts, "pictures": tuple(body["pictures"])})
        case "load_weights":
            return LoadWeights(weights=weights_from_list(body["weights"]), digest=body["digest"])
        case "regroup":
            prepare = tuple((number, rank, degree) for number, rank, degree in body["prepare"])
            keep = None if body["keep"] is None else tuple(body["keep"])
            return Regroup(**{**body, "members": tuple(body["members"]), "prepare": prepare, "keep": keep})
        case "drain":
            return Drain(**body)
        case "fenced":
            return Fenced(**body)
        case "exit":
            return Exit(**body)
        case other:
            raise ValueError(f"the coordinator sent an order this version does not know: {other!r}")


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
