"""The shapes task: its prompts, renderer, checker and shipped model."""

import random
from collections import Counter
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, EvaluationConfig, ModelConfig, RewardConfig, SamplerConfig
from engine.diffusion.noise import noise_rows
from engine.diffusion.sampler import denoise, evaluation_plan, rollout_plan
from engine.entrypoints.preflight import JobUnfit, check
from engine.models.load import load_adapter, trainable
from engine.models.shapes import (
    BASE,
    ShapesAdapter,
    WordText,
    build_transformer,
    load_shapes,
    patchify,
    render,
    unpatchify,
)
from engine.prompts import held_out_shapes, prompt_source
from engine.protocol.request import Stream, seed_of
from engine.rewards.shapes import Seen, ShapesReward, detect, relations, similarity
from engine.shapes import COLOURS, KINDS, RELATIONS, VOCABULARY, Clause, Request, Task, coverage, parse, requests
from engine.tasks.pretrain_shapes import MIX, evaluate, noisy_caption, pretrain, training_requests
from engine.tasks.pretraining import save_parts
from launcher.job.load import load_job


def sample(per_task, seed=0):
    """Yield requests of every task, with a random generator to draw them."""
    rng = random.Random(seed)
    by_task = {task: [request for request in requests() if request.task is task] for task in Task}
    return [rng.choice(by_task[task]) for task in Task for _ in range(per_task)], rng


def images_of(wanted, rng):
    return torch.from_numpy(np.stack([render(request, rng) for request in wanted]))


def exact(images, prompts):
    return [score.reward for score in ShapesReward("shapes_strict")(images, prompts)]


def one(image, prompt):
    (score,) = ShapesReward("shapes")(torch.from_numpy(image)[None], [prompt])
    return score


# --- prompts


def test_a_prompt_and_its_request_map_one_to_one():
    assert len({request.prompt for request in requests()}) == len(requests()) == 2752
    assert all(parse(request.prompt) == request for request in requests())


@pytest.mark.parametrize(
    ("prompt", "request_"),
    [
        ("a cross", Request(task=Task.SINGLE, clauses=(Clause(kind="cross"),))),
        ("a circle and a square", Request(task=Task.TWO, clauses=(Clause(kind="circle"), Clause(kind="square")))),
        ("two red squares", Request(task=Task.COUNTING, clauses=(Clause(kind="square", colour="red", count=2),))),
        ("three crosses", Request(task=Task.COUNTING, clauses=(Clause(kind="cross", count=3),))),
        (
            "two circles and a cross",
            Request(task=Task.COUNTING, clauses=(Clause(kind="circle", count=2), Clause(kind="cross"))),
        ),
        ("a blue triangle", Request(task=Task.COLOURS, clauses=(Clause(kind="triangle", colour="blue"),))),
        (
            "a circle and a red square",
            Request(task=Task.TWO, clauses=(Clause(kind="circle"), Clause(kind="square", colour="red"))),
        ),
        (
            "a red circle and a blue square",
            Request(
                task=Task.ATTRIBUTION,
                clauses=(Clause(kind="circle", colour="red"), Clause(kind="square", colour="blue")),
            ),
        ),
        (
            "a green circle left of a blue triangle",
            Request(
                task=Task.POSITION,
                clauses=(Clause(kind="circle", colour="green"), Clause(kind="triangle", colour="blue")),
                relation="left of",
            ),
        ),
    ],
)
def test_prompts_read_naturally(prompt, request_):
    assert parse(prompt) == request_
    assert request_.prompt == prompt


@pytest.mark.parametrize(
    "prompt",
    [
        *("", "a Cross", "a cross ", "two square", "a red circle and a red square", "a circle and a circle", "1234"),
        *("a red circle above a red square", "three circles and two squares", "two red circles and a square"),
    ],
)
def test_any_other_text_is_refused_with_examples_and_the_vocabulary(prompt):
    with pytest.raises(ValueError, match=r"is none of the 2752 of shapes.*`two red squares`.*triangles, crosses"):
        parse(prompt)


def source(per_batch=12, seed=0, evaluated=512):
    return prompt_source(
        EngineConfig(
            seed=seed,
            model=ModelConfig(name="shapes"),
            prompts="shapes",
            algorithm=AlgorithmConfig(prompts_per_batch=per_batch, updates_per_batch=1),
            evaluation=EvaluationConfig(prompts=evaluated),
        ),
        None,
    )


@given(st.integers(0, 2**40), st.integers(0, 10_000), st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_prompts_of_a_batch_are_distinct_trained_and_reproducible(seed, batch, per_batch):
    prompts = source(per_batch, seed).batch(batch)
    assert len(prompts) == len(set(prompts)) == per_batch
    assert all(parse(prompt) for prompt in prompts)
    assert not set(prompts) & set(held_out_shapes())
    assert prompts == source(per_batch, seed).batch(batch)


def test_other_batches_and_other_runs_have_other_shapes():
    assert source().batch(7) != source().batch(8)
    assert source().batch(7) != source(seed=1).batch(7)


@pytest.mark.parametrize("per_batch", [5, 12, 24])
def test_the_six_tasks_come_in_a_fixed_mix_while_each_has_prompts(per_batch):
    """Only two single prompts are trained and a batch has no repeats, so a batch above 24 has less than their share."""
    prompts = [prompt for batch in range(12) for prompt in source(per_batch).batch(batch)]
    seen = Counter(parse(prompt).task for prompt in prompts)
    share = len(prompts) / 12
    assert seen == {
        Task.SINGLE: share,
        Task.TWO: 2 * share,
        Task.COUNTING: 3 * share,
        Task.COLOURS: 2 * share,
        Task.POSITION: 2 * share,
        Task.ATTRIBUTION: 2 * share,
    }


def test_a_batch_may_hold_every_trained_prompt():
    prompts = source(2240).batch(0)
    assert sorted(prompts) == sorted({request.prompt for request in requests()} - set(held_out_shapes()))
    with pytest.raises(ValueError, match="prompts_per_batch is 2241; shapes has 2240"):
        source(2241)


def test_the_held_out_shapes_never_change():
    assert held_out_shapes()[:3] == [
        "four purple circles",
        "a triangle below a red circle",
        "a green cross and a purple circle",
    ]
    assert len(set(held_out_shapes())) == 512
    assert source(evaluated=7).held_out() == held_out_shapes()[:7]
    with pytest.raises(ValueError, match=r"evaluation\.prompts is 513; shapes has 512"):
        source(evaluated=513)


def test_no_task_is_more_than_about_a_third_of_what_is_evaluated():
    """At most half of a task's prompts and 174 are held out; four tasks have few prompts and none is repeated."""
    assert Counter(parse(prompt).task for prompt in held_out_shapes()) == {
        Task.SINGLE: 2,
        Task.TWO: 78,
        Task.COUNTING: 72,
        Task.COLOURS: 12,
        Task.POSITION: 174,
        Task.ATTRIBUTION: 174,
    }


def test_every_task_is_evaluated_from_the_first_dozen_on():
    assert {parse(prompt).task for prompt in held_out_shapes()[:12]} == set(Task)


@pytest.mark.parametrize(("model", "prompts"), [("shapes", "digits"), ("digits-ocr", "shapes")])
def test_prompts_that_the_model_cannot_read_are_refused(model, prompts):
    with pytest.raises(ValueError, match=f"prompts is {prompts}, which {model} cannot read"):
        EngineConfig(model=ModelConfig(name=model), prompts=prompts)


# --- renderer and checker


def test_every_clean_image_fits_its_request():
    wanted, rng = sample(40)
    assert exact(images_of(wanted, rng), [request.prompt for request in wanted]) == [1.0] * 240


def test_noise_of_a_fifth_is_tolerated():
    wanted, rng = sample(40)
    images = images_of(wanted, rng)
    noisy = images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert np.mean(exact(noisy, [request.prompt for request in wanted])) >= 0.95


@given(st.sampled_from(requests()), st.sampled_from(requests()), st.integers(0, 2**30))
@example(parse("a black triangle left of a green cross"), parse("a triangle below a green cross"), 0)
@settings(max_examples=300, deadline=None)
def test_an_image_is_accepted_only_for_requests_that_it_fits(drawn, wanted_request, seed):
    """The expected content comes from the drawing; only the rule of position is the checker's."""
    rng = random.Random(seed)
    image = render(drawn, rng)
    seen = detect(image.transpose(1, 2, 0))
    shown = Counter((each.kind, each.colour) for each in seen)
    for clause in drawn.clauses:
        assert sum(shown[clause.kind, c] for c in COLOURS if clause.colour in (None, c)) == clause.count
    fits = len(seen) == sum(clause.count for clause in wanted_request.clauses) and all(
        sum(shown[clause.kind, c] for c in COLOURS if clause.colour in (None, c)) == clause.count
        for clause in wanted_request.clauses
    )
    if fits and wanted_request.relation is not None:
        first, second = (next(each for each in seen if each.kind == clause.kind) for clause in wanted_request.clauses)
        fits = wanted_request.relation in relations(first, second)
    assert one(image, wanted_request.prompt).metrics["exact_match"] == fits


def wrong_ones():
    """Yield (request, a request of the same task that its image does not fit)."""
    square, circle = Clause(kind="square", colour="red"), Clause(kind="circle", colour="blue")
    plain_circle = Clause(kind="circle")
    for task, clauses, relation, other in [
        (Task.SINGLE, (Clause(kind="square"),), None, "a circle"),
        (Task.TWO, (Clause(kind="square"), Clause(kind="circle")), None, "a square and a cross"),
        (Task.COUNTING, (replace(square, count=3),), None, "two red squares"),
        (Task.COUNTING, (replace(square, count=3),), None, "four red squares"),
        (Task.COUNTING, (replace(square, count=3),), None, "three blue squares"),
        (Task.COLOURS, (square,), None, "a blue square"),
        (Task.COUNTING, (Clause(kind="square", count=2), plain_circle), None, "two circles and a square"),
        (Task.COUNTING, (Clause(kind="square", count=2), plain_circle), None, "three squares and a circle"),
        (Task.TWO, (square, plain_circle), None, "a blue square and a circle"),
        (Task.POSITION, (square, plain_circle), "left of", "a red square right of a circle"),
        (Task.POSITION, (square, plain_circle), "left of", "a blue square left of a circle"),
        (Task.POSITION, (square, circle), "left of", "a red square right of a blue circle"),
        (Task.POSITION, (square, circle), "above", "a blue circle above a red square"),
        (Task.ATTRIBUTION, (square, circle), None, "a blue square and a red circle"),
    ]:
        yield pytest.param(Request(task=task, clauses=clauses, relation=relation), other, id=other)


@pytest.mark.parametrize(("drawn", "other"), list(wrong_ones()))
def test_a_wrong_image_of_every_task_is_refused(drawn, other):
    for seed in range(10):
        image = render(drawn, random.Random(seed))
        for noise in (0.0, 0.2):  # tolerated noise must not make a wrong image right
            noisy = image + noise * noise_rows([seed], 0, (3, 36, 36))[0].numpy()
            score = one(noisy.astype(np.float32), other)
            assert score.metrics["exact_match"] == 0.0
            assert score.reward == score.metrics["similarity"] < 1.0


@pytest.mark.parametrize(
    ("drawn", "wanted_request", "share"),
    [
        ("two red squares", "three red squares", 2 / 3),
        ("four red squares", "three red squares", 3 / 4),
        ("three blue squares", "three red squares", 1 / 2),  # the kind, not the colour
        ("a red circle", "a red square", 0.0),
        ("a red square", "a red square and a blue circle", 1 / 2),
        ("a blue square and a red circle", "a red square and a blue circle", 1 / 2),
        ("a red square right of a circle", "a red square left of a circle", 3 / 4),
        ("a red square right of a blue circle", "a red square left of a blue circle", 4 / 5),
        ("three squares and a circle", "two squares and a circle", 3 / 4),  # one object too many
        ("two squares and a circle", "two circles and a square", 3 / 4),  # one circle of two
        ("a circle and a square", "a circle", 1 / 2),  # one object more than requested
    ],
)
def test_the_graded_score_is_the_fraction_of_the_request_that_is_shown(drawn, wanted_request, share):
    request = parse(drawn)
    for seed in range(200):
        rng = random.Random(seed)
        image = render(request, rng)
        seen = detect(image.transpose(1, 2, 0))
        # On a diagonal another relation would hold too, so the relation must be unambiguous.
        if request.relation is None or abs(seen[0].y - seen[1].y) < 1:
            assert one(image, wanted_request).reward == pytest.approx(share)
            return
    pytest.fail("no picture without a diagonal")


def test_an_empty_image_shows_nothing():
    assert one(np.ones((3, 36, 36), dtype=np.float32), "a circle").reward == 0.0


def test_a_small_speck_is_ignored_and_a_large_blot_is_not():
    image = render(parse("a red circle"), random.Random(0))
    free = image.copy()
    corner = next((r, c) for r in (1, 19) for c in (1, 19) if (image[:, r : r + 16, c : c + 16] == 1.0).all())
    for side, share in [(3, 1.0), (6, 0.5)]:
        free[:, corner[0] : corner[0] + side, corner[1] : corner[1] + side] = -0.8
        assert one(free, "a red circle").reward == share


def test_a_shape_of_two_colours_counts_as_neither_colour():
    image = render(parse("a red square"), random.Random(0))
    (whole,) = detect(image.transpose(1, 2, 0))
    red, blue = (np.array(COLOURS[name], dtype=np.float32)[:, None, None] / 127.5 - 1.0 for name in ("red", "blue"))
    half = np.where((image < 1.0).any(axis=0) & (np.arange(36) < whole.x), blue, image)
    assert [each.colour for each in detect(half.transpose(1, 2, 0))] == [None]
    assert one(half, "a red square").reward == one(half, "a blue square").reward == 0.5
    assert (red != blue).any()


def test_shapes_that_merge_have_no_kind():
    image = np.ones((36, 36, 3), dtype=np.float32)
    image[3:15, 3:30] = -1.0
    assert [each.kind for each in detect(image)] == [None]


def box(x, y, side=12):
    return Seen(kind="square", colour="red", x=x, y=y, width=side, height=side)


def test_position_is_genevals_rule():
    assert relations(box(9, 9), box(27, 9)) == {"left of"}
    assert relations(box(27, 9), box(9, 9)) == {"right of"}
    assert relations(box(9, 9), box(9, 27)) == {"above"}
    assert relations(box(27, 27), box(9, 9)) == {"right of", "below"}
    assert relations(box(9, 9), box(9, 9)) == set()


def test_offsets_within_a_tenth_of_the_box_sizes_are_no_position():
    """The boxes are 12 wide: 2.4 pixels are taken off the offset, and half of the distance must remain."""
    assert relations(box(9, 9), box(13.7, 9)) == set()
    assert relations(box(9, 9), box(13.9, 9)) == {"left of"}


seen_objects = st.builds(
    Seen,
    kind=st.sampled_from([None, *KINDS]),
    colour=st.sampled_from([None, *COLOURS]),
    x=st.floats(0, 36),
    y=st.floats(0, 36),
    width=st.integers(1, 36),
    height=st.integers(1, 36),
)


@given(st.lists(seen_objects, max_size=6), st.sampled_from(requests()))
def test_the_graded_score_is_1_only_if_everything_asked_for_is_shown(seen, request):
    share = similarity(seen, request)
    assert 0.0 <= share <= 1.0
    if len(seen) != sum(clause.count for clause in request.clauses):
        assert share < 1.0
    if share == 1.0:
        assert Counter(each.kind for each in seen) == {clause.kind: clause.count for clause in request.clauses}


@given(st.integers(0, 2**30), st.sampled_from(requests()), st.floats(0.0, 2.0))
@settings(max_examples=60, deadline=None)
def test_the_strict_score_never_exceeds_the_graded_score(seed, request, noise):
    rng = random.Random(seed)
    images = images_of([rng.choice(requests())], rng) + noise * noise_rows([seed], 0, (3, 36, 36))
    (graded,) = ShapesReward("shapes")(images, [request.prompt])
    (strict,) = ShapesReward("shapes_strict")(images, [request.prompt])
    assert graded.metrics == strict.metrics
    assert 0.0 <= strict.reward <= graded.reward <= 1.0
    assert strict.reward in (0.0, 1.0)


def test_images_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"\[B, 3, 36, 36\]; it was given \[1, 1, 12, 32\]"):
        ShapesReward()(torch.zeros(1, 1, 12, 32), ["a cross"])


@pytest.mark.parametrize(("kind", "area"), [("square", 1.0), ("circle", 0.785), ("triangle", 0.5), ("cross", 5 / 9)])
def test_outlines_have_the_areas_of_their_shapes(kind, area):
    assert coverage(kind).mean() == pytest.approx(area, abs=0.025)


def test_outlines_stand_upright():
    triangle = coverage("triangle")
    assert triangle[0].sum() < triangle[-1].sum() == pytest.approx(12, abs=0.5)
    assert all(np.array_equal(coverage(kind), coverage(kind)[:, ::-1]) for kind in KINDS)


# --- model


def untrained():
    torch.manual_seed(0)
    return ShapesAdapter(build_transformer(), WordText())


def test_unpatching_restores_the_image():
    images = noise_rows([1, 2], 0, (3, 36, 36))
    assert torch.equal(unpatchify(patchify(images)), images)


def test_a_patch_is_a_square_of_neighbouring_pixels():
    image = torch.zeros(1, 3, 36, 36)
    image[0, :, 9:18, 18:27] = 1.0
    assert patchify(image)[0].sum(dim=1).nonzero().flatten().tolist() == [4 + 2]


def test_heads_and_tokens_divide_by_every_degree_of_sequence_parallelism():
    adapter = untrained()
    sizes = (
        adapter.latent_shape()[0],
        adapter.encode(["a cross"])["text"].shape[1],
        adapter.transformer.config.num_attention_heads,
    )
    assert sizes == (16, 8, 4)
    assert all(size % degree == 0 for size in sizes for degree in (1, 2, 4))
    assert sum(p.numel() for p in adapter.transformer.parameters()) == pytest.approx(1.45e6, rel=0.01)


def test_shapes_of_an_adapters_tensors():
    adapter = untrained()
    text = adapter.encode(["a cross", "a green circle left of a blue triangle"])
    assert text["text"].shape == (2, 8, 64)
    x = noise_rows([1, 2], 0, adapter.latent_shape())
    assert adapter.velocity(x, torch.tensor([0.9, 0.2]), text, 1.0).shape == x.shape == (2, 16, 243)
    images = adapter.decode(5 * x)
    assert images.shape == (2, 3, 36, 36)
    assert images.abs().max() <= 1.0


def test_rows_of_a_batch_are_independent():
    adapter = untrained()
    x, sigma = noise_rows([1, 2], 0, adapter.latent_shape()), torch.tensor([0.9, 0.2])
    together = adapter.velocity(x, sigma, adapter.encode(["a cross", "two circles"]), 1.0)
    alone = adapter.velocity(x[1:], sigma[1:], adapter.encode(["two circles"]), 1.0)
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=1e-4)


def test_the_network_predicts_the_final_image():
    class Certain(nn.Module):
        def __init__(self, image):
            super().__init__()
            self.image = nn.Parameter(image)

        def forward(self, hidden_states, **_):
            return (self.image.expand(len(hidden_states), -1, -1),)

    image = patchify(torch.from_numpy(render(parse("three blue circles"), random.Random(0)))[None])
    adapter = ShapesAdapter(Certain(image), WordText())
    for shift in (1.0, 3.0):
        plan = evaluation_plan(SamplerConfig(shift=shift), steps=8)
        latents = denoise(adapter, plan, adapter.encode(["a cross"] * 2), [1, 2])
        torch.testing.assert_close(latents, image.expand(2, -1, -1), atol=1e-4, rtol=1e-4)


def test_the_vocabulary_is_exactly_the_words_of_all_prompts():
    assert {word for request in requests() for word in request.prompt.split()} == set(VOCABULARY)
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    with pytest.raises(ValueError, match=r"does not know: pink, hexagon; it knows a, and, left,.* red,.*, crosses"):
        untrained().encode(["a pink hexagon"])


def test_a_prompt_of_too_many_words_is_named_in_the_error():
    with pytest.raises(ValueError, match="has 9 words; shapes reads at most 8"):
        untrained().encode(["a green circle left of a blue blue triangle"])


def test_word_order_matters():
    text = untrained().encode(["a red circle and a blue square", "a blue circle and a red square"])["text"]
    assert not torch.equal(text[0], text[1])


def test_a_words_embedding_depends_on_its_neighbours():
    """`red` belongs to the circle in one prompt and to the square in the other; the embedding of `circle` differs."""
    text = untrained().encode(["a red circle and a blue square", "a blue circle and a red square"])["text"]
    circle = 2
    assert (text[0, circle] - text[1, circle]).abs().max() > 0.01


def test_guidance_is_refused_because_there_is_no_unconditional_branch():
    adapter = untrained()
    x = noise_rows([1], 0, adapter.latent_shape())
    with pytest.raises(ValueError, match="no unconditional branch"):
        adapter.velocity(x, torch.ones(1), adapter.encode(["a cross"]), 2.0)
    with pytest.raises(ValueError, match="shapes was made without an unconditional branch"):
        EngineConfig(model=ModelConfig(name="shapes"), prompts="shapes", sampler=SamplerConfig(guidance=2.0))


# --- base and job


def test_the_shipped_base_is_small_and_records_how_it_was_trained():
    assert BASE.stat().st_size < 4_000_000
    with safe_open(BASE, "pt") as file:
        facts = file.metadata()
        assert all(file.get_tensor(name).dtype == torch.float16 for name in file.keys())  # noqa: SIM118
    assert {"steps", "seed", "seconds", "torch", "similarity", *(f"exact_match/{task}" for task in Task)} <= set(facts)
    assert 0.30 <= float(facts["exact_match"]) <= 0.55
    assert 0.6 <= float(facts["similarity"]) <= 0.8


def test_the_shipped_bases_accuracy_matches_its_recorded_facts():
    with safe_open(BASE, "pt") as file:
        recorded = float(file.metadata()["exact_match"])
    scores = evaluate(load_shapes(), held_out_shapes()[:96])
    assert np.mean([score.metrics["exact_match"] for score in scores]) == pytest.approx(recorded, abs=0.15)


def test_rewards_of_sampled_images_differ_enough_to_learn_from():
    """With the job's sampler, most rewards are as good as those of the ODE despite noise, and seeds differ."""
    job = load_job(Path(str(files("sky_yamls") / "shapes.yaml"))).job.engine()
    size = job.algorithm.images_per_prompt
    adapter, reward, prompts = load_shapes(), ShapesReward("shapes"), prompt_source(job, None)
    rewards: list[float] = []
    strict: list[float] = []
    for batch in range(3):
        wanted_request = [prompt for prompt in prompts.batch(batch) for _ in range(size)]
        seeds = [seed_of(job.seed, Stream.TRAIN, batch, prompt, i % size) for i, prompt in enumerate(wanted_request)]
        latents = denoise(adapter, rollout_plan(job.sampler, job.seed, batch), adapter.encode(wanted_request), seeds)
        scores = reward(adapter.decode(latents), wanted_request)
        rewards.extend(score.reward for score in scores)
        strict.extend(score.metrics["exact_match"] for score in scores)
    groups = np.array(rewards).reshape(-1, size)
    assert 0.5 < groups.mean() < 0.9
    assert 0.25 < np.mean(strict) < 0.75
    assert np.mean(groups.std(axis=1) == 0.0) < 0.5


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_the_text_encoder_stays_frozen_in_every_training_mode(weights):
    adapter = load_adapter(ModelConfig(name="shapes", weights=weights))
    assert isinstance(adapter, ShapesAdapter)
    names = trainable(adapter)
    assert names
    assert (weights == "lora") == all("lora_" in name for name in names)
    assert not any(p.requires_grad for p in adapter.text.parameters())


def test_the_example_job_passes_its_preflight():
    job = load_job(Path(str(files("sky_yamls") / "shapes.yaml"))).job
    assert (job.model.name, job.prompts, job.reward.name) == ("shapes", "shapes", "shapes")
    found = check(job.engine(), None)
    assert found["metrics"] == ["exact_match", "reward", "similarity"]
    assert found["held_out"] == job.evaluation.prompts


@pytest.mark.parametrize(
    ("line", "found"), [("a pink hexagon", "does not know: pink, hexagon"), ("a red " * 5, "has 10 words")]
)
def test_an_unreadable_prompt_file_is_found_before_anything_is_bought(tmp_path, line, found):
    lines = [request.prompt for request in requests()[:20]]
    (tmp_path / "mine.txt").write_text("\n".join([*lines, line]))
    config = EngineConfig(
        model=ModelConfig(name="shapes"),
        prompts="mine.txt",
        reward=RewardConfig(name="shapes"),
        algorithm=AlgorithmConfig(prompts_per_batch=4, updates_per_batch=1),
        evaluation=EvaluationConfig(prompts=4),
    )
    with pytest.raises(JobUnfit, match=f"shapes cannot read a prompt.*{found}") as unfit:
        check(config, str(tmp_path))
    assert unfit.value.field == "prompts"
    assert "use prompts: shapes" in unfit.value.remedy


# --- pre-training


def test_pre_training_uses_no_held_out_prompt():
    rng = random.Random(0)
    wanted = training_requests(rng, 2_000, MIX)
    shown = {request.prompt for request in wanted} | {noisy_caption(request, rng) for request in wanted}
    assert not shown & set(held_out_shapes())


def test_five_captions_in_six_are_right():
    rng = random.Random(0)
    wanted = training_requests(rng, 3_000, MIX)
    right = np.mean([noisy_caption(request, rng) == request.prompt for request in wanted])
    assert right == pytest.approx(0.83, abs=0.03)


def test_a_noisy_caption_keeps_its_task():
    wanted, rng = sample(30)
    assert all(parse(noisy_caption(request, rng)).task is request.task for request in wanted)


def test_every_relation_is_drawn_as_requested():
    for relation in RELATIONS:
        request = parse(f"a circle {relation} a square")
        assert {one(render(request, random.Random(seed)), request.prompt).reward for seed in range(20)} == {1.0}


def test_pre_training_repeats_bit_for_bit_and_survives_its_file(tmp_path):
    torch.set_num_threads(1)
    first, second = pretrain(2, seed=1), pretrain(2, seed=1)
    for a, b in zip(first.transformer.parameters(), second.transformer.parameters(), strict=True):
        assert torch.equal(a, b)
    save_parts(first.transformer, first.text, tmp_path / "base.safetensors", {"steps": "2"})
    again = load_shapes(tmp_path / "base.safetensors")
    x, sigma = noise_rows([1], 0, (16, 243)), torch.tensor([0.7])
    before, after = (adapter.velocity(x, sigma, adapter.encode(["a cross"]), 1.0) for adapter in (first, again))
    torch.testing.assert_close(after, before, atol=0.02, rtol=0.02)
