"""`spotrl check-reward`: verdict, estimate and output. The engine's part is tested in tests/engine."""

import json
import sys

import pytest
from click.testing import CliRunner

from launcher.checks.reward_check import estimate
from launcher.cli.check_reward import check_reward
from launcher.exit_codes import ExitCode
from launcher.job.checked import JobError
from launcher.job.schema import Job
from tests.launcher.printed import printed

FOUND = {
    "warnings": [],
    "images": [
        {"prompt": "12", "seed": 0, "reward": 0.5, "metrics": {"exact_match": 0.0}},
        {"prompt": "34", "seed": 1, "reward": None, "metrics": {}},
    ],
    "device": "cpu",
    "sampling_ms": 40.0,
    "shape": 2,
    "first_score_ms": 1500.0,
    "score_ms": 10.0,
    "judge_micro_usd": 0,
}


def job(**fields):
    algorithm = {"name": "flow-grpo", "prompts_per_batch": 2, "images_per_prompt": 5}
    return Job.model_validate({"name": "demo", "iterations": 100, "algorithm": algorithm, **fields})


@pytest.mark.parametrize(
    ("score_ms", "reward", "bottleneck", "node_micro_usd"),
    [
        (40.0, "ocr", "sampling", 0),
        (3640.0, "ocr", "scoring", 2_000_000),  # 1,000 images wait 3.6 s each, at 2 dollars an hour
        (3640.0, {"name": "ocr", "placed": "pool", "pool": {"processes": 2}}, "scoring", 988_889),
        (60.0, {"name": "ocr", "placed": "pool", "pool": {"processes": 2}}, "sampling", 0),
    ],
)
def test_scoring_costs_node_time_if_it_is_slower_than_sampling(tmp_path, score_ms, reward, bottleneck, node_micro_usd):
    reward = {"name": reward} if isinstance(reward, str) else reward
    found = estimate(job(reward=reward), FOUND | {"score_ms": score_ms}, [], tmp_path / "sheet.png", 2_000_000.0)
    assert (found.bottleneck, found.run_node_micro_usd, found.run_images) == (bottleneck, node_micro_usd, 1000)


def test_the_judges_bill_grows_with_the_images_of_the_run(tmp_path):
    found = estimate(job(), FOUND | {"judge_micro_usd": 600}, [], tmp_path / "sheet.png", None)
    assert (found.judge_micro_usd, found.run_judge_micro_usd, found.run_node_micro_usd) == (600, 300_000, None)


def test_the_workers_of_a_node_share_its_scoring_processes(tmp_path):
    def bottleneck(**pool):
        reward = {"name": "ocr", "placed": "pool", "pool": pool}
        four = job(reward=reward, resources={"rollout": {"accelerators": "L4:4"}})
        return estimate(four, FOUND | {"score_ms": 25.0}, [], tmp_path / "sheet.png", None).bottleneck

    assert bottleneck(processes=2) == "scoring", "four workers make an image in 10 ms, two processes score one in 12.5"
    assert bottleneck(processes=2, gpus=1) == "sampling", "three workers make an image in 13.3 ms"


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Run the command on a small job with an engine that prints this answer and ends with this code."""
    (tmp_path / "job.yaml").write_text("name: demo\niterations: 10\n")
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))

    def run(answer, *words, code=0, command=None):
        text = json.dumps(json.dumps(answer))
        program = f"import json, sys; json.load(sys.stdin); print('HTTP 503'); print({text}); sys.exit({code})"
        command = command or [sys.executable, "-c", program]
        monkeypatch.setattr("launcher.checks.reward_check.engine_command", lambda module: command)
        arguments = [str(tmp_path / "job.yaml"), "--sheet", str(tmp_path / "sheet.png"), *words]
        return CliRunner(mix_stderr=False).invoke(check_reward, arguments, standalone_mode=False)

    return run


def test_the_output_shows_scores_times_bottleneck_and_sheet(checked, tmp_path):
    result = checked(FOUND)
    assert result.return_value == ExitCode.OK
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["prompt", "seed", "reward", "exact_match"]
    assert lines[1].split() == ["12", "0", "0.500", "0.000"]
    assert lines[2].split() == ["34", "1", "-", "-"]
    text = " ".join(result.stdout.split())
    assert "1 of 2 images have no score." in text
    assert "HTTP 503" in text
    assert "Sampling an image takes 40.0 ms on cpu." in text
    assert "Scoring an image takes 10.0 ms; the first took 1.5 s." in text
    assert "Sampling is the bottleneck" in text
    assert str(tmp_path / "sheet.png") in text


def test_a_slow_scorer_is_named_as_the_bottleneck_with_a_remedy(checked):
    text = " ".join(checked(FOUND | {"score_ms": 90.0}).stdout.split())
    assert "Scoring is the bottleneck: workers wait for scores. Use reward.placed: pool" in text


def test_the_json_output_has_every_key_of_its_schema(checked):
    found = printed("check-reward", checked(FOUND, "--json").stdout)
    assert (found["name"], found["bottleneck"], found["run_images"]) == ("demo", "sampling", 480)


def test_no_score_at_all_is_a_failure(checked):
    images = [image | {"reward": None} for image in FOUND["images"]]
    assert checked(FOUND | {"images": images}).return_value == ExitCode.FAILURE


def test_a_sheet_that_cannot_be_written_is_found_before_judges_are_paid(checked, tmp_path):
    sheet = tmp_path / "job.yaml" / "sheet.png"
    error = checked(FOUND, "--sheet", str(sheet), code=9).exception
    assert str(error) == f"{sheet.parent} cannot be made for sheet.png (File exists); name another file"


def test_a_reward_may_print_any_bytes(checked):
    program = f"import sys; sys.stdout.buffer.write(bytes([255, 10])); print({json.dumps(json.dumps(FOUND))})"
    result = checked(FOUND, "--json", command=[sys.executable, "-c", program])
    assert json.loads(result.stdout)["printed"] == ["\N{REPLACEMENT CHARACTER}"]


def test_an_engine_without_memory_is_not_called_missing(checked):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    error = str(checked(FOUND, command=[sys.executable, "-c", program]).exception)
    assert "the engine was ended by SIGKILL; Linux does that when memory is short" in error
    assert "pip install" not in error


def test_a_reward_that_cannot_score_is_an_error_of_the_job_file(checked):
    answer = {"field": "reward", "found": "it returned nothing", "remedy": "mend it"}
    error = checked(answer, code=3).exception
    assert isinstance(error, JobError)
    assert "it returned nothing" in str(error)
