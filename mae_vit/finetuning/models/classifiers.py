"""The networks that fine-tuning trains on labels: a Vision Transformer with a head, or any other."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.finetuning.config.schema import HeadInit
from mae_vit.models.encoders.base import Encoder, LoadReport, pool_tokens
from mae_vit.models.encoders.network import in_fast_layout, layer_in, network_layers
from mae_vit.models.geometry import NetworkGeometry
from mae_vit.models.sizes import Pool
from mae_vit.objectives.label_loss import LabelLoss, LabelTask
from mae_vit.objectives.objective import Pixels
from mae_vit.weights.load import load_weights
from mae_vit.weights.read import Weights

# Standard deviation of the head's initial weights; 2e-5 is the official MAE code's in fine-tuning.
HEAD_STD: dict[HeadInit, float] = {"zero": 0.0, "small": 2e-5}
# That of a probe by LARS, which scales steps by the norm of the weights (official MAE code, main_linprobe.py).
LARS_STD = 0.01


class Classifier(LabelTask):
    """A network that classifies images. Shapes: B batch, C channels, H W pixels, K classes."""

    def __init__(self, *, labels: LabelLoss, **pixels: Unpack[Pixels]) -> None:
        """Holds the normalization (see `Task`) and the training loss."""
        super().__init__(**pixels)
        self.labels = labels

    @abstractmethod
    def load(self, weights: Weights) -> LoadReport:
        """Loads pretrained weights into a fresh network; returns how each tensor was loaded. The head is new.

        Raises:
            InputError: if they do not fit; names the difference.
        """

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the loss, and the top-1 and top-5 hits."""
        logits = self.classify(batch)
        first = logits.topk(min(5, logits.shape[1]), dim=-1).indices == batch.labels[:, None]
        return {
            "images": torch.tensor(float(len(logits)), device=logits.device),
            "loss": F.cross_entropy(logits, batch.labels, reduction="sum"),
            "top1": (logits.argmax(dim=-1) == batch.labels).sum().float(),
            "top5": first.any(dim=1).sum().float(),
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss without smoothing, and both accuracies."""
        return {name: sums[name] / sums["images"] for name in ("loss", "top1", "top5")}


class ViTClassifier(Classifier):
    """An encoder, a pooling and one linear layer (ViT Sec. 3.1; MAE Sec. A.1).

    `pool="cls"` takes [CLS] after the encoder's final norm (ViT). `pool="mean"` drops the final norm,
    averages the patch tokens, and applies a new norm `fc_norm` to the mean (official MAE code,
    `global_pool`). Names are timm's.
    """

    def __init__(self, encoder: Encoder, *, pool: Pool, head_init: HeadInit, **common: Any) -> None:
        """Adds pooling and head to `encoder`; "mean" removes its final norm. `common`: see `Classifier`."""
        super().__init__(**common)
        self.encoder = encoder
        self.pool = pool
        if pool == "mean" and encoder.has_final_norm:
            encoder.norm = nn.Identity()
        # LayerNorm epsilon of timm and MAE.
        self.fc_norm: nn.Module = (
            nn.LayerNorm(encoder.embed_dim, eps=1e-6) if pool == "mean" else nn.Identity()
        )
        self.head = make_head(encoder.embed_dim, self.labels.num_classes, HEAD_STD[head_init])

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""
        tokens = self.encoder.forward_features(images)
        return self.head(self.fc_norm(pool_tokens(self.encoder, tokens, self.pool)))

    def load(self, weights: Weights) -> LoadReport:
        """Loads the encoder; the norm after the mean is new, as the head."""
        report = load_weights(weights, self.encoder)
        if self.pool == "mean":
            if dropped := [name for name in ("norm.weight", "norm.bias") if name in report.skipped]:
                report.skipped = [name for name in report.skipped if name not in dropped]
                note = "final norm, dropped: the mean of the patch tokens has a new norm after it (MAE)"
                report.by_design[" + ".join(dropped)] = note
            report.by_design["fc_norm"] = "new: the norm after the mean"
        report.by_design["head"] = "new: for these classes"
        return report


def make_head(embed_dim: int, num_classes: int, std: float) -> nn.Linear:
    """Makes a linear layer of zeros (ViT Sec. 3.2), or of random weights as in the official MAE code."""
    head = nn.Linear(embed_dim, num_classes)
    if std:
        nn.init.trunc_normal_(head.weight, std=std)
    else:
        nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class NetworkClassifier(Classifier):
    """A network that already has a head."""

    def __init__(self, network: nn.Module, **common: Any) -> None:
        """Holds the network, (B, C, H, W) -> (B, K); `common`: see `Classifier`."""
        super().__init__(**common)
        self.network = network

    def load(self, weights: Weights) -> LoadReport:
        """Loads all but the head."""
        report = load_weights(weights, NetworkBody(self.network))
        report.by_design["head"] = "new: for these classes"
        return report

    def layer_of(self, name: str) -> int | None:
        """Returns the number of a parameter's layer; None for the head."""
        return layer_in(network_layers(self.network), name.removeprefix("network."))

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""
        return self.network(in_fast_layout(images, self.network))


class NetworkBody(Encoder):
    """All of a network but its head; tensors keep the network's names."""

    family = NetworkGeometry.family

    def __init__(self, network: nn.Module) -> None:
        """Holds a `Sequential` whose last layer is the head, or a network of timm's."""
        super().__init__()
        self.network = network
        head = network[-1] if isinstance(network, nn.Sequential) else network.get_classifier()  # type: ignore[operator]
        # Distilled networks have two.
        heads = head if isinstance(head, tuple) else (head,)
        self._head = {id(value) for each in heads for value in each.state_dict(keep_vars=True).values()}

    def weights(self) -> dict[str, Tensor]:
        """Returns all tensors but those of the head."""
        state = self.network.state_dict(keep_vars=True)
        return {name: value.detach() for name, value in state.items() if id(value) not in self._head}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Loads all tensors but those of the head."""
        self.network.load_state_dict({**self.network.state_dict(), **tensors})
