"""A scorer that never returns, in the real processes of a run: they start anew, and the run goes on and ends."""

import pytest

from engine.config import EngineConfig
from engine.prompts import prompt_source
from tests.engine.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REWARD = """
import threading

HANGS = {hangs!r}


def score(pictures, prompts):
    if any(prompt in HANGS for prompt in prompts):
        {wait}
    return [float(picture.mean()) for picture in pictures]
"""

WAYS = {
    "event": "threading.Event().wait()",
    "thread": "helper = threading.Thread(target=threading.Event().wait); helper.start(); helper.join()",
    "loop": "while True: pass",
}
"""Ways to hang: in a lock; in a thread that is no daemon, for which Python waits at the exit; in a loop."""


def config_of(**reward):
    return EngineConfig.model_validate(
        {
            "iterations": 3,
            "sampler": {"steps": 3},
            "algorithm": {"prompts_per_batch": 2, "images_per_prompt": 2},
            "exploration": {"mode": "none"},
            "evaluation": {"prompts": 2, "every": 99, "steps": 2},
            "runtime": {"shape": 2, "lease_seconds": 2.0, "heartbeat_seconds": 0.3, "trainer_threads": 1},
            "reward": {"name": "hanging:score", **reward},
        }
    )


def run(folder, config, way, *, spot):
    hangs = prompt_source(config, None).batch(1)[0]
    work = folder / "work"
    work.mkdir()
    (work / "hanging.py").write_text(REWARD.format(hangs=[hangs], wait=WAYS[way]))
    fleet = Fleet(folder, config, workdir=work)
    try:
        fleet.start("trainer")
        for node in ["spot-0"] if spot else []:
            fleet.start(node)
        finished = fleet.wait_until_finished(seconds=300)
        fleet.wait_for(lambda: fleet.agents["trainer"].poll() is not None, seconds=60)
        return fleet, finished, hangs
    finally:
        fleet.close()


@pytest.mark.parametrize(("way", "spot"), [("event", True), ("thread", False), ("loop", True)])
def test_a_run_skips_the_group_of_a_scorer_that_hangs_and_its_processes_end(tmp_path, way, spot):
    fleet, finished, prompt = run(tmp_path, config_of(timeout_seconds=3.0), way, spot=spot)
    assert (finished.reason, finished.iteration) == ("iterations", 3)
    skipped = [event.health["skipped_groups"] for event in fleet.events("iteration_done")]
    assert skipped[1] >= 1
    assert (skipped[0], skipped[2]) == (0, 0)
    warned = [event.text for source in ("trainer", "coordinator") for event in fleet.events("warned", source)]
    named = "reward hanging:score gave no score for an image in 3 s (reward.timeout_seconds)"
    assert any(named in text and "failed" in text for text in warned)
    assert any(f"skipped {prompt!r}" in text and named in text for text in warned)


def test_a_scorer_that_hangs_in_a_pool_is_named_and_its_group_is_skipped(tmp_path):
    config = config_of(placed="pool", pool={"timeout_seconds": 3.0})
    fleet, finished, prompt = run(tmp_path, config, "event", spot=False)
    assert (finished.reason, finished.iteration) == ("iterations", 3)
    warned = [event.text for event in fleet.events("warned")]
    named = "reward hanging:score gave no score in 3 s (reward.pool.timeout_seconds)"
    assert any(f"skipped {prompt!r}" in text and named in text for text in warned)
