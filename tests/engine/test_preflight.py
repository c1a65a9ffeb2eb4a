"""What a job needs is looked for before anything is started."""

import sys

import pytest

from engine.config import EngineConfig, RuntimeConfig
from engine.preflight import JobUnfit, check


def test_a_job_for_ray_without_ray_is_told_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobUnfit, match="not installed") as unfit:
        check(EngineConfig(runtime=RuntimeConfig(name="ray")), None)
    assert unfit.value.field == "runtime"
    assert "pip install 'spotrl[ray]'" in unfit.value.remedy


def test_a_degree_that_the_model_does_not_allow_is_refused_with_those_that_it_does():
    with pytest.raises(JobUnfit, match="degree 3 does not divide the 4 attention heads") as unfit:
        check(EngineConfig(runtime=RuntimeConfig(sp_degree=3)), None)
    assert unfit.value.field == "runtime.sp_degree"
    assert "1, 2, 4" in unfit.value.remedy
