"""Early groups: sampled one version early, trained once, with the log-probs of their own version."""

import contextlib
import shutil
import time
from dataclasses import replace

import pytest
import torch

from engine.algorithm.health import Health
from engine.algorithm.transaction import Trainer, Transaction
from engine.config import EngineConfig, ExplorationConfig
from engine.diffusion.sampler import batch_plan, log_prob, policy
from engine.diffusion.trajectory import Trajectory
from engine.early_config import EarlyConfig
from engine.models.adapter import rows
from engine.protocol.draft import Draft, early_groups, has_pool, with_draft
from engine.protocol.request import Finished, Group, Kind, Manifest, RequestId, Score
from engine.storage.checkpoint import CheckpointStore
from engine.trainer.coordinator_client import Collected
from engine.trainer.early_groups import MOST_OUTSIDE, PAUSE_BATCHES
from engine.trainer.early_rollouts import EarlyRollouts
from engine.trainer.report import early_figures
from engine.trainer.rollouts import Rollouts
from tests.engine.test_loop import (
    TINY,
    Killed,
    build,
    evaluated,
    finish,
    newest,
    one_thread,  # noqa: F401  a fixture
    outcome,
    progress,
)

pytestmark = pytest.mark.usefixtures("one_layer")

ALGORITHM = TINY.algorithm.model_copy(update={"learning_rate": 3e-3, "clip_range": 0.2})
EARLY = TINY.model_copy(update={"early": EarlyConfig(share=0.5, patience_seconds=600), "algorithm": ALGORITHM})
"""One of two groups is early."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    assert finish(EARLY, folder).reason == "iterations"
    return outcome(folder)


def stale_shares(folder):
    return [event.health["staleness"] for event in progress(folder, "iteration_done")]


@pytest.mark.long
def test_half_of_the_groups_of_every_batch_but_the_first_are_early(tmp_path):
    run = build(EARLY, tmp_path)
    assert run.loop.run().reason == "iterations"
    assert stale_shares(tmp_path) == [0.0, 0.5, 0.5]
    health = [event.health for event in progress(tmp_path, "iteration_done")]
    assert "stale_share" not in health[0]
    assert all(0 <= one["early_outside_share"] <= 1 and one["stale_share"] == 0.5 for one in health[1:])
    # A fresh group has two chosen seeds.
    assert [event.pairs for event in progress(tmp_path, "ranked")] == [2, 4], "early groups are no evidence"
    assert sum(run.coordinator.queue.wanted(kind) for kind in Kind) == 0
    assert run.coordinator.queue.finished == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "answered"),
    [
        (("submit-early", 1), False),  # the draft is durable, and nobody samples it yet
        (("publish", 3), False),  # the checkpoint knows of the early group, nobody has the next weights
        (("collect-early", 2), True),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "answered" if value else "unheard",
)
def test_killed_after_its_draft_the_run_ends_on_the_same_bits(tmp_path, straight, at, answered):
    with pytest.raises(Killed):
        build(EARLY, tmp_path, at=at, answered=answered).loop.run()
    assert finish(EARLY, tmp_path).reason == "iterations"
    assert outcome(tmp_path) == straight
    assert stale_shares(tmp_path)[-2:] == [0.5, 0.5]


@pytest.mark.long
def test_killed_between_the_two_updates_of_a_batch_it_ends_on_the_same_bits(tmp_path, straight, monkeypatch):
    updates, commit = 0, Transaction.commit

    def deadly(transaction):
        nonlocal updates
        health = commit(transaction)
        updates += 1
        if updates in (3, 6):  # after the first step of a batch whose first group is early
            raise Killed
        return health

    monkeypatch.setattr(Transaction, "commit", deadly)
    for _ in range(2):
        with pytest.raises(Killed):
            finish(EARLY, tmp_path)
    assert finish(EARLY, tmp_path).reason == "iterations"
    assert outcome(tmp_path) == straight


def groups_trained(monkeypatch):
    """Record every added group as (batch, number, group), and each committed mini-batch as (batch, numbers)."""
    added, committed = [], []
    add, commit = Transaction.add, Transaction.commit

    def watched_add(step, number, group):
        added.append((step._manifest.batch, number, group))
        return add(step, number, group)

    def watched_commit(step):
        committed.append((step._manifest, step._step, sorted(step._groups)))
        return commit(step)

    monkeypatch.setattr(Transaction, "add", watched_add)
    monkeypatch.setattr(Transaction, "commit", watched_commit)
    return added, committed


@pytest.mark.slow
def test_old_log_probs_are_those_of_the_version_that_sampled_the_group(tmp_path, monkeypatch):
    """Fresh groups have the log-probs of their batch's version, early groups those of the version before."""
    added, _ = groups_trained(monkeypatch)
    run = build(EARLY, tmp_path)
    loop, versions = run.loop, {}
    publish = loop._publish

    def watched(file):
        versions[loop.state.iteration] = {k: v.detach().clone() for k, v in loop.model.parameters.items()}
        publish(file)

    loop._publish = watched
    loop.run()
    trainer: Trainer = loop.model.trainer
    early = [batch for batch, _, group in added if group.is_early]
    assert early == [1, 2]
    for batch, _, group in added:
        plan = batch_plan(EARLY, batch, loop.schedule)
        for version in {batch, max(0, batch - 1), max(0, batch - 2)}:
            is_own = version == (batch - 1 if group.is_early else batch)
            apart = max(distance(trainer, versions[version], plan, group.prompt, one) for one in group.trajectories)
            assert (apart < 1e-5) == is_own, f"batch {batch}, early {group.is_early}, version {version}: {apart:.1e}"


@torch.no_grad()
def distance(trainer, weights, plan, prompt, trajectory):
    """Return the largest difference between recorded log-probs and those of some weights."""
    for name, parameter in trainer.parameters.items():
        parameter.copy_(weights[name])
    steps = torch.tensor(plan.trained_steps)
    conditioning = rows(trainer.adapter.encode([prompt]), torch.zeros(len(steps), dtype=torch.long))
    mean, std = policy(trainer.adapter, plan, conditioning, trajectory.latents[:-1], steps)
    return float((log_prob(trajectory.latents[1:], mean, std) - trajectory.log_probs).abs().max())


@pytest.mark.slow
def test_every_step_trains_exactly_its_mini_batch(tmp_path, monkeypatch):
    added, committed = groups_trained(monkeypatch)
    finish(EARLY, tmp_path)
    assert len(committed) == 2 * EARLY.iterations
    for manifest, step, trained in committed:
        assert trained == sorted(step), "a step is taken when its mini-batch is whole, not before"
        for number in step:
            found = [group for batch, one, group in added if (batch, one) == (manifest.batch, number)]
            assert [group.seeds for group in found] == [manifest.groups[number].seeds]


@pytest.mark.long
@pytest.mark.parametrize("at", [("submit-early", 1), ("publish", 3)], ids=["after-the-draft", "during-publish"])
def test_without_any_spot_node_early_groups_are_made_anew_whole(tmp_path, monkeypatch, at):
    """All spot is gone, and the trainer dies with it: it makes every image itself, with the weights that it has."""
    with pytest.raises(Killed):
        build(EARLY, tmp_path, at=at, answered=True).loop.run()
    added, committed = groups_trained(monkeypatch)
    impatient = EARLY.early.model_copy(update={"patience_seconds": 0.001})
    runtime = EARLY.runtime.model_copy(update={"lease_seconds": 0.01})
    run = build(EARLY.model_copy(update={"early": impatient, "runtime": runtime}), tmp_path, workers=0)
    patience = EARLY.exploration.budget.model_copy(update={"patience_seconds": 0.01})
    run.loop.exploration._config = EARLY.model_copy(
        update={"exploration": EARLY.exploration.model_copy(update={"budget": patience})}
    )
    assert run.loop.run().reason == "iterations"
    assert not any(group.is_early for _, _, group in added)
    assert all(trained == sorted(step) for _, step, trained in committed)
    warned = [event.text for event in progress(tmp_path, "warned")]
    assert any("made anew with version 1" in text for text in warned)
    assert stale_shares(tmp_path)[-2:] == [0.0, 0.0]


@pytest.mark.slow
def test_a_run_that_has_seen_no_spot_node_drafts_nothing(tmp_path):
    """A draft would be waited for in the next batch, and made anew there."""
    early = EARLY.early.model_copy(update={"patience_seconds": 0.001})
    config = EARLY.model_copy(update={"early": early, "exploration": ExplorationConfig(mode="none"), "iterations": 2})
    assert finish(config, tmp_path, workers=0).reason == "iterations"
    assert stale_shares(tmp_path) == [0.0, 0.0]
    assert not [event.text for event in progress(tmp_path, "warned") if "made anew" in event.text]


@pytest.mark.long
def test_a_lost_machine_makes_early_groups_anew_under_the_next_lineage(tmp_path, straight):
    old, new = tmp_path / "old", tmp_path / "new"
    with pytest.raises(Killed):
        finish(EARLY, old, at=("publish", 3))
    assert newest(old).next_batch.early == (0,)
    shutil.copytree(old / "store", new / "store")
    again = build(EARLY, new)
    assert again.loop.run().reason == "iterations"
    assert again.loop.state.lineage == 2
    assert stale_shares(new) == [0.0, 0.5]


@pytest.mark.long
def test_a_restarted_trainer_keeps_its_draft_and_chooses_no_other(tmp_path):
    """The draft decides: seeds that are chosen again could be others, and would waste the early images."""
    config = EARLY.model_copy(update={"exploration": ExplorationConfig(mode="none")})
    first = build(config, tmp_path, at=("submit-early", 1), answered=True)
    first.workers[0].serve_once(wait=False)  # a live spot node, as far as the coordinator knows
    with pytest.raises(Killed):
        first.loop.run()
    store = CheckpointStore(f"file://{tmp_path}/store")
    draft = store.draft(1, 1)
    assert draft is not None
    other = Draft(**{**_fields(draft), "groups": (Group(prompt=draft.groups[0].prompt, seeds=(11, 12)),)})
    store.put_draft(other)
    run = build(config, tmp_path)
    manifests = []
    save = run.loop._save
    run.loop._save = lambda files: (manifests.append(run.loop.state.next_batch), save(files))
    run.loop.run()
    assert manifests[0].groups[0].seeds == (11, 12)
    assert manifests[0].early == (0,)


def _fields(draft):
    return {name: getattr(draft, name) for name in Draft.__dataclass_fields__}


@pytest.mark.long
def test_an_evaluation_beside_early_groups_has_the_figures_of_its_own_version(tmp_path):
    every = EARLY.model_copy(update={"evaluation": EARLY.evaluation.model_copy(update={"every": 1})})
    waits = every.model_copy(update={"evaluation": every.evaluation.model_copy(update={"wait": True})})
    finish(every, tmp_path / "beside")
    finish(waits, tmp_path / "waits")
    assert evaluated(tmp_path / "beside") == evaluated(tmp_path / "waits")
    values = evaluated(tmp_path / "waits")
    assert sorted(values) == list(range(EARLY.iterations + 1))
    assert len({tuple(metrics.items()) for metrics in values.values()}) == len(values), "versions can be told apart"


@pytest.mark.long
def test_early_groups_pause_while_too_many_of_their_rows_are_outside_the_clip_range(tmp_path):
    clipped = EARLY.algorithm.model_copy(update={"clip_range": 1e-9})
    config = EARLY.model_copy(update={"algorithm": clipped, "iterations": 5})
    finish(config, tmp_path)
    assert stale_shares(tmp_path) == [0.0, 0.5, 0.5, 0.0, 0.0]
    texts = [event.text for event in progress(tmp_path, "warned")]
    assert any(f"no early groups are drafted before batch {1 + 2 + PAUSE_BATCHES}" in text for text in texts)
    assert newest(tmp_path).early_off_until == 2 + 2 + PAUSE_BATCHES


def test_health_tells_early_rows_from_fresh_ones():
    health = Health(neutral={}, rows=8, early_rows=4, early_outside=3)
    assert early_figures(0.5, [health]) == {"stale_share": 0.5, "early_outside_share": 0.75}
    assert early_figures(0.5, [Health(neutral={})]) == {"stale_share": 0.5}
    assert early_figures(0.0, [health]) == {}
    assert MOST_OUTSIDE < 0.75


@pytest.mark.long
@pytest.mark.parametrize("change", [{"std": "batch"}, {"std": "ema"}, {"name": "grpo-guard"}], ids=str)
def test_early_groups_train_with_every_std_and_with_grpo_guard(tmp_path, change):
    config = EARLY.model_copy(update={"algorithm": ALGORITHM.model_copy(update=change), "iterations": 2})
    finish(config, tmp_path)
    assert stale_shares(tmp_path) == [0.0, 0.5]
    last = progress(tmp_path, "iteration_done")[-1].health
    assert last["gradient_norm"] > 0
    assert last["skipped_groups"] == 0


# --- a group whole, or anew


class Found:
    """A coordinator that has these early results. `alone_since`: as of `CoordinatorClient`.

    `asked`: the calls, each as the number of results that the trainer has, and whether the trainer waits.
    """

    def __init__(self, results=(), *, blobs=None, poisoned=(), alone_since=None):
        self.found = Collected(results=list(results), blobs=blobs or {}, to_come=False, poisoned=poisoned)
        self.alone_since = alone_since
        self.asked = []

    def collect(self, kind, batch, have, *, wait):
        assert (kind, batch) == (Kind.EARLY, 3)
        self.asked.append((have, wait))
        return replace(self.found, results=self.found.results[have:])

    def has(self, degrees):
        """Change the results to these."""
        results, blobs = results_of(degrees)
        self.found = replace(self.found, results=results, blobs=blobs)


def early_result(prompt, seed, degrees, *, kind=Kind.EARLY, reward=1.0):
    trajectory = replace(Trajectory.begin(torch.zeros(1, 1)), degrees=torch.tensor(degrees, dtype=torch.uint8))
    request = RequestId(run="r", lineage=1, batch=3, prompt=prompt, seed=seed, kind=kind)
    finished = Finished(request=request, score=Score(reward=reward, metrics={}), trajectory=f"{prompt}{seed}")
    return finished, trajectory.to_bytes()


def taken(coordinator, *, any_degrees=False):
    """Return the groups that a manifest with the early groups 0 and 1 takes, and those made anew."""
    anew = []
    manifest = with_draft(MANIFEST, DRAFT)
    rollouts = EarlyRollouts(manifest, coordinator, anew.extend, patience_seconds=0.01, any_degrees=any_degrees)
    found = rollouts.take(wait=False)
    assert rollouts.open == {0, 1} - found.keys() - set(anew)
    return sorted(found), anew


def results_of(degrees):
    made = [early_result(prompt, seed, found) for (prompt, seed), found in degrees.items()]
    return [one for one, _ in made], {one.trajectory: data for one, data in made}


WHOLE = {("a", 8): (1,), ("a", 9): (1,)}


def test_a_group_is_taken_when_it_is_whole():
    results, blobs = results_of({**WHOLE, ("b", 6): (1,)})
    assert taken(Found(results, blobs=blobs)) == ([0], [])


def test_an_image_finished_with_another_number_of_gpus_makes_its_group_anew():
    results, blobs = results_of({**WHOLE, ("a", 9): (1, 2)})
    assert taken(Found(results, blobs=blobs)) == ([], [0])
    assert taken(Found(results, blobs=blobs), any_degrees=True) == ([0], []), "the trainer computes the log-probs"


def test_a_poisoned_image_makes_no_other_group_anew():
    results, blobs = results_of({("a", 8): (1,), ("b", 6): (1,)})
    poisoned = [early_result("b", 7, (1,))[0].request]
    assert taken(Found(results, blobs=blobs, poisoned=poisoned)) == ([], [1])


def test_groups_that_cannot_be_completed_are_made_anew_and_whole_ones_are_kept():
    results, blobs = results_of({**WHOLE, ("b", 6): (1,)})
    poisoned = [early_result("b", 7, (1,))[0].request]
    assert taken(Found(results, blobs=blobs, poisoned=poisoned)) == ([0], [1])
    assert taken(Found(results, blobs=blobs, alone_since=time.monotonic() - 1)) == ([0], [1])
    assert taken(Found(results, blobs=blobs, alone_since=time.monotonic() + 1)) == ([0], [])


ANEW = 2.0
"""Reward of an image that is made anew."""


def rollouts_of(early, anew):
    """Return the rollouts of a manifest with the early groups 0 and 1.

    `early`: degrees of the early images that are there. `anew`: list of (prompt, seed) of images that are made anew,
    because an earlier process of the trainer ordered it. Both may grow later. The coordinator's `waits` are those for
    training rollouts.
    """
    results, blobs = results_of(early)
    coordinator = Found(results, blobs=blobs)
    manifest = with_draft(MANIFEST, DRAFT)
    arriving = EarlyRollouts(manifest, coordinator, lambda numbers: None, patience_seconds=600, any_degrees=False)
    coordinator.waits = []

    def collect(batch, have, wait):
        coordinator.waits.append(wait)
        made = [early_result(prompt, seed, (1,), kind=Kind.TRAIN, reward=ANEW) for prompt, seed in anew]
        files = {one.trajectory: data for one, data in made}
        return Collected(results=[one for one, _ in made][have:], blobs=files, to_come=False, poisoned=())

    return coordinator, Rollouts(
        manifest, collect, None, own_log_probs=None, old_policy=contextlib.nullcontext, early=arriving
    )


def test_an_early_group_that_is_whole_takes_no_image_made_anew():
    """A trainer that died had the group made anew, and the last early image came after all."""
    _, rollouts = rollouts_of(WHOLE, [("a", 9)])
    rollouts.look()
    assert rollouts.group(0).rewards == (1.0, 1.0)
    assert rollouts.group(0).is_early
    assert sum(rollouts.made_by.values()) == 2
    assert not rollouts.look(), "that image has been received"


def test_a_group_that_is_made_anew_takes_no_early_image():
    anew = [("a", 9)]
    coordinator, rollouts = rollouts_of({("a", 8): (1,)}, anew)
    rollouts.look()
    coordinator.has(WHOLE)
    rollouts.look()
    assert not rollouts.is_complete(0)
    anew.append(("a", 8))
    rollouts.look()
    assert rollouts.group(0).rewards == (ANEW, ANEW)
    assert not rollouts.group(0).is_early


def test_early_images_count_before_their_group_is_whole():
    """Otherwise the schedule takes them for lost, and plans no help."""
    _, rollouts = rollouts_of({**WHOLE, ("b", 6): (1,)}, [])
    rollouts.look()
    assert [rollouts.count(number) for number in (0, 1, 2)] == [2, 1, 0]


def test_each_early_image_is_fetched_once_and_every_whole_early_group_counts_as_early():
    """An image has megabytes of latents. A group that counts as fresh is compared with the wrong weights."""
    coordinator, rollouts = rollouts_of({("a", 8): (1,)}, [])
    assert not rollouts.look()
    coordinator.has(WHOLE)
    assert rollouts.look()
    coordinator.has({**WHOLE, ("b", 7): (1,), ("b", 6): (1,)})
    assert rollouts.look()
    assert not rollouts.look()
    assert coordinator.asked == [(0, False), (1, False), (2, False)], "and none is asked for after the last group"
    assert rollouts.early == (0, 1)
    assert [rollouts.group(number).is_early for number in (0, 1)] == [True, True]
    assert sum(rollouts.made_by.values()) == 4


def test_the_trainer_waits_for_early_groups_once_nothing_else_is_missing():
    """It waits in one call at a time: while it waits for the one kind, the other may arrive."""
    coordinator, rollouts = rollouts_of({("a", 8): (1,)}, (anew := [("c", 1), ("c", 2), ("d", 1)]))
    rollouts.wait()
    rollouts.wait()
    assert ([wait for _, wait in coordinator.asked], coordinator.waits) == ([False, False], [True, True])
    anew.append(("d", 2))
    rollouts.look()
    rollouts.wait()
    coordinator.has({**WHOLE, ("b", 6): (1,), ("b", 7): (1,)})
    rollouts.wait()
    assert [wait for _, wait in coordinator.asked[2:]] == [False, True, True]
    assert coordinator.waits[2:] == [False, True, False], "an early group has arrived"
    assert rollouts.are_complete()


# --- values


MANIFEST = Manifest(
    run="r",
    lineage=1,
    batch=3,
    version=3,
    sampler="s",
    groups=tuple(Group(prompt=prompt, seeds=(1, 2)) for prompt in "abcd"),
    minibatches=((0, 1), (2, 3)),
)
DRAFT = Draft(
    run="r",
    lineage=1,
    batch=3,
    version=2,
    sampler="s",
    groups=(Group(prompt="a", seeds=(8, 9)), Group(prompt="b", seeds=(6, 7))),
)


def test_a_manifest_takes_the_drafted_groups_and_marks_them():
    merged = with_draft(MANIFEST, DRAFT)
    assert [group.seeds for group in merged.groups] == [(8, 9), (6, 7), (1, 2), (1, 2)]
    assert merged.early == (0, 1)
    assert [one.seed for one in merged.requests(Kind.EARLY)] == [8, 9, 6, 7]
    assert {one.prompt for one in merged.requests()} == {"c", "d"}
    assert merged.requests(Kind.EARLY) == DRAFT.requests()
    assert Manifest.from_dict(merged.to_dict()) == merged


@pytest.mark.parametrize(
    "other",
    [{"version": 1}, {"version": 3}, {"batch": 2}, {"lineage": 2}, {"sampler": "t"}],
    ids=lambda one: "-".join(one),
)
def test_a_draft_that_does_not_fit_is_left_out(other):
    assert with_draft(MANIFEST, Draft(**{**_fields(DRAFT), **other})) == MANIFEST


def test_a_draft_of_other_prompts_is_left_out():
    other = Draft(**{**_fields(DRAFT), "groups": (Group(prompt="z", seeds=(8, 9)),)})
    assert with_draft(MANIFEST, other) == MANIFEST


def test_the_share_is_an_upper_bound():
    assert [early_groups(0.5, groups) for groups in (1, 2, 3, 4, 5)] == [0, 1, 1, 2, 2]
    assert early_groups(0.0, 8) == 0


def test_a_pool_counts_finite_rewards_of_every_prompt():
    def found(prompt, seed, reward):
        request = RequestId(run="r", lineage=1, batch=3, prompt=prompt, seed=seed, kind=Kind.EXPLORE)
        return Finished(request=request, score=Score(reward=reward, metrics={}))

    results = [found("a", 1, 0.1), found("a", 2, 0.2), found("b", 1, 0.3), found("b", 2, float("nan"))]
    assert has_pool(results, ["a", "b"], 1)
    assert not has_pool(results, ["a", "b"], 2)
    assert has_pool(results, ["a"], 2)


def test_an_unreadable_draft_counts_as_absent(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}")
    store.put_draft(DRAFT)
    assert store.draft(1, 3) == DRAFT
    assert store.draft(2, 3) is None, "a draft of another lineage"
    store.put("drafts/l0001-i000003.json", b'{"run": "r", "lin')
    assert store.draft(1, 3) is None


def test_only_the_newest_drafts_are_kept(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}")
    for batch in range(1, 6):
        store.put_draft(Draft(**{**_fields(DRAFT), "batch": batch}))
    assert [batch for batch in range(1, 6) if store.draft(1, batch)] == [4, 5]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"algorithm": {"name": "diffusion-nft"}}, "compares with the weights that made a rollout"),
        ({"exploration": {"mode": "in-path", "budget": {"candidates": 144}}}, "exploration.mode is in-path"),
        ({"model": {"compile": "on"}}, "model.compile is on with model.weights: full"),
    ],
    ids=["diffusion-nft", "in-path", "compile"],
)
def test_a_job_that_may_not_have_early_groups_is_refused(change, text):
    with pytest.raises(ValueError, match=r"early.share is 0\.5, but") as error:
        EngineConfig.model_validate({**change, "early": {"share": 0.5}, "prompts": change.get("prompts", "digits")})
    assert text in str(error.value)


def test_at_most_half_of_a_batch_is_early():
    with pytest.raises(ValueError, match=r"less than or equal to 0\.5"):
        EarlyConfig(share=0.6)
