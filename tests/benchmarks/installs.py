"""installs: on which Pythons does the wheel install and run, with each of its extras?

    python -m tests.benchmarks.installs --python python3.11 --python python3.12 --json

For each Python and each extra of pyproject.toml, a new environment gets the wheel with `engine/versions.lock`. Then
`pip check` looks for packages that contradict one another, the extra's packages are imported, `spotrl doctor` runs, and
with the extra `engine` the quickstart. All run in an empty folder, without variables of this project. Needs a package
index, and 5 GB of disk at a time. `--extra NAME` tries that extra alone, and may be repeated. Ctrl-C writes the page
with the environments that were tried.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.page import ROOT, load_now, publish

IMPORTS = {
    "none": "launcher.cli.main",
    "engine": "torch, diffusers, transformers, peft, rapidocr, onnxruntime",
    "prices": "boto3, gpuhunt, google.cloud.billing, google.cloud.compute",
    "sky": "sky, boto3, google.cloud.compute",
    "ray": "ray",
    "replay": "scipy.optimize",
    "bill": "duckdb",
    "ui": "starlette, uvicorn",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "node": "torch, diffusers, ray",
    "dev": "hypothesis, moto, mypy, playwright, pytest, duckdb, scipy",
    "docs": "material, mkdocs",
    "all": "torch, ray, sky, uvicorn, pytest, tensorboard",
}
"""Modules of each extra. `none`: the wheel without an extra."""

WITHOUT_LOCK = ("wandb", "mlflow")
"""Extras that want other packages than the lock has (pyproject.toml)."""

QUICKSTART = "engine"
"""The extra with which the quickstart runs."""

PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
STEP_SECONDS = 3600.0

TEXT = """
Each line is an environment of its own, with the wheel that `make dist` builds. *MB*: of the environment, with torch for
CPUs. *s*: of the installation, from a near package index. `wandb` and `mlflow` are installed without the lock.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", required=True, help="an interpreter; may be repeated")
    parser.add_argument("--extra", action="append", choices=list(IMPORTS), help="default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, as always")
    options = parser.parse_args()
    load1 = load_now()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(IMPORTS) == {"none", *extras}, "IMPORTS names every extra of pyproject.toml"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PIP_CACHE_DIR"] = f"{folder}/cache"  # one download for all environments
        wheel = built_wheel(Path(folder))
        with suppress(KeyboardInterrupt):
            for extra in options.extra or IMPORTS:
                for python in options.python:
                    rows.append(tried(wheel, python, extra))
                    print(rows[-1], file=sys.stderr, flush=True)
    publish(
        "installs",
        question="on which Pythons does the wheel install and run, with each of its extras?",
        command="python -m tests.benchmarks.installs "
        + " ".join(f"--python python{python}" for python in dict.fromkeys(row["Python"][:4] for row in rows))
        + " --json",
        result={"environments": len(rows), "faults": sum("fault" in str(row) for row in rows)},
        runs=1,
        seeds=[0],
        load1=load1,
        rows=rows,
        text=TEXT,
    )


def built_wheel(folder: Path) -> Path:
    """Build the wheel of this clone into a folder."""
    subprocess.run([sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("spotrl-*.whl")
    return wheel


def tried(wheel: Path, python: str, extra: str) -> dict[str, Any]:
    """Install the wheel with an extra into a new environment, and try it. Returns a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        environment, home = Path(folder) / "env", Path(folder) / "home"
        home.mkdir()
        subprocess.run([python, "-m", "venv", environment], check=True)
        programs = environment / "bin"
        wanted = f"{wheel}[{extra}]" if extra != "none" else str(wheel)
        lock = [] if extra in WITHOUT_LOCK else ["--constraint", str(ROOT / "engine" / "versions.lock")]
        begun = time.monotonic()
        installed = outcome([programs / "python", *PIP, "install", *lock, wanted], home)
        row = {
            "Python": outcome([programs / "python", "-c", "import platform; print(platform.python_version())"], home)[
                1
            ],
            "extra": extra,
            "install": verdict(installed),
            "s": round(time.monotonic() - begun),
            "MB": round(int(outcome(["du", "-sk", environment], home)[1].split()[0]) / 1000),
            "pip check": verdict(outcome([programs / "python", *PIP, "check"], home)),
            "imports": verdict(outcome([programs / "python", "-P", "-c", f"import {IMPORTS[extra]}"], home)),
            "doctor": verdict(outcome([programs / "spotrl", "doctor"], home)),
            "quickstart": "-",
        }
        if extra == QUICKSTART:
            row["quickstart"] = quickstart(programs, home)
        return row


def quickstart(programs: Path, home: Path) -> str:
    """Run the quickstart that the wheel ships. Returns its seconds, dollars and recoveries, or its fault."""
    path = outcome([programs / "python", "-P", "-c", "import sky_yamls; print(*sky_yamls.__path__)"], home)[1]
    command = ["launch", f"{path}/quickstart.yaml", "--yes", "--on-exit", "down", "--result", "result.json"]
    begun = time.monotonic()
    done = outcome([programs / "spotrl", *command], home)
    seconds = time.monotonic() - begun
    if done[0] != 0:
        return verdict(done)
    result = json.loads((home / "result.json").read_text())
    dollars = result["micro_usd"]["total"] / 1e6
    return f"ok, {seconds:.0f} s, ${dollars:.2f}, {len(result['preemptions'])} preemptions"


def outcome(command: Sequence[str | Path], home: Path) -> tuple[int, str]:
    """Run a command in an empty home. Returns its exit code and the last line that it wrote."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPOTRL", "AWS"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=home,
        env={**variables, "HOME": str(home), "SPOTRL_HOME": str(home / "state")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_SECONDS,
    )
    return done.returncode, (done.stdout.strip().splitlines() or [""])[-1].strip()


def verdict(done: tuple[int, str]) -> str:
    """Return `ok`, or the fault with the last line that the command wrote."""
    return "ok" if done[0] == 0 else f"fault {done[0]}: {done[1][:100].replace('|', '/')}"


if __name__ == "__main__":
    main()
