"""What a run needs of a GPU: memory between two bounds, the rate that it could reach, and less memory for more time."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.objectives import build
from timm.models.vision_transformer import Block
from torch import nn
from workers.plain_loop import batch_of, build_objective

from mae_vit.models.attention import set_fused_attention
from mae_vit.objectives import OBJECTIVES
from mae_vit.pretraining import doctor
from mae_vit.runtime.ranks import ALONE
from mae_vit.testing import batch_for
from mae_vit.training.engines.base import recompute_blocks
from mae_vit.training.engines.cost import BLOCKS, Estimate, MetaStep, peak_flops
from mae_vit.training.engines.precision import autocast


def kept_of(size: int, precision: str, name: str = "mae", *, fused: bool, recomputed: bool = False) -> int:
    step = MetaStep(lambda: build_objective(name), (3, 16, 16), size, recomputed)
    return step.kept_bytes(precision, fused_attention=fused)


def costs_of(build=build_objective, size: int = 16, **options) -> Estimate:
    return MetaStep(build, (3, 16, 16), size, **options).estimate()


def gradients_of(
    name: str, *, recomputed: bool = False, fused: bool = False, precision: str = "fp32"
) -> tuple[float, dict[str, torch.Tensor], int, int]:
    """Loss, gradients, bytes that autograd keeps, and how often blocks' first norms ran."""
    model = build("simmim", "rotary") if name == "rotary" else build_objective(name)
    set_fused_attention(model, fused)
    if recomputed:
        recompute_blocks(model)
    runs, kept = [], {}
    for module in model.modules():
        if isinstance(module, BLOCKS):
            module.norm1.register_forward_hook(lambda *_: runs.append(1))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive: no other takes its place
        return tensor

    autocast_on = autocast(torch.device("cpu"), precision)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast_on:
        loss = model(batch_for(model) if name == "rotary" else batch_of(0)).loss
    size = sum(size for size, _ in kept.values())
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, size, len(runs)


@pytest.mark.parametrize("name", [*OBJECTIVES, "rotary"])
def test_recomputing_gives_the_same_loss_and_gradients_from_less_memory(name):
    loss, gradients, kept, runs = gradients_of(name, recomputed=False)
    recomputed_loss, recomputed, recomputed_kept, recomputed_runs = gradients_of(name, recomputed=True)
    assert recomputed_loss == loss
    assert gradients.keys() == recomputed.keys()
    for key, gradient in gradients.items():
        assert torch.isfinite(gradient).all()
        assert torch.equal(recomputed[key], gradient), key
    assert recomputed_kept < kept
    assert recomputed_runs > runs
    if name == "rotary":
        estimated = [
            MetaStep(lambda: build("simmim", "rotary"), (3, 8, 24), 8, on).kept_bytes(
                "fp32", fused_attention=False
            )
            for on in (False, True)
        ]
        assert estimated[1] < estimated[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["mae", "masked_patch"])
def test_what_is_kept_is_what_autograd_keeps(precision, fused, name):
    kept = gradients_of(name, fused=fused, precision=precision)[2]
    # Some bytes more or less: small tables that are made in passing.
    assert kept_of(16, precision, name, fused=fused) == pytest.approx(kept, rel=0.02)


def weights_of(model: nn.Module) -> int:
    # Of the patch projection none is kept: pixels need no gradient.
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def test_bf16_keeps_a_copy_of_every_weight_unless_it_is_recomputed():
    whole, recomputed = (
        2 * kept_of(1, "bf16", fused=True, recomputed=on) - kept_of(2, "bf16", fused=True, recomputed=on)
        for on in (False, True)
    )
    model = build_objective()
    assert whole == 2 * weights_of(model)
    # Of four blocks one is computed again at a time, and the decoder's last runs in parts: never.
    in_blocks = sum(weights_of(block) for block in model.modules() if isinstance(block, Block))
    assert 0 < recomputed < 2 * (weights_of(model) - in_blocks * 0.4)


def test_a_shared_encoder_is_measured_whoever_refers_to_its_parameters(monkeypatch):
    """torch replaces no fake parameter that anything refers to weakly, and joint's objectives share one encoder."""
    expected, references, whole = kept_of(4, "fp32", "joint", fused=True), [], nn.Module._apply

    def refer(module, *words, **options):
        whole(module, *words, **options)
        references.extend(weakref.ref(p) for p in module._parameters.values() if p is not None)
        return module

    monkeypatch.setattr(nn.Module, "_apply", refer)
    assert kept_of(4, "fp32", "joint", fused=True) == expected
    assert references


def test_the_estimate_of_a_recomputed_stack_is_its_inputs_and_one_block():
    whole, recomputed = (costs_of(activation_checkpointing=on) for on in (False, True))
    assert 0 < recomputed.activation_bytes < 0.9 * whole.activation_bytes
    assert recomputed.flops_per_image == whole.flops_per_image

    def build(depth: int):
        model = build_objective("supervised")
        model.encoder.blocks = torch.nn.Sequential(*[Block(32, 2) for _ in range(depth)])
        return model

    few, many = (costs_of(lambda n=n: build(n), activation_checkpointing=True) for n in (2, 10))
    # Eight more inputs of 16 images, 17 tokens, 32 channels in float32.
    assert many.activation_bytes - few.activation_bytes == 8 * 16 * 17 * 32 * 4
    # Eight equal blocks.
    assert many.launches > few.launches
    assert (many.launches - few.launches) % 8 == 0


def test_raw_images_count_by_their_type_and_bands():
    """With the same network, an image of four bytes a value takes three more a value than one of 8 bits."""
    types = (torch.uint8, torch.uint16, torch.float32)
    byte, word, real = (costs_of(size=5, dtype=dtype).activation_bytes for dtype in types)
    assert (word - byte, real - byte) == (5 * 3 * 16 * 16, 3 * 5 * 3 * 16 * 16)


def test_zero_shares_what_it_can():
    costs = replace(costs_of(size=1), activation_bytes=0)
    huge = replace(costs, parameters=3_000_000_000, trainable=3_000_000_000)
    for one, stages in ((costs, 3), (huge, 4)):
        gib = [one.memory_gib(world_size=8, zero_stage=stage) for stage in range(stages)]
        assert gib == sorted(gib, reverse=True)
        assert len(set(gib)) == stages
    # By hand: a share of weights, slots, their float32 copy and gradients; a billion gathered weights; two buckets.
    by_hand = 4 * (3e9 * (1 + 2 + 1 + 1) / 8 + 1e9 + 2 * 25e6)
    assert gib[3] == pytest.approx(by_hand / 2**30)
    # Of a small model ZeRO 3 keeps all weights gathered, beside its share.
    assert costs.memory_gib(world_size=8, zero_stage=3) > costs.memory_gib(world_size=8, zero_stage=2)
    one_slot = replace(costs_of(size=1), optimizer_slots=1)
    assert one_slot.checkpoint_bytes == costs.checkpoint_bytes - 4 * costs.trainable
    # The bounds enclose each other.
    whole, kept = costs_of(size=256), kept_of(256, "bf16", fused=True)
    assert kept < 0.7 * whole.activation_bytes
    for stage in range(4):
        sharing = {"world_size": 8, "zero_stage": stage}
        least = whole.least_gib(**sharing, kept_bytes=kept)
        assert whole.least_gib(**sharing, kept_bytes=0) < least < whole.memory_gib(**sharing)


@pytest.mark.parametrize(
    ("free", "status"), [(0.9, "FAIL"), (1.1, "warn"), (2.9, "warn"), (3.1, "warn"), (4.0, "ok")]
)
def test_only_what_cannot_fit_fails(free, status, monkeypatch):
    monkeypatch.setattr(doctor, "free_memory_gib", lambda ranks, device: (free, "the GPU"))
    monkeypatch.setattr(doctor, "least_kept", lambda setup: 0)
    costs = SimpleNamespace(memory_gib=lambda **sharing: 3.0, least_gib=lambda **sharing: 1.0)
    train = SimpleNamespace(zero_stage=0)
    check = doctor.check_memory(
        SimpleNamespace(config=SimpleNamespace(train=train), ranks=ALONE, device=None, costs=costs)
    )
    assert check.status == status
    assert ("train.zero_stage" in check.text) == (status != "ok")


PEAKS = {
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GB200": 2500,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40S": 362,
    "Tesla V100-PCIE-16GB": 112,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 4090": None,
    "NVIDIA A1000 Laptop GPU": None,
}


def test_peak_rates_by_name(monkeypatch):
    for name, teraflops in PEAKS.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        expected = None if teraflops is None else teraflops * 1e12
        assert peak_flops(torch.device("cuda"), "bf16") == expected, name
        assert peak_flops(torch.device("cuda"), "fp32") is None
