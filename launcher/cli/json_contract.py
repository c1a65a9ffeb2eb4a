"""The written form of spotrl's JSON: `result.json`, the output of `--json`, and lines of events.

The promise of a version: no key goes away, changes its type or its meaning. New keys may come at any time, so a reader
ignores unknown keys. Money is in integer micro-dollars (`micro_usd`), time in integer milliseconds (`_ms`), or in
seconds where the key says so.
"""

from dataclasses import is_dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

VERSION = 1

DIALECT = "https://json-schema.org/draft/2020-12/schema"

TEXT, NUMBER, WHOLE, TRUTH = {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"type": "boolean"}

MONEY_BY_NAME = {"type": "object", "additionalProperties": WHOLE}

OUTPUTS: dict[str, str] = {
    "spotrl catalog diff": "catalog-diff",
    "spotrl catalog refresh": "catalog-refresh",
    "spotrl catalog show": "catalog",
    "spotrl catalog validate": "catalog-validate",
    "spotrl check": "check",
    "spotrl config show": "config",
    "spotrl down": "down",
    "spotrl events": "event",
    "spotrl init": "init",
    "spotrl launch": "launch",
    "spotrl logs": "log",
    "spotrl ls": "runs",
    "spotrl panic": "cleanup",
    "spotrl prices history": "prices",
    "spotrl prices refresh": "prices-refresh",
    "spotrl prices show": "prices",
    "spotrl prices watch": "prices-refresh",
    "spotrl pull": "pull",
    "spotrl reap": "cleanup",
    "spotrl report": "report",
    "spotrl resume": "resume",
    "spotrl rm": "rm",
    "spotrl sample": "sample",
    "spotrl ssh": "ssh",
    "spotrl status": "status",
    "spotrl trace": "trace",
}
"""By command: the schema of its `--json`. `events`, `logs` and `prices watch` print an object a line. The file of
`launch --result FILE` is `result`. An error is `error`, whatever the command."""


class _AsWritten(GenerateJsonSchema):
    """Leaves out titles, which only repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _of(kind: Any) -> dict[str, Any]:
    """Return the schema of a dataclass, as `asdict` writes its values."""
    assert is_dataclass(kind)
    return TypeAdapter(kind).json_schema(mode="serialization", schema_generator=_AsWritten)


def _about(name: str, kind: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that refers to `#/$defs/NAME`, with the definition of a dataclass under that name."""
    of_kind = _of(kind)
    inner = of_kind.pop("$defs", {})
    return {**schema, "$defs": {**schema.get("$defs", {}), **inner, name: of_kind}}


def _or_none(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _object(**keys: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all of these keys, and may have more."""
    return {"type": "object", "properties": keys, "required": sorted(keys)}


def _with(schema: dict[str, Any], **keys: dict[str, Any]) -> dict[str, Any]:
    """Return an object's schema with further keys."""
    return {
        **schema,
        "properties": {**schema["properties"], **keys},
        "required": sorted({*schema.get("required", ()), *keys}),
    }


def _result() -> dict[str, Any]:
    evaluated = {"before": _or_none(NUMBER), "after": _or_none(NUMBER)}
    preemption = _object(
        node=TEXT,
        zone=TEXT,
        signal=_or_none(TEXT),
        notice=_or_none(TRUTH),
        lost_steps=_or_none(WHOLE),
        replaced_after_s=_or_none(NUMBER),
        replaced_after_wall_s=_or_none(NUMBER),
        micro_usd=_or_none(WHOLE),
    )
    return _object(
        target=_object(
            metric=TEXT,
            value=_or_none(NUMBER),
            reached=TRUTH,
            iteration=_or_none(WHOLE),
            hours=_or_none(NUMBER),
            micro_usd=_or_none(WHOLE),
            best=_or_none({"type": "object"}),
        ),
        exact_match=_object(**evaluated, prompts_before=_or_none(WHOLE), prompts_after=_or_none(WHOLE)),
        drift=_or_none(NUMBER),
        guards=_list({"type": "object"}),
        exploration=_or_none({"type": "object"}),
        preemptions=_list(preemption),
        micro_usd=_object(
            total=WHOLE,
            by_phase=MONEY_BY_NAME,
            by_node=MONEY_BY_NAME,
            by_market=MONEY_BY_NAME,
            by_role=MONEY_BY_NAME,
            by_place=MONEY_BY_NAME,
        ),
        clouds=MONEY_BY_NAME,
        sums_equal=TRUTH,
        money_basis=TEXT,
        leftovers=_object(processes=_list(WHOLE)),
        seed=WHOLE,
        iterations=WHOLE,
        wall_seconds=_or_none(NUMBER),
        clock_factor=NUMBER,
    )


def _prices() -> dict[str, dict[str, Any]]:
    price = {"type": "object", "required": ["cloud", "instance_type", "market", "micro_usd_per_hour"]}
    changes = _list({"type": "object"})
    return {
        "catalog": _object(place=TEXT, tables={"type": "object"}, offers=_list(price)),
        "catalog-diff": _object(old=TEXT, new=TEXT, changes=changes),
        "catalog-refresh": {"type": "object", "required": ["changes"]},
        "catalog-validate": _object(
            place=TEXT, rows=WHOLE, quality={"type": "object"}, wrong=_list({"type": "object"})
        ),
        "prices": {"type": "object", "properties": {"prices": _list(price)}, "required": ["prices"]},
        "prices-refresh": {"type": "object"},
    }


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by name, except the job file's (launcher/job/json_schema.py)."""
    from launcher.checks.check import Check
    from launcher.cleanup.removal import Remains
    from launcher.report.values import Report
    from launcher.runs.views import EventLine, RunView

    status = _about("EventLine", EventLine, _with(_of(RunView), events=_list({"$ref": "#/$defs/EventLine"})))
    runs = _about("RunView", RunView, _list({"$ref": "#/$defs/RunView"}))
    checks = _about("Check", Check, _object(exit_code=WHOLE, checks=_list({"$ref": "#/$defs/Check"})))
    launched = _object(exit_code=WHOLE, started=TRUTH)
    file = _object(path=TEXT, sha256=TEXT)
    image = _object(file=TEXT, prompt=TEXT)
    found = {
        "check": checks,
        "cleanup": _object(
            dry_run=TRUTH,
            ended=_list(TEXT),
            left=_list(TEXT),
            unasked=_list({"type": "object"}),
            troubles=_list(TEXT),
            exit_code=WHOLE,
        ),
        "config": _object(
            home=TEXT,
            user_config=TEXT,
            fields={"type": "object", "additionalProperties": {"type": "object", "required": ["value", "origin"]}},
        ),
        "down": _object(run=TEXT, left=_list(TEXT)),
        "error": _object(error=TEXT, exit_code=WHOLE),
        "event": _of(EventLine),
        "init": _object(file=TEXT, beside=_list(TEXT)),
        "launch": launched,
        "log": _object(file=TEXT, line=TEXT),
        "pull": _object(
            run=TEXT,
            checkpoint=TEXT,
            iteration=WHOLE,
            files=_list(file),
            diffusers=_or_none(TEXT),
            card=TEXT,
            metrics=_list(TEXT),
        ),
        "report": _of(Report),
        "result": _result(),
        "resume": _object(run=TEXT, controller=WHOLE),
        "rm": _with(_of(Remains), run=TEXT, spent_micro_usd=WHOLE),
        "runs": runs,
        "sample": _object(
            run=TEXT, checkpoint=_or_none(TEXT), iteration=_or_none(WHOLE), steps=WHOLE, pictures=_list(image)
        ),
        "ssh": _object(node=TEXT),
        "status": status,
        "trace": {"type": "object"},
        **_prices(),
    }
    return {
        name: {"$schema": DIALECT, "title": f"spotrl {name}, version {VERSION}", **one} for name, one in found.items()
    }
