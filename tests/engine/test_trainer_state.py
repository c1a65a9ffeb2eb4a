"""The trainer's state in a checkpoint, and the digest of a job by which a checkpoint recognises its own job."""

from dataclasses import fields, replace

from engine.algorithm.advantages import RunningStd
from engine.config import EngineConfig, RewardConfig
from engine.drift import Look
from engine.protocol.request import Group, Manifest
from engine.reward_config import PoolConfig
from engine.storage.checkpoint import CheckpointStore, RowsThatFit
from engine.storage.tensor_files import Stored
from engine.trainer.state import TrainerState, config_digest

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


def test_every_field_of_the_state_goes_through_a_checkpoint(tmp_path):
    """A field that is lost changes what a resumed run trains. Digest and lineage are settled when the run begins."""
    state = TrainerState(
        config_digest="d",
        iteration=7,
        evaluations=[(0, {"reward": 0.25}), (5, {"reward": 0.5})],
        std=RunningStd(0.3),
        skipped_in_a_row=2,
        base=Look(tone=(1, 2), grain=(3, 4)),
        fits=RowsThatFit(device="cpu", rows=6),
        early_off_until=19,
        unlearned=3,
        has_learned=True,
    )
    state.next_batch = Manifest(
        run="r",
        lineage=2,
        batch=7,
        version=7,
        sampler="s",
        groups=(Group(prompt="a", seeds=(1, 2)), Group(prompt="b", seeds=(3, 4))),
        minibatches=((0,), (1,)),
        early=(0,),
    )
    restored, kept = TrainerState(config_digest="d"), [field.name for field in fields(TrainerState)]
    kept = [name for name in kept if name not in ("config_digest", "lineage")]
    for name in kept:
        assert getattr(state, name) != getattr(restored, name, None), f"{name} is not tested"
    store, weights = CheckpointStore(f"file://{tmp_path}"), {"weights": Stored.of_bytes(b"w")}
    store.save(replace(state.checkpoint({"of": "the explorer"}), lineage=2, files=weights), keep=1)
    checkpoint = store.newest()
    assert checkpoint is not None
    restored.restore(checkpoint)
    assert {name: getattr(restored, name) for name in kept} == {name: getattr(state, name) for name in kept}
    assert checkpoint.exploration == {"of": "the explorer"}
