"""Baselines of the small-data experiment, and any timm model by name.

SimpleCNN and SmallResNet follow the experiment's report, whose parameter counts (141,354 and
175,258 with ten classes) determine widths and depths. SmallBiT is the ViT paper's
comparison at 32 px.
Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch.nn.functional as F
from timm.layers import GroupNormAct, StdConv2d
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from mae_vit.core.messages import closest, error_reason
from mae_vit.models.sizes import TIMM_PREFIX


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

    def __init__(self, num_classes: int, in_chans: int = 3, *, drop_path_rate: float = 0.0) -> None:
        """Builds (B, C, H, W) -> (B, K)."""
        super().__init__(
            [2, 2, 2],
            channels=(32, 64, 128),
            num_classes=num_classes,
            in_chans=in_chans,
            stem_chs=32,
            basic=True,
            bottle_ratio=1.0,
            norm_layer=partial(GroupNormAct, num_groups=8),
            drop_path_rate=drop_path_rate,
        )
        self.stem = nn.Sequential(StdConv2d(in_chans, 32, 3, padding=1))


# Builders; arguments: number of classes, channels, rate of stochastic depth.
BASELINES: dict[str, Callable[[int, int, float], nn.Module]] = {
    "SimpleCNN": lambda classes, chans, rate: SimpleCNN(classes, chans),
    "SmallResNet": lambda classes, chans, rate: SmallResNet(classes, chans),
    "SmallBiT": lambda classes, chans, rate: SmallBiT(classes, chans, drop_path_rate=rate),
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
        return BASELINES[name](num_classes, in_chans, drop_path_rate)
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
        if "drop_path_rate" in str(error):
            raise ValueError(f"{name} has no stochastic depth; give model.drop_path_rate=0") from None
        raise ValueError(
            f"{name} cannot be built for {in_chans} x {img_size}: {error_reason(error)[:160]}"
        ) from None
