"""Checks a comparison before anything runs."""

from __future__ import annotations

import numpy as np

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import is_url
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.comparison.config import TUNED_BY, EntrySection
from mae_vit.finetuning.comparison.inputs import data_folder
from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.finetuning.comparison.settings import lines_of, settings_of
from mae_vit.finetuning.config.modes import ModeName
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.models.encoder_cost import cost_of_weights
from mae_vit.objectives.pretrain_config import PretrainConfig


def check(plan: ComparisonPlan) -> None:
    """Checks every config, as far as this is possible before pretraining has run.

    Raises:
        InputError: if one is wrong; names the entry.
    """
    for name, section in plan.config.pretrain.items():
        path = plan.file(section.config)
        try:
            load_config(PretrainConfig, path, lines_of(section.set), overrides_from="set")
        except InputError as error:
            raise InputError(f"pretrain.{name}: {error}") from None
    for entry in plan.config.entries:
        try:
            if entry.compute_of is not None:
                _check_equal_compute(plan, entry)
            for mode in plan.modes_of(entry):
                _check_mode(plan, entry, mode)
        except InputError as error:
            raise InputError(f'entry "{entry.name}": {error}') from None


def check_data(plan: ComparisonPlan) -> None:
    """Checks that local data exist and have enough labels. The runs themselves check remote data.

    Raises:
        InputError: if data are missing, or a class has too few labels.
    """
    path = plan.config.data.path
    for settings in (plan.config.set, *(section.set for section in plan.config.pretrain.values())):
        if not is_url(settings.get("data.path", path)):
            read_dataset(data_folder(path, settings))
    if is_url(path):
        return
    index = open_index(data_folder(path, plan.config.set), plan.config.set.get("data.split", "train"))
    # Of masks, images without a label are one class.
    labels = np.maximum(index.labels, 0) if plan.config.segments else np.asarray(index.labels)
    most = int(np.bincount(labels[labels >= 0], minlength=1).max())
    asked = max((number for _, number, _ in plan.rows() if number != "all"), default=0)
    if asked > most:
        raise InputError(f"labels_per_class: {asked} is more than any class of {path} has (most: {most:,})")


def _check_mode(plan: ComparisonPlan, entry: EntrySection, mode: ModeName) -> None:
    path = plan.file(entry.config)
    # Weights that the comparison still has to pretrain are checked when they exist.
    start = None if entry.start in plan.config.pretrain else entry.start
    points = plan.config.tuning_settings(entry) if mode in TUNED_BY else []
    for point in points or [{}]:
        lines = lines_of({**settings_of(plan.config, entry), **point, "finetune.mode": mode})
        amend = WeightsOverrides(start, path, lines)
        try:
            load_config(FinetuneConfig, path, lines, amend=amend, overrides_from="set")
        except InputError as error:
            by_default = mode != "finetune" and entry.modes is None
            hint = " (or give this entry modes of its own: modes: [finetune])" if by_default else ""
            raise InputError(f"{error}{hint}") from None


def _check_equal_compute(plan: ComparisonPlan, entry: EntrySection) -> None:
    """Checks that the cells exist from which a `compute_of` entry takes its cost and its settings."""
    if others := [mode for mode in plan.modes_of(entry) if mode != "finetune"]:
        raise InputError(
            f'compute_of: "{entry.name}" trains as long as another: not in mode {", ".join(others)}'
        )
    other = plan.entry(entry.compute_of)
    if unknown := _weights_of_unknown_cost(plan, other):
        raise InputError(
            f'compute_of: the cost of "{other.name}" is not known: {unknown} does not record what it cost'
        )
    for needed in (other, plan.usual(entry)):
        for what, own, theirs in (
            ("labels_per_class", entry.labels_per_class, needed.labels_per_class),
            ("modes", entry.modes, needed.modes),
        ):
            default = getattr(plan.config, what)
            if missing := set(own or default) - set(theirs or default):
                raise InputError(f'compute_of: "{needed.name}" has no {what} {", ".join(map(str, missing))}')


def _weights_of_unknown_cost(plan: ComparisonPlan, entry: EntrySection) -> str | None:
    """Returns the weights that an entry, or its pretraining, begins from if they do not record their cost."""
    section, weights = plan.config.pretrain.get(entry.start or ""), entry.start
    if section is not None:
        path = plan.file(section.config)
        weights = load_config(PretrainConfig, path, lines_of(section.set), overrides_from="set").model.init
    return weights if weights is not None and cost_of_weights(weights).flops is None else None
