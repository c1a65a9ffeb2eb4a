"""The messages between the launcher and a node's remote console, as JSON lines in both directions.

    launcher -> console: Order          console -> launcher: Report

Standard library only: the console must open on a node where nothing else works. A side ignores a message of a kind that
it does not know, because the other side may be newer.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

MIRRORED = ("agent.json", "ready.json", "notice.json", "hint.json", "exit.json")
"""Small files of a node, sent whole. node.json is left out: it holds the token, and comes from the launcher."""
APPENDED = re.compile(r"(progress/[\w-][\w.-]*\.jsonl|logs/[\w-][\w.-]*\.log)")
"""Names of files that grow. Only new bytes are sent."""
TAIL_BYTES = 64
"""Number of last bytes by which a file is recognised as the file in the mirror."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A sign of life, in both directions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Have:
    """The launcher's copies of appended files, by name: size and last bytes. The first line of a connection."""

    files: Mapping[str, tuple[int, bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAgent:
    """The order to run the agent of exactly this NodeSpec. `number`: an order with a smaller number is void."""

    spec: Mapping[str, Any]
    number: int
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """More of the agent's environment, never written to disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimeLeft:
    """The order to terminate the node in `left_ms`. `number`: an order with a smaller number is void."""

    left_ms: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncePreemption:
    """The order to expect a preemption at this time (UTC). `source`: the service that announced the preemption."""

    deadline_ms: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PutFile:
    """The new content of a small file."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveFile:
    """The name of a removed small file."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendFile:
    """New bytes of a growing file from offset `at`. 0: the file was replaced."""

    name: str
    at: int
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """The error of an order, for example a full disk."""

    text: str


Order = Have | RunAgent | SetTimeLeft | AnnouncePreemption | Heartbeat
Report = PutFile | RemoveFile | AppendFile | Trouble | Heartbeat


def encode_order(order: Order) -> dict[str, Any]:
    """Return the order as JSON values."""
    match order:
        case Have():
            return {"have": {name: [size, _text(tail)] for name, (size, tail) in order.files.items()}}
        case RunAgent():
            return {"run": dict(order.spec), "told": order.number, "secrets": dict(order.secrets)}
        case SetTimeLeft():
            return {"money": {"left_ms": order.left_ms, "told": order.number}}
        case AnnouncePreemption():
            return {"notice": {"deadline_ms": order.deadline_ms, "source": order.source}}
        case Heartbeat():
            return {"beat": 1}
        case _:
            assert_never(order)


def decode_order(line: Mapping[str, Any]) -> Order | None:
    """Return the order, or None for an unknown kind. Raises ValueError or KeyError for a malformed order."""
    if "have" in line:
        return Have(files={name: (int(size), base64.b64decode(tail)) for name, (size, tail) in line["have"].items()})
    if "run" in line:
        return RunAgent(spec=line["run"], number=int(line["told"]), secrets=line.get("secrets", {}))
    if "money" in line:
        return SetTimeLeft(left_ms=int(line["money"]["left_ms"]), number=int(line["money"]["told"]))
    if "notice" in line:
        return AnnouncePreemption(deadline_ms=int(line["notice"]["deadline_ms"]), source=str(line["notice"]["source"]))
    return Heartbeat() if "beat" in line else None


def encode_report(report: Report) -> dict[str, Any]:
    """Return the report as JSON values."""
    match report:
        case PutFile():
            return {"put": report.name, "text": report.text}
        case RemoveFile():
            return {"gone": report.name}
        case AppendFile():
            return {"append": report.name, "at": report.at, "data": _text(report.data)}
        case Trouble():
            return {"trouble": report.text}
        case Heartbeat():
            return {"beat": 1}
        case _:
            assert_never(report)


def decode_report(line: Mapping[str, Any]) -> Report | None:
    """Return the report, or None for an unknown kind or a malformed report: a node is not trusted."""
    match line:
        case {"put": str(name), "text": str(text)}:
            return PutFile(name=name, text=text)
        case {"gone": str(name)}:
            return RemoveFile(name=name)
        case {"append": str(name), "at": int(at), "data": str(data)}:
            return AppendFile(name=name, at=at, data=base64.b64decode(data))
        case {"trouble": text}:
            return Trouble(text=str(text))
        case {"beat": _}:
            return Heartbeat()
        case _:
            return None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
