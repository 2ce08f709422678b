"""The labels that a run's weights have seen, and their overlap with those of its held-out images."""

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
    """Returns the labels that a run's final weights have seen, also through pretrained weights and teacher."""
    trained_on = SeenLabels(
        fingerprint=data.index.fingerprint,
        per_class=config.data.labels_per_class,
        holdout=config.finetune.holdout,
        draw=config.data.label_draw,
    )
    return trained_on.joined(*_labels_before(start, teacher))


def _labels_before(start: Weights | None, teacher: Teacher | None) -> list[SeenLabels | None]:
    return [start.labels if start else None, teacher.description.labels if teacher else None]


def start_label_overlap(
    start: Weights | None, teacher: Teacher | None, config: FinetuneConfig, data: FinetuneData
) -> Overlap | None:
    """Returns the overlap of the labels that pretrained weights or teacher have seen with the run's held-out labels.

    If both have an overlap, it is the one that flatters the result most. None if neither has seen labels.
    """
    holdout = config.finetune.holdout if len(data.held_out) else 0.0
    overlaps = {
        labels.overlap(
            data.index.fingerprint, config.data.labels_per_class, holdout, draw=config.data.label_draw
        )
        for labels in _labels_before(start, teacher)
        if labels is not None
    }
    return most_flattering(overlaps)


def warn_of_seen_labels(source: str) -> None:
    """Warns on standard error that pretrained weights have seen the labels of the held-out images."""
    print(
        f"warning: {source} was trained on the labels of the held-out images, which choose epoch or rate here "
        "and flatter it: pretrain with data.leave_out_per_class, or give finetune.holdout=0",
        file=sys.stderr,
    )
