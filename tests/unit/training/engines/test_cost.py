"""What a run needs of a GPU: memory between two bounds, and the rate that it could reach."""

import weakref
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn
from workers.plain_loop import batch_of, build_objective

from mae_vit.models.attention import set_fused_attention
from mae_vit.pretraining import doctor
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.cost import estimate, kept_bytes, peak_flops
from mae_vit.training.engines.precision import AUTOCAST_DTYPES


def kept_of(
    batch_size: int, precision: str, *, fused: bool, recomputed: bool = False, name: str = "mae"
) -> int:
    return kept_bytes(
        lambda: build_objective(name),
        image_shape=(3, 16, 16),
        batch_size_per_device=batch_size,
        precision=precision,
        fused_attention=fused,
        activation_checkpointing=recomputed,
    )


def test_a_shared_encoder_is_measured_whoever_refers_to_its_parameters(monkeypatch):
    """torch replaces no fake parameter that anything refers to weakly, and joint's objectives share one encoder."""
    expected, references, whole = kept_of(4, "fp32", fused=True, name="joint"), [], nn.Module._apply

    def refer(module, *words, **options):
        whole(module, *words, **options)
        references.extend(weakref.ref(p) for p in module._parameters.values() if p is not None)
        return module

    monkeypatch.setattr(nn.Module, "_apply", refer)
    assert kept_of(4, "fp32", fused=True, name="joint") == expected
    assert references


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["mae", "masked_patch"])
def test_what_is_kept_is_what_autograd_keeps(precision, fused, name):
    model, storages = build_objective(name), {}
    set_fused_attention(model, fused)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            # Held, so that no other storage takes its place.
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    dtype = AUTOCAST_DTYPES.get(precision)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
    ):
        loss = model(batch_of(0)).loss
    assert torch.isfinite(loss)
    estimated = kept_of(16, precision, fused=fused, name=name)
    # Real storages of some bytes more or less: small tables that are made in passing.
    assert estimated == pytest.approx(sum(size for size, _ in storages.values()), rel=0.02)


def weights_of(model: nn.Module) -> int:
    # Of the patch projection none is kept: pixels need no gradient.
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("recomputed", [False, True])
def test_bf16_keeps_a_copy_of_every_weight_unless_it_is_recomputed(recomputed):
    one, two = (kept_of(size, "bf16", fused=True, recomputed=recomputed) for size in (1, 2))
    model = build_objective()
    copies = 2 * one - two
    if not recomputed:
        assert copies == 2 * weights_of(model)
        return
    # Of four blocks one is computed again at a time, and the decoder's last runs in parts: never.
    in_blocks = sum(weights_of(block) for block in model.modules() if isinstance(block, Block))
    assert 0 < copies < 2 * (weights_of(model) - in_blocks * 0.4)


def test_fused_attention_keeps_no_maps():
    plain, fused = (
        kept_of(64, "bf16", fused=on, name="supervised") - kept_of(32, "bf16", fused=on, name="supervised")
        for on in (False, True)
    )
    # Two blocks, two heads, 17 tokens; a float32 number for each row instead of a map.
    assert plain - fused >= 32 * 2 * 2 * 17 * 17 * 2 - 32 * 2 * 2 * 17 * 4


def test_the_bounds_enclose_each_other():
    costs = estimate(build_objective, image_shape=(3, 16, 16), batch_size_per_device=256)
    kept = kept_of(256, "bf16", fused=True)
    assert kept < 0.7 * costs.activation_bytes
    for stage in range(4):
        sharing = {"world_size": 8, "zero_stage": stage}
        least = costs.least_gib(**sharing, kept_bytes=kept)
        assert costs.least_gib(**sharing, kept_bytes=0) < least < costs.memory_gib(**sharing)


def test_raw_images_count_by_their_type_and_bands():
    """With the same network, an image of four bytes a value takes three more a value than one of 8 bits."""
    shape = {"image_shape": (3, 16, 16), "batch_size_per_device": 5}
    byte, word, real = (
        estimate(build_objective, **shape, dtype=one).activation_bytes
        for one in (torch.uint8, torch.uint16, torch.float32)
    )
    assert (word - byte, real - byte) == (5 * 3 * 16 * 16, 3 * 5 * 3 * 16 * 16)


def test_zero_shares_what_it_can():
    costs = replace(
        estimate(build_objective, image_shape=(3, 16, 16), batch_size_per_device=1), activation_bytes=0
    )
    huge = replace(costs, parameters=3_000_000_000, trainable=3_000_000_000)
    gib_by_stage = [huge.memory_gib(world_size=8, zero_stage=stage) for stage in range(4)]
    assert gib_by_stage == sorted(gib_by_stage, reverse=True)
    # By hand: a share of weights, slots, their float32 copy and gradients; a billion gathered weights; two buckets.
    by_hand = 4 * (3e9 * (1 + 2 + 1 + 1) / 8 + 1e9 + 2 * 25e6)
    assert gib_by_stage[3] == pytest.approx(by_hand / 2**30)
    # Of a small model ZeRO 3 keeps all weights gathered, beside its share.
    assert costs.memory_gib(world_size=8, zero_stage=3) > costs.memory_gib(world_size=8, zero_stage=2)


@pytest.mark.parametrize(
    ("free", "status"), [(0.9, "FAIL"), (1.1, "warn"), (2.9, "warn"), (3.1, "warn"), (4.0, "ok")]
)
def test_only_what_cannot_fit_fails(free, status, monkeypatch):
    monkeypatch.setattr(doctor, "free_memory_gib", lambda ranks, device: (free, "the GPU"))
    check = doctor.check_memory(1.0, 3.0, Ranks(), torch.device("cuda"))
    assert check.status == status
    assert ("train.zero_stage" in check.text) == (status != "ok")


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A1000 Laptop GPU", None),
    ],
)
def test_peak_rates_by_name(name, teraflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(torch.device("cuda"), "bf16") == expected
    assert peak_flops(torch.device("cuda"), "fp32") is None
