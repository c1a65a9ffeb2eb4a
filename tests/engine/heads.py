"""Message heads as dicts, for tests that write a call in its wire format."""

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.protocol.codec import Head, encode
from engine.protocol.messages import Result
from engine.protocol.request import Finished, Reply, RequestId, WeightsKey
from engine.protocol.task import Task


def request_to_list(request: RequestId) -> list[Any]:
    return list(msgspec.to_builtins(request))


def request_from_list(raw: Any) -> RequestId:
    return msgspec.convert(raw, RequestId)


def weights_to_list(key: WeightsKey) -> list[Any]:
    return [key.version, key.average]


def task_to_dict(task: Task) -> Head:
    return encode(task)


def task_from_dict(raw: Mapping[str, Any]) -> Task:
    return msgspec.convert(raw, Task)


def finished_to_dict(result: Finished) -> Head:
    return encode(Result.of(result))


def finished_from_dict(raw: Mapping[str, Any]) -> Finished:
    return msgspec.convert(raw, Result).finished()


def reply_to_dict(reply: Reply) -> Head:
    return encode(reply)


def reply_from_dict(raw: Mapping[str, Any]) -> Reply:
    reply: Reply = msgspec.convert(raw, Reply, str_keys=True)
    return reply
