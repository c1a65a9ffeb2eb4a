"""Read a YAML file that a person wrote, and keep the line number of every value.

YAML 1.2, one document, plain values only. Each refusal names the line. Refused are duplicate keys, anchors, aliases and
tags (a small file could grow without bound, or run code), files beyond `MAX_BYTES`, and the bare words that some YAML
readers take for true or false (`off` is a word in YAML 1.2 and `false` in 1.1, so a reader of the file cannot tell).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    NodeEvent,
    ScalarEvent,
)
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES = 64 * 1024
"""Largest file in bytes. A job file is a page or two; a much larger file is a mistake or an attack."""

MAX_DEPTH = 12
"""Deepest nesting of sections. The job's own sections nest four deep."""

_DECIMAL = re.compile(r"[-+]?\d{1,18}")

AMBIGUOUS_WORDS = frozenset({"y", "n", "yes", "no", "on", "off"})

Field = tuple[str | int, ...]
"""Path of a value in the file: `("resources", "rollout", "num_nodes")`; list items by number."""


class YamlFileError(Exception):
    """The file cannot be read. `found` and `remedy` are sentences without the place; `line` is the place."""

    def __init__(self, found: str, remedy: str, line: int | None = None) -> None:
        super().__init__(f"{found}; {remedy}")
        self.found, self.remedy, self.line = found, remedy, line


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlFile:
    """Values of a file as plain Python, and the line of every key and list item (from 1)."""

    text: str
    values: dict[str, Any]
    lines: Mapping[Field, int]

    def line(self, field: Field) -> int | None:
        """Return the line of the field, or of the nearest enclosing section in the file."""
        for length in range(len(field), 0, -1):
            if field[:length] in self.lines:
                return self.lines[field[:length]]
        return None


def read_yaml(path: Path) -> YamlFile:
    """Read a file. Raises YamlFileError, also if the file is missing, not text, or too large."""
    # Reading a pipe would block for ever, and `-` means one.
    if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        raise YamlFileError("it is not a regular file", "name a file that can be read twice")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise YamlFileError("there is no such file", "check the path, or write one with `spotrl init`") from None
    except OSError as error:
        raise YamlFileError(f"it cannot be read ({error.strerror})", "check what it is, and its permissions") from None
    if len(raw) > MAX_BYTES:
        raise YamlFileError(
            f"it is larger than {MAX_BYTES // 1024} KiB", "keep prompts in a file of their own (`prompts: FILE`)"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise YamlFileError("it is not UTF-8 text", "save it as UTF-8", line) from None
    return parse_yaml(text)


def parse_yaml(text: str) -> YamlFile:
    """Parse a text. Raises YamlFileError with the line. An empty document is an empty mapping."""
    try:
        _refuse_what_can_grow(YAML(typ="safe", pure=True).parse(text))
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlFileError(
            f"this is not YAML: {error.problem or error.context}",
            "check indentation, colons and quotes here and just above",
            mark.line + 1 if mark else None,
        ) from None
    except (YAMLError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise YamlFileError(f"this is not YAML: {first_line}", "remove what is not plain text") from None
    if root is None or (isinstance(root, ScalarNode) and not root.value):
        return YamlFile(text=text, values={}, lines={})
    if not isinstance(root, MappingNode):
        raise YamlFileError("the file is not a list of `key: value` lines", "start from `spotrl init`", _line(root))
    lines: dict[Field, int] = {}
    values = _build(root, (), lines)
    return YamlFile(text=text, values=values, lines=lines)


def parse_value(text: str) -> Any:
    """Parse a single value, as written after `key: `; for flags and environment variables."""
    try:
        return parse_yaml(f"value: {text}").values["value"]
    except YamlFileError as error:
        if error.found.startswith("this is not YAML"):
            return text  # `[draft] name` is a valid string in a shell, because shell users do not expect YAML's quoting
        raise YamlFileError(error.found.replace("`value: ", "`"), error.remedy) from None


def _refuse_what_can_grow(events: Iterable[Event]) -> None:
    """Check the event stream before building any value, so no alias is ever followed."""
    depth = documents = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent) or (isinstance(event, NodeEvent) and event.anchor):
            sign = "*" if isinstance(event, AliasEvent) else "&"
            raise YamlFileError(
                f"`{sign}{event.anchor}` is an alias or anchor", "write the value out where it is used", line
            )
        if isinstance(event, ScalarEvent | CollectionStartEvent) and event.tag:
            raise YamlFileError(f"`{event.tag}` is a YAML tag", "write the plain value", line)
        if isinstance(event, DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise YamlFileError("a second document starts here", "keep one job in one file", line)
            if event.version and tuple(event.version) != (1, 2):
                raise YamlFileError(f"%YAML {event.version} is asked for", "remove the line; spotrl reads 1.2", line)
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise YamlFileError(f"sections nest more than {MAX_DEPTH} deep", "no field of a job is that deep", line)


def _build(node: Node, field: Field, lines: dict[Field, int]) -> Any:
    match node:
        case MappingNode():
            return _build_mapping(node, field, lines)
        case SequenceNode():
            values = []
            for number, child in enumerate(node.value):
                lines[(*field, number)] = _line(child)
                values.append(_build(child, (*field, number), lines))
            return values
        case ScalarNode():
            return _scalar(node, field)
    raise AssertionError(f"no such node: {node}")


def _build_mapping(node: MappingNode, field: Field, lines: dict[Field, int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line, key = _line(key_node), key_node.value
        if not isinstance(key_node, ScalarNode):
            raise YamlFileError("a key is a list or a section", "use a word as key", line)
        if key in values:
            first = lines[(*field, key)]
            raise YamlFileError(
                f"`{'.'.join(map(str, (*field, key)))}` stands here and on line {first}",
                "keep one of the two",
                line,
            )
        lines[(*field, key)] = line
        values[key] = _build(value_node, (*field, key), lines)
    return values


def _scalar(node: ScalarNode, field: Field) -> Any:
    is_bare = node.style is None
    if is_bare and node.value.lower() in AMBIGUOUS_WORDS:
        raise YamlFileError(
            f"`{'.'.join(map(str, field))}: {node.value}` is true or false to some YAML readers and a word to others",
            "write true, false, none or the word in quotes",
            _line(node),
        )
    if not is_bare:
        return node.value
    match (node.tag or "").rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return node.value.lower() == "true"
        case "int" | "float":
            return _number(node)
        case _:  # keep dates and similar values as the text in the file
            return node.value


def _number(node: ScalarNode) -> int | float:
    text = node.value.replace("_", "")
    if _DECIMAL.fullmatch(text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # .nan, .inf, 0x1F: no job needs a number like .nan
    if not math.isfinite(value):
        raise YamlFileError(
            f"`{node.value[:40]}` is not a plain finite number", "write it in decimal digits", _line(node)
        )
    return value


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
