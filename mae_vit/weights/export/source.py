"""The source of an export (an encoder with its head or decoder), and its result.

Shapes: B batch, C channels, H W pixels, D width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mae_vit.core.errors import InputError
from mae_vit.models.attention import set_fused_attention
from mae_vit.models.encoder_file import EncoderInfo, to_metadata
from mae_vit.models.sizes import Pool
from mae_vit.weights.encoder import PretrainedEncoder, encoder_from_weights
from mae_vit.weights.mae_decoder import Decoder, read_decoder
from mae_vit.weights.read import Weights, read_weights

# Differs from the number that programs are traced with, to test that their batch axis is free.
_RANDOM_IMAGES = 3
# Two float32 implementations of the same network differ by some 1e-6, of the largest value if that is above 1.
TOLERANCE = 1e-4


class Network(nn.Module):
    """An encoder with its pooling, and the linear head of a classifier, (B, D) -> (B, K), if there is one."""

    def __init__(self, encoder: PretrainedEncoder, head: nn.Linear | None) -> None:
        """Joins both, in evaluation mode."""
        super().__init__()
        self.encoder, self.head = encoder, head
        self.output_name = "features" if head is None else "logits"
        # A norm after the mean, and none before (official MAE code, `global_pool`).
        self.has_fc_norm = isinstance(encoder.fc_norm, nn.LayerNorm)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Computes features (B, D) or logits (B, K) of normalized images, float32 (B, C, H, W)."""
        features = self.encoder(images)
        return features if self.head is None else self.head(features)

    def timm_state(self) -> dict[str, Tensor]:
        """Returns all weights by timm's names, float32 on the CPU."""
        head = nn.Identity() if self.head is None else self.head
        parts = {"": self.encoder.encoder, "fc_norm.": self.encoder.fc_norm, "head.": head}
        return {
            prefix + name: value.detach().float().cpu().clone().contiguous()
            for prefix, part in parts.items()
            for name, value in part.state_dict().items()
        }


@dataclass(frozen=True)
class ExportSource:
    """The source of an export.

    Attributes:
        asked: weights as the user named them.
        network: float32 network with the weights.
        classes: names of the head's outputs; empty without a head or if unknown.
        decoder: decoder of MAE; None if there is none.
    """

    asked: str
    network: Network
    classes: tuple[str, ...]
    decoder: Decoder | None

    @property
    def encoder(self) -> PretrainedEncoder:
        """The encoder with its pooling."""
        return self.network.encoder

    @property
    def info(self) -> EncoderInfo:
        """Geometry, normalization and training of the encoder."""
        return self.encoder.info

    @property
    def weights(self) -> Weights:
        """The weights as they were read."""
        return self.encoder.weights

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """C, H and W."""
        return (self.info.in_chans, *self.info.img_size)

    @property
    def preparation(self) -> str:
        """Sentences on changes to images before any other step; empty without any."""
        return self.info.preprocessing.describe(in_bands=not self.info.bands.photographs)

    def random_images(self) -> Tensor:
        """Returns the same normalized random images at every call: float32 (3, C, H, W)."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(_RANDOM_IMAGES, *self.image_shape, generator=generator)

    def metadata(self) -> dict[str, str]:
        """Returns a file's metadata: geometry, normalization, training, pooling and classes."""
        more = {"pool": self.encoder.pool, **({"classes": self.classes} if self.classes else {})}
        return to_metadata({**self.info.to_dict(), **more})


@dataclass(frozen=True)
class Written:
    """The written files, as the other library loads them.

    Attributes:
        outputs: name -> (our result, the other library's) for `ExportSource.random_images`.
        code: Python code that uses the files in their folder. It defines `model`, and computes the first of
            `outputs` from `images`.
        notes: facts for the user, a sentence each.
    """

    outputs: dict[str, tuple[Tensor, Tensor]]
    code: str
    notes: tuple[str, ...] = ()

    def largest_difference(self, library: str) -> float:
        """Compares the outputs.

        Raises InputError if outputs have another shape, differ by more than `TOLERANCE`, or are not finite.
        """
        differences = []
        for name, (ours, theirs) in self.outputs.items():
            same_shape = ours.shape == theirs.shape
            scale = max(1.0, ours.abs().max().item())
            differences.append((ours - theirs).abs().max().item() / scale if same_shape else float("nan"))
            if not differences[-1] <= TOLERANCE:  # also true for NaN
                problem = f"differ by {differences[-1]:.3g} from ours (at most {TOLERANCE:g})"
                raise InputError(f"{library}'s {name} {problem}; nothing was written")
        return max(differences)


def load_for_export(asked: str, pool: Pool | None) -> ExportSource:
    """Reads weights of any supported kind for an export; a `pool` of None is the encoder's own.

    Raises InputError if there are no such weights, or if `pool` is set for a classifier, which has its own pooling.
    """
    weights = read_weights(asked)
    head = _read_head(weights)
    if pool is not None and (head is not None or "fc_norm.weight" in weights.tensors):
        raise InputError(
            f"--pool {pool} has no effect on {weights.source}, which is fine-tuned; leave it out"
        )
    encoder = encoder_from_weights(weights, pool=pool)
    _ = encoder.info.vit  # no format has other families
    # Tracers see fused attention as one operation, for all sequence lengths.
    set_fused_attention(encoder, True)
    if head is not None and head.in_features != encoder.num_features:
        raise InputError(
            f"{weights.source}: its head has {head.in_features} inputs, its encoder {encoder.num_features} outputs"
        )
    classes = weights.classes if head is not None and len(weights.classes) == head.out_features else ()
    decoder = read_decoder(weights, encoder.encoder, encoder.info)
    return ExportSource(asked, Network(encoder, head), classes, decoder)


def _read_head(weights: Weights) -> nn.Linear | None:
    """Returns the head of a classifier; None for weights with an objective, whose heads do not classify."""
    weight, bias = (weights.tensors.get(f"head.{name}") for name in ("weight", "bias"))
    if weights.objective is not None or weight is None or weight.ndim != 2:
        return None
    if bias is None or bias.shape != weight.shape[:1]:
        raise InputError(f"{weights.source}: its head.weight has no matching head.bias; give another file")
    head = nn.Linear(weight.shape[1], weight.shape[0])
    head.load_state_dict({"weight": weight, "bias": bias})
    return head
