"""One linear layer on frozen features, trained by gradient descent (MAE Sec. A.1, linear probing).

Shapes: n images, B batch, D width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Official MAE code, main_linprobe.py.
_EPS = 1e-6


class LinearProbe(nn.Module):
    """BatchNorm without affine parameters, then one linear layer (MAE Sec. A.1).

    The norm uses statistics of the whole batch; the official code uses those of each GPU's part.
    """

    def __init__(self, head: nn.Linear) -> None:
        """Copies `head`, D -> K."""
        super().__init__()
        self.norm = nn.BatchNorm1d(head.in_features, eps=_EPS, affine=False)
        self.head = nn.Linear(head.in_features, head.out_features)
        self.head.load_state_dict(head.state_dict())

    def forward(self, features: Tensor) -> Tensor:
        """Classifies features: (B, D) -> logits (B, K)."""
        return self.head(self.norm(features))

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """Folds the norm's running statistics into the layer: weight (K, D), bias (K,)."""
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        scale = (self.norm.running_var.double() + self.norm.eps).rsqrt()  # (D,)
        weight = self.head.weight.double() * scale
        bias = self.head.bias.double() - weight @ self.norm.running_mean.double()
        return weight.float(), bias.float()


def train_probe(
    probe: LinearProbe,
    features: Tensor,
    labels: Tensor,
    steps: Iterable[tuple[float, np.ndarray]],
    optimizer: torch.optim.Optimizer,
    *,
    label_smoothing: float = 0.0,
) -> None:
    """Trains a probe, in float32, and leaves it in evaluation mode.

    Features are the same in every epoch; the paper crops, flips and encodes each image anew.

    Args:
        probe: the probe, on the device of the features.
        features: (n, D) of the training images.
        labels: int64 (n,), on the same device.
        steps: learning rate and row numbers (B,) of the images of each step.
        optimizer: updates the probe's parameters.
        label_smoothing: share of the target that is spread over all classes, 0 to 1.
    """
    probe.train()
    for rate, numbers in steps:
        chosen = torch.from_numpy(numbers).to(features.device)  # (B,)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(probe(features[chosen]), labels[chosen], label_smoothing=label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    probe.eval()


@torch.no_grad()
def probe_top1(probe: LinearProbe, features: Tensor, labels: Tensor) -> float | None:
    """Computes top-1 accuracy; None if a logit is not finite, because the learning rate was too large."""
    logits = probe(features)  # (n, K)
    if not torch.isfinite(logits).all():
        return None
    return float((logits.argmax(dim=-1) == labels).double().mean())


def best_index(scores: Sequence[float | None]) -> int | None:
    """Returns the index of the largest score, the first of equal ones; None if no score is known."""
    known = [-math.inf if score is None else score for score in scores]
    best = max(known, default=-math.inf)
    return None if best == -math.inf else known.index(best)
