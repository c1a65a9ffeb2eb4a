"""Seconds by which a run's clock advances for its work: they follow the sizes of the model that is trained."""

from engine.config import EngineConfig, ModelConfig
from engine.timing.work import work_seconds
from tests.model_folders import write_model


def seconds_of(path: str | None) -> float:
    model = ModelConfig(name="flux", path=path, height=32, width=32)
    return work_seconds(EngineConfig(model=model)).image


def test_a_small_folder_takes_less_time_than_the_published_model(tmp_path):
    published = seconds_of("a/bucket's/folder")
    write_model(tmp_path / "whole", "flux")
    assert seconds_of(str(tmp_path / "whole")) == published
    write_model(tmp_path / "small", "flux", transformer={"num_layers": 2, "num_single_layers": 1})
    assert 0 < seconds_of(str(tmp_path / "small")) < published / 10
