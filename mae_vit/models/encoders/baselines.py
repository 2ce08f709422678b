"""Baselines of the small-data experiment, and any timm model by name.

SimpleCNN and SmallResNet follow the experiment's report, whose parameter counts (141,354 and
175,258 with ten classes) determine widths and depths. SmallBiT and SmallHybrid are the ViT
paper's comparisons at 32 px, about as large as ViT-Tiny.
Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch.nn.functional as F
from timm.layers import GroupNormAct, HybridEmbed, StdConv2d
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mae_vit.core.messages import closest, error_reason
from mae_vit.models.sizes import SIZES, TIMM_PREFIX


def _conv_norm_relu(in_chans: int, out_chans: int) -> list[nn.Module]:
    return [nn.Conv2d(in_chans, out_chans, 3, padding=1), nn.BatchNorm2d(out_chans), nn.ReLU(inplace=True)]


class SimpleCNN(nn.Sequential):
    """3x3 convolutions of widths 32-32, 64-64, 128; max-pooling halves the image between groups; global average."""

    def __init__(self, num_classes: int, in_chans: int = 3) -> None:
        """Builds (B, C, H, W) -> (B, K)."""
        super().__init__(
            *_conv_norm_relu(in_chans, 32),
            *_conv_norm_relu(32, 32),
            nn.MaxPool2d(2),
            *_conv_norm_relu(32, 64),
            *_conv_norm_relu(64, 64),
            nn.MaxPool2d(2),
            *_conv_norm_relu(64, 128),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, num_classes),
        )


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., arXiv 1512.03385, Sec. 3.3, option B)."""

    def __init__(self, in_chans: int, out_chans: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, out_chans, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_chans)
        self.conv2 = nn.Conv2d(out_chans, out_chans, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_chans)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_chans != out_chans:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_chans, out_chans, 1, stride, bias=False), nn.BatchNorm2d(out_chans)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class SmallResNet(nn.Sequential):
    """A stem of width 16 and three stages of two blocks, 16 / 32 / 64 wide."""

    def __init__(self, num_classes: int, in_chans: int = 3) -> None:
        """Builds (B, C, H, W) -> (B, K)."""
        super().__init__(
            nn.Conv2d(in_chans, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            _BasicBlock(16, 16, 1),
            _BasicBlock(16, 16, 1),
            _BasicBlock(16, 32, 2),
            _BasicBlock(32, 32, 1),
            _BasicBlock(32, 64, 2),
            _BasicBlock(64, 64, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, num_classes),
        )


class SmallBiT(ResNetV2):
    """A residual network like BiT (arXiv 1912.11370, Sec. 3.1), for small images.

    It has group norms, standardized weights and pre-activation. A convolution of stride 1 replaces BiT's
    stem, which divides both sides by 4. The three stages are 32 / 64 / 128 wide.
    """

    def __init__(
        self,
        num_classes: int,
        in_chans: int = 3,
        *,
        layers: Sequence[int] = (2, 2, 2),
        global_pool: str = "avg",
        drop_path_rate: float = 0.0,
    ) -> None:
        """Builds (B, C, H, W) -> (B, K), or (B, 128, H/4, W/4) with 0 classes and no pool."""
        super().__init__(
            list(layers),
            channels=(32, 64, 128),
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            stem_chs=32,
            basic=True,
            bottle_ratio=1.0,
            norm_layer=partial(GroupNormAct, num_groups=8),
            drop_path_rate=drop_path_rate,
        )
        self.stem = nn.Sequential(StdConv2d(in_chans, 32, 3, padding=1))


def small_hybrid(
    num_classes: int, in_chans: int, img_size: tuple[int, int], drop_path_rate: float = 0.0
) -> nn.Module:
    """Builds ViT-Tiny on the features of a SmallBiT with one block per stage (ViT Sec. 3.1, "Hybrid").

    Each of the H/4 x W/4 features is a token. ViT-Tiny with patches of 4 px has the same number of tokens.
    """
    size = SIZES["tiny-cifar"]
    backbone = SmallBiT(0, in_chans, layers=(1, 1, 1), global_pool="")
    model = VisionTransformer(
        img_size,
        patch_size=1,
        in_chans=in_chans,
        num_classes=num_classes,
        embed_dim=size.embed_dim,
        depth=size.depth,
        num_heads=size.num_heads,
        drop_path_rate=drop_path_rate,
        embed_layer=partial(HybridEmbed, backbone=backbone),
    )
    # Initialize the backbone again: timm's transformer has set its residual branches to zero, which
    # standardized weights must not be.
    backbone.init_weights(zero_init_last=False)
    return model


# Builders; arguments: number of classes, channels, (H, W), rate of stochastic depth.
BASELINES: dict[str, Callable[[int, int, tuple[int, int], float], nn.Module]] = {
    "SimpleCNN": lambda classes, chans, size, rate: SimpleCNN(classes, chans),
    "SmallResNet": lambda classes, chans, size, rate: SmallResNet(classes, chans),
    "SmallBiT": lambda classes, chans, size, rate: SmallBiT(classes, chans, drop_path_rate=rate),
    "SmallHybrid": small_hybrid,
}


def check_network(name: str) -> None:
    """Raises ValueError, which names the closest architecture, if timm does not know `name`."""
    known, wanted = timm.list_models(), name.removeprefix(TIMM_PREFIX)
    if wanted not in known:
        hint = closest(wanted, known)
        raise ValueError(f'timm has no architecture "{wanted}"' + (f": {hint}" if hint else ""))


def build_network(
    name: str, *, num_classes: int, in_chans: int, img_size: tuple[int, int], drop_path_rate: float = 0.0
) -> nn.Module:
    """Builds a baseline or a timm architecture with fresh weights: (B, C, H, W) -> (B, K).

    `name` is in `BASELINES`, or "timm:NAME" (such as BiT's resnetv2_50x1_bit, or the hybrid vit_small_r26_s32_224).
    Networks of fixed size need `img_size`; `drop_path_rate` is for architectures that have it. Raises ValueError if
    timm does not know the architecture, or cannot build it with these sizes.
    """
    if not name.startswith(TIMM_PREFIX):
        return BASELINES[name](num_classes, in_chans, img_size, drop_path_rate)
    check_network(name)
    wanted = name.removeprefix(TIMM_PREFIX)
    # Pass the rate even if it is 0, because some architectures have another default.
    options: dict[str, Any] = {"drop_path_rate": drop_path_rate}
    if timm.get_pretrained_cfg_value(wanted, "fixed_input_size"):
        options["img_size"] = img_size
    try:
        try:
            return timm.create_model(wanted, num_classes=num_classes, in_chans=in_chans, **options)
        except TypeError:
            if drop_path_rate:
                raise
            del options["drop_path_rate"]  # this architecture has no drop path
            return timm.create_model(wanted, num_classes=num_classes, in_chans=in_chans, **options)
    except Exception as error:  # timm raises many types
        raise ValueError(
            f"{name} cannot be built for {in_chans} x {img_size}: {error_reason(error)[:160]}"
        ) from None
