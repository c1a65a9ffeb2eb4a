"""Candidates are trained as they are: exactly once, with their own bits, whatever is lost on the way."""

import math
import shutil

import pytest
import torch

from engine.config import EngineConfig, ProfileConfig
from engine.diffusion.sampler import batch_plan, denoise
from engine.diffusion.trajectory import Trajectory
from engine.models.load import load_adapter
from engine.protocol.request import Finished, Group, Kind, Manifest, RequestId, Score
from engine.trainer.candidates import FILE, CandidateImages, CandidateRollouts
from tests.engine.test_loop import TINY, Killed, build, finish, manifests, newest, outcome, progress

pytestmark = pytest.mark.usefixtures("one_layer")


def job(**exploration) -> EngineConfig:
    """TINY with DiffusionNFT: 2 prompts of 2 images, out of 8 candidates."""
    raw = TINY.model_dump(mode="json", by_alias=True)
    raw["algorithm"] |= {"name": "diffusion-nft"}
    raw["sampler"].pop("noise_level")
    raw["exploration"] |= {"trains": "auto", **exploration}
    return EngineConfig.model_validate(raw)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    run = build(job(), folder)
    assert run.loop.run().reason == "iterations"
    return run, folder


# --- which jobs


def test_auto_means_candidates_where_the_algorithm_trains_images_and_the_profile_is_exact():
    assert job().exploration.trains == "candidates"
    assert TINY.exploration.trains == "rollouts"
    student = [{"name": "cheap", "scorer": "student"}]
    assert job(profiles=student).exploration.trains == "rollouts"
    assert job(mode="none").exploration.trains == "rollouts"
    again = EngineConfig.model_validate_json(job().model_dump_json(by_alias=True))
    assert again == job()


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"mode": "none"}, "use mode: stale"),
        ({"mode": "in-path"}, "use mode: stale"),
        ({"profiles": [{"scorer": "student"}]}, "needs scorer: reward"),
        ({"profiles": [{"dtype": "bfloat16"}]}, "needs dtype: float32 and all steps"),
        ({"profiles": [{"steps": 2}]}, "needs dtype: float32 and all steps"),
        ({"profiles": [{"name": "a"}, {"name": "b"}]}, "use a single one"),
    ],
)
def test_candidates_that_cannot_be_trained_are_refused_with_the_remedy(change, remedy):
    with pytest.raises(ValueError, match=remedy):
        job(trains="candidates", **change)


def test_an_algorithm_that_trains_steps_refuses_candidates():
    raw = TINY.model_dump(mode="json", by_alias=True)
    raw["exploration"] |= {"trains": "candidates"}
    with pytest.raises(ValueError, match="use diffusion-nft or awm"):
        EngineConfig.model_validate(raw)


# --- the path of an image


def test_only_the_first_batch_is_rolled_out_and_every_later_one_is_its_candidates(straight):
    run, folder = straight
    assert run.loop.coordinator.transport.calls.count(f"submit-{Kind.TRAIN}") == 1
    done = progress(folder, "iteration_done")
    assert [event.health["staleness"] for event in done] == [0.0, 1.0, 1.0]
    assert [event.explored for event in done] == [8, 8, 0]
    assert all(sum(event.made_by.values()) == 4 for event in done)


def test_the_trained_rewards_are_those_of_the_candidates(straight, tmp_path):
    """The chosen candidates of batch 1, in the checkpoint after batch 0, have the rewards that batch 1 reports."""
    two = job().model_copy(update={"iterations": 2})
    with pytest.raises(Killed):
        build(two, tmp_path, at=("publish", 3)).loop.run()
    checkpoint = newest(tmp_path)
    assert checkpoint.next_batch.early == (0, 1)
    images = CandidateImages.restored(checkpoint.files[FILE])
    groups = [images.group(checkpoint.next_batch, number) for number in (0, 1)]
    rewards = [result.score.reward for group in groups for result, _ in group]
    event = progress(straight[1], "iteration_done")[1]
    assert event.reward_mean == pytest.approx(sum(rewards) / 4)
    assert event.manifest_digest == checkpoint.next_batch.digest


def test_a_candidate_is_made_by_the_exact_sampler(tmp_path):
    two = job().model_copy(update={"iterations": 2})
    with pytest.raises(Killed):
        build(two, tmp_path, at=("publish", 3)).loop.run()
    checkpoint = newest(tmp_path)
    images, adapter = CandidateImages.restored(checkpoint.files[FILE]), load_adapter(two.model)
    for number, group in enumerate(checkpoint.next_batch.groups):
        wanted = denoise(adapter, batch_plan(two, 1), adapter.encode([group.prompt] * 2), group.seeds)
        found = torch.stack([trajectory.x for _, trajectory in images.group(checkpoint.next_batch, number)])
        assert torch.allclose(found, wanted, atol=1e-5)


def test_the_old_velocity_is_that_of_the_newest_weights(straight):
    """Before a batch's first step, trained weights and old policy are the same, whatever weights made the images."""
    health = [event.health for event in progress(straight[1], "iteration_done")]
    assert [row["velocity_change_before_update"] for row in health] == [0.0, 0.0, 0.0]


# --- losses


@pytest.mark.parametrize(
    ("at", "answered"),
    [
        (("collect-explore", 1), True),
        pytest.param(("publish", 2), False, marks=pytest.mark.slow),
        (("publish", 3), False),  # the checkpoint has the images, and nobody knows its weights yet
        pytest.param(("explore", 2), True, marks=pytest.mark.slow),
        (("withdraw", 5), True),  # the coordinator has no candidate of the open batch any more
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "answered" if value else "unheard",
)
def test_a_trainer_killed_at_a_call_ends_on_the_same_bits(straight, tmp_path, at, answered):
    with pytest.raises(Killed):
        build(job(), tmp_path, at=at, answered=answered).loop.run()
    again = build(job(), tmp_path)
    assert again.loop.run().reason == "iterations"
    assert outcome(tmp_path) == outcome(straight[1])
    assert again.loop.coordinator.transport.calls.count(f"submit-{Kind.TRAIN}") <= 1


@pytest.mark.parametrize("at", [("publish", 3), ("explore", 2)], ids=lambda at: f"{at[0]}-{at[1]}")
def test_a_lost_machine_trains_the_candidates_of_its_checkpoint(straight, tmp_path, at):
    """Coordinator, journal and all nodes are gone. The checkpoint has the images of its manifest."""
    old, new = tmp_path / "old", tmp_path / "new"
    with pytest.raises(Killed):
        finish(job(), old, at=at)
    shutil.copytree(old / "store", new / "store")
    again = build(job(), new)
    assert again.loop.run().reason == "iterations"
    assert again.loop.state.lineage == 2
    assert again.loop.coordinator.transport.calls.count(f"submit-{Kind.TRAIN}") == 0
    assert dict(newest(new).files) == dict(newest(straight[1]).files)
    assert {**manifests(old), **manifests(new)} == manifests(straight[1])


def test_without_a_spot_node_the_trainer_rolls_every_batch_out(tmp_path):
    run = build(job(wait="idle"), tmp_path, workers=0)
    assert run.loop.run().reason == "iterations"
    assert run.loop.coordinator.transport.calls.count(f"submit-{Kind.TRAIN}") == 3
    done = progress(tmp_path, "iteration_done")
    assert [(event.explored, event.health["staleness"]) for event in done] == [(0, 0.0)] * 3


def test_two_runs_with_other_workers_have_the_same_bits(straight, tmp_path):
    assert finish(job(), tmp_path, workers=3, run="another").reason == "iterations"
    assert outcome(tmp_path) == outcome(straight[1])


# --- the images


def candidate(prompt, seed, reward, name="trajectory"):
    request = RequestId(run="r", lineage=1, batch=4, prompt=prompt, seed=seed, kind=Kind.EXPLORE)
    return Finished(request=request, score=Score(reward=reward, metrics={"m": reward}), trajectory=name, node="n")


def manifest():
    return Manifest(
        run="r",
        lineage=1,
        batch=4,
        version=4,
        sampler="s",
        groups=(Group(prompt="a", seeds=(1, 2)), Group(prompt="b", seeds=(3, 4)), Group(prompt="c", seeds=(5, 6))),
        minibatches=((0, 1, 2),),
    )


def images(*candidates):
    latents = {one.trajectory: Trajectory.begin(torch.full((2, 3), one.score.reward)).to_bytes() for one in candidates}
    return CandidateImages.of(candidates, latents)


def test_a_group_is_taken_whole_or_rolled_out_whole():
    """Prompt b misses an image, and one of c has no finite reward."""
    rewards = {("a", 1): 0.5, ("a", 2): 1.0, ("b", 3): 0.0, ("c", 5): math.nan, ("c", 6): 1.0}
    found = images(*(candidate(*key, reward, name=str(key)) for key, reward in rewards.items()))
    drafted = found.with_early_groups(manifest())
    assert drafted.early == (0,)
    assert {request.prompt for request in drafted.requests()} == {"b", "c"}
    assert len(found.only(drafted)) == 2


def test_images_go_through_a_checkpoint_to_the_bit():
    whole = replace_early(images(candidate("a", 2, 0.1, "x"), candidate("a", 1, 1 / 3, "y")))
    drafted, kept = whole
    again = CandidateImages.restored(kept.stored())
    for (result, trajectory), (was, before) in zip(again.group(drafted, 0), kept.group(drafted, 0), strict=True):
        assert (result.score, result.node, result.request) == (was.score, was.node, was.request)
        assert trajectory.x.equal(before.x)
    assert len(CandidateImages.restored(None)) == 0


def replace_early(found):
    drafted = found.with_early_groups(manifest())
    return drafted, found.only(drafted)


def test_rollouts_get_every_candidate_group_once():
    drafted, kept = replace_early(images(candidate("a", 2, 0.1, "x"), candidate("a", 1, 0.2, "y")))
    rollouts = CandidateRollouts(drafted, kept)
    assert rollouts.open == {0}
    assert [result.request.seed for result, _ in rollouts.take(wait=True)[0]] == [1, 2]
    assert rollouts.take(wait=True) == {}
    assert ProfileConfig().scorer == "reward"
