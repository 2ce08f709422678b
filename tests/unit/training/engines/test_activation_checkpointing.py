"""Activation checkpointing: the same numbers from less memory."""

import pytest
import torch
from timm.models.vision_transformer import Block
from workers.plain_loop import batch_of, build_objective

from mae_vit.models.attention import set_fused_attention
from mae_vit.objectives import OBJECTIVES
from mae_vit.training.engines.base import recompute_blocks
from mae_vit.training.engines.cost import estimate


def gradients_of(name: str, *, recomputed: bool) -> tuple[float, dict[str, torch.Tensor], int, int]:
    """Loss, gradients, bytes that autograd keeps, and how often blocks' first norms ran."""
    model = build_objective(name)
    set_fused_attention(model, False)
    if recomputed:
        recompute_blocks(model)
    runs, kept = [], {}
    for module in model.modules():
        if isinstance(module, Block):
            module.norm1.register_forward_hook(lambda *_: runs.append(1))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch_of(0)).loss
    loss.backward()
    return (
        loss.item(),
        {key: p.grad for key, p in model.named_parameters() if p.grad is not None},
        sum(kept.values()),
        len(runs),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_are_the_same(name):
    loss, gradients, kept, runs = gradients_of(name, recomputed=False)
    recomputed_loss, recomputed, recomputed_kept, recomputed_runs = gradients_of(name, recomputed=True)
    assert recomputed_loss == loss
    assert gradients.keys() == recomputed.keys()
    for key, gradient in gradients.items():
        assert torch.isfinite(gradient).all()
        assert torch.equal(recomputed[key], gradient), key
    assert recomputed_kept < kept
    assert recomputed_runs > runs


def test_the_estimate_says_so():
    whole, recomputed = (
        estimate(
            build_objective, image_shape=(3, 16, 16), batch_size_per_device=16, activation_checkpointing=on
        )
        for on in (False, True)
    )
    assert 0 < recomputed.activation_bytes < 0.9 * whole.activation_bytes
    assert recomputed.flops_per_image == whole.flops_per_image


def test_the_estimate_of_a_long_stack_is_its_inputs_and_one_block():
    def build(depth: int):
        model = build_objective("supervised")
        model.encoder.blocks = torch.nn.Sequential(*[Block(32, 2) for _ in range(depth)])
        return model

    few, many = (
        estimate(
            lambda depth=depth: build(depth),
            image_shape=(3, 16, 16),
            batch_size_per_device=16,
            activation_checkpointing=True,
        )
        for depth in (2, 10)
    )
    # Eight more inputs of 16 images, 17 tokens, 32 channels in float32.
    assert many.activation_bytes - few.activation_bytes == 8 * 16 * 17 * 32 * 4


def test_memory_falls_with_the_stage():
    costs = estimate(build_objective, image_shape=(3, 16, 16), batch_size_per_device=1)
    gib_by_stage = [costs.memory_gib(world_size=8, zero_stage=stage) for stage in range(3)]
    assert gib_by_stage == sorted(gib_by_stage, reverse=True)
    assert len(set(gib_by_stage)) == 3
    one_slot = estimate(build_objective, image_shape=(3, 16, 16), batch_size_per_device=1, optimizer_slots=1)
    assert one_slot.memory_gib(world_size=8, zero_stage=0) < gib_by_stage[0]
    assert one_slot.checkpoint_bytes == costs.checkpoint_bytes - 4 * costs.trainable
