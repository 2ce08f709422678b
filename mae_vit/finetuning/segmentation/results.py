"""Measures the final weights on test images and their masks, and writes the results."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mae_vit.core.batch import Batch
from mae_vit.core.files import replacing, write_atomically, write_json
from mae_vit.core.keyed_rng import RngStream, derive_key
from mae_vit.data.order.permutation import permute
from mae_vit.evaluation.segmentation import IMAGES_FILE, Overlaps, count_overlaps
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.results.final_weights import load_chosen, model_bytes
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.finetuning.results.test_reads import record_test_read
from mae_vit.finetuning.results.write import sizes_of
from mae_vit.finetuning.segmentation.segmenter import Segmenter
from mae_vit.inspection.class_maps import draw_class_maps
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.runtime.collectives import sum_over_ranks
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.weights.seen_labels import SeenLabels
from mae_vit.weights.start import origin_of

OVERLAYS_FILE = "overlays.png"
_SHOWN = 8


@dataclass(frozen=True)
class SegmentationOutputs:
    """Writes the results of a run into its folder, as `Outputs` does those of a classifier.

    Attributes:
        config: the resolved config.
        data: the training, held-out and test images.
        folder: the run folder.
        predictor: ranks, device, precision and batch size.
        info: geometry of the encoder; None if the network is not one of our Vision Transformers.
        labels: the labels that the final weights have seen.
    """

    config: FinetuneConfig
    data: FinetuneData
    folder: RunFolder
    predictor: Predictor
    info: EncoderInfo | None
    labels: SeenLabels

    def measure(self, model: Segmenter, best: BestWeights) -> tuple[dict[str, Any], Callable[[], None]]:
        """Measures the chosen weights on training and on test images; collective.

        Args:
            model: receives the weights.
            best: the chosen weights; only rank 0 needs the tensors.

        Returns:
            Entries for `summary.json`, and a function that writes weights and results.
        """
        ranks, data, size = self.predictor.ranks, self.data, self.predictor.batch_size
        load_chosen(model, best, self.predictor)
        known = data.some_of_train(self.config.finetune.train_images)
        train = self._overlaps(model, data.fixed(data.plain, known, ranks, size, replace=True), len(known))
        summary = {
            **sizes_of(self.config, data),
            "best_step": best.step,
            "train_miou": train.miou,
            "val_miou": best.score if len(data.held_out) else None,
        }
        test, shown = None, dict[str, np.ndarray]()
        if self.config.finetune.test:
            summary["test_reads"] = record_test_read(self.config, self.folder, best, ranks)
            source, samples = data.open_test(), data.test
            test = self._overlaps(model, data.fixed(source, samples, ranks, size), len(samples))
            summary |= {"test_miou": test.miou, "test_pixel_accuracy": test.pixel_accuracy}
            some = permute(
                np.arange(min(_SHOWN, len(samples))), len(samples), derive_key(0, RngStream.ORDER, 0)
            )
            if ranks.rank == 0:
                batch = next(iter(data.fixed(source, samples[some], ranks, _SHOWN * ranks.world_size)))
                shown = self._predicted(model, batch)

        def write() -> None:
            path = self.folder.path
            write_atomically(path / "model.safetensors", self._model_bytes(model, best))
            if test is not None:
                self._write(path, test, shown, {**summary, "train_images_measured": len(train.pixels)})

        return summary, write

    @torch.no_grad()
    def _overlaps(self, model: Segmenter, batches: Iterable[Batch], count: int) -> Overlaps:
        """Counts pixels of all images, each rank its share; an image that replaces a damaged one counts nothing."""
        model.eval()
        classes, rows = model.num_classes, []
        with self.predictor.autocast():
            for batch in batches:
                moved = batch.to(self.predictor.device)
                truth = moved.class_map()
                damaged = torch.tensor([one.sample for one in batch.damaged], dtype=torch.int64)
                truth[torch.isin(batch.keys.index, damaged).to(truth.device)] = -1
                both, either = count_overlaps(model.logits(moved.images).argmax(dim=1), truth, classes)
                counted = (truth >= 0).sum(dim=(1, 2))[:, None].double()
                rows.append(torch.cat([both, either, counted], dim=1))
        ranks = self.predictor.ranks
        table = torch.zeros(count, 2 * classes + 1, dtype=torch.float64, device=self.predictor.device)
        if rows:
            table[ranks.rank :: ranks.world_size] = torch.cat(rows)
        counts = sum_over_ranks(table, ranks).cpu().numpy()
        return Overlaps(counts[:, :classes], counts[:, classes : 2 * classes], counts[:, -1])

    @torch.no_grad()
    def _predicted(self, model: Segmenter, batch: Batch) -> dict[str, np.ndarray]:
        with self.predictor.autocast():
            guess = model.logits(batch.to(self.predictor.device).images).argmax(dim=1)
        return {
            "pixels": batch.images.numpy(),
            "truth": batch.class_map().numpy().astype(np.int32),
            "predicted": guess.cpu().numpy().astype(np.int32),
        }

    def _write(
        self, path: Path, test: Overlaps, shown: dict[str, np.ndarray], summary: dict[str, Any]
    ) -> None:
        classes, split = self.data.classes, self.data.test_index.split_info
        assert split.masks is not None
        details = {
            **summary,
            "test_split": self.data.test_index.split,
            "classes": classes,
            "per_class": dict(zip(classes, test.per_class(), strict=True)),
            "pixel_shares": dict(zip(classes, split.masks.shares, strict=True)),
        }
        write_json(path / "results.json", details)
        write_atomically(path / "predictions.csv", self._table(test).encode())
        with replacing(path / IMAGES_FILE) as partial, partial.open("wb") as file:
            counts = {"intersections": test.intersections, "unions": test.unions}
            arrays: dict[str, Any] = {name: one.astype(np.int32) for name, one in counts.items()} | shown
            arrays["classes"] = np.array(classes)
            np.savez_compressed(file, **arrays)
        columns = {"true": shown["truth"], "predicted": shown["predicted"]}
        drawn = draw_class_maps(shown["pixels"], columns, classes, shown["truth"])
        write_atomically(path / OVERLAYS_FILE, drawn)

    def _table(self, test: Overlaps) -> str:
        keys, stream = self.data.test_index.keys(), io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["key", "miou", "pixel_accuracy"])
        values = zip(self.data.test, test.miou_by_image, test.pixel_accuracy_by_image, strict=True)
        writer.writerows([keys[sample], f"{miou:.6f}", f"{share:.6f}"] for sample, miou, share in values)
        return stream.getvalue()

    def _model_bytes(self, model: Segmenter, best: BestWeights) -> bytes:
        facts: dict[str, Any] = {"segments": self.data.classes, "labels": self.labels.model_dump()}
        if self.info is not None:
            facts["step"] = best.step
        if origin := origin_of(self.config.finetune.start):
            facts["origin"] = origin
        return model_bytes(model, facts, self.config, self.data, self.info)


def describe_scores(config: FinetuneConfig, summary: dict[str, Any], path: Path) -> list[str]:
    """Names the outcome and the files."""
    model = f"  model     {path / 'model.safetensors'}"
    if not config.finetune.test:
        return [
            f"  held-out  mIoU {summary['val_miou']:.2%} of {summary['val_size']:,} images at step "
            f"{summary['best_step']}; the test split was not read (finetune.test=false)",
            model,
        ]
    return [
        f"  test      mIoU {summary['test_miou']:.2%}, pixel accuracy {summary['test_pixel_accuracy']:.2%} of "
        f"{summary['test_size']:,} images, by the weights of step {summary['best_step']} (train images: mIoU "
        f"{summary['train_miou']:.2%})",
        model,
        f"  details   {path / 'results.json'}, {path / 'predictions.csv'}, {path / OVERLAYS_FILE}",
    ]
