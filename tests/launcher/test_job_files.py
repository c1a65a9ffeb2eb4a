"""The example jobs of published models: each fits its GPUs, and its comment is the memory budget of the code.

`python -m tests.launcher.test_job_files` writes the comments anew.
"""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.cli.memory_text import memory_lines
from launcher.exit_codes import ExitCode
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from launcher.placement.memory import check_memory, gpu_memory
from tests.launcher.printed import printed

PUBLISHED = (
    "qwen_image_ocr",
    "sd3_5",
    "sd3_5_geneval",
    "flux",
    "flux_pickscore",
    "flux2_klein",
    "z_image",
    "sana",
    "wan_video",
    "wan2_2_video",
    "wan_video_http",
)


def path_of(name: str) -> Path:
    return Path(str(files("sky_yamls") / f"{name}.yaml"))


def budget_comment(name: str) -> str:
    """Return the memory budget of a job file as comment lines, as the file should have it."""
    resolved = resolve(load_job(path_of(name)).job)
    check_memory(resolved)
    lines = [line for line in memory_lines(gpu_memory(resolved, resolved.ranks)) if line.strip()]
    return "\n".join(f"# {line}".rstrip() for line in lines)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_comment_of_a_job_file_is_its_memory_budget(name):
    expected = budget_comment(name)
    assert expected in path_of(name).read_text("utf-8"), "run `python -m tests.launcher.test_job_files`"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_pass_that_a_job_file_asks_for_fits(name):
    resolved = resolve(load_job(path_of(name)).job)
    for gpu in gpu_memory(resolved, resolved.ranks):
        assert gpu.asked <= gpu.fitting
        assert gpu.free > 0


ALONE = {"flux2_klein"}
"""Jobs whose cheapest plan is the trainer alone at the shipped prices."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dry_run_plans_every_job_file(name, tmp_path, monkeypatch, capsys, few_replays):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    assert run(["launch", str(path_of(name)), "--dry-run", "--json"]) == ExitCode.OK
    plan = printed("launch", capsys.readouterr().out)["plan"]
    assert [gpu["role"] for gpu in plan["memory"]] == ["trainer", "rollout"]
    assert len(plan["slots"]) >= (1 if name in ALONE else 2), "a trainer and rollout nodes"
    assert 0 < plan["cost"]["low"] <= plan["cost"]["expected"] <= plan["cost"]["high"]


def main() -> None:
    for name in PUBLISHED:
        old = path_of(name).read_text("utf-8")
        new = re.sub(r"#   memory: .*?\n#   as many would fit[^\n]*", budget_comment(name), old, flags=re.DOTALL)
        path_of(name).write_text(new, "utf-8")


if __name__ == "__main__":
    main()
