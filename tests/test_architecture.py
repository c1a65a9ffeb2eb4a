"""Allowed imports between folders (DESIGN.md, section 3), and a launcher without heavy imports."""

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu_seconds import takes_less_than

ROOT = Path(__file__).parent.parent

CONTRACT = {
    "engine.events",
    "engine.config",
    "engine.algorithm_config",
    "engine.strict",
    "engine.trainer_ranks",
    "engine.node_spec",
    "engine.clock",
    "engine.durable",
    "engine.installation",
    "engine.work_clock",
    "engine.mark",
    "engine.lora_file",
    "engine.model_folder",
    "engine.model_parts",
    "engine.prompt_set",
    "engine.reward_config",
    "engine.protocol.console",
}
"""Engine modules that the whole launcher may import."""

PURE = {
    "engine.queue.queue",
    "engine.parallel.groups",
    "engine.parallel.worker_group",
    "engine.parallel.forecast",
    "engine.parallel.latency",
    "engine.exploration.planner",
    "engine.exploration.value",
    "engine.memory.activations",
    "engine.memory.architecture",
    "engine.memory.budget",
    "engine.memory.job",
    "engine.memory.published",
    "engine.memory.scorers",
    "engine.tally",
    "engine.schedule.choose",
    "engine.schedule.decide",
    "engine.schedule.simulate",
    "engine.schedule.state",
    "engine.schedule.values",
    "engine.timing.figures",
    "engine.timing.job",
    "engine.timing.ranks",
    "engine.timing.seconds",
    "engine.timing.utilisation",
    "engine.trainer.cadence",
}
"""Further engine modules for policies and replays: decisions without torch or Ray."""

FLOORS = {
    "engine": [
        "families",
        "memory",
        "timing",
        "schedule",
        "protocol",
        "storage",
        "parallel",
        "exploration",
        "models",
        "diffusion",
        "queue",
        "rewards",
        "pool",
        "tasks",
        "algorithm",
        "coordinator",
        "worker",
        "trainer",
        "node",
        "ray",
        "entrypoints",
    ],
    "launcher": [
        "market",
        "job",
        "storage",
        "placement",
        "decide",
        "replay",
        "ledger",
        "services",
        "report",
        "notifications",
        "sinks",
        "clouds",
        "bill",
        "checks",
        "provision",
        "controller",
        "runs",
        "web",
        "cleanup",
        "selftest",
        "schemas",
        "cli",
    ],
}
"""Folders of each half from the ground up. A folder imports only itself and folders below. Files that lie directly in
`engine/` or `launcher/` are below all folders, but for `engine/families/`: rows of facts that those files read."""

GROUND = {"engine": 0, "launcher": -1}
"""Highest floor that files directly in a half may import."""

HEAVY = {"torch", "ray", "sky", "diffusers", "transformers"}

INSTALLED_AS = {
    "PIL": "pillow",
    "google": "google-cloud-compute",
    "mlflow": "mlflow-skinny",
    "sky": "skypilot",
    "vl_convert": "vl-convert-python",
    "xdist": "pytest-xdist",
    "rapidocr_onnxruntime": "rapidocr-onnxruntime",  # `make bench` alone installs it
}
"""Modules whose name differs from their distribution."""


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Return every module that a file imports. `from a import b` counts as `a.b` if that is a module."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if is_module(inner) else str(node.module)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def forbidden(folder: str, is_allowed) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in python_files(folder)
        for line, name in imports_of(file)
        if not is_allowed(file, name)
    ]


def top(name: str) -> str:
    return name.partition(".")[0]


def test_the_engine_never_imports_the_launcher():
    assert not forbidden("engine", lambda _, name: top(name) not in ("launcher", "catalogs", "sky", "boto3"))


def test_the_launcher_imports_only_the_contract_of_the_engine():
    def is_allowed(file: Path, name: str) -> bool:
        if top(name) != "engine":
            return True
        pure = (
            "launcher/placement",
            "launcher/replay",
            "launcher/job/gpu_checks.py",
            "launcher/job/load.py",
            "launcher/job/recipe.py",
            "launcher/job/resolved.py",
            "launcher/report/card.py",
            "launcher/report/throughput.py",
        )
        decides = any(file.is_relative_to(ROOT / place) for place in pure)
        return name in CONTRACT or (decides and name in PURE)

    assert not forbidden("launcher", is_allowed)


def folder_of(name: str) -> str | None:
    """Return the folder of a module inside engine or launcher, or None if the module lies directly in it."""
    half, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    return first if half in FLOORS and (ROOT / half / first).is_dir() else None


def upward_imports() -> list[str]:
    """Return the imports of a folder (or of a file beside the folders) outside its own and lower folders."""
    found = []
    for half, floors in FLOORS.items():
        for file in python_files(half):
            own = file.relative_to(ROOT / half).parts
            height = floors.index(own[0]) if len(own) > 1 else GROUND[half]
            for line, name in imports_of(file):
                folder = folder_of(name) if top(name) == half else None
                if folder is not None and floors.index(folder) > height:
                    found.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    return found


def test_a_folder_imports_only_folders_below_it():
    assert not upward_imports()


@pytest.mark.parametrize("half", sorted(FLOORS))
def test_every_folder_has_a_place_in_the_import_order(half):
    folders = {file.relative_to(ROOT / half).parts[0] for file in python_files(half) if file.parent != ROOT / half}
    assert sorted(FLOORS[half]) == sorted(folders)


@pytest.mark.parametrize("folder", ["launcher", "catalogs", "sky_yamls"])
def test_the_launcher_never_loads_a_heavy_package(folder):
    """The exception is SkyPilot, imported on use in the folder that drives it."""
    sky = ROOT / "launcher/provision/sky"
    assert not forbidden(
        folder, lambda file, name: top(name) not in HEAVY or (top(name) == "sky" and file.is_relative_to(sky))
    )


def test_only_the_ray_folder_and_its_entry_point_import_ray():
    allowed = (ROOT / "engine/ray", ROOT / "engine/entrypoints/ray_processes.py")
    assert not forbidden("engine", lambda file, name: top(name) != "ray" or any(map(file.is_relative_to, allowed)))


def test_the_contract_needs_no_torch():
    for name in CONTRACT:
        used = {top(module) for _, module in imports_of(ROOT.joinpath(*name.split(".")).with_suffix(".py"))}
        assert not used & HEAVY, name


def test_the_events_are_standard_library_only():
    used = {top(module) for _, module in imports_of(ROOT / "engine/events.py")}
    assert used <= set(sys.stdlib_module_names)


def test_every_imported_package_is_a_declared_dependency():
    """An indirect dependency may disappear at any time, and may be missing in a new environment."""
    text = (ROOT / "pyproject.toml").read_text() + (ROOT / "Makefile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    declared = {re.split(r"[\[<>=~!]", one)[0].lower() for one in wanted} | set(re.findall(r"'([a-z-]+)==", text))
    ours = {"engine", "launcher", "catalogs", "sky_yamls", "spotrl", "tests"}

    def is_allowed(_: Path, name: str) -> bool:
        module = top(name)
        known = INSTALLED_AS.get(module, module.replace("_", "-").lower())
        return (
            module in sys.stdlib_module_names
            or module in {*ours, "docs"}
            or known in declared
            or name.startswith("ruamel.")
        )

    assert not [line for folder in sorted(ours) for line in forbidden(folder, is_allowed)]


def test_every_started_python_excludes_its_start_folder_from_imports():
    """Otherwise a user's own `launcher.py` or `engine.py` would be imported in place of ours."""
    texts = [file.read_text("utf-8") for folder in ("engine", "launcher") for file in python_files(folder)]
    first_words = [word for text in texts for word in re.findall(r"sys\.executable, (?!\[)(\S+?),", text)]
    assert len(first_words) >= 8
    assert set(first_words) == {'"-P"'}


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules of a new interpreter after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_pure_modules_load_neither_torch_nor_ray():
    there = sorted(name for name in PURE if is_module(name))
    assert "engine.queue.queue" in there
    assert not loaded_by(f"import {', '.join(there)}") & HEAVY


def test_the_launchers_folders_load_no_heavy_package():
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in python_files("launcher")
        if "migrations" not in file.parts and file.name != "__init__.py"
    ]
    assert not loaded_by(f"import {', '.join(modules)}") & HEAVY


HELP = "from launcher.cli.main import run\nassert run(['--help']) == 0"


def test_help_loads_nothing_that_it_does_not_print():
    assert not loaded_by(HELP) & (HEAVY | {"sqlalchemy", "altair", "pydantic", "rich", "ruamel"})


def test_help_answers_at_once():
    def ask() -> None:
        subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, check=True, capture_output=True, env=os.environ)

    assert takes_less_than(0.5, ask, times=5)
