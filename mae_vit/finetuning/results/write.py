"""Measures the final weights and writes the results. A fine-tuning run reads its test split here, once."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mae_vit.core.files import write_atomically, write_json
from mae_vit.evaluation.metrics import Predictions, interpret_gap
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.models.classifiers import Classifier
from mae_vit.finetuning.results.final_weights import load_chosen, model_bytes
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.finetuning.results.test_reads import record_test_read
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.weights.seen_labels import SeenLabels
from mae_vit.weights.start import origin_of


@dataclass(frozen=True)
class Outputs:
    """Writes the results of a run into its folder. All ranks take part; rank 0 writes.

    Attributes:
        config: the resolved config.
        data: the training, held-out and test images.
        folder: the run folder.
        predictor: classifies the images.
        info: geometry of the encoder; None if the network is not one of our Vision Transformers.
        labels: the labels that the final weights have seen.
    """

    config: FinetuneConfig
    data: FinetuneData
    folder: RunFolder
    predictor: Predictor
    info: EncoderInfo | None
    labels: SeenLabels

    def measure(self, model: Classifier, best: BestWeights) -> tuple[dict[str, Any], Callable[[], None]]:
        """Measures the chosen weights on training and on test images; collective.

        Args:
            model: receives the weights.
            best: the chosen weights; only rank 0 needs the tensors.

        Returns:
            Entries for `summary.json`, and a function that writes weights and results.
        """
        load_chosen(model, best, self.predictor)
        data, ranks, size = self.data, self.predictor.ranks, self.predictor.batch_size
        known = data.some_of_train(self.config.finetune.train_images)
        train = self.predictor.predict(
            model,
            data.fixed(data.plain, known, ranks, size, replace=True),
            np.asarray(data.index.labels)[known],
        )
        held_out = best.score if len(data.held_out) else None
        summary = {
            **sizes_of(self.config, data),
            "best_step": best.step,
            "train_top1": train.top1,
            "val_top1": held_out,
        }
        test = None
        if self.config.finetune.test:
            summary["test_reads"] = record_test_read(self.config, self.folder, best, ranks)
            test = self.predictor.predict(
                model,
                data.fixed(data.open_test(), data.test, ranks, size),
                np.asarray(data.test_index.labels)[data.test],
            )
            summary |= measured_on_test(data, train, test)

        def write() -> None:
            write_atomically(self.folder.path / "model.safetensors", self._model_bytes(model, best))
            if test is not None:
                self.write(test, summary, {"train_images_measured": len(train.labels)})

        return summary, write

    def write(self, test: Predictions, summary: dict[str, Any], more: dict[str, Any]) -> None:
        """Writes `results.json` and `predictions.csv`."""
        classes = self.data.classes
        details = {
            **summary,
            **more,
            "test_split": self.data.test_index.split,
            "classes": classes,
            "per_class": dict(zip(classes, test.per_class(len(classes)), strict=True)),
            "confusion": test.confusion(len(classes)).tolist(),
        }
        write_json(self.folder.path / "results.json", details)
        write_atomically(self.folder.path / "predictions.csv", self._table(test).encode())

    def _table(self, test: Predictions) -> str:
        keys, classes = self.data.test_index.keys(), self.data.classes
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["key", "label", "prediction", "confidence"])
        for row, sample in enumerate(self.data.test):
            label, guess = classes[test.labels[row]], classes[test.classes[row]]
            writer.writerow([keys[sample], label, guess, f"{test.confidences[row]:.6f}"])
        return stream.getvalue()

    def _model_bytes(self, model: Classifier, best: BestWeights) -> bytes:
        facts: dict[str, Any] = {"classes": self.data.classes, "labels": self.labels.model_dump()}
        if self.info is not None:
            facts |= {"step": best.step, "pool": self.config.finetune.pool}
        return model_bytes(model, facts, self.config, self.data, self.info)


def measured_on_test(data: FinetuneData, train: Predictions, test: Predictions) -> dict[str, Any]:
    """Returns metrics of the test images, and their comparison with training images, for the summary."""
    known = np.isin(test.labels, np.asarray(data.index.labels)[data.train])
    return {
        "test_top1": test.top1,
        "test_most_frequent": test.most_frequent,
        "test_top5": test.top5,
        "train_test_gap": train.top1 - test.top1,
        "reading": interpret_gap(train.top1, test.top1, unknown=1 - float(known.mean())),
        "calibration_error": test.calibration_error,
    }


def sizes_of(config: FinetuneConfig, data: FinetuneData) -> dict[str, Any]:
    """Returns mode, model, pretrained weights, seed, and which images, for the summary."""
    return {
        "mode": config.finetune.mode,
        "model": config.model.name,
        "start": config.finetune.start,
        "start_origin": origin_of(config.finetune.start),
        "seed": config.run.seed,
        "train_size": len(data.train),
        "val_size": len(data.held_out),
        "test_size": len(data.test),
        "precision": config.train.precision,
        "data": data.index.fingerprint,
        "test_data": data.test_index.fingerprint,
        "train_images": data.digest_of(data.train),
        "held_out_images": data.digest_of(data.held_out),
    }
