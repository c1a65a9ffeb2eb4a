"""Preflight checks of the engine: a job's needs are checked before anything starts."""

import sys

import pytest

from engine.config import EngineConfig, GuardConfig, ModelConfig, RewardConfig, RuntimeConfig, TargetConfig
from engine.entrypoints.preflight import JobUnfit, check
from engine.installation import install_command
from tests.model_folders import write_model


def test_a_ray_job_without_ray_gets_an_install_instruction(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobUnfit, match="not installed") as unfit:
        check(EngineConfig(runtime=RuntimeConfig(name="ray")), None)
    assert unfit.value.field == "runtime"
    assert f"`{install_command('ray')}`" in unfit.value.remedy


def test_a_degree_that_the_model_does_not_allow_names_the_allowed_ones():
    with pytest.raises(JobUnfit, match="degree 3 does not divide the 4 attention heads") as unfit:
        check(EngineConfig(runtime=RuntimeConfig(sp_degree=3)), None)
    assert unfit.value.field == "runtime.sp_degree"
    assert "1, 2, 4" in unfit.value.remedy


@pytest.mark.parametrize(
    ("size", "field", "found"),
    [({"height": 100}, "model.height", "is 100, .* multiples of 16"), ({}, "sampler.shift", "auto, and .* has no sch")],
)
def test_a_model_folder_that_does_not_fit_the_job_names_the_field(tmp_path, size, field, found):
    write_model(tmp_path, "qwen-image", scheduler=None)
    model = ModelConfig(name="qwen-image", path=str(tmp_path), **size)
    with pytest.raises(JobUnfit, match=found) as unfit:
        check(EngineConfig(model=model), None)
    assert unfit.value.field == field
    assert unfit.value.remedy


def test_a_guard_on_a_metric_that_evaluations_do_not_report_is_refused():
    target = TargetConfig(value=0.5, guards=(GuardConfig(metric="blur", max=1.0),))
    with pytest.raises(JobUnfit, match=r"a guard on 'blur'; evaluations report .*, drift") as unfit:
        check(EngineConfig(target=target), None)
    assert unfit.value.field == "target.guards"


def test_a_reward_whose_own_metric_is_called_drift_is_refused(tmp_path):
    source = "from engine.protocol.request import Score\n"
    source += "def score(pictures, prompts):\n    return [Score(reward=1.0, metrics={'drift': 0.0})] * len(prompts)\n"
    (tmp_path / "reports_drift.py").write_text(source)
    with pytest.raises(JobUnfit, match="reports a metric called 'drift'"):
        check(EngineConfig(reward=RewardConfig(name="reports_drift:score")), str(tmp_path))
