"""Trains MAE and masked patch prediction on one encoder, by the sum of both losses. Our own objective."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.models.encoders.base import Encoder
from mae_vit.objectives.config import JointConfig
from mae_vit.objectives.objective import Objective, ObjectiveOutput, Pixels


class Joint(Objective):
    """Both objectives share the encoder, and each has its own head.

    Each part draws the same masks as when it is trained alone: both use the same noise.
    """

    def __init__(self, encoder: Encoder, config: JointConfig, **pixels: Unpack[Pixels]) -> None:
        super().__init__(encoder, **pixels)
        self.mae = config.mae.build(encoder, **pixels)
        self.masked_patch = config.masked_patch.build(encoder, **pixels)
        self.mask_ratio = config.mae.mask_ratio
        self._weights = {"mae": config.weights.mae, "masked_patch": config.weights.masked_patch}

    def _parts(self) -> dict[str, Objective]:
        return {"mae": self.mae, "masked_patch": self.masked_patch}

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the weighted sum of both losses."""
        outputs = {name: part(batch) for name, part in self._parts().items()}
        values: dict[str, tuple[Tensor, Tensor]] = {}
        for name, output in outputs.items():
            loss, images = output.loss.detach(), len(batch.images)
            values[f"{name}_loss"] = (loss * images, torch.full_like(loss, images))
            values |= {f"{name}_{key}": value for key, value in output.values.items()}
        weighted = [self._weights[name] * output.loss for name, output in outputs.items()]
        return ObjectiveOutput(weighted[0] + weighted[1], values)

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the sums of both parts."""
        return {
            f"{name}.{key}": value
            for name, part in self._parts().items()
            for key, value in part.evaluation_sums(batch).items()
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of both parts, and the weighted sum of their losses."""
        metrics: dict[str, float] = {"loss": 0.0}
        for name, part in self._parts().items():
            part_sums = {
                key.removeprefix(f"{name}."): value
                for key, value in sums.items()
                if key.startswith(f"{name}.")
            }
            part_metrics = part.evaluation_metrics(part_sums)
            metrics["loss"] += self._weights[name] * part_metrics["loss"]
            metrics |= {f"{name}_{key}": value for key, value in part_metrics.items()}
        return metrics

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows the rows of both parts, the original once."""
        rows = [
            Picture(f"{name}: {row.label}", row.images)
            for name, part in self._parts().items()
            for row in part.pictures(batch)[:-1]
        ]
        return [*rows, self.mae.pictures(batch)[-1]]
