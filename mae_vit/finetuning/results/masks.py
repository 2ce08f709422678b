"""Results of segmentation: the final weights measured on test images and their masks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from mae_vit.core.batch import Batch
from mae_vit.core.files import replacing, write_atomically, write_json
from mae_vit.core.keyed_rng import RngStream, derive_key
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.index import ShardIndex
from mae_vit.data.order.permutation import permute
from mae_vit.evaluation.segmentation import IMAGES_FILE, Overlaps, count_overlaps
from mae_vit.finetuning.models.segmenter import Segmenter
from mae_vit.finetuning.results.predict import gather_rows, intact
from mae_vit.finetuning.results.results import Results, write_table
from mae_vit.inspection.class_maps import draw_class_maps
from mae_vit.weights.names import origin_of

_SHOWN = 8


class MaskResults(Results):
    """Results of a segmenter."""

    @torch.no_grad()
    def predict(
        self, model: Segmenter, batches: Iterable[Batch], index: ShardIndex, samples: np.ndarray
    ) -> Overlaps:
        """Counts pixels of all images except those that replace damaged ones; collective."""
        model.eval()
        classes, rows = model.num_classes, []
        with self.predictor.autocast():
            for batch in batches:
                moved = batch.to(self.predictor.device)
                truth = moved.class_map()
                truth[~intact(batch).to(truth.device)] = -1
                both, either = count_overlaps(model.logits(moved.images).argmax(dim=1), truth, classes)
                counted = (truth >= 0).sum(dim=(1, 2))[:, None].double()
                rows.append(torch.cat([both, either, counted], dim=1))
        counts = gather_rows(rows, (len(samples), 2 * classes + 1), self.predictor)
        return Overlaps(counts[:, :classes], counts[:, classes : 2 * classes], counts[:, -1])

    def test_metrics(self, train: Overlaps, test: Overlaps) -> dict[str, Any]:
        """Returns metrics of the test images."""
        return {"test_miou": test.miou, "test_pixel_accuracy": test.pixel_accuracy}

    @torch.no_grad()
    def predict_some(self, model: Segmenter, source: AugmentedSource) -> dict[str, np.ndarray]:
        """Predicts a few test images on rank 0, the same in every run; returns nothing on other ranks."""
        samples, ranks = self.data.test, self.predictor.ranks
        if ranks.rank:
            return {}
        order = permute(np.arange(min(_SHOWN, len(samples))), len(samples), derive_key(0, RngStream.ORDER, 0))
        batch = next(iter(self.data.fixed(source, samples[order], ranks, _SHOWN * ranks.world_size)))
        with self.predictor.autocast():
            guess = model.logits(batch.to(self.predictor.device).images).argmax(dim=1)
        return {
            "pixels": batch.images.numpy(),
            "truth": batch.class_map().numpy().astype(np.int32),
            "predicted": guess.cpu().numpy().astype(np.int32),
        }

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns pixel classes and labels; step and origin of the encoder where known."""
        origin = origin_of(self.config.finetune.start)
        known = {"step": None if self.info is None else step, "origin": origin}
        return {
            "segments": self.data.classes,
            "labels": self.labels.model_dump(),
            **{name: value for name, value in known.items() if value is not None},
        }

    def write_test(self, test: Overlaps, summary: dict[str, Any], shown: dict[str, np.ndarray]) -> None:
        """Writes `results.json`, `predictions.csv`, and counts and pictures of the test images."""
        path, classes, split = self.folder.path, self.data.classes, self.data.test_index.split_info
        assert split.masks is not None
        details = {
            **summary,
            "test_split": self.data.test_index.split,
            "classes": classes,
            "per_class": dict(zip(classes, test.per_class(), strict=True)),
            "pixel_shares": dict(zip(classes, split.masks.shares, strict=True)),
        }
        write_json(path / "results.json", details)
        scores = zip(test.miou_by_image, test.pixel_accuracy_by_image, strict=True)
        rows = [[f"{miou:.6f}", f"{accuracy:.6f}"] for miou, accuracy in scores]
        write_table(self.folder, self.data, ["miou", "pixel_accuracy"], rows)
        counts = {"intersections": test.intersections, "unions": test.unions}
        arrays: dict[str, Any] = {name: table.astype(np.int32) for name, table in counts.items()} | shown
        with replacing(path / IMAGES_FILE) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **arrays, classes=np.array(classes))
        columns = {"true": shown["truth"], "predicted": shown["predicted"]}
        drawn = draw_class_maps(shown["pixels"], columns, classes, shown["truth"])
        write_atomically(path / "overlays.png", drawn)

    def aside(self, summary: dict[str, Any]) -> str:
        """Returns the pixel accuracy, and the score on training images."""
        return f"pixel accuracy {summary['test_pixel_accuracy']:.2%}; train images: mIoU {summary['train_miou']:.2%}"
