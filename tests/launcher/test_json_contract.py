"""Real JSON outputs follow their schemas, and outputs of version 1 keep following them."""

import json
from pathlib import Path

import jsonschema
import pytest
from sqlalchemy.orm import sessionmaker

from launcher.cli.main import cli, run
from launcher.job.load import load_job
from launcher.report.result import result_dict
from tests.launcher.made_ledger import a_long_run, a_session

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "launcher" / "schemas"
GOLDEN = ROOT / "tests" / "data" / "json"


def check(name, value):
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(value)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    with a_session(path) as session:
        made = a_long_run(session)
        made.job = {**load_job(None).job.model_dump(mode="json"), **made.job}
        name = made.name
        session.commit()
        return sessionmaker(session.get_bind()), name


def printed(made, capsys, *arguments):
    cli.main(list(arguments), obj=made[0], standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ("runs", ["ls", "--json"]),
        ("status", ["status", "RUN", "--json"]),
        ("report", ["report", "RUN", "--json"]),
        ("config", ["config", "show", "--json"]),
        ("catalog", ["catalog", "show", "--shipped", "--json"]),
        ("catalog-validate", ["catalog", "validate", "--json"]),
    ],
)
def test_an_output_follows_its_schema(made, capsys, schema, arguments):
    value = json.loads(printed(made, capsys, *[made[1] if word == "RUN" else word for word in arguments]))
    assert value
    check(schema, value)


def test_every_event_follows_its_schema(made, capsys):
    lines = printed(made, capsys, "events", made[1], "--json").splitlines()
    assert lines
    for line in lines:
        check("event", json.loads(line))


def test_a_result_follows_its_schema(made):
    with made[0]() as session:
        check("result", json.loads(json.dumps(result_dict(session, made[1], []))))


def test_a_written_job_file_follows_its_schema(tmp_path, capsys):
    cli.main(["init", str(tmp_path / "job.yaml"), "--json"], standalone_mode=False)
    check("init", json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("example", sorted((ROOT / "sky_yamls").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_jobs_follow_the_jobs_schema(example):
    from ruamel.yaml import YAML

    check("job", YAML(typ="safe").load(example.read_text()))


@pytest.mark.parametrize("field", [{"iteratons": 3}, {"model": {"name": "gpt"}}, {"budget": {"max_total": [1]}}])
def test_a_wrong_job_does_not_follow_the_jobs_schema(field):
    with pytest.raises(jsonschema.ValidationError):
        check("job", field)


def test_an_error_follows_its_schema(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    assert run(["status", "nothing", "--json"]) == 1
    check("error", json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_an_output_of_version_1_still_follows_its_schema(golden):
    name = golden.stem.partition(".")[0]
    check(name, json.loads(golden.read_text()))


def test_there_is_an_output_of_version_1_for_the_main_schemas():
    kept = {golden.stem.partition(".")[0] for golden in GOLDEN.glob("*.json")}
    assert {"check", "config", "event", "report", "result", "runs", "status"} <= kept
