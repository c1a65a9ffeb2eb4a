"""The place of scorers in the job file."""

import pytest
from pydantic import ValidationError

from engine.reward_config import LEASES_AT_A_SERVER, PoolConfig, RewardConfig

SERVER = {"name": "http", "http": {"url": "http://10.0.0.5:1"}}


@pytest.mark.parametrize(
    ("reward", "beside", "pool"),
    [
        ({"name": "ocr"}, 1, None),
        ({"name": "ocr", "placed": "pool"}, 1, PoolConfig()),
        ({"name": "ocr", "placed": "pool", "pool": {"processes": 3}}, 3, PoolConfig(processes=3)),
        ({**SERVER, "placed": "http"}, LEASES_AT_A_SERVER, None),
        (SERVER, 1, None),
    ],
)
def test_the_place_decides_how_many_leases_are_scored_beside_sampling(reward, beside, pool):
    config = RewardConfig.model_validate(reward)
    assert (config.scored_beside, config.scoring_pool) == (beside, pool)


@pytest.mark.parametrize(
    ("gpus", "is_rollout_node", "numbers"),
    [(0, True, [-1, -2, -3]), (1, True, [-1, -1, -1]), (2, True, [-1, -2, -1]), (2, False, [-1, -2, -3])],
)
def test_processes_take_the_last_gpus_and_only_those_of_the_pool(gpus, is_rollout_node, numbers):
    pool = PoolConfig(processes=3, gpus=gpus)
    assert [pool.gpu_of(process, is_rollout_node=is_rollout_node) for process in range(3)] == numbers


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({**SERVER, "placed": "pool"}, "a server needs no process beside it"),
        ({"name": "sum", "placed": "pool", "parts": [{"name": "ocr"}, SERVER]}, "a server needs no process"),
        ({"name": "ocr", "placed": "http"}, "a scorer runs on the node"),
        ({"name": "ocr", "pool": {"processes": 2}}, "use placed: pool"),
        ({"name": "ocr", "placed": "pool", "pool": {"gpus": 2}}, "a process uses one GPU: use processes: 2, or fewer"),
    ],
)
def test_a_place_that_does_not_fit_the_scorers_is_refused(reward, message):
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate(reward)
