"""The JSON schemas of the job file and of every JSON output, generated from the types in the code.

    python -m launcher.schemas.documents     writes launcher/schemas/*.schema.json

The promise: within a version, a key never changes its meaning or its type, and no key disappears. New keys may appear,
so output schemas allow unknown keys. The job file is input: its schema refuses unknown keys, as the launcher does.
JSON Schema 2020-12.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter

from engine.events import Capacity, IterationDone, Progress, ProgressEvent
from launcher.bill.importing import BillImport
from launcher.checks.reward_check import RewardCheck
from launcher.job.layers import SHORT_FORMS
from launcher.job.schema import Job
from launcher.market.offers import Offer
from launcher.market.prices import RawPrice
from launcher.money import exact_duration
from launcher.placement.cloud_plan import CloudPlan
from launcher.placement.plan import Plan
from launcher.replay.simulate import Simulated
from launcher.report.comparison import Comparison
from launcher.report.values import Report
from launcher.runs.event_lines import EventLine
from launcher.runs.views import RunView
from launcher.schemas import outputs
from launcher.selftest.outcome import SelftestOutcome
from launcher.services.refresh_catalog import Change

FOLDER = Path(__file__).parent

DIALECT = "https://json-schema.org/draft/2020-12/schema"

VERSION = 1
"""Version of the schemas, the last part of each `$id`. The version grows when a key is removed or changes its
meaning."""

Schema = dict[str, Any]

ADDED_LATER = {
    "DryRun": {"warnings"},
    "RunView": {
        "trainer",
        "trainer_ms",
        "trouble",
        "learning",
        "on_demand_micro_usd",
        "preemptions",
        "iteration_ms",
        "usual_iteration_ms",
        "deadline_ms",
        "missed_deadline",
        "resume_with",
        "billed_micro_usd",
        "point",
        "left_in_buckets",
        "prices",
    },
    "Report": {
        "learning",
        "pictures",
        "job_text",
        "schedule",
        "provenance",
        "stand_ins",
        "collectives",
        "trainer_time",
        "throughput",
        "trainer_losses",
        "moves",
        "resume_with",
        "bill",
        "point",
        "fleets",
        "left_in_buckets",
    },
    "Removed": {"left_in_buckets"},
    "ComparedRun": {"billed_micro_usd"},
    "RewardCheck": {"warnings"},
    "CloudPlan": {"other_trainer", "checkpoint_every"},
    "PlanReplays": {"trainer"},
    "PolicyResult": {"trainer"},
    "NodeLine": {"taken"},
    "NodeView": {"goes_in_ms"},
    "PreemptionLine": {"role", "recovered_by"},
    "ResultPreemption": {"role", "recovered_by"},
}
"""By type, the keys that are always printed, and that outputs of version 1 from before the keys may lack."""

WITH_DOCSTRINGS = ConfigDict(use_attribute_docstrings=True)


def documents() -> dict[str, Schema]:
    """Return every schema by name. The name is the command's, with `-` between command and subcommand."""
    schemas = {
        "job": job_schema(),
        "progress": _progress(),
        "capacity": _schema(Capacity),
        "report": _schema(Report),
        "compare": _schema(Comparison),
        "bill-import": _schema(BillImport),
        "result": _schema(outputs.Result),
        "launch": _launch(),
        "ls": _listed(_schema(RunView), "Output of `spotrl ls --json`: one object per run."),
        "status": _joined("Output of `spotrl status --json`.", RunView, outputs.StatusEvents),
        "events": _schema(EventLine),
        "logs": _schema(outputs.LogLine),
        "trace": _schema(outputs.TraceOutput),
        "simulate": _simulation(),
        "down": _schema(outputs.Down),
        "resume": _schema(outputs.Resumed),
        "rm": _schema(outputs.Removed),
        "pull": _schema(outputs.Pulled),
        "sync": _schema(outputs.Synced),
        "sample": _schema(outputs.Sampled),
        "ssh": _either("Output of `spotrl ssh --json`.", outputs.LocalNode, outputs.Login, outputs.RemoteCommand),
        "config-show": _schema(outputs.ConfigShow),
        "init": _schema(outputs.Initialised),
        "check": _schema(outputs.Checks),
        "doctor": _schema(outputs.Checks),
        "check-reward": _joined("Output of `spotrl check-reward --json`.", RewardCheck, outputs.CheckedJobName),
        "cleanup": _schema(outputs.Cleanup),
        "selftest": _either("Output of `spotrl selftest --json`.", SelftestOutcome, outputs.SelftestPlan),
        "catalog-show": _with_items(outputs.CatalogShow, "offers", _joined("An offer.", Offer, outputs.OfferAge)),
        "catalog-refresh": _with_items(outputs.CatalogRefresh, "changes", _schema(Change)),
        "catalog-validate": _schema(outputs.CatalogValidate),
        "catalog-diff": _with_items(outputs.CatalogDiff, "changes", _schema(Change)),
        "prices-show": _schema(outputs.PricesShow),
        "prices-history": _schema(outputs.PricesHistory),
        "prices-refresh": _with_refused(outputs.PricesRefresh),
        "prices-watch": _with_refused(outputs.PricesWatch),
        "error": _schema(outputs.ErrorOutput),
    }
    # Outputs of version 1 from before several rewards have no scores, and those from before early groups no such share.
    schemas["report"]["required"].remove("scores")
    for added_later in ("expected_stale_share", "stale_share", "early_outside_share"):
        schemas["report"]["$defs"]["ScheduleResult"]["required"].remove(added_later)
    schemas["result"]["$defs"]["ResultMoney"]["required"].remove("judges")
    schemas["sync"]["$defs"]["ShippedOutput"]["required"].remove("is_offline")
    return {
        name: {"$schema": DIALECT, "$id": f"urn:spotrl:schema:{name}:{VERSION}", "title": f"spotrl {name}"} | schema
        for name, schema in schemas.items()
    }


# --- the job file ------------------------------------------------------------------------------------


def job_schema() -> Schema:
    """Return the schema of the job file as people write it, with the short forms.

    Editors check names, types and ranges. Rules that join several fields are checked by `spotrl launch --dry-run` only.
    """
    schema: Schema = _plain(Job.model_json_schema(by_alias=True))
    fields = schema["properties"]
    reward = fields["reward"]
    for section, field in SHORT_FORMS.items():
        short = _definition(schema, fields[section])["properties"][field]
        fields[section] = _or(fields[section], {key: short[key] for key in ("type", "enum", "const") if key in short})
    fields["reward"] = _or(fields["reward"], {**_definition(schema, reward)["properties"]["parts"], "default": []})
    fields["store"] = _or(fields["store"], {"type": "string"})
    accelerators = schema["$defs"]["NodeResources"]["properties"]
    trainer_wait = schema["$defs"]["Recovery"]["properties"]["trainer_wait"]
    notice = schema["$defs"]["PreemptionConfig"]["properties"]["notice"]
    no_progress = schema["$defs"]["Notifications"]["properties"]["no_progress"]
    for duration in (trainer_wait, notice, no_progress):
        duration["default"] = exact_duration(duration["default"])
    counts = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 1}
    accelerators["accelerators"] = _or(accelerators["accelerators"], counts)
    return schema


def _definition(schema: Schema, field: Schema) -> Schema:
    definition: Schema = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return definition


def _or(field: Schema, alternative: Schema) -> Schema:
    """Return the field's schema with another way to write the value."""
    notes = {key: value for key, value in field.items() if key in ("description", "default")}
    return notes | {"anyOf": [{key: value for key, value in field.items() if key not in notes}, alternative]}


# --- outputs -----------------------------------------------------------------------------------------


def _schema(kind: Any) -> Schema:
    """Return the schema of a dataclass or TypedDict as written by `json.dumps`: every key is always there."""
    whole = TypeAdapter(list[kind], config=WITH_DOCSTRINGS).json_schema(mode="serialization")
    definitions = whole.get("$defs", {})
    name = whole["items"]["$ref"].rpartition("/")[2]
    schema = _complete(_plain(definitions.pop(name) | ({"$defs": definitions} if definitions else {})))
    assert isinstance(schema, dict)
    for part, part_schema in ((name, schema), *schema.get("$defs", {}).items()):
        if part in ADDED_LATER:
            part_schema["required"] = [key for key in part_schema["required"] if key not in ADDED_LATER[part]]
    return schema


def _joined(description: str, *kinds: Any) -> Schema:
    """Return the schema of an object with the keys of several types."""
    return _join(description, *map(_schema, kinds))


def _join(description: str, *parts: Schema) -> Schema:
    properties: Schema = {}
    definitions: Schema = {}
    for part in parts:
        properties |= part["properties"]
        definitions |= part.get("$defs", {})
    schema: Schema = {"type": "object", "description": description, "properties": properties}
    required = sorted({key for part in parts for key in part["required"]})
    return schema | {"required": required} | ({"$defs": definitions} if definitions else {})


def _either(description: str, *kinds: Any) -> Schema:
    choices: list[Schema] = [_schema(kind) for kind in kinds]
    definitions: Schema = {}
    for choice in choices:
        definitions |= choice.pop("$defs", {})
    return {"description": description, "anyOf": choices} | ({"$defs": definitions} if definitions else {})


def _listed(item_schema: Schema, description: str) -> Schema:
    definitions = item_schema.pop("$defs", {})
    return {"description": description, "type": "array", "items": item_schema, "$defs": definitions}


def _with_items(kind: Any, field: str, item_schema: Schema) -> Schema:
    """Return the schema of `kind`, with `item_schema` as the schema of each item of the list `field`."""
    schema = _schema(kind)
    schema["$defs"] = schema.get("$defs", {}) | item_schema.pop("$defs", {})
    schema["properties"][field]["items"] = item_schema
    return schema


def _with_refused(kind: Any) -> Schema:
    schema = _schema(kind)
    refused = _joined("A price that was refused.", RawPrice, outputs.PriceReason)
    schema["$defs"] |= refused.pop("$defs", {})
    schema["$defs"]["PriceAnswer"]["properties"]["refused"]["items"] = refused
    return schema


def _launch() -> Schema:
    """Return the schema of `spotrl launch --json`: of a dry run on this machine or on clouds, or of a started run."""
    local = _joined("Plan of a local run.", Plan, outputs.PlanRates)
    on_clouds = _joined("Plan of a run on clouds.", CloudPlan, outputs.CloudPlanBound)
    # These keys are always printed. Outputs of version 1 from before the keys are valid all the same.
    for added_later in (
        "memory",
        "disk",
        "trainer",
        "judge_micro_usd",
        "schedule",
        "pace_ms",
        "max_runtime_ms",
        "replays",
        "zones",
        "stand_ins",
        "fleets",
    ):
        on_clouds["required"].remove(added_later)
    for added_later in (
        "judge_micro_usd",
        "iterations",
        "pace_ms",
        "ranks_have_room",
        "moved_bytes",
        "trainer_life_hours",
        "fleets",
    ):
        local["required"].remove(added_later)
    added = (
        ("Factors", outputs.FactorsCost),
        ("WhenSpotPays", outputs.SpotPaysVerdict),
        ("GpuMemory", outputs.GpuMemoryCounts),
        ("TrainerRanks", outputs.TrainerRanksCounts),
    )
    for name, more in added:
        part = on_clouds["$defs"][name]
        on_clouds["$defs"][name] = _join(part.get("description", ""), part, _schema(more))
    definitions = local.pop("$defs") | on_clouds.pop("$defs")
    definitions["Placement"]["required"].remove("disk_gib")
    definitions["TrainerRanks"]["required"].remove("nodes")
    for added_later in ("early_share", "stale_share"):
        definitions["PlanSchedule"]["required"].remove(added_later)
    started = _joined("A started run.", outputs.LaunchFacts, RunView)
    definitions |= started.pop("$defs") | {"LocalPlan": local, "CloudPlan": on_clouds}
    dry = _schema(outputs.DryRun)
    dry["properties"]["plan"] = {"anyOf": [{"$ref": "#/$defs/LocalPlan"}, {"$ref": "#/$defs/CloudPlan"}]}
    started["properties"]["plan"] = {"$ref": "#/$defs/LocalPlan"}
    return {"description": "Output of `spotrl launch --json`.", "anyOf": [dry, started], "$defs": definitions}


def _simulation() -> Schema:
    """Return the schema of `spotrl simulate --json`."""
    schema = _joined(str(Simulated.__doc__), Simulated, outputs.SimulatedPlan)
    schema["$defs"]["PolicyResult"]["required"].remove("ms")
    for added_later in ("prices", "fleets"):
        schema["required"].remove(added_later)
    return schema


def _progress() -> Schema:
    """Return the schema of one line of a progress file, the engine's messages to the launcher."""
    head = _schema(Progress)
    definitions: Schema = {}
    lines = []
    for kind in get_args(ProgressEvent):
        event = _schema(kind)
        if kind is IterationDone:
            event["required"].remove("scores")  # lines of version 1 from before several rewards have none
        definitions |= event.pop("$defs", {}) | {kind.__name__: event}
        properties = {
            **{name: head["properties"][name] for name in ("run", "source", "lineage", "seq", "at_ms")},
            "kind": {"const": kind.KIND},
            "event": {"$ref": f"#/$defs/{kind.__name__}"},
        }
        lines.append({"type": "object", "properties": properties, "required": sorted(properties)})
    return {"description": head["description"], "oneOf": lines, "$defs": definitions}


# --- shared ------------------------------------------------------------------------------------------


def _plain(value: Any, is_map_of_names: bool = False) -> Any:
    """Remove pydantic's titles and the defaults of sections, and put each description on one line."""
    if isinstance(value, list):
        return [_plain(child) for child in value]
    if not isinstance(value, Mapping):
        return value
    plain = {}
    for key, child in value.items():
        if not is_map_of_names:
            if key == "title" or (key == "default" and isinstance(child, dict)):
                continue
            if key == "description":
                plain[key] = " ".join(child.split())
                continue
        plain[key] = _plain(child, key in ("properties", "$defs") and not is_map_of_names)
    return plain if is_map_of_names else _short_union(plain)


def _short_union(schema: Schema) -> Schema:
    """Write `anyOf` of bare types as one `type`: `{"type": ["number", "null"]}`."""
    choices = schema.get("anyOf", [])
    if not choices or any(list(choice) != ["type"] or not isinstance(choice["type"], str) for choice in choices):
        return schema
    return {"type": [choice["type"] for choice in choices]} | {key: schema[key] for key in schema if key != "anyOf"}


def _complete(value: Any) -> Any:
    """Make every key of every object required, because an output always has all keys."""
    if isinstance(value, list):
        return [_complete(child) for child in value]
    if not isinstance(value, dict):
        return value
    complete = {key: _complete(child) for key, child in value.items()}
    if complete.get("type") == "object" and isinstance(complete.get("properties"), dict):
        complete["required"] = sorted(complete["properties"])
    return complete


def text(schema: Schema) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    for name, schema in documents().items():
        (FOLDER / f"{name}.schema.json").write_text(text(schema), "utf-8")


if __name__ == "__main__":
    main()
