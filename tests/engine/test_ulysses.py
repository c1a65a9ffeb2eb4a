"""Ulysses: several processes share a forward pass on live models, at a degree that changes."""

import os
import signal
import time
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel, QwenImageTransformer2DModel
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from engine.models.half import half_precision
from engine.parallel.communicator import SPGroup
from engine.parallel.sp_plans import DIFFUSERS, PLANS, plan_for
from engine.parallel.ulysses import (
    Ulysses,
    degrees_of,
    order_of,
    own_part,
    places_of,
    problem_with_degree,
    share_of,
    sum_gradients,
)
from tests.benchmarks.sp_parity import (
    CASES,
    FAMILIES,
    GRADIENT_BOUND,
    GROUPS,
    LENGTHS,
    OUTPUT_BOUND,
    Case,
    Difference,
    Failed,
    Lengths,
    Member,
    Ranks,
    alone_again,
    both_passes,
    difference,
    drawn,
    live,
    shared_difference,
    switch_ms,
)
from tests.engine.test_families import FAMILIES as ADAPTERS
from tests.engine.test_half_layers import model as half_model
from tests.engine.test_half_layers import velocity_of as half_velocity

PAIR, EVERYONE = (0, 1), (0, 1, 2, 3)
THREE = (0, 1, 2)
FROZEN_SECONDS = 3.0
"""Timeout of the groups in tests with a frozen peer."""
BF16 = 2.0**-8
"""Resolution of bfloat16 at 1."""


@pytest.fixture(scope="module")
def ranks():
    live_ranks = Ranks(4, (*GROUPS, THREE), preload=[__name__])
    yield live_ranks
    live_ranks.close()


# --- distribution of tokens (no processes)

some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple)


@given(some_lengths, st.integers(1, 8))
def test_every_token_is_on_one_rank_and_gathered_back(lengths, degree):
    streams = [torch.arange(length) + 100 * which for which, length in enumerate(lengths)]
    held = torch.cat([own_part(stream + 1, 0, rank, degree) for rank in range(degree) for stream in streams])
    order = order_of(lengths, degree)
    assert len(held) == degree * sum(share_of(length, degree) for length in lengths)
    assert torch.equal(held[order] - 1, torch.cat(streams))
    empty = torch.ones(len(held), dtype=torch.bool)
    empty[order] = False
    assert not held[empty].any()


@given(some_lengths, st.integers(1, 8))
def test_tokens_return_to_their_positions_after_attention(lengths, degree):
    order = order_of(lengths, degree)
    places = places_of(order, degree * sum(share_of(length, degree) for length in lengths))
    assert torch.equal(places[order], torch.arange(sum(lengths)))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2))
def test_a_part_has_equal_length_on_every_rank_in_any_dimension(length, degree, dim):
    shape = [2, 2, 2]
    shape[dim] = length
    parts = [own_part(torch.ones(shape), dim, rank, degree) for rank in range(degree)]
    assert {part.shape[dim] for part in parts} == {share_of(length, degree)}
    assert sum(float(part.sum()) for part in parts) == 4 * length


# --- supported models and degrees


def test_allowed_degrees_divide_the_attention_heads():
    assert degrees_of(FAMILIES["QwenImage"].build()) == (1, 2, 4)


def test_a_degree_that_is_not_allowed_is_refused_with_the_reason():
    problem = problem_with_degree(FAMILIES["QwenImage"].build(), 3)
    assert problem is not None
    assert "degree 3 does not divide the 4 attention heads" in problem
    assert "1, 2, 4" in problem


def test_a_model_without_a_plan_is_refused_by_name():
    with pytest.raises(ValueError, match="Linear has no sequence-parallel plan; use degree 1, or one of Qwen"):
        Ulysses(nn.Linear(1, 1))


def test_models_that_condition_on_a_tokens_place_are_refused():
    tiny = {"num_layers": 1, "attention_head_dim": 6, "num_attention_heads": 1}
    with pytest.raises(ValueError, match="zero_cond_t=True"):
        plan_for(QwenImageTransformer2DModel(zero_cond_t=True, joint_attention_dim=8, axes_dims_rope=(2, 2, 2), **tiny))
    with pytest.raises(ValueError, match="image_condition_type='token_replace'"):
        plan_for(
            HunyuanVideoTransformer3DModel(
                image_condition_type="token_replace",
                num_single_layers=1,
                num_refiner_layers=1,
                text_embed_dim=8,
                pooled_projection_dim=8,
                rope_axes_dim=(2, 2, 2),
                **tiny,
            )
        )


def test_the_diffusers_internals_are_those_that_the_plans_were_written_for():
    """If this fails after an update, read `engine/parallel/sp_plans.py` against the new diffusers, then change it."""
    from diffusers.models import attention_dispatch

    assert version("diffusers").startswith(f"{DIFFUSERS}."), "sp_plans.py knows another version of diffusers"
    for name, attend in attention_dispatch._AttentionBackendRegistry._backends.items():
        taken = attention_dispatch._AttentionBackendRegistry._supported_arg_names[name]
        assert {"query", "key", "value", "attn_mask", "_parallel_config"} <= taken, attend
    for name, family in FAMILIES.items():
        model = family.build()
        plan = PLANS[type(model).__name__]
        assert plan.attention_modules(model), name
        assert isinstance(model.get_submodule("proj_out"), nn.Linear)
        for module in plan.outputs:
            model.get_submodule(module)
        Ulysses(model)
        assert all(hasattr(one.processor, "_parallel_config") for one in plan.attention_modules(model)), name


# --- parity


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.lengths == "odd" or case.family == "digits-ocr"], ids=str
)
def test_two_ranks_compute_the_same_pass_as_one(ranks, case):
    for found in ranks.run(PAIR, difference, case, 2):
        assert found.output <= OUTPUT_BOUND, found
        assert found.gradients <= GRADIENT_BOUND, found
        assert found.again
    assert all(ranks.run(PAIR, alone_again, case, (2,)))


def test_four_ranks_and_two_pairs_compute_the_same_pass_as_one(ranks):
    for case in (Case("digits-ocr", "divides", False), Case("QwenImage", "odd", True)):
        for degree in (2, 4):
            for found in ranks.run(EVERYONE, difference, case, degree):
                assert found.output <= OUTPUT_BOUND, found
                assert found.gradients <= GRADIENT_BOUND, found


def adapter_difference(member: Member, name: str, degree: int) -> float:
    torch.manual_seed(0)
    adapter = ADAPTERS[name].build()
    adapter.transformer.eval()
    conditioning = adapter.encode(["12", "345"])
    x, sigma = drawn(2, *ADAPTERS[name].latent), torch.tensor([0.3, 0.8])
    ulysses = Ulysses(adapter.transformer)
    with torch.no_grad():
        alone = adapter.velocity(x, sigma, conditioning, ADAPTERS[name].guidance)
        ulysses.use(member.group_of(degree))
        shared = adapter.velocity(x, sigma, conditioning, ADAPTERS[name].guidance)
    return float((shared - alone).abs().max() / alone.abs().max())


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_work_unchanged_on_shared_passes(ranks, name):
    assert max(ranks.run(PAIR, adapter_difference, name, 2)) <= OUTPUT_BOUND


def lora_difference(member: Member, wrap: str, lora_first: bool) -> Difference:
    torch.manual_seed(0)
    model: nn.Module = FAMILIES["QwenImage"].build().eval().requires_grad_(False)
    ulysses = None if lora_first else Ulysses(model)
    config = LoraConfig(
        r=4, target_modules=["to_q", "add_k_proj", "img_mlp.net.2", "proj_out"], init_lora_weights=False
    )
    if wrap == "peft":
        model = get_peft_model(model, config)
    else:
        model.add_adapter(config)  # type: ignore[operator]
    ulysses = ulysses or Ulysses(model)
    return shared_difference(
        ulysses, model, lambda: FAMILIES["QwenImage"].forward(model, LENGTHS["odd"], True), member.group_of(2)
    )


@pytest.mark.parametrize("wrap", ["peft", "diffusers"])
@pytest.mark.parametrize("lora_first", [True, False])
def test_low_rank_adapters_get_complete_gradients(ranks, wrap, lora_first):
    for found in ranks.run(PAIR, lora_difference, wrap, lora_first):
        assert found.output <= OUTPUT_BOUND, found
        assert found.gradients <= GRADIENT_BOUND, found


def half_difference(member: Member, family: str) -> tuple[float, float]:
    one = live(member, family)

    def passes(group: SPGroup | None) -> tuple[Tensor, Tensor]:
        one.ulysses.use(group)

        def forward() -> Tensor:
            with half_precision(one.model):
                return FAMILIES[family].forward(one.model, LENGTHS["divides"], FAMILIES[family].takes_mask).float()

        output, gradients = both_passes(one.model, forward, group)
        return output, torch.cat([gradient.reshape(-1) for gradient in gradients.values()])

    (output, gradient), (shared, whole) = passes(None), passes(member.group_of(2))
    one.ulysses.use(None)
    return float((shared - output).norm() / output.norm()), float((whole - gradient).norm() / gradient.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_differs_only_by_its_rounding(ranks, family):
    for output, gradient in ranks.run(PAIR, half_difference, family):
        assert output <= 4 * BF16
        assert gradient <= 8 * BF16


def half_layers_difference(member: Member, name: str) -> tuple[float, float]:
    """Compare a pass of a model as it is loaded: adapters and layers of `engine/models/half_layers.py`."""
    adapter = half_model(name)
    ulysses = Ulysses(adapter.transformer)

    def passes(group: SPGroup | None) -> tuple[Tensor, Tensor]:
        ulysses.use(group)
        output, gradients = both_passes(adapter.transformer, lambda: half_velocity(adapter, name), group)
        return output, torch.cat([gradient.reshape(-1) for gradient in gradients.values()])

    (output, gradient), (shared, whole) = passes(None), passes(member.group_of(2))
    return float((shared - output).norm() / output.norm()), float((whole - gradient).norm() / gradient.norm())


@pytest.mark.parametrize("name", ["qwen-image", "sd3", "flux-schnell", "wan", "hunyuan-video"])
def test_layers_beside_half_precision_weights_differ_only_by_their_rounding(ranks, name):
    for output, gradient in ranks.run(PAIR, half_layers_difference, name):
        assert output <= 4 * BF16
        assert gradient <= 8 * BF16


def checkpointing_difference(member: Member, family: str) -> Difference:
    one = live(member, family)
    one.model.enable_gradient_checkpointing()
    try:
        # Blocks are recomputed in training only.
        one.model.train()
        return shared_difference(
            one.ulysses,
            one.model,
            lambda: FAMILIES[family].forward(one.model, LENGTHS["odd"], FAMILIES[family].takes_mask),
            member.group_of(2),
        )
    finally:
        one.model.eval().disable_gradient_checkpointing()


@pytest.mark.parametrize("family", ["QwenImage", "Flux", "Wan", "SD3", "HunyuanVideo", "Flux2"])
def test_gradient_checkpointing_computes_the_same(ranks, family):
    for found in ranks.run(PAIR, checkpointing_difference, family):
        assert found.gradients <= GRADIENT_BOUND, found


def after_inference(member: Member) -> Difference:
    one = live(member, "Flux")
    new = Lengths(rows=2, columns=5, text=3)
    one.ulysses.use(member.group_of(2))
    with torch.inference_mode():
        FAMILIES["Flux"].forward(one.model, new, False)
    return shared_difference(
        one.ulysses, one.model, lambda: FAMILIES["Flux"].forward(one.model, new, False), member.group_of(2)
    )


def test_lengths_first_seen_in_inference_mode_can_be_trained_on(ranks):
    for found in ranks.run(PAIR, after_inference):
        assert found.gradients <= GRADIENT_BOUND, found


# --- switching


def everything_alive(member: Member) -> tuple[object, ...]:
    """Return what a switch must not change: weights, the process and the model's modules."""
    model = live(member, "QwenImage").model
    processors = [id(one.processor) for one in model.modules() if hasattr(one, "processor")]
    weights = [weight.data_ptr() for weight in [*model.parameters(), *model.buffers()]]
    return os.getpid(), weights, processors, [id(group.group) for group in member.groups.values()]


def hooks_of(member: Member) -> int:
    model = live(member, "QwenImage").model
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def bits_at(member: Member, degree: int) -> bytes:
    one = live(member, "QwenImage")
    one.ulysses.use(member.group_of(degree))
    assert one.ulysses.degree == degree
    with torch.no_grad():
        return FAMILIES["QwenImage"].forward(one.model, LENGTHS["odd"], True).numpy().tobytes()


def test_switching_degrees_keeps_weights_processes_and_communicators_bit_for_bit(ranks):
    before = ranks.run(EVERYONE, everything_alive)
    seen: dict[int, bytes] = {}
    for degree in (1, 2, 4, 1, 4, 2, 1):
        (bits,) = set(ranks.run(EVERYONE, bits_at, degree))
        assert seen.setdefault(degree, bits) == bits, degree
    assert ranks.run(EVERYONE, everything_alive) == before
    assert ranks.run(EVERYONE, hooks_of) == [0] * 4


def refusal(member: Member) -> tuple[str, int, bytes]:
    one = live(member, "QwenImage")
    one.ulysses.use(member.group_of(2))
    before = bits_at(member, 2)
    with pytest.raises(ValueError) as refused:
        one.ulysses.use(member.groups[THREE])
    with torch.no_grad():
        after = FAMILIES["QwenImage"].forward(one.model, LENGTHS["odd"], True).numpy().tobytes()
    return str(refused.value), one.ulysses.degree, after == before


def test_a_refused_group_keeps_the_old_one(ranks):
    for message, degree, same in ranks.run(PAIR, refusal):
        assert "use one of 1, 2, 4" in message
        assert degree == 2
        assert same


def test_a_switch_takes_about_a_millisecond(ranks):
    """The median over sixty blocks, as in Qwen-Image; the limit is ten times the value on a quiet computer."""
    (times,) = ranks.run([0], switch_ms)
    assert max(sorted(one)[len(one) // 2] for one in times.values()) < 5.0


def summed(member: Member, group: tuple[int, ...]) -> list[list[float]]:
    kept = [
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(1)),
    ]
    kept[0].grad = torch.tensor([1.0, float(member.rank)])
    kept[1].grad = torch.tensor([2.0], dtype=torch.bfloat16)
    sum_gradients(kept, member.groups[group])
    assert kept[2].grad is None
    return [one.grad.tolist() for one in kept[:2] if one.grad is not None]


def test_partial_gradients_sum_to_the_whole_gradient(ranks):
    assert ranks.run(EVERYONE, summed, EVERYONE) == [[[4.0, 6.0], [8.0]]] * 4


# --- peers that die


def begin_pass(member: Member, degree: int) -> Tensor:
    one = live(member, "QwenImage")
    one.ulysses.use(member.group_of(degree))
    with torch.no_grad():
        return FAMILIES["QwenImage"].forward(one.model, LENGTHS["odd"], True)


def begin_training(member: Member) -> None:
    """Run the forward pass together, and the backward pass after the others had time to lose a peer."""
    one = live(member, "QwenImage")
    one.ulysses.use(member.group_of(4))
    output = FAMILIES["QwenImage"].forward(one.model, LENGTHS["odd"], True)
    member.kept["loss"] = output.sum()


def backward(member: Member) -> None:
    member.kept.pop("loss").backward()


def alone(member: Member) -> bytes:
    return bits_at(member, 1)


@pytest.fixture
def mortal():
    made = Ranks(4, GROUPS, preload=[__name__], timeout_seconds=FROZEN_SECONDS)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "how"),
    [
        (begin_pass, signal.SIGSTOP),
        (backward, signal.SIGKILL),
        pytest.param(begin_pass, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(backward, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_dead_peer_fails_every_survivor_and_keeps_the_model_usable(mortal, how, work: Callable[..., object]):
    before = mortal.run(EVERYONE, alone)
    if work is backward:
        mortal.run(EVERYONE, begin_training)
    else:
        mortal.run(EVERYONE, begin_pass, 4)
    # The survivors wait in a collective for rank 3, which got no order to join; then rank 3 dies.
    mortal.send(THREE, *((work,) if work is backward else (work, 4)))
    time.sleep(0.2)
    died = time.monotonic()
    os.kill(mortal.processes[3].pid, how)
    found = mortal.answers(THREE)
    assert all(isinstance(one, Failed) for one in found), found
    assert time.monotonic() - died < FROZEN_SECONDS + 20.0
    assert mortal.run(THREE, alone) == before[:3]
    # A group that the dead rank was not in still serves.
    pair = mortal.run(PAIR, begin_pass, 2)
    assert torch.equal(pair[0], pair[1])
