"""Read the JSON output of a command, and check it against its schema (launcher/schemas)."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

import launcher.schemas

FOLDER = Path(launcher.schemas.__file__).parent
NAMES = sorted(path.name.removesuffix(".schema.json") for path in FOLDER.glob("*.schema.json"))


def schema(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.schema.json").read_text("utf-8"))


def closed(part: Any) -> Any:
    """Return the schema with unknown keys forbidden, so that an undocumented key is found."""
    if isinstance(part, list):
        return [closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    made = {key: closed(item) for key, item in part.items()}
    if isinstance(made.get("properties"), dict) and "additionalProperties" not in made:
        made["additionalProperties"] = False
    return made


def check(name: str, value: Any) -> Any:
    """Fail if the value lacks a key of its schema, has another type, or has a key that the schema does not name."""
    errors = [
        f"{error.json_path}: {error.message[:300]}"
        for error in Draft202012Validator(closed(schema(name))).iter_errors(value)
    ]
    assert not errors, f"{name}: {errors[:5]}"
    return value


def printed(name: str, text: str) -> Any:
    return check(name, json.loads(text))
