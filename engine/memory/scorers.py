"""Bytes of the scorers' models on a GPU. The sizes are those of the published models; their passes are not counted."""

from collections.abc import Iterator

from engine.reward_config import RewardConfig, ScorerConfig
from engine.tally import FP32, HALF

CLIP_L14, CLIP_H14, MASK2FORMER = 427_616_513, 986_109_441, 68_741_083
"""Parameters of openai/clip-vit-large-patch14, PickScore_v1 and facebook/mask2former-swin-small-coco-instance."""

HPSV3 = 7_748_610_610
"""Parameters of HPSv3: Qwen2-VL-7B without its output layer, 151,658 tokens, and the head; counted from the shapes."""

PARAMETERS = {"clip": CLIP_L14, "pickscore": CLIP_H14, "aesthetic": CLIP_L14, "hpsv3": HPSV3}


def scorer_bytes(reward: RewardConfig, gpus: int, pool_gpus: int = 0) -> int:
    """Return the bytes of all scorers' models on one of a node's GPUs with a worker.

    `gpus`: GPUs with a worker, which each hold as many scoring processes, unless the pool has `pool_gpus` more for
    itself. The student is in the worker, of which each of the `gpus` has one.
    """
    pool = reward.scoring_pool
    processes = 1 if pool is None else 0 if pool_gpus else -(-pool.processes // gpus)
    student = 0 if reward.student is None else sum(_bytes_of(reward.student))
    return student + processes * _bytes_of_process(reward)


def pool_bytes(reward: RewardConfig) -> int:
    """Return the bytes of all scorers' models on one of the GPUs that only score. 0: there is none."""
    pool = reward.scoring_pool
    return -(-pool.processes // pool.gpus) * _bytes_of_process(reward) if pool is not None and pool.gpus else 0


def _bytes_of_process(reward: RewardConfig) -> int:
    return sum(size for scorer in reward.scorers for size in _bytes_of(scorer))


def _bytes_of(scorer: ScorerConfig) -> Iterator[int]:
    if scorer.model is not None and scorer.name == "geneval":
        yield MASK2FORMER * (HALF if scorer.model.dtype == "bfloat16" else FP32)
    elif scorer.model is not None:
        yield PARAMETERS[scorer.name] * (FP32 if scorer.model.dtype == "float32" else HALF)
    if scorer.colours is not None:
        yield CLIP_L14 * (FP32 if scorer.colours.dtype == "float32" else HALF)
