"""A scorer that never returns, and images that are not finite: a run skips their groups, or ends and says why."""

import math
import threading

import pytest
import torch

from engine.models.load import load_adapter
from engine.protocol.request import Score
from tests.engine.test_loop import TINY, build, evaluated, one_thread, progress

__all__ = ["one_thread"]  # a fixture

QUICK = TINY.model_copy(
    update={
        "reward": TINY.reward.model_copy(update={"timeout_seconds": 0.2}),
        "evaluation": TINY.evaluation.model_copy(update={"every": 99}),
    }
)


class Scorer:
    """A reward of brightness that does not return for some prompts. `calls`: the prompts of each call."""

    def __init__(self, hangs_for):
        self.hangs_for, self.calls, self.let_go = hangs_for, [], threading.Event()

    def __call__(self, pictures, prompts):
        self.calls.append(tuple(prompts))
        if any(map(self.hangs_for, prompts)):
            self.let_go.wait(60)
        return [Score(reward=float(picture.mean()), metrics={}) for picture in pictures]


def warnings(folder):
    found = []
    for source in ("trainer", "coordinator"):
        path = folder / "progress" / f"{source}.jsonl"
        found += [line for line in path.read_text().splitlines() if '"warned"' in line]
    return "\n".join(found)


def run(config, folder, scorer, workers=1):
    made = build(config, folder, reward=scorer, workers=workers)
    made.finished = made.loop.run()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_scorer_that_hangs_on_one_prompt_costs_its_group_and_no_run(tmp_path, workers):
    batch = build(QUICK, tmp_path / "look", workers=0).loop.exploration._prompts.batch(1)
    scorer = Scorer(lambda prompt: prompt == batch[0])
    made = run(QUICK, tmp_path / "run", scorer, workers)
    scorer.let_go.set()
    assert (made.finished.reason, made.finished.iteration) == ("iterations", 3)
    skipped = {done.iteration: done.health["skipped_groups"] for done in progress(tmp_path / "run", "iteration_done")}
    assert skipped[1] >= 1
    assert skipped[0] + skipped[2] == 0
    text = warnings(tmp_path / "run")
    assert f"skipped '{batch[0]}'" in text
    assert "reward ocr gave no score for an image in 0.2 s (reward.timeout_seconds)" in text


def test_a_prompt_that_hangs_is_asked_for_twice_and_not_for_every_image(tmp_path):
    batch = build(QUICK, tmp_path / "look", workers=0).loop.exploration._prompts.batch(0)
    scorer = Scorer(lambda prompt: prompt == batch[0])
    run(QUICK.model_copy(update={"iterations": 1}), tmp_path / "run", scorer)
    scorer.let_go.set()
    asked = [call for call in scorer.calls if batch[0] in call]
    assert len(asked) <= 2 + 1  # together, alone; one more lease may have been sampled before
    assert (batch[0],) in asked


def test_a_scorer_that_hangs_always_ends_the_run_with_its_name(tmp_path):
    scorer = Scorer(lambda prompt: True)
    made = run(QUICK, tmp_path, scorer)
    scorer.let_go.set()
    assert made.finished.reason == "unhealthy"
    assert "reward ocr gave no score for an image in 0.2 s" in made.finished.text
    assert len(scorer.calls) <= 12  # one for each time limit that the run waits for


@pytest.mark.slow
def test_a_scorer_that_hangs_in_an_evaluation_leaves_the_image_out(tmp_path):
    config = QUICK.model_copy(update={"iterations": 1, "evaluation": TINY.evaluation})
    held_out = build(config, tmp_path / "look", workers=0).loop.exploration._prompts.held_out()
    scorer = Scorer(lambda prompt: prompt == held_out[0])
    made = run(config, tmp_path / "run", scorer)
    scorer.let_go.set()
    assert made.finished.reason == "iterations"
    assert evaluated(tmp_path / "run")[0]["not_finite"] == 1.0
    assert f"1 of {len(held_out)} images have no score" in warnings(tmp_path / "run")


def test_a_slow_scorer_that_returns_in_time_loses_nothing(tmp_path):
    config = QUICK.model_copy(update={"iterations": 1, "reward": TINY.reward})
    scorer = Scorer(lambda prompt: False)
    made = run(config, tmp_path, scorer)
    assert made.finished.reason == "iterations"
    assert progress(tmp_path, "iteration_done")[0].health["skipped_groups"] == 0


# --- images that are not finite


class Broken:
    """The shipped model with a decoder or a sampler that gives values that are not finite."""

    def __init__(self, value, *, where="images", every=1):
        self._adapter = load_adapter(TINY.model)
        self._value, self._where, self._every = value, where, every

    def __getattr__(self, name):
        return getattr(self._adapter, name)

    def decode(self, latents):
        if self._where == "latents":  # a decoder that hides them
            return torch.zeros_like(self._adapter.decode(torch.nan_to_num(latents)))
        images = self._adapter.decode(latents).clone()
        images[:: self._every, ..., 0, 0] = self._value
        return images

    def velocity(self, *given):
        found = self._adapter.velocity(*given)
        return found + self._value if self._where == "latents" else found


def run_broken(folder, scorer, **broken):
    from engine.clock import ScaledClock
    from engine.entrypoints.inproc import build_inproc

    clock = ScaledClock(origin_ms=0)
    made = build_inproc(
        TINY, folder, run="run", clock=clock, reward=scorer, workers=1, make_adapter=lambda: Broken(**broken)
    )
    return made.loop.run()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"value": math.nan}, "the image is not finite"),
        ({"value": math.inf}, "the image is not finite"),
        ({"value": -math.inf}, "the image is not finite"),
        ({"value": math.nan, "every": 2}, "the image is not finite"),
        ({"value": math.nan, "where": "latents"}, "the latents of the image are not finite"),
    ],
    ids=["nan", "inf", "minus-inf", "every-second", "latents"],
)
def test_images_that_are_not_finite_are_never_scored(tmp_path, broken, reason):
    """A scorer that takes NaN for black would give a finite score for each."""
    seen = []

    def black(pictures, prompts):
        seen.append(bool(torch.isfinite(pictures).all()))
        return [Score(reward=float(torch.nan_to_num(picture).mean()), metrics={}) for picture in pictures]

    finished = run_broken(tmp_path, black, **broken)
    assert all(seen)
    assert finished.reason == "unhealthy"
    assert reason in finished.text
    assert reason in warnings(tmp_path)
    assert evaluated(tmp_path)[0]["not_finite"] >= 1.0
