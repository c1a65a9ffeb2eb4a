"""The models of scorers in the memory of a job."""

import pytest
import torch

from engine.config import EngineConfig
from engine.memory.job import job_memory, sized_model
from engine.memory.scorers import CLIP_H14, CLIP_L14, MASK2FORMER, pool_bytes, scorer_bytes
from engine.reward_config import RewardConfig

MODEL = {"path": "there"}
JOB = {"model": {"name": "sd3", "path": "sd3.5-medium", "height": 512, "width": 512}, "prompts": "prompts.txt"}


def memory_of(job):
    config = EngineConfig.model_validate(job)
    return job_memory(config, sized_model(config.model))


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_sizes_are_those_of_the_published_configurations():
    from transformers import (
        CLIPConfig,
        CLIPModel,
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        SwinConfig,
    )

    large = CLIPConfig(
        text_config={"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
        vision_config={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
        projection_dim=768,
    )
    huge = CLIPConfig(
        text_config={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
        },
        vision_config={
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_attention_heads": 16,
            "num_hidden_layers": 32,
            "patch_size": 14,
        },
        projection_dim=1024,
    )
    swin = SwinConfig(
        image_size=384,
        embed_dim=96,
        depths=[2, 2, 18, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    with torch.device("meta"):
        assert parameters(CLIPModel(large)) == CLIP_L14
        assert parameters(CLIPModel(huge)) == CLIP_H14
        detector = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=swin, num_labels=80))
        assert parameters(detector) == MASK2FORMER


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({"name": "ocr"}, 0),
        ({"name": "pickscore", "model": MODEL}, 2 * CLIP_H14),
        ({"name": "pickscore", "model": {**MODEL, "dtype": "float32"}}, 4 * CLIP_H14),
        ({"name": "geneval", "model": MODEL}, 4 * MASK2FORMER),
        ({"name": "geneval", "model": MODEL, "colours": MODEL}, 4 * MASK2FORMER + 2 * CLIP_L14),
        ({"name": "sum", "parts": [{"name": "clip", "model": MODEL}, {"name": "ocr"}]}, 2 * CLIP_L14),
        ({"name": "clip", "model": MODEL, "placed": "pool", "pool": {"processes": 3}}, 2 * 2 * CLIP_L14),
    ],
)
def test_every_model_counts_on_each_gpu(reward, expected):
    assert scorer_bytes(RewardConfig.model_validate(reward), gpus=2) == expected


@pytest.mark.parametrize(("processes", "gpus", "of_pool"), [(3, 1, 3), (3, 2, 2), (2, 2, 1), (3, 0, 0)])
def test_a_pool_with_gpus_of_its_own_takes_no_memory_of_workers(processes, gpus, of_pool):
    pool = {"processes": processes, "gpus": gpus}
    reward = RewardConfig.model_validate({"name": "clip", "model": MODEL, "placed": "pool", "pool": pool})
    assert pool_bytes(reward) == of_pool * 2 * CLIP_L14
    assert scorer_bytes(reward, 1, reward.pool_gpus) == (0 if gpus else 3 * 2 * CLIP_L14)
    memory = memory_of({**JOB, "reward": reward.model_dump()})
    assert ("scorers" in memory.rollout.parts) == (not gpus)
    assert memory.trainer.parts["scorers"] == processes * 2 * CLIP_L14, "the trainer's node shares its GPUs"


def test_a_job_with_a_model_that_scores_needs_that_much_more_on_both_roles():
    plain = memory_of(JOB)
    scored = memory_of({**JOB, "reward": {"name": "pickscore", "model": MODEL}})
    for before, after in ((plain.trainer, scored.trainer), (plain.rollout, scored.rollout)):
        assert after.parts == {**before.parts, "scorers": 2 * CLIP_H14}
        assert after.fitting(76 * 2**30) < before.fitting(76 * 2**30)
