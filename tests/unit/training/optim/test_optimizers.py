"""Optimizers by number: what the engines' oracle takes from libraries is checked by hand here."""

import pytest
import torch
from torch import nn

from mae_vit.training.engines.state import LossScale
from mae_vit.training.optim import OptimizerOptions, make_optimizer


def stepped(options: OptimizerOptions, *, steps: int = 3) -> tuple[nn.Linear, nn.Linear, list]:
    """A layer before and after some steps with fixed gradients, and those gradients."""
    torch.manual_seed(0)
    layer, before = nn.Linear(3, 2), nn.Linear(3, 2)
    before.load_state_dict(layer.state_dict())
    optimizer = make_optimizer(layer, options)
    gradients = [[torch.randn(2, 3), torch.randn(2)] for _ in range(steps)]
    for pair in gradients:
        for parameter, gradient in zip(layer.parameters(), pair, strict=True):
            parameter.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.step()
    kept = set().union(*(set(state) - {"step"} for state in optimizer.state.values()))
    assert kept == set(options.optimizer_states)
    return before, layer, gradients


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_lars_is_that_of_mae(weight_decay):
    """Without decay the official util/lars.py, written out: no adaptation of 1-D parameters.

    With decay it is the paper's and timm's: another denominator, and 1-D ones do not decay.
    """
    options = OptimizerOptions("lars", weight_decay, momentum=0.9)
    before, after, gradients = stepped(options)
    weight, bias = before.weight.detach().clone(), before.bias.detach().clone()
    of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    for gradient, gradient_of_bias in gradients:
        change = gradient + weight_decay * weight
        # The paper and timm divide by the sum of norms, MAE by the norm of the sum;
        # without decay, as in the recipe, they are one.
        norm = gradient.norm() + weight_decay * weight.norm()
        of_weight = 0.9 * of_weight + change * (0.001 * weight.norm() / norm)
        of_bias = 0.9 * of_bias + gradient_of_bias
        weight, bias = weight - 0.1 * of_weight, bias - 0.1 * of_bias
    torch.testing.assert_close(after.weight.detach(), weight)
    torch.testing.assert_close(after.bias.detach(), bias)


def test_adam_decays_through_the_gradient():
    before, after, gradients = stepped(OptimizerOptions("adam", 0.2, betas=[0.9, 0.99]), steps=1)
    for parameter, start, gradient, decay in zip(
        after.parameters(), before.parameters(), gradients[0], (0.2, 0.0), strict=True
    ):
        change = gradient + decay * start
        # The first step of Adam is the sign of the gradient.
        torch.testing.assert_close(parameter, start - 0.1 * change / (change.abs() + 1e-8))


def test_sgd_without_momentum_keeps_nothing():
    _, after, _ = stepped(OptimizerOptions("sgd", 0.0, momentum=0.0))
    assert torch.isfinite(after.weight).all()


def test_the_loss_scale_halves_doubles_and_counts():
    scale = LossScale(scale=8.0, growth_interval=2)
    assert scale.update(overflow=True)
    assert (scale.scale, scale.good_steps, scale.skipped_steps) == (4.0, 0, 1)
    assert not scale.update(overflow=False)
    assert (scale.scale, scale.good_steps) == (4.0, 1)
    assert not scale.update(overflow=False)
    assert (scale.scale, scale.good_steps, scale.skipped_steps) == (8.0, 0, 1)
    assert not scale.update(overflow=False)
    assert scale.update(overflow=True)
    assert (scale.scale, scale.good_steps, scale.skipped_steps) == (4.0, 0, 2)


def test_the_loss_scale_has_bounds():
    scale = LossScale(scale=2.0, growth_interval=1)
    assert scale.update(overflow=True)
    assert scale.scale == LossScale.LOWEST
    # Nothing left to try: the step counts as bad.
    assert not scale.update(overflow=True)
    assert (scale.scale, scale.skipped_steps) == (LossScale.LOWEST, 1)
    for _ in range(40):
        scale.update(overflow=False)
    assert scale.scale == LossScale.HIGHEST
