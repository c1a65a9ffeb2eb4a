"""The wheel of `make dist` without extras, in a new environment: every command answers a mistake in a sentence."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.main import summaries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # creates an environment: minutes on a slow machine

ROOT = Path(__file__).parents[2]

MISTAKES = {
    "attach": ("attach", "nobody"),
    "catalog": ("catalog", "refresh"),
    "check": ("check", "job.yaml", "--infra", "aws"),
    "compare": ("compare", "nobody", "nothing"),
    "check-reward": ("check-reward", "none.yaml"),
    "config": ("config", "show", "none.yaml"),
    "controller": ("controller", "nobody"),
    "doctor": ("doctor", "--nosuch"),
    "down": ("down", "nobody"),
    "events": ("events", "nobody"),
    "init": ("init", "no/such/job.yaml"),
    "launch": ("launch", "job.yaml", "--dry-run"),
    "logs": ("logs", "nobody"),
    "ls": ("ls", "--nosuch"),
    "panic": ("panic", "-y"),
    "prices": ("prices", "L4"),
    "pull": ("pull", "nobody", "--to", "no/such"),
    "reap": ("reap", "-y"),
    "report": ("report", "nobody", "--html", "no/such/report.html"),
    "resume": ("resume", "nobody"),
    "rm": ("rm", "nobody", "-y"),
    "sample": ("sample", "nobody", "1234"),
    "ssh": ("ssh", "nobody", "node"),
    "selftest": ("selftest", "--infra", "aws", "--max-total", "$6"),
    "status": ("status", "nobody"),
    "sync": ("sync", "nobody"),
    "trace": ("trace", "nobody", "-o", "no/such/trace.json"),
    "simulate": ("simulate", "none.yaml"),
    "ui": ("ui",),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    pip = [folder / "env" / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "build"], check=True)
    # The wheel is built from the source archive, as `make dist` does, so that the archive lacks nothing.
    subprocess.run([folder / "env" / "bin" / "python", "-m", "build", "--outdir", folder, ROOT], check=True)
    assert list(folder.glob("spotrl-*.tar.gz"))
    (built,) = folder.glob("spotrl-*.whl")
    subprocess.run([*pip, "install", "--constraint", ROOT / "engine" / "versions.lock", built], check=True)
    return folder / "env"


ASK_ALL = """
from launcher.cli.main import cli, summaries
for name in summaries():
    cli([name, "--help"], standalone_mode=False)
"""


def run(environment: Path, folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("AWS", "GOOGLE", "PYTHON"))}
    variables |= {"SPOTRL_HOME": str(folder / "state"), "HOME": str(folder)}
    command = [str(environment / "bin" / program), *words]
    return subprocess.run(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


@pytest.mark.long
def test_every_command_answers_a_mistake_in_a_sentence(environment, tmp_path):
    (tmp_path / "job.yaml").write_text("name: a\nbudget: {max_total: $10}\n")
    assert MISTAKES.keys() == summaries().keys()
    helped = run(environment, tmp_path, "python", "-P", "-c", ASK_ALL)
    assert (helped.returncode, helped.stderr, helped.stdout.count("Usage: ")) == (0, "", len(MISTAKES))
    for words in MISTAKES.values():
        done = run(environment, tmp_path, "spotrl", *words)
        assert done.returncode not in (0, -1), words
        assert "Traceback" not in done.stdout + done.stderr, words
        assert "Error: " in done.stderr, words
        assert len(done.stderr.strip().splitlines()) <= 4, words


def test_doctor_needs_no_extra(environment, tmp_path):
    done = run(environment, tmp_path, "spotrl", "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "spotrl   0.1.0 from a wheel" in done.stdout
    assert "engine   without torch" in done.stdout


def test_a_missing_extra_is_named_in_the_error(environment, tmp_path):
    (tmp_path / "job.yaml").write_text("name: a\nbudget: {max_total: $10}\n")
    for words, extra in ((("reap", "-y"), "prices"), (("launch", "job.yaml", "--dry-run"), "engine"), (("ui",), "ui")):
        assert f".whl[{extra}]'" in run(environment, tmp_path, "spotrl", *words).stderr
    # The command in the message works: it installs the extra into this environment.
    command = re.search(r"`(.* install .*)`", run(environment, tmp_path, "spotrl", "ui").stderr)
    subprocess.run([*shlex.split(command[1]), "--quiet", "--disable-pip-version-check"], check=True)
    assert run(environment, tmp_path, "python", "-P", "-c", "import uvicorn, starlette").returncode == 0
    result = run(environment, tmp_path, "spotrl", "reap", "-y", "--json")
    assert json.loads(result.stdout) == {"error": result.stderr.strip().removeprefix("Error: "), "exit_code": 1}
