"""Lines of the launcher contract: a complete line decodes to the same event, any other is refused."""

import json
import typing

import pytest

from engine.clock import ScaledClock
from engine.events import (
    Capacity,
    CheckpointSaved,
    EngineFinished,
    EngineStarted,
    Evaluated,
    ExplorationRests,
    IterationDone,
    Judged,
    Market,
    NodeCapacity,
    NodeMissed,
    NodeSeen,
    NodeServed,
    NodeState,
    NodeUsage,
    Progress,
    ProgressEvent,
    Ranked,
    Regrouped,
    StoreAway,
    TargetReached,
    Warned,
)
from engine.storage.progress import ProgressLog

CLOCK = ScaledClock(origin_ms=0)
EVENTS = [
    EngineStarted(iteration=3, config_digest="abc", devices="cpu", versions={"torch": "2"}),
    IterationDone(
        iteration=3,
        reward_mean=0.5,
        reward_std=0.1,
        group_std_mean=0.05,
        explored=32,
        manifest_digest="abc",
        phase_ms={"training": 120},
        wall_seconds=1.5,
        health={"kl": 0.0},
        made_by={"spot-0": 3, "trainer": 1},
        scores={"ocr": 0.5, "look": -1.25},
    ),
    Evaluated(iteration=3, metrics={"exact_match": 0.25}, prompts=4, pictures="evaluation/l0001-i000003.png"),
    CheckpointSaved(iteration=3, path="checkpoints/l0001-i000003", digest="abc"),
    Ranked(
        iteration=3,
        profile="full",
        control=12,
        explores_on=True,
        spearman=0.9,
        kendall=None,
        low=0.8,
        high=0.95,
        corrected=True,
        batches=3,
        prompts=12,
        left_out=0,
        pairs=60,
        selection_gain=2.4,
        predicted_gain=1.9,
        realised_gain=None,
        refused_stale=0,
        refused_sampler=0,
    ),
    ExplorationRests(iteration=3, short_batches=3, trained=4, batches=10),
    NodeUsage(node="spot-0", from_ms=1, to_ms=2, phase_ms={"rollout": 1}, spans=(("spot-0/0", "rollout", 1, 2),)),
    NodeSeen(node="spot-0", worker="spot-0/0"),
    NodeServed(node="spot-0", worker="spot-0/0"),
    Judged(worker="spot-0/0", calls=((1000, 50, 5500),), unaccounted=10_120),
    NodeMissed(node="spot-0", reason="missed its lease", lost_steps=4, fenced_requests=2),
    Regrouped(node="spot-0", groups=(("spot-0/0", "spot-0/1"), ("spot-0/2",)), reason="spot-0/3 is gone"),
    TargetReached(iteration=3, metric="exact_match", value=0.9),
    Warned(text="zwölf\u2028lines\nin one"),
    StoreAway(is_away=True),
    EngineFinished(reason="target", iteration=3),
]


def line_of(event, /, **changes):
    progress = Progress(run="run", source="trainer", lineage=1, seq=2, at_ms=3, event=event)
    return json.dumps(json.loads(progress.to_json()) | changes)


def test_the_examples_cover_every_event():
    assert {type(event) for event in EVENTS} == set(typing.get_args(ProgressEvent))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.KIND)
def test_an_event_is_one_line_and_decodes_to_the_same_event(event):
    line = Progress(run="run", source="trainer", lineage=1, seq=2, at_ms=3, event=event).to_json()
    assert len(line.splitlines()) == 1
    assert Progress.from_json(line).event == event


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.KIND)
def test_a_field_that_a_later_version_added_is_tolerated(event):
    raw = json.loads(line_of(event))
    raw["event"]["of_a_later_version"] = 1
    assert Progress.from_json(json.dumps(raw)).event == event


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.KIND)
def test_a_truncated_line_is_refused(event):
    line = line_of(event)
    for size in range(len(line)):
        with pytest.raises(json.JSONDecodeError):
            Progress.from_json(line[:size])


@pytest.mark.parametrize(
    "line", ["1", "null", "[]", "{}", line_of(EVENTS[0], kind="dance"), line_of(EVENTS[0], event={})]
)
def test_a_line_that_is_not_progress_is_refused(line):
    with pytest.raises(ValueError, match="not a progress line"):
        Progress.from_json(line)


@pytest.mark.parametrize("state", NodeState)
@pytest.mark.parametrize("market", Market)
def test_a_capacity_snapshot_survives_encoding(state, market):
    node = NodeCapacity(node="spot-0", market=market, state=state, workers=2, deadline_ms=5)
    snapshot = Capacity(generation=7, nodes=(node,))
    assert Capacity.from_json(snapshot.to_json()) == snapshot


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"generation":1}', '{"generation":1,"nodes":[{"node":"a"}]}'])
def test_a_message_that_is_not_a_capacity_snapshot_is_refused(text):
    with pytest.raises(ValueError, match=r"^not a capacity snapshot: |^Expecting value"):
        Capacity.from_json(text)


# --- progress files


def log(path):
    return ProgressLog(path, run="run", source="trainer", clock=CLOCK)


def numbers(path):
    seen = []
    for line in path.read_text().splitlines():
        try:
            progress = Progress.from_json(line)
        except ValueError:
            continue
        seen.append((progress.lineage, progress.seq))
    return seen


def test_event_numbers_continue_per_lineage_when_a_file_is_reopened(tmp_path):
    path = tmp_path / "progress" / "trainer.jsonl"
    first = log(path)
    first.write(1, Warned(text="a"))
    first.write(1, Warned(text="b"))
    again = log(path)
    again.write(1, Warned(text="c"))
    again.write(2, Warned(text="d"))
    assert numbers(path) == [(1, 0), (1, 1), (1, 2), (2, 0)]


def test_a_line_truncated_by_a_crash_damages_no_number_and_no_later_line(tmp_path):
    path = tmp_path / "trainer.jsonl"
    log(path).write(1, Warned(text="a"))
    whole = path.read_text()
    path.write_text(whole + whole[: len(whole) // 2])
    log(path).write(1, Warned(text="b"))
    assert numbers(path) == [(1, 0), (1, 1)]
