"""The JSON that spotrl reads and prints has a written schema (docs/json.md).

Tests of the commands check real outputs against the closed schemas (tests/launcher/printed.py). A golden file is an
output of the version of the schema in its name. A golden file is never changed: a schema that refuses one needs a new
version, and golden files of its own.
"""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from engine.events import Capacity, Market, NodeCapacity, NodeState, Progress
from launcher.cli.config import schema as schema_command
from launcher.job.layers import read
from launcher.schemas.documents import DIALECT, VERSION, documents, text
from tests.engine.test_events import EVENTS
from tests.launcher.printed import FOLDER, NAMES, check, printed, schema

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests/data/json"
EXAMPLES = sorted((ROOT / "sky_yamls").glob("*.yaml"))


def test_the_schema_files_match_the_code():
    made = documents()
    assert sorted(made) == NAMES
    stale = [name for name in NAMES if (FOLDER / f"{name}.schema.json").read_text("utf-8") != text(made[name])]
    assert not stale, "run `python -m launcher.schemas.documents`"


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_valid_and_has_a_version(name):
    found = schema(name)
    Draft202012Validator.check_schema(found)
    assert (found["$schema"], found["$id"]) == (DIALECT, f"urn:spotrl:schema:{name}:{VERSION}")
    assert set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(found))) <= set(found.get("$defs", {}))


@pytest.mark.parametrize("name", NAMES)
def test_an_output_may_grow_and_a_job_file_may_not(name):
    is_open = '"additionalProperties": false' not in json.dumps(schema(name))
    assert is_open == (name != "job")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "job"])
def test_an_output_has_a_golden_file(name):
    assert (GOLDEN / f"{name}.{VERSION}.json").exists()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_a_golden_file_is_valid(path):
    name, _, version = path.stem.rpartition(".")
    assert int(version) == VERSION
    Draft202012Validator(schema(name)).validate(json.loads(path.read_text("utf-8")))


@pytest.mark.parametrize("name", NAMES)
def test_the_command_prints_each_schema_and_the_page_names_it(name):
    result = CliRunner().invoke(schema_command, [name])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == schema(name)
    assert f"`{name}`" in (ROOT / "docs/json.md").read_text("utf-8")


def test_the_schema_of_the_job_file_is_the_default():
    assert json.loads(CliRunner().invoke(schema_command, []).output) == schema("job")


# --- the job file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_job_is_valid(path):
    assert check("job", json.loads(json.dumps(read(path).values)))["name"]


@pytest.mark.parametrize(
    "values",
    [
        {"reward": "ocr"},
        {"reward": {"name": "my_reward:score"}},
        {"budget": {"max_total": "$40", "max_hourly": 4, "deadline": "12h30m"}},
        {"store": "s3://bucket/folder"},
        {"store": {"aws": "s3://bucket/folder"}},
        {"resources": {"rollout": {"accelerators": {"L4": 1}}}},
        {"model": {"name": "digits-ocr", "from": "digits"}},
        {"exploration": {"budget": {"candidates": 144}}},
    ],
    ids=str,
)
def test_usual_job_files_are_valid_for_the_schema(values):
    check("job", values)


@pytest.mark.parametrize(
    "values",
    [{"rewards": "ocr"}, {"iterations": 0}, {"spot": "maybe"}, {"budget": {"deadline": 3}}, {"exploration": "always"}],
    ids=str,
)
def test_the_schema_marks_a_mistake(values):
    assert list(Draft202012Validator(schema("job")).iter_errors(values))


def test_every_default_of_the_job_file_is_valid():
    whole = schema("job")
    for part in (whole, *whole["$defs"].values()):
        for name, field in part.get("properties", {}).items():
            if "default" in field:
                rules = {**field, "$defs": whole["$defs"]}
                assert Draft202012Validator(rules).is_valid(field["default"]), name


# --- messages between engine and launcher ------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.KIND)
def test_a_progress_line_is_valid(event):
    line = Progress(run="digits", source="trainer", lineage=0, seq=1, at_ms=5, event=event).to_json()
    assert printed("progress", line)["kind"] == event.KIND


def test_a_capacity_snapshot_is_valid():
    node = NodeCapacity(node="digits-spot-0-g0", market=Market.SPOT, state=NodeState.READY, workers=1)
    assert printed("capacity", Capacity(generation=3, nodes=(node,)).to_json())["generation"] == 3
