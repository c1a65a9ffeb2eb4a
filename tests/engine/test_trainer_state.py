"""The digest of a job, which a checkpoint keeps to recognise its own job."""

from engine.config import EngineConfig, RewardConfig
from engine.reward_config import PoolConfig
from engine.trainer.state import config_digest

OF_0_1_0 = "69b3403fc33280b5"
"""Digest of the default job, computed by commit c355425, before `shift: auto` and the sizes of a model were fields."""


def test_the_default_job_keeps_the_digest_of_earlier_checkpoints():
    assert config_digest(EngineConfig()) == OF_0_1_0


OF_A_POOL = "6d461950cc63ab96"
"""Digest of the default job with `placed: pool` and two processes, computed by commit d34e1bc, before `pool.gpus`."""


def test_a_pool_without_gpus_of_its_own_keeps_the_digest_of_earlier_checkpoints():
    def digest(**pool: int) -> str:
        reward = RewardConfig(placed="pool", pool=PoolConfig(**pool))
        return config_digest(EngineConfig(reward=reward))

    assert digest(processes=2) == OF_A_POOL
    assert digest(processes=2, gpus=1) != OF_A_POOL


def test_another_value_of_a_newer_field_is_another_job():
    job = EngineConfig()
    shifted = job.model_copy(update={"sampler": job.sampler.model_copy(update={"shift": 3.0})})
    recomputed = job.model_copy(update={"model": job.model.model_copy(update={"checkpointing": "on"})})
    compiled = job.model_copy(update={"model": job.model.model_copy(update={"compile": "on"})})
    doubled = job.model_copy(update={"model": job.model.model_copy(update={"guidance_passes": "one"})})
    assert len({config_digest(one) for one in (job, shifted, recomputed, compiled, doubled)}) == 5
