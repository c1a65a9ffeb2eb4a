"""The sources of a job's values, and their order.

flag > `SPOTRL_*` > job file > user's config > default    (`spotrl config show --origin` prints the sources)
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.reward_config import SUM
from launcher.job.checked import JobError
from launcher.job.yaml_file import Field as FieldPath
from launcher.job.yaml_file import YamlFile, YamlFileError, parse_value, read_yaml

SHORT_FORMS = {
    "model": "name",
    "sampler": "name",
    "algorithm": "name",
    "reward": "name",
    "runtime": "name",
    "exploration": "mode",
}
"""Fields with a short form: `reward: ocr` means `reward: {name: ocr}`. A list of rewards is short for their sum."""

OLD_NAMES = {"reclaims": "preemptions"}
"""Sections with a new name, by the old name. An old name works for one release, with a warning."""

FLAGS = {
    "name": "--name",
    "infra": "--infra",
    "iterations": "--iterations",
    "seed": "--seed",
    "runtime": "--runtime",
    "budget.max_total": "--max-total",
    "budget.max_hourly": "--max-hourly",
    "budget.deadline": "--deadline",
    "budget.max_runtime": "--max-runtime",
    "spot": "--spot",
}
"""Fields with their own flag on `spotrl launch`; `--set FIELD=VALUE` reaches every field."""

ENVIRONMENT_PREFIX = "SPOTRL_"

NOT_A_FIELD = (
    "SPOTRL_HOME",
    "SPOTRL_CONFIG",
    "SPOTRL_GCP_BILLING_ENDPOINT",
    "SPOTRL_GCP_COMPUTE_ENDPOINT",
    "SPOTRL_GCP_IAM_ENDPOINT",
    "SPOTRL_GCP_RESOURCE_MANAGER_ENDPOINT",
    "SPOTRL_CHECK_IP_URL",
    "SPOTRL_NODE_LOCK",
    "SPOTRL_IMDS_URL",
    "SPOTRL_SHUTDOWN",
    "SPOTRL_ALONE_SECONDS",
)
"""`SPOTRL_*` variables that are no job fields: settings (`launcher/settings.py`) and the endpoints for Google's
prices (launcher/market/sources/gcp.py). Every variable not listed here names a field: SPOTRL_BUDGET__MAX_TOTAL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A source of values. `labels` names the origin of each field; a file has line numbers instead."""

    values: dict[str, Any]
    labels: Mapping[FieldPath, str]
    file: Path | None = None
    yaml: YamlFile | None = None

    def has(self, place: FieldPath) -> bool:
        part: Any = self.values
        for key in place:
            if isinstance(part, dict) and key in part:
                part = part[key]
            elif not (isinstance(part, list) and isinstance(key, int) and key < len(part)):
                return False
        return True

    def line(self, place: FieldPath) -> int | None:
        return self.yaml.line(place) if self.yaml else None

    def origin(self, place: FieldPath) -> str:
        if self.file:
            return f"{self.file.name}, line {self.line(place)}"
        inside = (label for at, label in self.labels.items() if at == place[: len(at)] or place == at[: len(place)])
        return next(inside, "")


def read(path: Path) -> Layer:
    try:
        return _file_layer(read_yaml(path), path)
    except YamlFileError as error:
        raise JobError(error.found, error.remedy, file=path, line=error.line) from None


def _file_layer(yaml: YamlFile, path: Path) -> Layer:
    for old in OLD_NAMES.keys() & yaml.values.keys():
        _warn_of_old_name(f"{path.name}, line {yaml.line((old,))}", old)
    lines = {(OLD_NAMES.get(str(place[0]), place[0]), *place[1:]): line for place, line in yaml.lines.items() if place}
    yaml = replace(yaml, values=_long_forms(yaml.values), lines=lines)
    return Layer(values=yaml.values, labels={}, file=path, yaml=yaml)


def flag_layer(overrides: Mapping[str, Any]) -> Layer:
    named = {tuple(field.split(".")): value for field, value in overrides.items() if value is not None}
    labels: dict[FieldPath, str] = {place: FLAGS.get(".".join(place), f"--set {'.'.join(place)}") for place in named}
    for place, value in named.items():
        if isinstance(value, str) and not value.strip():
            raise JobError("it has no value", "give one, or leave it out", file=labels[place], field=".".join(place))
    return Layer(values=_nested(named, labels), labels=labels)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Return the fields set by environment variables: SPOTRL_BUDGET__MAX_TOTAL=40 is budget.max_total: 40."""
    named, labels = {}, dict[FieldPath, str]()
    for variable, value in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in NOT_A_FIELD:
            place = tuple(variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            if not value.strip():  # as a value it would be `null`, which takes a limit away
                raise JobError("it has no value", "give it one, or unset it", file=variable, field=".".join(place))
            named[place], labels[place] = value, variable
    return Layer(values=_nested(named, labels), labels=labels)


def _nested(named: Mapping[tuple[str, ...], Any], labels: Mapping[FieldPath, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for place, value in sorted(named.items(), key=lambda entry: len(entry[0])):
        try:
            value = parse_value(value) if isinstance(value, str) else value
        except YamlFileError as error:
            raise JobError(error.found, error.remedy, file=labels[place], field=".".join(place)) from None
        for key in reversed(place):
            value = {key: value}
        if place[0] in OLD_NAMES:
            _warn_of_old_name(labels[place], place[0])
        values = merged(values, _long_forms(value))
    return values


def _long_forms(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with sections in their long form and under their newest name."""

    def long_form(section: str, value: Any) -> Any:
        if section in SHORT_FORMS and isinstance(value, str):
            return {SHORT_FORMS[section]: value}
        if section == "reward" and isinstance(value, list):
            return {"name": SUM, "parts": value}
        return value

    return {OLD_NAMES.get(section, section): long_form(section, value) for section, value in values.items()}


def _warn_of_old_name(place: str, old: str) -> None:
    new = OLD_NAMES[old]
    print(f"Warning: {place}: {old} is called {new} now; write {new}, the next release refuses {old}", file=sys.stderr)


def merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Merge two layers field by field; `high` wins.

    An exploration budget of one kind replaces a budget of the other kind entirely.
    """
    result = dict(low)
    for key, value in high.items():
        old = result.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            replaces = {"candidates", "seconds"} & (value.keys() ^ old.keys()) & value.keys()
            result[key] = value if replaces else merged(old, value)
        else:
            result[key] = value
    return result
