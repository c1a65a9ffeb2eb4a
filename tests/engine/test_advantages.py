"""Advantages and losses, by hand-sized numbers."""

import math

import pytest
import torch

from engine.algorithm.advantages import EPSILON, RunningStd, batch_std, decoupled, group_advantages, varies
from engine.algorithm.flow_grpo import clipped_loss, gaussian_kl, outside


def test_a_group_is_centred_on_its_mean_and_divided_by_its_std():
    advantages = group_advantages(torch.tensor([[0.0, 1.0], [0.2, 0.6]]))
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("std", "scale"), [("group", None), ("batch", None), ("ema", 0.3), ("ema", None)])
def test_a_group_without_variance_gives_exactly_0(std, scale):
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.0, 0.5, 1.0]])
    advantages = group_advantages(rewards, std, scale=scale)
    assert (advantages[0] == 0).all()
    assert advantages[1].abs().max() > 0.5
    assert varies(rewards).tolist() == [False, True]


def test_batch_mode_divides_every_group_by_the_same_std():
    rewards = torch.tensor([[0.0, 1.0], [0.4, 0.6]])
    advantages = group_advantages(rewards, "batch")
    torch.testing.assert_close(advantages[0, 1] / advantages[1, 1], torch.tensor(5.0))
    torch.testing.assert_close(advantages[0, 1], torch.tensor(0.5 / (batch_std(rewards) + 1e-4)))


@pytest.mark.parametrize("std", ["batch", "ema"])
def test_groups_may_come_one_by_one_when_the_std_is_given(std):
    rewards = torch.tensor([[0.0, 1.0], [0.4, 0.6]])
    together = group_advantages(rewards, std, scale=0.25)
    one_by_one = torch.cat([group_advantages(row[None], std, scale=0.25) for row in rewards])
    assert torch.equal(together, one_by_one)


def test_before_the_first_batch_ema_divides_by_the_groups_own_std():
    rewards = torch.tensor([[0.0, 1.0], [0.4, 0.6]])
    assert torch.equal(group_advantages(rewards, "ema"), group_advantages(rewards, "group"))


def test_advantages_are_clipped():
    rewards = torch.tensor([[0.0] * 99 + [1.0]])
    assert group_advantages(rewards, clip=5.0).max() == 5.0


def test_the_running_std_starts_with_the_first_batch_and_then_averages():
    first = RunningStd(decay=0.5).after(torch.tensor([[0.0, 2.0]]))
    second = first.after(torch.tensor([[0.0, 4.0]]))
    assert first.value == 1.0
    assert second.value == 1.5


def test_on_policy_the_loss_is_minus_the_advantage_and_the_ratio_1():
    ratio, advantage = torch.ones(2), torch.tensor([0.5, -3.0])
    assert torch.equal(clipped_loss(ratio, advantage, 1e-3), -advantage)
    assert not outside(ratio, 1e-3).any()


def test_moving_further_in_the_right_direction_earns_nothing_outside_the_clip_range():
    log_prob = torch.tensor([0.1, 0.1, -0.1, -0.1], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    ratio = log_prob.exp()
    clipped_loss(ratio, advantage, 0.01).sum().backward()
    assert (log_prob.grad != 0).tolist() == [False, True, True, False]
    assert outside(ratio.detach(), 0.01).all()


def test_kl_is_0_for_the_reference_and_on_ode_steps():
    mean = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert not gaussian_kl(mean, mean, torch.tensor([0.1, 0.5, 0.0])).any()
    assert gaussian_kl(mean + 1, mean, torch.tensor([1.0, 1.0, 0.0]))[2] == 0


def test_a_groups_std_is_corrected_when_asked_to():
    rewards = torch.tensor([[0.0, 0.5, 1.0]])
    assert group_advantages(rewards)[0, 2] == pytest.approx(0.5 / (rewards.std(correction=0).item() + EPSILON))
    corrected = group_advantages(rewards, correction=1)
    assert corrected[0, 2] == pytest.approx(0.5 / (rewards.std(correction=1).item() + EPSILON))


def test_kl_is_that_of_two_gaussians():
    mean, reference, std = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 1.5]]), torch.tensor([0.2])
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(mean, std), normal(reference, std)).mean(dim=1)
    torch.testing.assert_close(gaussian_kl(mean, reference, std), exact)


SCORES = torch.tensor([[0.0, 1.0, 2.0, 3.0], [100.0, 0.0, 0.0, 100.0]])
"""Two scorers of one group; the second has a hundred times the spread."""


def test_decoupled_scores_weigh_the_same_whatever_their_spread():
    by_hand = [[-1.3416, -0.4472, 0.4472, 1.3416], [1.0, -1.0, -1.0, 1.0]]
    total = decoupled(SCORES, torch.tensor([1.0, 0.5]))
    expected = [a + 0.5 * b for a, b in zip(*by_hand, strict=True)]
    torch.testing.assert_close(total, torch.tensor(expected), atol=1e-3, rtol=0)
    wider = decoupled(SCORES * torch.tensor([[1000.0], [1.0]]), torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(wider, total, atol=1e-3, rtol=0)
    summed = SCORES[0] + 0.5 * SCORES[1]
    assert torch.argsort(summed).tolist() != torch.argsort(total).tolist(), "a plain sum ranks the images otherwise"


def test_a_scorer_without_variance_adds_exactly_nothing():
    scores = torch.cat([SCORES[:1], torch.full((1, 4), 0.1)])
    assert torch.equal(decoupled(scores, torch.tensor([1.0, 9.0])), decoupled(SCORES[:1], torch.tensor([1.0])))
    assert (decoupled(torch.full((2, 4), 0.1), torch.ones(2)) == 0).all()


def test_one_scorer_with_weight_1_trains_as_if_it_were_alone():
    alone = group_advantages(SCORES[:1])
    again = group_advantages(decoupled(SCORES[:1], torch.ones(1))[None])
    torch.testing.assert_close(again, alone, atol=1e-3, rtol=0)


def test_a_score_that_is_not_finite_leaves_no_value_for_the_group():
    for value in (math.nan, math.inf):
        scores = SCORES.clone()
        scores[1, 2] = value
        assert torch.isnan(decoupled(scores, torch.ones(2))).all()


def test_with_the_std_of_the_batch_decoupled_advantages_have_std_1():
    groups = torch.stack([decoupled(SCORES * scale, torch.tensor([1.0, 1.0])) for scale in (1.0, 3.0)])
    assert float(group_advantages(groups, "batch").std(correction=0)) == pytest.approx(1.0, abs=1e-3)
