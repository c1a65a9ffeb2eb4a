"""A whole run in one process: it goes on exactly where it was, and ends for a reason."""

import hashlib
import json
import math
import shutil
import time
from itertools import combinations

import pytest
import torch
from safetensors.torch import save_file

from engine.algorithm.transaction import Transaction
from engine.algorithm_config import AlgorithmConfig
from engine.clock import ScaledClock
from engine.config import (
    CandidateBudget,
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ModelConfig,
    ProfileConfig,
    RuntimeConfig,
    SamplerConfig,
    TargetConfig,
    WindowConfig,
)
from engine.entrypoints.inproc import build_inproc
from engine.events import Progress
from engine.exploration.selection import variance
from engine.models.load import ReferencePolicy, load_adapter, trainable
from engine.models.weights import get_weights
from engine.prompts import held_out_digits, prompt_source
from engine.protocol.request import Kind, Score
from engine.storage.checkpoint import CheckpointStore, Superseded

pytestmark = pytest.mark.usefixtures("one_layer")

CANDIDATES = 8
TINY = EngineConfig(
    iterations=3,
    sampler=SamplerConfig(steps=3),
    algorithm=AlgorithmConfig(prompts_per_batch=2, images_per_prompt=2, updates_per_batch=2),
    exploration=ExplorationConfig(
        budget=CandidateBudget(candidates=CANDIDATES),
        wait="all",
        policy="uniform",
        profiles=(ProfileConfig(shape=4),),
    ),
    evaluation=EvaluationConfig(prompts=3, every=2, steps=2),
    runtime=RuntimeConfig(name="inproc", shape=2, lease_seconds=60.0, trainer_threads=1),
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def brightness(pictures, prompts):
    return [Score(reward=float(picture.mean()), metrics={"bright": 1.0}) for picture in pictures]


class Killed(BaseException):
    """Nothing in the engine catches it, as nothing catches SIGKILL."""


class Line:
    """The trainer's line to the coordinator: counts its calls, and is cut at a chosen one."""

    def __init__(self, inner, *, at=None, answered=False):
        self._inner, self._at, self._answered = inner, at, answered
        self.calls = []
        self.answers = []

    def call(self, head, blobs=None, *, wait=False):
        kind = head["task"]["requests"][0][5] if head["call"] == "submit" else head.get("kind")
        names = [head["call"], f"{head['call']}-{kind}"]
        self.calls += names
        mine = self._at in [(name, self.calls.count(name)) for name in names]
        if mine and not self._answered:
            raise Killed
        answer = self._inner.call(head, blobs, wait=wait)
        self.answers.append((head, answer[0]))
        if mine:
            raise Killed
        return answer


def build(config, folder, *, reward=brightness, workers=1, run="run", at=None, answered=False, judges=None):
    clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
    one = build_inproc(config, folder, run=run, clock=clock, reward=reward, workers=workers, judges_micro_usd=judges)
    line = Line(one.loop.coordinator.transport, at=at, answered=answered)
    one.loop.coordinator.transport = line
    one.loop.worker.calls.transport = line
    return one


def finish(config, folder, **more):
    return build(config, folder, **more).loop.run()


def progress(folder, kind):
    lines = (folder / "progress" / "trainer.jsonl").read_text().splitlines()
    found = [Progress.from_json(line) for line in lines]
    return [one.event for one in sorted(found, key=lambda one: (one.lineage, one.seq)) if kind == one.event.KIND]


def manifests(folder):
    return {event.iteration: event.manifest_digest for event in progress(folder, "iteration_done")}


def evaluated(folder):
    return {event.iteration: event.metrics for event in progress(folder, "evaluated")}


def newest(folder):
    return CheckpointStore(f"file://{folder}/store").newest()


def outcome(folder):
    """What a run leaves behind, without its name and lineage."""
    last = newest(folder)
    return last.iteration, dict(last.files), last.evaluations, last.std, manifests(folder), evaluated(folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert finish(TINY, folder).reason == "iterations"
    return outcome(folder)


# --- exactly where it was


@pytest.mark.parametrize(
    ("at", "answered"),
    [
        (("publish", 2), True),  # the average of iteration 0, to be evaluated
        pytest.param(("submit", 2), True, marks=pytest.mark.slow),
        (("finish", 2), False),
        pytest.param(("finish", 2), True, marks=pytest.mark.slow),
        pytest.param(("collect", 12), False, marks=pytest.mark.slow),
        (("collect-explore", 1), False),  # the checkpoint's files are written, and nobody knows the next batch
        pytest.param(("collect-explore", 2), True, marks=pytest.mark.slow),
        (("publish", 3), False),  # the checkpoint is written, nobody knows its weights yet
        pytest.param(("publish", 3), True, marks=pytest.mark.slow),
        (("withdraw", 5), False),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "answered" if value else "unheard",
)
def test_killed_at_a_call_and_started_again_it_ends_on_the_same_bits(tmp_path, straight, at, answered):
    with pytest.raises(Killed):
        build(TINY, tmp_path, at=at, answered=answered).loop.run()
    again = build(TINY, tmp_path)
    assert again.loop.run().reason == "iterations"
    assert outcome(tmp_path) == straight
    assert again.loop.state.lineage == 1
    assert again.coordinator.queue.finished == {}
    assert sum(again.coordinator.queue.wanted(kind) for kind in Kind) == 0


@pytest.mark.slow
@pytest.mark.parametrize("pictures", [3, 17])
def test_killed_while_a_picture_is_scored_it_ends_on_the_same_bits(tmp_path, straight, pictures):
    scored = 0

    def deadly(made, prompts):
        nonlocal scored
        scored += len(prompts)
        if scored > pictures:
            raise Killed
        return brightness(made, prompts)

    with pytest.raises(Killed):
        finish(TINY, tmp_path, reward=deadly)
    assert finish(TINY, tmp_path).reason == "iterations"
    assert outcome(tmp_path) == straight


@pytest.mark.slow
def test_killed_again_and_again_it_still_ends_on_the_same_bits(tmp_path, straight):
    for number in (9, 7, 5):
        with pytest.raises(Killed):
            finish(TINY, tmp_path, at=("collect", number))
    assert finish(TINY, tmp_path).reason == "iterations"
    assert outcome(tmp_path) == straight


@pytest.mark.parametrize("at", [("publish", 3), ("collect", 12)], ids=lambda at: f"{at[0]}-{at[1]}")
def test_a_lost_machine_goes_on_from_its_checkpoint_under_the_next_lineage(tmp_path, straight, at):
    old, new = tmp_path / "old", tmp_path / "new"
    with pytest.raises(Killed):
        finish(TINY, old, at=at)
    shutil.copytree(old / "store", new / "store")
    again = build(TINY, new)
    assert again.loop.run().reason == "iterations"
    assert again.loop.state.lineage == 2
    last = newest(new)
    assert (last.lineage, last.iteration, dict(last.files), last.evaluations) == (2, *straight[:3])
    assert {**manifests(old), **manifests(new)} == straight[4]


def test_a_trainer_whose_role_another_node_took_ends_without_a_word(tmp_path, straight):
    """As after a freeze: the node was given up, and its successor has begun from the checkpoint."""
    store = CheckpointStore((tmp_path / "store").absolute().as_uri(), "successor")
    claimed = []

    def claims(made, prompts):
        if not claimed and store.names():
            claimed.append(store.claim_lineage())
        return brightness(made, prompts)

    with pytest.raises(Superseded, match="claimed by successor"):
        finish(TINY, tmp_path, reward=claims)
    assert claimed == [2]
    assert [name[:5] for name in store.names()] == ["l0001"]
    assert store.newest().iteration == 1, "what was trained after the claim was not saved"
    assert not progress(tmp_path, "engine_finished")
    with pytest.raises(Superseded):  # its agent starts the process again
        finish(TINY, tmp_path)


def test_with_auto_a_run_of_full_weights_has_few_checkpoints_and_resumes_to_the_same_bits(tmp_path):
    """A life of a year against checkpoints of milliseconds: only the first batch of a start has one, and the last."""
    config = TINY.model_copy(
        update={
            "model": TINY.model.model_copy(update={"weights": "full"}),
            "checkpoint": CheckpointConfig(every="auto"),
            "iterations": 4,
        }
    )
    straight = tmp_path / "straight"
    assert finish(config, straight).reason == "iterations"
    saved = [event.iteration for event in progress(straight, "checkpoint_saved")]
    assert saved[0] == 1
    assert saved[-1] == 4
    with pytest.raises(Killed):
        finish(config, tmp_path / "killed", at=("collect", 12))
    assert finish(config, tmp_path / "killed").reason == "iterations"
    assert dict(newest(tmp_path / "killed").files) == dict(newest(straight).files)


def test_with_a_checkpoint_every_other_batch_the_lost_batch_is_trained_again_under_a_new_lineage(tmp_path, straight):
    config = TINY.model_copy(update={"checkpoint": CheckpointConfig(every=2)})
    with pytest.raises(Killed):
        finish(config, tmp_path, at=("collect", 12))
    again = build(config, tmp_path)
    again.loop.run()
    assert dict(newest(tmp_path).files) == straight[1]
    assert manifests(tmp_path) == straight[4]


def test_a_run_that_is_finished_does_nothing_more(tmp_path, straight):
    finish(TINY, tmp_path)
    assert finish(TINY, tmp_path).reason == "iterations"
    assert outcome(tmp_path) == straight


def test_name_and_number_of_spot_workers_change_no_bit(tmp_path, straight):
    assert finish(TINY, tmp_path, workers=3, run="another").reason == "iterations"
    assert outcome(tmp_path) == straight


# --- other algorithms, and work beside the batch


ALGORITHMS = {
    "diffusion-nft": {},
    "diffusion-nft-averaged": {"diffusion_nft": {"old_policy_decay": "gradual"}},
    "awm": {},
    "grpo-guard": {"grpo_guard": {"clip_range": 1e-3}},
    "flow-dppo": {"flow_dppo": {"kl_limit": 1e-3}},
}


def with_algorithm(key):
    job = TINY.model_dump(mode="json", by_alias=True)
    job["algorithm"] |= {"name": key.removesuffix("-averaged"), **ALGORITHMS[key]}
    if key.startswith(("diffusion-nft", "awm")):
        job["sampler"].pop("noise_level")
    return EngineConfig.model_validate(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", [key if key == "diffusion-nft-averaged" else pytest.param(key, marks=pytest.mark.slow) for key in ALGORITHMS]
)
def test_every_algorithm_killed_between_its_updates_ends_on_the_same_bits(tmp_path, monkeypatch, key):
    config = with_algorithm(key)
    assert finish(config, tmp_path / "straight").reason == "iterations"
    updates = 0
    commit = Transaction.commit

    def deadly(transaction):
        nonlocal updates
        health = commit(transaction)
        updates += 1
        if updates in (1, 4):  # after the first of two optimiser steps; then in the middle of the next batch
            raise Killed
        return health

    monkeypatch.setattr(Transaction, "commit", deadly)
    for _ in range(2):
        with pytest.raises(Killed):
            finish(config, tmp_path / "killed")
    assert finish(config, tmp_path / "killed").reason == "iterations"
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")


def test_a_checkpoint_without_an_old_policy_resumes_with_a_warning(tmp_path):
    first = with_algorithm("diffusion-nft").model_copy(update={"iterations": 2})
    finish(first, tmp_path)
    assert finish(with_algorithm("diffusion-nft-averaged"), tmp_path).reason == "iterations"
    texts = [event.text for event in progress(tmp_path, "warned")]
    assert any("checkpoint 2 has no old policy" in text for text in texts)
    assert "old" in newest(tmp_path).files


def test_the_averaged_old_policy_makes_the_rollouts(tmp_path):
    run = build(with_algorithm("diffusion-nft-averaged"), tmp_path)
    run.loop.run()
    published = run.workers[0].parameters
    trained = run.loop.model.parameters
    assert any(not torch.equal(published[name], trained[name]) for name in trained)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_beside_the_next_batch_has_the_figures_of_one_that_everybody_waits_for(tmp_path, workers):
    """Each evaluation uses the weights of its own version, although the trainer trains the next version meanwhile."""
    plain = TINY.model_copy(update={"exploration": ExplorationConfig(mode="none")})
    waits = plain.model_copy(update={"evaluation": TINY.evaluation.model_copy(update={"wait": True, "every": 1})})
    beside = plain.model_copy(update={"evaluation": TINY.evaluation.model_copy(update={"every": 1})})
    assert finish(waits, tmp_path / "waits", workers=workers).reason == "iterations"
    assert finish(beside, tmp_path / "beside", workers=workers).reason == "iterations"
    assert evaluated(tmp_path / "beside") == evaluated(tmp_path / "waits")
    assert len(evaluated(tmp_path / "beside")) == TINY.iterations + 1


def test_a_reached_target_keeps_the_evaluated_weights_as_the_newest(tmp_path):
    target = TargetConfig(metric="bright", value=1.0, evaluations=2)
    evaluation = TINY.evaluation.model_copy(update={"every": 1})
    finish(TINY.model_copy(update={"target": target, "evaluation": evaluation}), tmp_path)
    assert newest(tmp_path).iteration == max(evaluated(tmp_path)) == 1


def test_a_budget_that_ends_with_training_is_not_waited_for(tmp_path):
    """Without a spot worker no candidate is ever tried. With `wait: idle` the run goes on at once."""
    config = TINY.model_copy(update={"exploration": TINY.exploration.model_copy(update={"wait": "idle"})})
    run = build(config, tmp_path, workers=0)
    begun = time.monotonic()
    assert run.loop.run().reason == "iterations"
    assert time.monotonic() - begun < config.exploration.budget.patience_seconds
    assert all(event.explored == 0 for event in progress(tmp_path, "iteration_done"))


# --- why it ends


def test_three_groups_in_a_row_that_are_not_finite_end_the_run_and_the_last_good_checkpoint_stays(tmp_path):
    good = {*held_out_digits(), *prompt_source(TINY, None).batch(0)}

    def sick(pictures, prompts):
        scores = brightness(pictures, prompts)
        return [s if p in good else Score(reward=math.nan, metrics={}) for s, p in zip(scores, prompts, strict=True)]

    finished = finish(TINY, tmp_path, reward=sick)
    assert (finished.reason, finished.iteration) == ("unhealthy", 2)
    assert "checkpoint is iteration 2" in finished.text
    last = newest(tmp_path)
    assert (last.iteration, last.skipped_in_a_row) == (2, 2)
    assert sum("not finite" in event.text for event in progress(tmp_path, "warned")) == 3


def test_gradients_that_are_not_finite_end_the_run_too(tmp_path):
    run = build(TINY, tmp_path)
    next(iter(run.loop.model.parameters.values())).register_hook(lambda gradient: gradient * math.inf)
    finished = run.loop.run()
    assert (finished.reason, finished.iteration) == ("unhealthy", 1)


def test_told_to_stop_it_stops_and_says_why(tmp_path):
    scored = 0

    def budget(pictures, prompts):
        nonlocal scored
        scored += 1
        if scored == 6:
            run.coordinator.stop("the budget is used up")
        return brightness(pictures, prompts)

    run = build(TINY, tmp_path, reward=budget)
    finished = run.loop.run()
    assert (finished.reason, finished.text) == ("stopped", "the budget is used up")
    assert progress(tmp_path, "engine_finished") == [finished]


def test_a_target_that_is_held_ends_the_run(tmp_path):
    target = TargetConfig(metric="bright", value=1.0, evaluations=2)
    evaluation = TINY.evaluation.model_copy(update={"every": 1})
    finished = finish(TINY.model_copy(update={"target": target, "evaluation": evaluation}), tmp_path)
    assert (finished.reason, finished.iteration) == ("target", 1)
    assert [event.iteration for event in progress(tmp_path, "target_reached")] == [1]


def test_evaluations_report_the_drift_from_the_pictures_that_the_run_began_with(straight):
    *_, metrics = straight
    assert metrics[0]["drift"] == 0.0
    assert all(0.0 < metrics[iteration]["drift"] < 0.1 for iteration in metrics if iteration > 0)


def test_a_target_that_no_reward_reports_ends_the_run_at_once(tmp_path):
    target = TargetConfig(metric="beauty", value=1.0)
    finished = finish(TINY.model_copy(update={"target": target}), tmp_path)
    assert (finished.reason, finished.iteration) == ("unhealthy", 0)
    assert "'beauty'" in finished.text
    assert "'bright', 'reward'" in finished.text


def test_a_reward_that_always_fails_ends_the_run(tmp_path):
    def broken(pictures, prompts):
        raise TypeError("no such thing")

    finished = finish(TINY, tmp_path, reward=broken)
    assert finished.reason == "unhealthy"
    assert "TypeError: no such thing" in finished.text


# --- exploration


def test_the_seeds_that_are_trained_are_those_of_largest_variance(tmp_path):
    run = build(TINY, tmp_path)
    run.loop.run()
    line = run.loop.coordinator.transport
    explored = [r for head, a in line.answers if head.get("kind") == "explore" for r in a["results"]]
    assert len(explored) == CANDIDATES * (TINY.iterations - 1)
    trained = {}
    for head, _ in line.answers:
        if head["call"] == "submit":
            for _run, _lineage, batch, prompt, seed, kind in head["task"]["requests"]:
                if kind == "train" and batch > 0:
                    trained.setdefault((batch, prompt), []).append(seed)
    assert len(trained) == 2 * (TINY.iterations - 1)
    for (batch, prompt), seeds in trained.items():
        rewards = {r["request"][4]: r["reward"] for r in explored if r["request"][2:4] == [batch, prompt]}
        assert len(rewards) == CANDIDATES // 2
        best = max(variance(pair) for pair in combinations(rewards.values(), 2))
        assert variance([rewards[seed] for seed in seeds]) == best


def test_the_checkpoints_files_are_written_while_spot_nodes_explore(tmp_path):
    run = build(TINY, tmp_path, workers=1)
    store = run.loop.context.store
    order = []

    class Watched(CheckpointStore):
        def put(self, path, data):
            order.append(path.rsplit("/", 1)[1])
            store.put(path, data)

        def take_over(self, path, file):
            order.append(path.rsplit("/", 1)[1])
            store.take_over(path, file)

    object.__setattr__(run.loop.context, "store", Watched(f"file://{tmp_path}/store"))
    collect = run.loop.coordinator.collect

    def watched(kind, *rest, **more):
        order.append(str(kind))
        return collect(kind, *rest, **more)

    run.loop.coordinator.collect = watched
    assert run.loop.run().reason == "iterations"
    first = order[: order.index("manifest.json") + 1]
    asked = first.index("explore")
    assert {"weights.safetensors", "ema.safetensors", "optimizer.safetensors"} <= set(first[:asked])
    assert "train" not in first[first.index("weights.safetensors") :]


def test_in_path_the_best_of_all_candidates_are_trained_with_the_weights_that_made_them(tmp_path):
    exploration = TINY.exploration.model_copy(update={"mode": "in-path"})
    run = build(TINY.model_copy(update={"exploration": exploration}), tmp_path)
    assert run.loop.run().reason == "iterations"
    line = run.loop.coordinator.transport
    rewards = {}
    for head, answer in line.answers:
        if head.get("kind") == "train":
            for result in answer["results"]:
                _, _, batch, prompt, seed, _ = result["request"]
                rewards.setdefault((batch, prompt), {})[seed] = result["reward"]
    assert len(rewards) == 2 * TINY.iterations
    assert {len(found) for found in rewards.values()} == {CANDIDATES // 2}
    spread = {event.iteration: event.group_std_mean for event in progress(tmp_path, "iteration_done")}
    for batch in range(TINY.iterations):
        best = [
            max(variance(pair) for pair in combinations(found.values(), 2)) ** 0.5
            for (one, _), found in rewards.items()
            if one == batch
        ]
        assert spread[batch] == pytest.approx(sum(best) / len(best), rel=1e-5)
    assert not any(head["call"] == "explore" for head, _ in line.answers)


def test_a_control_slice_is_rolled_out_and_not_trained_and_the_ranking_is_told(tmp_path):
    run = build(TINY.model_copy(update={"iterations": 4}), tmp_path)
    run.loop.run()
    line = run.loop.coordinator.transport
    wanted = {"train": set(), "control": set(), "explore": set()}
    for _head, answer in line.answers:
        for result in answer.get("results", ()):
            _, _, batch, prompt, seed, kind = result["request"]
            wanted.get(kind, set()).add((batch, prompt, seed))
    assert wanted["control"]
    assert wanted["control"] <= wanted["explore"]
    assert not wanted["control"] & wanted["train"]
    told = progress(tmp_path, "ranked")
    assert [event.iteration for event in told] == [1, 2, 3]
    assert [event.control for event in told[:2]] == [1, 1]  # beside the last one nobody explores, and nobody waits
    assert told[-1].spearman > 0.5  # brightness hardly changes in four steps
    assert told[-1].explores_on


def test_without_a_spot_node_a_counted_budget_is_not_waited_for_longer_than_its_patience(tmp_path):
    budget = TINY.exploration.budget.model_copy(update={"patience_seconds": 0.05})
    config = TINY.model_copy(update={"exploration": TINY.exploration.model_copy(update={"budget": budget})})
    assert finish(config, tmp_path, workers=0).reason == "iterations"
    assert {event.explored for event in progress(tmp_path, "iteration_done")} == {0}
    batch = config.algorithm.prompts_per_batch * config.algorithm.images_per_prompt
    assert {sum(event.made_by.values()) for event in progress(tmp_path, "iteration_done")} == {batch}
    assert any("no spot node to explore" in event.text for event in progress(tmp_path, "warned"))


def test_candidates_that_cannot_be_scored_are_given_up_and_the_run_goes_on(tmp_path):
    cursed = prompt_source(TINY, None).batch(1)[0]

    def fails_to_explore(pictures, prompts):
        if cursed in prompts and not progress(tmp_path, "iteration_done"):
            raise TypeError("a picture that cannot be read")
        return brightness(pictures, prompts)

    config = TINY.model_copy(update={"iterations": 2})
    assert finish(config, tmp_path, reward=fails_to_explore).reason == "iterations"
    explored = {event.iteration: event.explored for event in progress(tmp_path, "iteration_done")}
    assert explored[0] == TINY.exploration.budget.candidates // TINY.algorithm.prompts_per_batch


# --- every way to train


WAYS = {
    "std-batch": {"algorithm": {"std": "batch"}},
    "std-ema": {"algorithm": {"std": "ema"}},
    "kl": {"algorithm": {"kl_beta": 0.1}},
    "lora": {"model": ModelConfig(weights="lora", lora_rank=2, lora_alpha=4)},
    "lora-kl": {"model": ModelConfig(weights="lora", lora_rank=2, lora_alpha=4), "algorithm": {"kl_beta": 0.1}},
    "cps": {"sampler": SamplerConfig(steps=3, name="cps")},
    "window": {"sampler": SamplerConfig(steps=4, window=WindowConfig(size=1))},
    "arrival": {"algorithm": {"order": "arrival"}},
    "exact": {"algorithm": {"order": "exact"}},
    "idle-seconds": {"exploration": ExplorationConfig(profiles=(ProfileConfig(shape=4),))},
    "bayes": {"exploration": TINY.exploration.model_copy(update={"policy": "bayes"})},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_moves_the_weights_and_stays_sound(tmp_path, way):
    changes = {**WAYS[way], "iterations": 2}
    if "algorithm" in changes:
        changes["algorithm"] = TINY.algorithm.model_copy(update=changes["algorithm"])
    run = build(TINY.model_copy(update=changes), tmp_path)
    before = {name: value.detach().clone() for name, value in run.loop.model.parameters.items()}
    assert run.loop.run().reason == "iterations"
    assert any(not torch.equal(value, before[name]) for name, value in run.loop.model.parameters.items())
    for event in progress(tmp_path, "iteration_done"):
        assert all(math.isfinite(value) for value in event.health.values())
        assert event.health["skipped_groups"] == 0
        assert event.health["gradient_norm"] > 0
        assert event.health["dlogp_before_update"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("way", ["std-ema", "lora-kl", "window", "exact"])
def test_every_way_to_train_goes_on_exactly_where_it_was(tmp_path, way):
    changes = {**WAYS[way], "iterations": 2}
    if "algorithm" in changes:
        changes["algorithm"] = TINY.algorithm.model_copy(update=changes["algorithm"])
    config = TINY.model_copy(update=changes)
    finish(config, tmp_path / "straight")
    with pytest.raises(Killed):
        finish(config, tmp_path / "killed", at=("publish", 3))
    finish(config, tmp_path / "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")


# --- start weights


def a_started_run(folder, weights, **algorithm):
    """A run of `TINY` with these start weights in its store, before its first step."""
    store = CheckpointStore(f"file://{folder}/store")
    store.put("start/weights.safetensors", weights)
    digest = hashlib.sha256(weights).hexdigest()
    store.put("start/manifest.json", json.dumps({"sha256": digest, "text": "first, iteration 3"}).encode())
    model = ModelConfig(start="first", **algorithm.pop("model", {}))
    config = TINY.model_copy(
        update={"iterations": 1, "model": model, "algorithm": TINY.algorithm.model_copy(update=algorithm)}
    )
    return build(config, folder)


@pytest.mark.parametrize("model", [{}, {"weights": "lora", "lora_rank": 2}])
def test_start_weights_are_those_before_the_first_step_bit_for_bit(tmp_path, model):
    trained = trainable(load_adapter(ModelConfig(**model)))
    with torch.no_grad():
        for value in trained.values():
            value += 0.01
    weights = get_weights(trained)
    one = a_started_run(tmp_path, weights, kl_beta=0.1, model=model)
    assert get_weights(one.loop.model.parameters) == weights
    assert all(torch.equal(one.loop.model.average.tensors[name], value) for name, value in trained.items())
    one.loop.begin()
    assert progress(tmp_path, "engine_started")[0].started_from == "first, iteration 3"


@pytest.mark.parametrize("model", [{}, {"weights": "lora", "lora_rank": 2}])
def test_the_kl_divergence_of_a_started_run_is_one_from_its_start_weights(tmp_path, model):
    adapter = load_adapter(ModelConfig(**model))
    parameters = trainable(adapter)
    with torch.no_grad():
        for value in parameters.values():
            value += 0.01
    latents, prompt = torch.randn(1, *adapter.latent_shape()), adapter.encode(["1234"])
    time_of = torch.tensor([0.5])
    with torch.no_grad():
        start = adapter.velocity(latents, time_of, prompt, 1.0)
        reference = ReferencePolicy.of(adapter, is_started=True)
        for value in parameters.values():
            value += 0.01
        with reference.active():
            assert torch.equal(adapter.velocity(latents, time_of, prompt, 1.0), start)
        assert not torch.equal(adapter.velocity(latents, time_of, prompt, 1.0), start)


@pytest.mark.parametrize("use", ["merge", "continue"])
def test_a_run_with_a_lora_of_another_program_goes_on_exactly_where_it_was(tmp_path, use):
    layer, generator = "transformer_blocks.0.attn.to_q", torch.Generator().manual_seed(1)
    factors = {"A": torch.randn(2, 96, generator=generator), "B": torch.randn(96, 2, generator=generator)}
    tensors = {f"diffusion_model.{layer}.lora_{part}.weight": factor / 8 for part, factor in factors.items()}
    save_file(tensors, tmp_path / "their.safetensors")
    lora = {"lora": str(tmp_path / "their.safetensors"), "lora_use": use}
    model = ModelConfig(weights="lora", lora_rank=2, lora_alpha=4, **lora)
    algorithm = TINY.algorithm.model_copy(update={"kl_beta": 0.1})
    config = TINY.model_copy(update={"iterations": 2, "model": model, "algorithm": algorithm})
    finish(config, tmp_path / "straight")
    with pytest.raises(Killed):
        finish(config, tmp_path / "killed", at=("publish", 3))
    finish(config, tmp_path / "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")
    plain = config.model_copy(update={"model": ModelConfig(weights="lora", lora_rank=2, lora_alpha=4)})
    finish(plain, tmp_path / "plain")
    assert evaluated(tmp_path / "plain")[0] != evaluated(tmp_path / "straight")[0]
    assert progress(tmp_path / "straight", "engine_started")[0].started_from.startswith("their.safetensors, ")


# --- few prompts on the way, all before a figure counts


def by_prompt(values):
    """A reward that gives each held-out prompt what `values` names for it, and every other prompt its brightness."""

    def reward(pictures, prompts):
        given = dict(zip(held_out_digits(), values, strict=False))
        return [
            Score(reward=float(picture.mean()), metrics={"right": given.get(prompt, 0.0)})
            for picture, prompt in zip(pictures, prompts, strict=True)
        ]

    return reward


def some_on_the_way(folder, values, value, iterations):
    config = TINY.model_copy(
        update={
            "iterations": iterations,
            "evaluation": EvaluationConfig(prompts=4, on_the_way=1, every=1, steps=2),
            "target": TargetConfig(metric="right", value=value, evaluations=1),
        }
    )
    finished = finish(config, folder, reward=by_prompt(values))
    return finished, [
        (event.iteration, event.prompts, event.metrics["right"]) for event in progress(folder, "evaluated")
    ]


def test_a_target_that_few_prompts_reach_and_all_do_not_is_not_reached(tmp_path):
    finished, told = some_on_the_way(tmp_path, [1.0, 0.0, 0.0, 0.0], value=0.5, iterations=2)
    assert finished.reason == "iterations"
    # Iteration 1: one prompt says 1, which would reach the target; all four are asked, and their word counts.
    assert told == [(0, 4, 0.25), (1, 1, 1.0), (1, 4, 0.25), (2, 4, 0.25)]
    assert not progress(tmp_path, "target_reached")
    assert [metrics["right"] for _, metrics in newest(tmp_path).evaluations] == [0.25, 0.25]


def test_few_prompts_are_enough_while_the_target_is_far(tmp_path):
    _, told = some_on_the_way(tmp_path, [0.0, 1.0, 0.0, 0.0], value=0.5, iterations=2)
    assert told == [(0, 4, 0.25), (1, 1, 0.0), (2, 4, 0.25)]


def test_a_target_is_reached_by_all_held_out_prompts(tmp_path):
    finished, told = some_on_the_way(tmp_path, [1.0, 1.0, 1.0, 0.0], value=0.7, iterations=2)
    assert (finished.reason, told) == ("target", [(0, 4, 0.75)])


def test_more_prompts_on_the_way_than_there_are_is_refused():
    with pytest.raises(ValueError, match="on_the_way is 5, and prompts 4; use at most as many"):
        EvaluationConfig(prompts=4, on_the_way=5)
