"""The digest of a job, which a checkpoint keeps to recognise its own job."""

from engine.config import EngineConfig
from engine.trainer.state import config_digest

OF_0_1_0 = "69b3403fc33280b5"
"""Digest of the default job, computed by commit c355425, before `shift: auto` and the sizes of a model were fields."""


def test_the_default_job_keeps_the_digest_of_earlier_checkpoints():
    assert config_digest(EngineConfig()) == OF_0_1_0


def test_another_value_of_a_newer_field_is_another_job():
    job = EngineConfig()
    shifted = job.model_copy(update={"sampler": job.sampler.model_copy(update={"shift": 3.0})})
    recomputed = job.model_copy(update={"model": job.model.model_copy(update={"checkpointing": "on"})})
    compiled = job.model_copy(update={"model": job.model.model_copy(update={"compile": "on"})})
    doubled = job.model_copy(update={"model": job.model.model_copy(update={"guidance_passes": "one"})})
    assert len({config_digest(one) for one in (job, shifted, recomputed, compiled, doubled)}) == 5
