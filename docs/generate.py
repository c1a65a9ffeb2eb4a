"""Write the pages and files that are made from the code: the job file's fields, the commands, the JSON schemas.

    python -m docs.generate            write them
    python -m docs.generate --check    exit 1 if one of them is not as the code is now

A field without a description, or a command without an example, is an error.
"""

import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.cli import main as program
from launcher.job.schema import Job
from launcher.schemas.documents import documents, text

ROOT = Path(__file__).parents[1]

GENERATED = "<!-- Written by `python -m docs.generate`. -->"

COLUMNS = 80


class Undocumented(Exception):
    """A field without a description, or a command without an example."""


# --- the job file -------------------------------------------------------------------------------------


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


def plain(number: float) -> str:
    """Return a bound as people write it: 1,000,000 and not 1e+06."""
    return f"{int(number):,}" if float(number).is_integer() and abs(number) >= 1e6 else f"{number:g}"


def allowed(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the allowed values of a field as text, from its JSON schema."""
    if "$ref" in schema:
        found = definitions[schema["$ref"].rpartition("/")[2]]
        return allowed(found, definitions) if "enum" in found else "section"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(allowed(one, definitions) for one in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "examples" in schema:
        return f"like `{schema['examples'][0]}`"
    names = {"null": "none", "integer": "whole number", "array": "list", "object": "mapping", "boolean": "true, false"}
    kinds = schema.get("type", "text")
    text = " or ".join(names.get(kind, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = [
        f"at least {plain(low)}" if low is not None else "",
        f"above {plain(above)}" if above is not None else "",
        f"at most {plain(high)}" if high is not None else "",
        f"below {plain(below)}" if below is not None and below < 2**60 else "",
    ]
    return ", ".join(filter(None, [text, *bounds]))


def default_of(info: FieldInfo) -> str:
    """Return a field's default as people write it in a job file."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple) and any(isinstance(one, BaseModel) for one in value):
        return ""
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def field_rows(model: type[BaseModel], path: str) -> list[str]:
    """Return a table's rows for the fields of one section. Raises Undocumented."""
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.get("$defs", {})
    rows = []
    for name, info in model.model_fields.items():
        shown = info.alias or name
        inner = list(models_in(info.annotation))
        text = info.description or (inner[0].__doc__ if inner else None)
        if not text:
            raise Undocumented(f"{path}{shown}")
        first = " ".join(text.split()) if info.description else text.split("\n\n")[0].replace("\n", " ")
        kind = allowed(schema["properties"][shown], definitions)
        rows.append(f"| `{path}{shown}` | {_cell(kind)} | {_cell(default_of(info))} | {_cell(first)} |")
    return rows


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every section of the job file by its path, in the order of the file. Sections in a list get `[]`."""
    seen: set[type[BaseModel]] = set()
    for name, info in model.model_fields.items():
        for inner in models_in(info.annotation):
            if inner in seen:
                continue
            seen.add(inner)
            within = f"{path}{info.alias or name}{'[]' if _is_list(info.annotation) else ''}"
            yield within, inner
            yield from sections(inner, f"{within}.")


def _is_list(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return origin in (tuple, list, dict) or any(_is_list(part) for part in typing.get_args(annotation))


def job_page() -> str:
    top = [name for name, info in Job.model_fields.items() if not list(models_in(info.annotation))]
    lines = [
        "# Job file",
        "",
        GENERATED,
        "",
        "A job file is YAML. `spotrl init job.yaml` writes one with comments. Every field has a default, unless the",
        "table says *required*. `spotrl config show job.yaml --origin` prints every value and its source. An",
        "unknown field is an error.",
        "",
        "Priority: flag, then `SPOTRL_*` variable (`SPOTRL_BUDGET__MAX_TOTAL=40`), then job file, then the user's",
        "configuration file, then default. A path in a job file is relative to the folder of that file; in a flag or a",
        "variable, to the working folder; in the configuration file, to its folder.",
        "",
        "For completion in an editor: `spotrl config schema > job.schema.json`, and as the first line of the job file",
        "`# yaml-language-server: $schema=job.schema.json`.",
        "",
        "## Fields outside sections",
        "",
        *TABLE,
        *[row for row in field_rows(Job, "") if any(row.startswith(f"| `{name}` |") for name in top)],
    ]
    found = list(sections(Job))
    paths = [path for path, _ in found]
    for path, model in found:
        # A section with two forms: the first field tells them apart.
        title = path if paths.count(path) == 1 else f"{path}, with {next(iter(model.model_fields))}"
        text = " ".join((model.__doc__ or "").split())
        if not text:
            raise Undocumented(path)
        lines += ["", f"## {title}", "", text, "", *TABLE, *field_rows(model, f"{path}.")]
    return "\n".join(lines) + "\n"


TABLE = ["| field | values | default | meaning |", "| --- | --- | --- | --- |"]


# --- commands -----------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield every command and sub-command with its context, in the order of `spotrl --help`."""
    group = program.cli
    top = click.Context(group, info_name="spotrl", terminal_width=COLUMNS, max_content_width=COLUMNS)
    for name in [name for names in program.GROUPS.values() for name in names]:
        command = group.get_command(top, name)
        assert command is not None
        context = click.Context(command, parent=top, info_name=name, terminal_width=COLUMNS, max_content_width=COLUMNS)
        yield f"spotrl {name}", command, context
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                sub = command.get_command(context, inner)
                assert sub is not None
                yield (
                    f"spotrl {name} {inner}",
                    sub,
                    click.Context(
                        sub, parent=context, info_name=inner, terminal_width=COLUMNS, max_content_width=COLUMNS
                    ),
                )


def cli_page() -> str:
    top = click.Context(program.cli, info_name="spotrl", terminal_width=COLUMNS, max_content_width=COLUMNS)
    lines = [
        "# Commands",
        "",
        GENERATED,
        "",
        "Every command has `--help` with an example. Commands with `--json` print one JSON object on stdout, and",
        "errors as JSON too ([JSON output](json.md)).",
        "",
        "```text",
        program.cli.get_help(top),
        "```",
    ]
    for name, command, context in commands():
        text = command.get_help(context)
        if not isinstance(command, click.Group) and "Example:" not in text:
            raise Undocumented(name)
        lines += ["", f"## {name}", "", "```text", text, "```"]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


# --- JSON ---------------------------------------------------------------------------------------------


def files() -> dict[Path, str]:
    """Return every generated file with its content."""
    return {
        ROOT / "docs" / "job-file.md": job_page(),
        ROOT / "docs" / "cli.md": cli_page(),
        **{ROOT / "launcher" / "schemas" / f"{name}.schema.json": text(schema) for name, schema in documents().items()},
    }


def main(arguments: list[str]) -> int:
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not as the code is now; run `python -m docs.generate`")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files()[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
