"""Measures the final weights and writes the results. A fine-tuning run reads its test split here, once."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mae_vit.core.batch import Batch
from mae_vit.core.files import write_atomically, write_json
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.index import ShardIndex
from mae_vit.evaluation.metrics import Predictions, interpret_gap
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.results.final_weights import load_chosen, model_bytes, network_facts, record_test_read
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.weights.names import origin_of
from mae_vit.weights.seen_labels import SeenLabels


@dataclass(frozen=True)
class Results(ABC):
    """Measures a run's weights, and writes the results into its folder. All ranks take part; rank 0 writes.

    Attributes:
        config: the resolved config.
        data: the training, held-out and test images.
        folder: the run folder.
        predictor: computes predictions on all ranks.
        info: geometry of the encoder; None if the network is not one of our encoders.
        labels: the labels that the final weights have seen.
    """

    config: FinetuneConfig
    data: FinetuneData
    folder: RunFolder
    predictor: Predictor
    info: EncoderInfo | None
    labels: SeenLabels

    def measure(self, model: Any, best: BestWeights) -> tuple[dict[str, Any], Callable[[], None]]:
        """Measures the chosen weights, which only rank 0 needs, on training and on test images; collective.

        Returns:
            Entries for `summary.json`, and a function that writes weights and results.
        """
        load_chosen(model, best, self.predictor)
        data, ranks, size = self.data, self.predictor.ranks, self.predictor.batch_size
        known, metric = data.some_of_train(self.config.finetune.train_images), self.config.mode.metric
        train = self.predict(
            model, data.fixed(data.plain, known, ranks, size, replace=True), data.index, known
        )
        summary = {
            **run_facts(self.config, data),
            "best_step": best.step,
            f"train_{metric}": getattr(train, metric),
            f"val_{metric}": best.score if len(data.held_out) else None,
        }
        test, shown = None, None
        if self.config.finetune.test:
            summary["test_reads"] = record_test_read(self.config, self.folder, best, ranks)
            source = data.open_test()
            batches = data.fixed(source, data.test, ranks, size)
            test = self.predict(model, batches, data.test_index, data.test)
            summary |= self.test_metrics(train, test)
            shown = self.predict_some(model, source)

        def write() -> None:
            metadata = {**network_facts(self.config, data, self.info), **self.metadata(best.step)}
            write_atomically(self.folder.path / "model.safetensors", model_bytes(model, metadata))
            if test is not None:
                self.write_test(test, {**summary, "train_images_measured": len(train)}, shown)

        return summary, write

    @abstractmethod
    def predict(self, model: Any, batches: Iterable[Batch], index: ShardIndex, samples: np.ndarray) -> Any:
        """Predicts this rank's batches of `samples`; returns the scores of all of them; collective."""

    @abstractmethod
    def test_metrics(self, train: Any, test: Any) -> dict[str, Any]:
        """Returns entries of the summary on test images."""

    def predict_some(self, model: Any, source: AugmentedSource) -> Any:
        """Predicts a few test images for pictures; None without pictures."""
        return None

    @abstractmethod
    def metadata(self, step: int) -> dict[str, Any]:
        """Returns metadata of the model's file beyond its network's."""

    @abstractmethod
    def write_test(self, test: Any, summary: dict[str, Any], shown: Any) -> None:
        """Writes `results.json`, `predictions.csv` and other files on the test images."""

    def lines(self, summary: dict[str, Any]) -> list[str]:
        """Returns lines on the outcome and the files."""
        metric, path, step = self.config.mode.metric, self.folder.path, summary["best_step"]
        what, model = "mIoU " * (metric == "miou"), f"  model     {path / 'model.safetensors'}"
        if not self.config.finetune.test:
            return [
                f"  held-out  {what}{summary[f'val_{metric}']:.2%} of {summary['val_size']:,} images at step {step}; "
                "the test split was not read (finetune.test=false)",
                model,
            ]
        return [
            f"  test      {what}{summary[f'test_{metric}']:.2%} of {summary['test_size']:,} images, with the weights "
            f"of step {step} ({self.aside(summary)})",
            *([f"  reading   {summary['reading']}"] if "reading" in summary else []),
            model,
            f"  details   {path / 'results.json'}, {path / 'predictions.csv'}",
        ]

    @abstractmethod
    def aside(self, summary: dict[str, Any]) -> str:
        """Returns the numbers in parentheses after the score."""


class ClassResults(Results):
    """Results of a classifier."""

    def predict(
        self, model: Any, batches: Iterable[Batch], index: ShardIndex, samples: np.ndarray
    ) -> Predictions:
        """Predicts this rank's batches of `samples`; returns the predictions of all; collective."""
        return self.predictor.predict(model, batches, np.asarray(index.labels)[samples])

    def test_metrics(self, train: Predictions, test: Predictions) -> dict[str, Any]:
        """Returns metrics of the test images, and their comparison with training images."""
        return compare_with_test(self.data, train, test)

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns classes and labels; for our encoders also step and pooling."""
        own = {} if self.info is None else {"step": step, "pool": self.config.finetune.pool}
        return {"classes": self.data.classes, "labels": self.labels.model_dump(), **own}

    def write_test(self, test: Predictions, summary: dict[str, Any], shown: Any = None) -> None:
        """Writes `results.json` and `predictions.csv`."""
        write_predictions(self.folder, self.data, test, summary)

    def aside(self, summary: dict[str, Any]) -> str:
        """Returns the accuracy of a constant guess."""
        return f"the most frequent class: {summary['test_most_frequent']:.2%}"


def write_predictions(
    folder: RunFolder, data: FinetuneData, test: Predictions, summary: dict[str, Any]
) -> None:
    """Writes `results.json` and `predictions.csv` of classified test images."""
    classes = data.classes
    details = {
        **summary,
        "test_split": data.test_index.split,
        "classes": classes,
        "per_class": dict(zip(classes, test.per_class(len(classes)), strict=True)),
        "confusion": test.confusion(len(classes)).tolist(),
    }
    write_json(folder.path / "results.json", details)
    columns = zip(test.labels, test.classes, test.confidences, strict=True)
    rows = [[classes[label], classes[guess], f"{chance:.6f}"] for label, guess, chance in columns]
    write_table(folder, data, ["label", "prediction", "confidence"], rows)


def write_table(folder: RunFolder, data: FinetuneData, head: list[str], rows: Sequence[list[str]]) -> None:
    """Writes `predictions.csv`: a row for each test image, with its key."""
    keys, stream = data.test_index.keys(), io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["key", *head])
    writer.writerows([keys[sample], *row] for sample, row in zip(data.test, rows, strict=True))
    write_atomically(folder.path / "predictions.csv", stream.getvalue().encode())


def compare_with_test(data: FinetuneData, train: Predictions, test: Predictions) -> dict[str, Any]:
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


def run_facts(config: FinetuneConfig, data: FinetuneData) -> dict[str, Any]:
    """Returns mode, model, pretrained weights, seed and images, for the summary."""
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
        "train_images": data.digest(data.train),
        "held_out_images": data.digest(data.held_out),
    }
