"""Convolutional baselines of the small-data experiment, and any timm model by name.

The two small networks are those of the experiment's report, whose parameter counts
fix widths and depths: SimpleCNN 141,354, SmallResNet 175,258 with ten classes.
Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import timm
import torch.nn.functional as F
from torch import Tensor, nn

TIMM_PREFIX = "timm:"


def _conv_norm_relu(in_chans: int, out_chans: int) -> list[nn.Module]:
    return [nn.Conv2d(in_chans, out_chans, 3, padding=1), nn.BatchNorm2d(out_chans), nn.ReLU(inplace=True)]


class SimpleCNN(nn.Sequential):
    """3x3 convolutions 32-32, 64-64, 128, halved between the groups, then a global average."""

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
    """A stem of 16 and three stages of two blocks, 16 / 32 / 64 wide."""

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


BASELINES: dict[str, Callable[[int, int], nn.Module]] = {"SimpleCNN": SimpleCNN, "SmallResNet": SmallResNet}


def check_network(name: str) -> None:
    """Checks the name of a baseline, or of an architecture of timm's.

    Raises:
        ValueError: naming the nearest.
    """
    known = timm.list_models() if name.startswith(TIMM_PREFIX) else list(BASELINES)
    wanted = name.removeprefix(TIMM_PREFIX)
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
        raise ValueError(
            f'timm has no architecture "{wanted}"' + (f': did you mean "{close[0]}"?' if close else "")
        )


def build_network(
    name: str, *, num_classes: int, in_chans: int, img_size: tuple[int, int], drop_path_rate: float = 0.0
) -> nn.Module:
    """Builds a baseline, or an architecture of timm's, with fresh weights: (B, C, H, W) -> (B, K).

    Args:
        name: of `BASELINES`, or "timm:NAME" (ResNets of BiT: resnetv2_50x1_bit; hybrids:
            vit_small_r26_s32_224).
        num_classes: K.
        in_chans: C.
        img_size: (H, W), for networks of fixed size.
        drop_path_rate: stochastic depth, where the architecture has it.

    Raises:
        ValueError: if timm does not know it, or cannot build it so.
    """
    if not name.startswith(TIMM_PREFIX):
        return BASELINES[name](num_classes, in_chans)
    check_network(name)
    wanted = name.removeprefix(TIMM_PREFIX)
    # Given even at 0: some architectures have another default.
    options: dict[str, Any] = {"drop_path_rate": drop_path_rate}
    if timm.get_pretrained_cfg_value(wanted, "fixed_input_size"):
        options["img_size"] = img_size
    try:
        try:
            return timm.create_model(wanted, num_classes=num_classes, in_chans=in_chans, **options)
        except TypeError:
            if drop_path_rate:
                raise
            del options["drop_path_rate"]  # an architecture without
            return timm.create_model(wanted, num_classes=num_classes, in_chans=in_chans, **options)
    except Exception as error:  # whatever an architecture has against it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{name} cannot be built for {in_chans} x {img_size}: {reason[:160]}") from None
