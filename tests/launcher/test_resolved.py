"""A job is resolved once: what its plan, its checks and its launch read agrees, for any fleet, and is quick."""

import re
from itertools import product

import pytest

from launcher.cli.plan_text import exploration_text
from launcher.job.resolved import resolve
from launcher.job.schema import Job
from launcher.placement.memory import gpu_memory
from launcher.placement.ranks import ranks_of_nodes
from launcher.placement.requirements import cloud_requirements
from tests.cpu_seconds import takes_less_than

GPUS = ("A100-80GB", "H100", "H200", "L40S", "B200")


def job(gpu="H100", gpus=1, nodes=2, weights="lora", name="qwen-image"):
    return Job(
        infra="aws,gcp",
        model={"name": name, "weights": weights}
        | ({} if name == "shapes" else {"path": "there", "max_text_tokens": 256}),
        reward={"name": "shapes" if name == "shapes" else "ocr"},
        prompts="shapes" if name == "shapes" else "digits",
        algorithm={"name": "flow-grpo", "prompts_per_batch": 16, "images_per_prompt": 8},
        exploration={"mode": "stale"},
        runtime={"trainer_ranks": gpus},
        resources={
            "trainer": {"accelerators": f"{gpu}:{gpus}"},
            "rollout": {"accelerators": f"{gpu}:1", "num_nodes": nodes},
        },
        budget={"max_total": 4000},
    )


def test_200_fleets_of_a_job_are_resolved_and_forecast_in_5_ms_each():
    fleets = [job(*fleet) for fleet in product(GPUS, (1, 2, 4, 8), (1, 2, 4, 8, 12), ("lora", "full"))]
    assert len(fleets) == 200

    def forecast():
        for fleet in fleets:
            resolved, gpus = resolve(fleet), fleet.resources.trainer.gpus
            recipe = resolved.recipe.on(gpus)
            for spot_gpus in range(fleet.resources.rollout.num_nodes + 1):
                assert recipe.seconds(spot_gpus) > 0
                recipe.iterations_share(recipe.candidates_per_prompt(spot_gpus), recipe.gain_exponent.mean)
            ranks_of_nodes(resolved.recipe, gpus)
            gpu_memory(resolved, resolved.ranks)

    assert takes_less_than(200 * 0.005, forecast)


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_memory_with_other_ranks_is_that_of_a_job_with_these_ranks(weights):
    for gpus in (2, 8):
        assert resolve(job("H200", 1, weights=weights)).memory_of(gpus).trainer == (
            resolve(job("H200", gpus, weights=weights)).memory.trainer
        )


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_plan_is_asked_for_what_the_job_resolves_to(gpus):
    resolved = resolve(job(gpus=gpus))
    needs = cloud_requirements(resolved)
    assert (resolved.ranks, needs.trainer.gpus, needs.recipe) == (gpus, gpus, resolved.recipe)
    assert resolved.recipe.copy_bytes == resolved.trained_bytes // 2, "adapters of a model in bf16 are sent in bf16"
    assert resolved.recipe.train_seconds == pytest.approx(16 * 8 * resolved.seconds.train)
    assert [gpu.ranks for gpu in gpu_memory(resolved, resolved.ranks)] == [gpus, 1]


def test_a_shipped_model_fits_everywhere_and_is_not_timed():
    resolved = resolve(job("L4", name="shapes"))
    assert (resolved.sized, resolved.memory, resolved.seconds) == (None, None, None)
    assert resolved.have_room
    assert gpu_memory(resolved, 1) == ()
    assert any("nobody has timed shapes on L4" in sentence for sentence in resolved.recipe.never_run)


@pytest.mark.parametrize(
    ("exploration", "sentence"),
    [
        ({"mode": "none"}, "exploration none: each prompt's first seeds are trained"),
        ({"mode": "stale"}, "exploration stale: as many candidates as spot nodes can try"),
        ({"mode": "stale", "budget": {"candidates": 96}}, r"8 candidates a prompt, .* the 4 .* differ x1.4 as much"),
        ({"mode": "in-path", "budget": {"candidates": 96}}, r"8 candidates a prompt, .* the 4 .* differ x1.9 as much"),
    ],
)
def test_a_local_plan_names_the_gain_of_counted_candidates(exploration, sentence):
    """12 prompts of 4 images. V(4 / 8) is 1.86: all of it with current weights, rho^2 of it with old ones."""
    assert re.search(sentence, exploration_text(resolve(Job(exploration=exploration))))


def test_a_plan_says_where_candidates_are_trained_as_they_are():
    def text(**exploration) -> str:
        return exploration_text(resolve(Job(algorithm={"name": "diffusion-nft"}, exploration=exploration)))

    assert "while the trainer trains, and the chosen ones are trained as they are;" in text()
    assert re.search(r"the 4 that differ most, x1.9 as much, are trained as they are", text(budget={"candidates": 96}))
    assert "trained as they are" not in text(trains="rollouts")
