"""The documentation agrees with the program: commands, fields, examples, links and sessions."""

import gzip
import json
import multiprocessing
import re
import shlex
import sqlite3
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file

from docs.generate import commands, files, models_in, sections
from engine.model_parts import PIPELINES
from launcher.cli import main as program
from launcher.cli.follow import last_words
from launcher.exit_codes import ExitCode
from launcher.job.load import load_job
from launcher.job.schema import Job
from launcher.ledger.store import open_ledger
from launcher.runs.views import run_view
from launcher.schemas.documents import documents
from tests.model_folders import write_model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SKILL = ROOT / ".claude" / "skills" / "spotrl-run" / "SKILL.md"
PAGES = sorted({*DOCS.rglob("*.md"), *ROOT.glob("*.md"), SKILL})
README = (ROOT / "README.md").read_text()

BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")


def blocks(language: str) -> list[tuple[str, str]]:
    """Return every code block of a language with its page."""
    return [
        (page.relative_to(ROOT).as_posix(), text)
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text())
        if kind == language
    ]


def command_lines() -> list[tuple[str, str]]:
    """Return every `spotrl ...` line of the pages' shell blocks without comments; continued lines are joined."""
    found = []
    for page, text in [*blocks("sh"), *blocks("console")]:
        for line in text.replace("\\\n", " ").splitlines():
            line = line.partition("  #")[0].partition(" #")[0].strip().removeprefix("$ ").replace(".venv/bin/", "")
            if line.startswith("spotrl "):
                found.append((page, line))
    return found


def anchor(heading: str) -> str:
    words = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def test_generated_files_match_the_code():
    """A process of its own generates them: another test may have changed what a command says."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as process:
        generated = process.submit(files).result()
    stale = [path.name for path, text in generated.items() if not path.exists() or path.read_text() != text]
    assert len(generated) > 2
    assert stale == [], "run `python -m docs.generate`"


def test_every_command_is_documented_with_an_example():
    page = (DOCS / "cli.md").read_text()
    for name, command, _ in commands():
        assert f"\n## {name}\n" in page
        assert isinstance(command, click.Group) or "Example:" in (command.help or "")


def test_every_command_is_in_a_group_of_the_help():
    assert sorted(name for names in program.GROUPS.values() for name in names) == sorted(
        name for name in program.summaries() if name not in program.HIDDEN
    )


def test_every_job_field_is_documented():
    page = (DOCS / "job-file.md").read_text()
    for path, model in [("", Job), *sections(Job)]:
        for name, info in model.model_fields.items():
            field = f"{path}.{info.alias or name}" if path else info.alias or name
            if path or not list(models_in(info.annotation)):
                assert f"| `{field}` |" in page


@pytest.mark.parametrize(("page", "line"), command_lines(), ids=lambda value: value[:50])
def test_a_command_of_the_pages_parses(page, line):
    """The options of the command exist. Upper-case words stand for names, and `|` for a choice."""
    words = shlex.split(line.split(" > ")[0].split(" && ")[0])[1:]
    words = [word.split("|")[0] for word in words if word != "..."]
    command: click.Command = program.cli
    context = click.Context(program.cli, info_name="spotrl")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        inner = command.get_command(context, words[0])
        assert inner is not None, f"{page}: {line}"
        command, context, words = inner, click.Context(inner, parent=context, info_name=words[0]), words[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in options | {"--help", "--version"}, f"{page}: {line}"


@pytest.mark.parametrize(("page", "text"), blocks("yaml"), ids=lambda value: value[:40])
def test_a_job_of_the_pages_loads(page, text, tmp_path):
    values = YAML(typ="safe").load(text)
    job = tmp_path / "job.yaml"
    job.write_text(text)
    for section in (values, values.get("reward")) if isinstance(values, dict) else ():
        for model in (section.get("model"), section.get("colours")) if isinstance(section, dict) else ():
            if isinstance(model, dict) and "path" in model:
                (tmp_path / model["path"]).mkdir(exist_ok=True)
                if model.get("name") in PIPELINES:
                    write_model(tmp_path / model["path"], model["name"])
            if isinstance(model, dict) and "lora" in model:
                pair = {f"transformer.x.lora_{part}.weight": np.ones((1, 1), np.float32) for part in "AB"}
                save_file(pair, tmp_path / model["lora"])
    assert load_job(job).path == job


@pytest.mark.parametrize(("page", "text"), blocks("json"), ids=lambda value: value[:40])
def test_a_json_example_of_the_pages_parses(page, text):
    json.loads(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, fragment in LINK.findall(text):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{target} of {page.name}"
        if fragment and there.suffix == ".md":
            headings = {anchor(line.lstrip("#")) for line in there.read_text().splitlines() if line.startswith("#")}
            assert fragment[1:] in headings, f"{target}{fragment} of {page.name}"


def test_every_page_is_in_the_sites_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert f" {page.name}\n" in config


def test_every_json_output_has_its_schema():
    schemas, page = documents(), (DOCS / "json.md").read_text()
    for name, command, _ in commands():
        if any("--json" in parameter.opts for parameter in command.params):
            words = name.split()[1:]
            assert "cleanup" if words[0] in ("reap", "panic") else "-".join(words) in schemas
    for name in schemas:
        assert f"`{name}`" in page


def test_the_skill_of_agents_names_keys_and_exit_codes_that_exist():
    """A table of keys belongs to the output that its heading names."""
    schemas, text = documents(), SKILL.read_text()
    of = {
        "a plan on clouds": schemas["launch"]["$defs"]["CloudPlan"]["properties"],
        "`status`": schemas["status"]["properties"],
        "`report`": schemas["report"]["properties"],
    }
    for heading, properties in of.items():
        table = text.partition(f"| keys of {heading} |")[2].partition("\n\n")[0]
        named = {key for line in table.splitlines()[2:] for key in re.findall("`(\\w+)`", line.split("|")[1])}
        assert len(named) > 3
        assert named <= properties.keys()
    codes = re.findall(r"^\| (\d+) \||exit code (\d+)", text, re.IGNORECASE | re.MULTILINE)
    assert {int(row or sentence) for row, sentence in codes} <= set(ExitCode)
    assert f"\nname: {SKILL.parent.name}\n" in text


def test_the_documented_exit_codes_are_those_of_the_commands():
    section = (DOCS / "operations.md").read_text().partition("## Exit codes")[2]
    assert {int(code) for code in re.findall(r"^\| (\d+) ", section, re.MULTILINE)} == set(ExitCode)


def test_the_readme_is_one_page():
    assert len(README.split()) <= 900
    assert (DOCS / "images" / "report.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Open the ledger of a real quickstart, the run of README's session and image."""
    path = tmp_path_factory.mktemp("quickstart") / "ledger.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(gzip.decompress((ROOT / "tests/data/quickstart/ledger.sql.gz").read_bytes()).decode())
    database.close()
    return open_ledger(path)


def session_steps() -> list[tuple[str, str]]:
    """Return every command of README's session with the output below it."""
    session = next(text for kind, text in BLOCK.findall(README) if kind == "console")
    steps = [step.partition("\n") for step in re.split(r"^\$ ", session, flags=re.MULTILINE) if step]
    return [(command, output) for command, _, output in steps]


@pytest.mark.parametrize(("command", "output"), session_steps(), ids=lambda value: value[:30])
def test_the_session_of_the_readme_is_what_the_program_prints(quickstart, capsys, command, output):
    """Compare words, because a narrow terminal wraps lines. A line `...` stands for lines left out."""
    words = shlex.split(command)[1:]
    if words[0] == "launch":  # the run itself is over; its ledger reproduces the last output of the command
        printed = "\n".join(last_words(run_view(quickstart, "quickstart"), []))
    else:
        program.cli.main(words, obj=quickstart, standalone_mode=False)
        printed = capsys.readouterr().out
    shown = " ".join(output.split()).split("...")
    assert any(shown)
    pattern = ".*".join(re.escape(part.strip()) for part in shown)
    assert re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL), f"{command} prints:\n{printed}"
