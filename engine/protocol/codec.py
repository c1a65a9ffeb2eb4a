"""Codec of all messages: a class to a JSON head and back, with raw bytes beside the head for tensors.

    message --encode--> head --pack--> [8 bytes: length][JSON: head, names and sizes of blobs][blobs, one after another]

No pickle: bytes from a worker are only data. The promise: `decode_...` raises ValueError for a head that is not exactly
one message of its union, so no caller meets a missing or mistyped field. A head is a plain mapping and never leaves the
transports and this module.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from engine.protocol.messages import Answer, Call, tag_of
from engine.protocol.records import LeaseRecord, Record
from engine.protocol.request import Reply

Head = dict[str, Any]
Blobs = Mapping[str, bytes]
_LENGTH = struct.Struct("<Q")
_CALLS = frozenset(tag_of(call) for call in get_args(Call))


def encode(message: msgspec.Struct) -> Head:
    """Return the head of a message."""
    head: Head = msgspec.to_builtins(message, str_keys=True)
    return head


def decode_call(head: Mapping[str, Any]) -> Call:
    """Return the call in this head. Raises ValueError for an unknown or malformed call."""
    tag = head.get("call")
    if not isinstance(tag, str) or tag not in _CALLS:
        raise ValueError(f"the coordinator does not know the call {tag!r}; use one of {', '.join(sorted(_CALLS))}")
    try:
        call: Call = _decode(head, Call)
    except ValueError as error:
        raise ValueError(f"the call {tag!r} cannot be read: {error}") from error
    return call


def decode_answer(head: Mapping[str, Any]) -> Answer:
    """Return the answer in this head. Raises ValueError for an unknown or malformed answer."""
    answer: Answer = _decode(head, Answer)
    return answer


def decode_reply(head: Mapping[str, Any]) -> Reply:
    """Return the answer to a call about leases. Raises ValueError for any other answer."""
    reply: Reply = _decode(head, Reply)
    return reply


def encode_record(record: Record) -> Head:
    """Return the head of a journal record. The number of a trainer's order is stored as `said`: [boot, seq]."""
    head = encode(record)
    head = {"op": head.pop("call"), **head}
    if not isinstance(record, LeaseRecord):
        order = [head.pop("boot", 0), head.pop("seq", 0)]
        head |= {"said": order} if any(order) else {}
    return head


def decode_record(head: Mapping[str, Any]) -> Record:
    """Return the journal record in this head. Raises ValueError for an unknown or malformed record."""
    body = {name: value for name, value in head.items() if name not in ("op", "said")}
    order = {}
    if "said" in head:
        try:
            order["boot"], order["seq"] = head["said"]
        except TypeError:
            raise ValueError(f"the order number `said` is {head['said']!r}; it must be [boot, seq]") from None
    record: Record = _decode({"call": head.get("op"), **body, **order}, Record)
    return record


def _decode(head: Mapping[str, Any], union: Any) -> Any:
    return msgspec.convert(head, type=union, str_keys=True)


def pack(head: Mapping[str, Any], blobs: Blobs | None = None) -> bytes:
    """Return a head and blobs as bytes. Raises ValueError for a number that JSON does not know."""
    blobs = blobs or {}
    sizes = [[name, len(data)] for name, data in blobs.items()]
    text = json.dumps({"head": head, "blobs": sizes}, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs.values()])


def unpack(body: bytes) -> tuple[Head, dict[str, bytes]]:
    """Return the head and blobs in these bytes. Raises ValueError if the bytes are truncated or not from spotrl."""
    if len(body) < _LENGTH.size:
        raise ValueError(f"message of {len(body)} bytes has no head")
    (length,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + length
    try:
        raw = json.loads(body[_LENGTH.size : start])
    except RecursionError:
        raise ValueError("the head is nested too deeply") from None
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
