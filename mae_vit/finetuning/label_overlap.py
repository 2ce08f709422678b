"""Which labels a run's weights have seen, and how they overlap with those that it is measured on."""

from __future__ import annotations

import sys

from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.models.teacher import Teacher
from mae_vit.weights.seen_labels import Overlap, SeenLabels, most_flattering
from mae_vit.weights.start import Weights


def labels_after_training(
    config: FinetuneConfig, data: FinetuneData, start: Weights | None = None, teacher: Teacher | None = None
) -> SeenLabels:
    """The labels that a run's weights will have seen, by way of its start and its teacher too."""
    trained_on = SeenLabels(
        fingerprint=data.index.fingerprint,
        per_class=config.data.labels_per_class,
        holdout=config.finetune.holdout,
    )
    return trained_on.joined(*_labels_before(start, teacher))


def _labels_before(start: Weights | None, teacher: Teacher | None) -> list[SeenLabels | None]:
    return [start.labels if start else None, teacher.description.labels if teacher else None]


def start_label_overlap(
    start: Weights | None, teacher: Teacher | None, config: FinetuneConfig, data: FinetuneData
) -> Overlap | None:
    """Tells of which labels a start, or a teacher, passes something on; of both the one that flatters most."""
    holdout = config.finetune.holdout if len(data.held_out) else 0.0
    overlaps = {
        labels.overlap(data.index.fingerprint, config.data.labels_per_class, holdout)
        for labels in _labels_before(start, teacher)
        if labels is not None
    }
    return most_flattering(overlaps)


def warn_of_seen_labels(source: str) -> None:
    """Says on standard error that weights have seen the labels of images that choose here."""
    print(
        f"warning: {source} was trained on the labels of the images that choose here (the epoch, the rate), "
        "which flatter it: pretrain with data.leave_out_per_class, or give finetune.holdout=0",
        file=sys.stderr,
    )
