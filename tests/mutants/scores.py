"""Planted bugs between an image and its score: the score of another image, an old score, a made-up score."""

from dataclasses import replace as copy_of
from math import isfinite
from typing import Any

from msgspec.structs import replace

from engine.algorithm.transaction import Transaction
from engine.pool import client, messages, server
from engine.worker.scoring_queue import ScoringQueue
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

POOL = "tests/engine/test_pool.py"
WORKER = "tests/engine/test_worker.py"

_score, _of_message, _rows_of = server.ScoringProcess._score, messages.Scored.score, Transaction.rows_of


def mixed_up(self: server.ScoringProcess, images: Any, prompts: Any) -> Any:
    """Score the images of a batch in another order, and forget that."""
    return _score(self, images.flip(0), list(prompts)[::-1])


def zero_for_none(self: messages.Scored) -> Any:
    return _of_message(replace(self, reward=0.0 if self.reward is None else self.reward))


def with_zeros(self: Transaction, number: int, group: Any) -> Any:
    rewards = tuple(reward if isfinite(reward) else 0.0 for reward in group.rewards)
    return _rows_of(self, number, copy_of(group, rewards=rewards))


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="scores-of-a-batch-are-mixed-up",
            forgets="which score belongs to which image of a batch",
            patches=((server.ScoringProcess, "_score", mixed_up),),
            found_by=f"{POOL}::test_a_pool_gives_the_scores_and_metrics_of_the_reward",
        ),
        Fault(
            name="a-score-for-another-image-is-taken",
            forgets="to look for which images an answer has scores",
            patches=(
                (
                    client.PoolReward,
                    "_ask",
                    changed(client.PoolReward._ask, "[scored.digest for scored in scores] != list(digests)", "False"),
                ),
            ),
            found_by=f"{POOL}::test_a_wrong_answer_is_never_taken_and_the_request_repeated[swapped]",
        ),
        Fault(
            name="a-stale-score-after-a-retry-is-taken",
            forgets="that a prompt is sampled again with other weights",
            patches=(everywhere(messages.digest_of, lambda image, prompt: prompt),),
            found_by=f"{POOL}::test_a_wrong_answer_is_never_taken_and_the_request_repeated[stale]",
        ),
        Fault(
            name="an-image-without-a-score-counts-as-zero",
            forgets="that no score is not the score 0",
            patches=((messages.Scored, "score", zero_for_none),),
            found_by=f"{POOL}::test_an_image_without_a_score_keeps_none",
        ),
        Fault(
            name="a-scorer-that-died-too-often-gives-zero",
            forgets="that images whose scorers all died have no score",
            patches=(
                (
                    client.PoolReward,
                    "_asked",
                    changed(client.PoolReward._asked, "Score(reward=nan", "Score(reward=0.0"),
                ),
            ),
            found_by=f"{POOL}::test_images_have_no_score_after_the_last_try[dies]",
        ),
        Fault(
            name="a-skipped-group-counts-as-zero",
            forgets="to skip a group with an image that has no score",
            patches=((Transaction, "rows_of", with_zeros),),
            found_by="tests/engine/test_transaction.py::"
            "test_a_group_with_a_reward_that_is_not_finite_is_skipped_and_counted",
        ),
        Fault(
            name="unscored-images-are-held-until-the-node-is-gone",
            forgets="to give sampled images back on a notice while their scorer is slow",
            patches=((ScoringQueue, "take_unscored", lambda self: []),),
            found_by=f"{WORKER}::test_a_drained_worker_gives_unscored_images_back_whole",
        ),
    )
}
