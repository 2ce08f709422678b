"""Measures the final weights and writes the results. A fine-tuning run reads its test split here, once."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from shlex import quote
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.core.files import replacing, write_atomically, write_json
from mae_vit.core.image_rows import Picture, in_colors
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.index import ShardIndex
from mae_vit.data.order.permutation import draw_some
from mae_vit.evaluation.metrics import Predictions, interpret_gap, interval_of_share
from mae_vit.evaluation.segmentation import IMAGES_FILE, Overlaps, count_overlaps
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.models.classifiers import Classifier
from mae_vit.finetuning.models.segmenter import Segmenter
from mae_vit.finetuning.setup import Setup
from mae_vit.inspection.class_maps import draw_class_maps
from mae_vit.models.attention import choose_attention
from mae_vit.models.encoder_file import EncoderInfo, to_metadata
from mae_vit.models.geometry import GEOMETRIES
from mae_vit.runtime.ranks import ALONE, run_on_rank_zero, share_weights, sum_over_ranks
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.outputs.run_folder import RunFolder

# Returns the context of a forward pass, in the run's precision.
Autocasts = Callable[[], AbstractContextManager[Any]]
# Number of test images that pictures of masks show.
_SHOWN = 8


@torch.no_grad()
def predict_classes(
    model: Classifier, batches: Iterable[Batch], labels: np.ndarray, setup: Setup, autocast: Autocasts
) -> Predictions:
    """Classifies images; each rank computes its share, every world_size-th image; collective.

    Replacements of damaged images do not count. The model is left in evaluation mode.

    Returns:
        Predictions for all images that are counted, the same on all ranks.
    """
    model.eval()
    rows = []
    with autocast():
        for batch in batches:
            moved = batch.to(setup.device)
            columns = _best(model.classify(moved).softmax(dim=-1), moved.labels)
            rows.append(torch.stack([*columns, _intact(batch).to(setup.device)], dim=1).double())
    table = gather_rows(rows, (len(labels), 4), setup, torch.float64).cpu().numpy()
    counted = table[:, 3] > 0
    labels, table = labels[counted].astype(np.int64), table[counted]
    return Predictions(labels, table[:, 0].astype(np.int64), table[:, 1], table[:, 2].astype(bool))


def as_predictions(labels: np.ndarray, chances: Tensor) -> Predictions:
    """Turns labels int64 (n,) and probabilities (n, K) into predictions."""
    best = _best(chances, torch.from_numpy(labels).to(chances.device))
    first, confidence, in_top5 = (column.cpu() for column in best)
    return Predictions(labels, first.numpy(), confidence.double().numpy(), in_top5.numpy())


def _best(chances: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the most probable class, its probability, and whether the label is in the top five; each (n,)."""
    top = chances.topk(min(5, chances.shape[1]), dim=-1)
    return top.indices[:, 0], top.values[:, 0], (top.indices == labels[:, None]).any(dim=1)


def _intact(batch: Batch) -> Tensor:
    """Returns which images are not replacements of damaged ones: bool (B,), on the CPU."""
    damaged = torch.tensor([sample.sample for sample in batch.damaged], dtype=torch.int64)
    return ~torch.isin(batch.keys.index, damaged)


def gather_rows(rows: Sequence[Tensor], shape: tuple[int, int], setup: Setup, dtype: torch.dtype) -> Tensor:
    """Interleaves the rows of all ranks, each with every world_size-th: `shape`, on the device; collective."""
    ranks, table = setup.ranks, torch.zeros(shape, dtype=dtype, device=setup.device)
    if rows:
        table[ranks.rank :: ranks.world_size] = torch.cat([*rows])
    return sum_over_ranks(table, ranks)


@dataclass(frozen=True)
class Results:
    """Measures a classifier, and writes the results into the run folder. All ranks take part; rank 0 writes."""

    setup: Setup
    folder: RunFolder
    autocast: Autocasts

    def measure(self, model: Any, best: BestWeights) -> tuple[dict[str, Any], Callable[[], None]]:
        """Measures the chosen weights, which only rank 0 needs, on training and on test images; collective.

        Returns:
            Entries for `summary.json`, and a function that writes weights and results.
        """
        self._load(model, best)
        data, ranks, size = self.setup.data, self.setup.ranks, self.setup.batch_size
        known, metric = data.some_of_train(), self.setup.config.mode.metric
        train = self.predict(
            model, data.fixed(data.plain, known, ranks, size, replace=True), data.index, known
        )
        summary = {
            **run_facts(self.setup),
            "best_step": best.step,
            f"train_{metric}": getattr(train, metric),
            f"val_{metric}": best.score if len(data.held_out) else None,
        }
        test, shown = None, None
        if self.setup.config.finetune.test:
            summary["test_reads"] = self._record_test_read(best)
            source = data.open_test()
            batches = data.fixed(source, data.test, ranks, size)
            test = self.predict(model, batches, data.test_index, data.test)
            summary |= self.test_metrics(train, test)
            shown = self.predict_some(model, source)

        def write() -> None:
            metadata = {**network_facts(self.setup.config, data, self.setup.info), **self.metadata(best.step)}
            write_atomically(self.folder.path / "model.safetensors", model_bytes(model, metadata))
            if test is not None:
                self.write_test(test, {**summary, "train_images_measured": len(train)}, shown)

        return summary, write

    def _load(self, model: nn.Module, best: BestWeights) -> None:
        """Loads the chosen weights onto the devices of all ranks; collective."""
        if self.setup.ranks.rank == 0:
            model.load_state_dict(best.tensors, strict=True)
        model.to(self.setup.device)
        share_weights(model, self.setup.ranks)
        choose_attention(model, self.setup.device)

    def _record_test_read(self, best: BestWeights) -> int:
        """Records that weights are about to be tested; returns how many have been (over 1: `--extend`); collective."""
        train, path = self.setup.config.train, self.folder.path / "test_reads.json"
        weights = {"step": best.step, "epochs": train.epochs, "steps": train.steps, "samples": train.samples}

        def record() -> int:
            reads = json.loads(path.read_text()) if path.exists() else []
            # A run that was killed while testing tests the same weights again.
            if weights not in reads:
                reads.append(weights)
                write_json(path, reads)
            return len(reads)

        return run_on_rank_zero(record, self.setup.ranks)

    def predict(self, model: Any, batches: Iterable[Batch], index: ShardIndex, samples: np.ndarray) -> Any:
        """Predicts this rank's batches of `samples`; returns the predictions of all of them; collective."""
        return predict_classes(model, batches, np.asarray(index.labels)[samples], self.setup, self.autocast)

    def test_metrics(self, train: Any, test: Any) -> dict[str, Any]:
        """Returns entries of the summary: metrics of the test images, compared with training images."""
        return compare_with_test(self.setup.data, train, test)

    def predict_some(self, model: Any, source: AugmentedSource) -> Any:
        """Predicts a few test images for pictures; None without pictures."""
        return None

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns classes and labels for the model's file; for our encoders also step and pooling."""
        own = {} if self.setup.info is None else {"step": step, "pool": self.setup.config.finetune.pool}
        return {"classes": self.setup.data.classes, "labels": self.setup.labels_seen.model_dump(), **own}

    def write_test(self, test: Any, summary: dict[str, Any], shown: Any) -> None:
        """Writes `results.json`, `predictions.csv` and other files on the test images."""
        write_predictions(self.folder, self.setup.data, test, summary)

    def aside(self, summary: dict[str, Any]) -> str:
        """Returns the numbers in parentheses after the score: the accuracy of a constant guess."""
        return f"the most frequent class: {summary['test_most_frequent']:.2%}"

    def lines(self, summary: dict[str, Any]) -> list[str]:
        """Returns lines on the outcome and the files."""
        metric, path, step = self.setup.config.mode.metric, self.folder.path, summary["best_step"]
        what, model = "mIoU " * (metric == "miou"), f"  model     {path / 'model.safetensors'}"
        if not self.setup.config.finetune.test:
            return [
                f"  val       {what}{summary[f'val_{metric}']:.2%} of {summary['val_size']:,} validation images at "
                f"step {step}; the test split was not read (finetune.test=false)",
                model,
            ]
        return [
            f"  test      {what}{summary[f'test_{metric}']:.2%} of {summary['test_size']:,} images, with the weights "
            f"of step {step} ({self.aside(summary)})",
            *([describe_interval(summary)] if "interval_95" in summary else []),
            *([f"  reading   {summary['reading']}"] if "reading" in summary else []),
            model,
            f"  details   {path / 'results.json'}, {path / 'predictions.csv'}",
            *([] if metric == "miou" else [f"  next      mae-vit predict {quote(str(path))} IMAGES"]),
        ]


class MaskResults(Results):
    """Measures a segmenter."""

    @torch.no_grad()
    def predict(
        self, model: Segmenter, batches: Iterable[Batch], index: ShardIndex, samples: np.ndarray
    ) -> Overlaps:
        """Counts pixels of all images except those that replace damaged ones; collective."""
        model.eval()
        classes, rows = model.num_classes, []
        with self.autocast():
            for batch in batches:
                moved = batch.to(self.setup.device)
                truth = moved.class_map()
                truth[~_intact(batch).to(truth.device)] = -1
                both, either = count_overlaps(model.logits(moved.images).argmax(dim=1), truth, classes)
                rows.append(torch.cat([both, either], dim=1))
        shape = len(samples), 2 * classes
        counts = gather_rows(rows, shape, self.setup, torch.float64).cpu().numpy()
        return Overlaps(counts[:, :classes], counts[:, classes:])

    def test_metrics(self, train: Overlaps, test: Overlaps) -> dict[str, Any]:
        """Returns metrics of the test images."""
        return {"test_miou": test.miou, "test_pixel_accuracy": test.pixel_accuracy}

    @torch.no_grad()
    def predict_some(self, model: Segmenter, source: AugmentedSource) -> dict[str, np.ndarray]:
        """Predicts a few test images on rank 0, the same in every run; returns nothing on other ranks."""
        samples = self.setup.data.test
        if self.setup.ranks.rank:
            return {}
        shown = samples[draw_some(_SHOWN, len(samples))]
        batch = next(iter(self.setup.data.fixed(source, shown, ALONE, _SHOWN)))
        moved, wanted = batch.to(self.setup.device), self.setup.config.monitor.picture_bands
        with self.autocast():
            guess = model.logits(moved.images).argmax(dim=1)
        (colors,) = in_colors([Picture("", model.unit(moved.images).cpu())], model.bands, wanted)
        return {
            "pixels": (colors.images * 255).round().byte().numpy(),
            "truth": batch.class_map().numpy().astype(np.int32),
            "predicted": guess.cpu().numpy().astype(np.int32),
        }

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns pixel classes and labels; step and origin of the encoder where known."""
        known = {"step": None if self.setup.info is None else step, "origin": self.setup.origin}
        return {
            "segments": self.setup.data.classes,
            "labels": self.setup.labels_seen.model_dump(),
            **{name: value for name, value in known.items() if value is not None},
        }

    def write_test(self, test: Overlaps, summary: dict[str, Any], shown: dict[str, np.ndarray]) -> None:
        """Writes `results.json`, `predictions.csv`, and counts and pictures of the test images."""
        path, classes = self.folder.path, self.setup.data.classes
        details = {
            **summary,
            "test_split": self.setup.data.test_index.split,
            "classes": classes,
            "per_class": dict(zip(classes, test.per_class(), strict=True)),
        }
        write_json(path / "results.json", details)
        scores = zip(test.miou_by_image, test.pixel_accuracy_by_image, test.pixels, strict=True)
        # An image without pixels that count has no score.
        rows = [[f"{miou:.6f}", f"{hits:.6f}"] if pixels else ["", ""] for miou, hits, pixels in scores]
        _write_table(self.folder, self.setup.data, ["miou", "pixel_accuracy"], rows)
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
    _write_table(folder, data, ["label", "prediction", "confidence"], rows)


def _write_table(folder: RunFolder, data: FinetuneData, head: list[str], rows: Sequence[list[str]]) -> None:
    """Writes `predictions.csv`: a row for each test image, with its key."""
    keys, stream = data.test_index.keys(), io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["key", *head])
    writer.writerows([keys[sample], *row] for sample, row in zip(data.test, rows, strict=True))
    # Names in tars need not be Unicode.
    write_atomically(folder.path / "predictions.csv", stream.getvalue().encode("utf-8", "backslashreplace"))


def compare_with_test(data: FinetuneData, train: Predictions, test: Predictions) -> dict[str, Any]:
    """Returns metrics of the test images, and their comparison with training images, for the summary."""
    known = np.isin(test.labels, np.asarray(data.index.labels)[data.train])
    return {
        "test_top1": test.top1,
        "interval_95": interval_of_share(test.top1, len(test)),
        "test_most_frequent": test.most_frequent,
        "test_top5": test.top5,
        "reading": interpret_gap(train.top1, test.top1, unknown=1 - float(known.mean())),
        "calibration_error": test.calibration_error,
    }


def describe_interval(summary: dict[str, Any]) -> str:
    """Returns the line about the interval of the accuracy."""
    low, high = summary["interval_95"]
    return f"  95 %      {low:.1%} to {high:.1%}, with other images"


def run_facts(setup: Setup) -> dict[str, Any]:
    """Returns mode, model, pretrained weights, seed and images, for the summary."""
    config, data = setup.config, setup.data
    return {
        "mode": config.finetune.mode,
        "model": config.model.name,
        "img_size": list(config.model.image_hw),
        "start": config.finetune.start,
        "start_origin": setup.origin,
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


def network_facts(config: FinetuneConfig, data: FinetuneData, info: EncoderInfo | None) -> dict[str, Any]:
    """Returns the metadata that describe a network: the encoder's geometry, or the network's name; and its images."""
    if info is not None:
        return info.to_dict()
    facts = {"network": config.model.name, "img_size": list(config.model.image_hw)}
    facts |= data.bands.to_entry()
    return {"mean": data.mean, "std": data.std, **facts, **data.preprocessing.to_entry()}


def model_bytes(model: nn.Module, metadata: dict[str, Any]) -> bytes:
    """Returns a network as a safetensors file: timm's names for our Vision Transformers, else the network's.

    `model` holds it as `encoder` or `network`; its other parts keep their names.
    """
    encoder = getattr(model, "encoder", None)
    prefix = "network." if encoder is None else f"encoder.{GEOMETRIES[encoder.family].holder}"
    tensors = {
        name.removeprefix(prefix): value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    return save_tensors(tensors, metadata=to_metadata(metadata))
