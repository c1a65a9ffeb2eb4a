"""Messages of the remote console survive encoding, and have the JSON form of released versions."""

import json
import typing

import pytest

from engine.protocol.console import (
    AnnouncePreemption,
    AppendFile,
    Have,
    Heartbeat,
    Order,
    PutFile,
    RemoveFile,
    Report,
    RunAgent,
    SetTimeLeft,
    Trouble,
    decode_order,
    decode_report,
    encode_order,
    encode_report,
)

ORDERS = [
    (Have(files={"logs/a.log": (70, b"tail\x00")}), {"have": {"logs/a.log": [70, "dGFpbAA="]}}),
    (
        RunAgent(spec={"node": "spot-0"}, number=3, secrets={"TOKEN": "t"}),
        {"run": {"node": "spot-0"}, "told": 3, "secrets": {"TOKEN": "t"}},
    ),
    (SetTimeLeft(left_ms=-5, number=4), {"money": {"left_ms": -5, "told": 4}}),
    (AnnouncePreemption(deadline_ms=9, source="imds"), {"notice": {"deadline_ms": 9, "source": "imds"}}),
    (Heartbeat(), {"beat": 1}),
]
REPORTS = [
    (PutFile(name="ready.json", text="{}"), {"put": "ready.json", "text": "{}"}),
    (RemoveFile(name="exit.json"), {"gone": "exit.json"}),
    (AppendFile(name="logs/a.log", at=7, data=b"\xff"), {"append": "logs/a.log", "at": 7, "data": "/w=="}),
    (Trouble(text="no room"), {"trouble": "no room"}),
    (Heartbeat(), {"beat": 1}),
]


def test_every_kind_of_message_is_listed_here():
    assert {type(order) for order, _ in ORDERS} == set(typing.get_args(Order))
    assert {type(report) for report, _ in REPORTS} == set(typing.get_args(Report))


@pytest.mark.parametrize(("order", "line"), ORDERS)
def test_an_order_survives_encoding(order, line):
    assert encode_order(order) == line
    assert decode_order(json.loads(json.dumps(line))) == order


@pytest.mark.parametrize(("report", "line"), REPORTS)
def test_a_report_survives_encoding(report, line):
    assert encode_report(report) == line
    assert decode_report(json.loads(json.dumps(line))) == report


@pytest.mark.parametrize("line", [{}, {"new": 1}, {"put": 5, "text": "x"}, {"append": "logs/a.log", "at": "0"}])
def test_a_report_of_an_unknown_kind_is_ignored(line):
    assert decode_report(line) is None


def test_an_order_of_a_newer_launcher_is_ignored():
    assert decode_order({"new": 1}) is None


def test_secrets_are_not_printed():
    assert "hidden" not in repr(RunAgent(spec={}, number=1, secrets={"TOKEN": "hidden"}))
