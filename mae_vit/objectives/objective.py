"""The interface of pretraining objectives and fine-tuning tasks to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import NotRequired, TypedDict, Unpack

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.patches import patchify


class ObjectiveOutput(NamedTuple):
    """The result of a forward pass; a tuple, because DeepSpeed searches tuples for tensors.

    Attributes:
        loss: scalar float32, the mean over the micro-batch.
        values: numbers to log by name, each a detached sum and its divisor. Both are summed over
            micro-batches and ranks before the division, so the split of a batch does not matter.
    """

    loss: Tensor
    values: dict[str, tuple[Tensor, Tensor]] = {}  # noqa: RUF012 (only read)


class Pixels(TypedDict):
    """The meaning of raw pixels, as keyword arguments of tasks.

    Attributes:
        mean: mean of each channel, for pixels in 0..1.
        std: standard deviation of each channel, for pixels in 0..1.
        bands: meaning of raw values; photographs by default.
    """

    mean: Sequence[float]
    std: Sequence[float]
    bands: NotRequired[Bands]


class Task(nn.Module, ABC):
    """A module to train: networks and a loss.

    Images arrive as raw values of the data's type. The task normalizes them on the device, because some targets
    need raw values.
    """

    mean: Tensor
    std: Tensor
    low: Tensor
    span: Tensor

    def __init__(self, *, mean: Sequence[float], std: Sequence[float], bands: Bands = RGB8) -> None:
        """Holds the normalization of each channel, see `Pixels`."""
        super().__init__()
        self.bands = bands
        facts = {"mean": mean, "std": std}
        if not bands.eight_bit:
            facts |= {
                "low": bands.low,
                "span": [high - low for low, high in zip(bands.low, bands.high, strict=True)],
            }
        for name, values in facts.items():
            # Not persistent: they describe the data, and the exported encoder's metadata has them.
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def unit(self, images: Tensor) -> Tensor:
        """Maps raw values (B, C, H, W) to float32 in 0..1 as `Bands.unit` does; missing values become 0."""
        return self._without_missing(self._scaled(images), images)

    def _scaled(self, images: Tensor) -> Tensor:
        # Returns a new tensor, which `normalize` changes in place.
        dtype = torch.float64 if self.mean.dtype == torch.float64 else torch.float32
        if self.bands.eight_bit:
            return images.to(dtype) / 255
        # In place: on a CPU, allocating intermediate results of many bands costs more than the arithmetic.
        # Buffers hold `low` and `span`, because a copy from the host would block.
        return images.to(dtype, copy=True).sub_(self.low).div_(self.span)

    def _without_missing(self, values: Tensor, images: Tensor) -> Tensor:
        valid = self.bands.valid(images)
        return values if valid is None else values.masked_fill_(~valid, 0.0)

    def normalize(self, images: Tensor) -> Tensor:
        """Maps raw values (B, C, H, W) to float32 of zero mean and unit variance over the data; missing ones to 0."""
        return self._without_missing(self._scaled(images).sub_(self.mean).div_(self.std), images)

    def mark_missing(self, batch: Batch) -> Batch:
        """Replaces missing values by NaN, so that they are missing in mixtures of images, too."""
        valid = self.bands.valid(batch.images)
        if valid is None:
            return batch
        return replace(batch, images=torch.where(valid, batch.images.float(), torch.nan))

    def layer_of(self, name: str) -> int | None:
        """Returns the number of a parameter's layer for layer-wise rate decay; None for the last layer, with the head.

        Raises ValueError for an encoder's parameter that belongs to no layer.
        """
        held, _, rest = name.partition(".")
        encoder = getattr(self, "encoder", None) if held == "encoder" else None
        layer: int | None = None if encoder is None else encoder.layer_of(rest)
        return layer

    @abstractmethod
    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the training loss of a micro-batch."""

    @abstractmethod
    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums over the images of a batch: scalars or vectors, which the caller adds over batches and ranks."""

    @abstractmethod
    def evaluation_metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Turns total sums, a float or float64 (n,) each, into named metrics of held-out images."""

    @abstractmethod
    def pictures(self, batch: Batch) -> list[Picture]:
        """Returns labeled image rows: masked, predicted, pasted (if they exist), and the original last."""


def as_numbers(sums: Mapping[str, Tensor]) -> dict[str, Any]:
    """Turns sums into what `evaluation_metrics` takes."""
    return {
        name: value.double().cpu().numpy() if value.dim() else value.item() for name, value in sums.items()
    }


class Objective(Task):
    """An encoder, and the modules that pretraining adds to it.

    Attributes:
        encoder: the encoder, the result of pretraining.
        mask_ratio: fraction of patches that training masks; 0 without masking.
    """

    mask_ratio: float = 0.0

    def __init__(self, encoder: Encoder, **pixels: Unpack[Pixels]) -> None:
        super().__init__(**pixels)
        self.encoder = encoder

    def valid_patches(self, images: Tensor) -> Tensor | None:
        """Returns which patch values of raw images are present, bool (B, N, P*P*C); None if none can be missing."""
        valid = self.bands.valid(images)
        return None if valid is None else patchify(valid, self.encoder.patch_size)
