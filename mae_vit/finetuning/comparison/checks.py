"""Checks a comparison before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import is_url
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.comparison.config import TUNED_BY, EntrySection
from mae_vit.finetuning.comparison.inputs import data_folder
from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.finetuning.comparison.settings import entry_settings, override_words
from mae_vit.finetuning.config.modes import ModeName
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.models.encoder_file import cost_of_weights
from mae_vit.objectives.pretrain_config import PretrainConfig


def check(plan: ComparisonPlan) -> None:
    """Checks every config, as far as this is possible before pretraining has run.

    Raises:
        InputError: if a config is wrong; names the entry.
    """
    pretraining = {}
    for name, section in plan.config.pretrain.items():
        with _naming(f"pretrain.{name}"):
            path, words = plan.file(section.config), override_words(section.set)
            pretraining[name] = load_config(PretrainConfig, path, words, overrides_from="set")
    for entry in plan.config.entries:
        with _naming(f'entry "{entry.name}"'):
            if entry.compute_of is not None:
                other = plan.entry(entry.compute_of)
                made = pretraining.get(other.start or "")
                _check_equal_compute(plan, entry, other, made.model.init if made else other.start)
            for mode in plan.modes(entry):
                _check_mode(plan, entry, mode)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


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
    # With masks, images without a label form one class.
    labels = np.maximum(index.labels, 0) if plan.config.segments else np.asarray(index.labels)
    most = int(np.bincount(labels[labels >= 0], minlength=1).max())
    asked = max((number for _, number, _ in plan.rows() if number != "all"), default=0)
    if asked > most:
        raise InputError(f"labels_per_class: {asked} is more than any class of {path} has (most: {most:,})")


def _check_mode(plan: ComparisonPlan, entry: EntrySection, mode: ModeName) -> None:
    path = plan.file(entry.config)
    # Weights that are still to be pretrained are checked once they exist.
    ckpt = None if entry.start in plan.config.pretrain else entry.start
    points = plan.config.tuning_settings(entry) if mode in TUNED_BY else []
    for point in points or [{}]:
        words = override_words({**entry_settings(plan.config, entry), **point, "finetune.mode": mode})
        try:
            amend = WeightsOverrides(ckpt, path, words)
            load_config(FinetuneConfig, path, words, amend=amend, overrides_from="set")
        except InputError as error:
            by_default = mode != "finetune" and entry.modes is None
            hint = " (or give this entry modes of its own: modes: [finetune])" if by_default else ""
            raise InputError(f"{error}{hint}") from None


def _check_equal_compute(
    plan: ComparisonPlan, entry: EntrySection, other: EntrySection, weights: str | None
) -> None:
    """Checks that the cells exist that give a `compute_of` entry its cost and settings."""
    if extra := [mode for mode in plan.modes(entry) if mode != "finetune"]:
        raise InputError(
            f'compute_of: "{entry.name}" trains as long as another: not in mode {", ".join(extra)}'
        )
    if weights is not None and cost_of_weights(weights).flops is None:
        raise InputError(
            f'compute_of: the cost of "{other.name}" is not known: {weights} does not record what it cost'
        )
    for needed in (other, plan.usual(entry)):
        for key in ("labels_per_class", "modes"):
            default = getattr(plan.config, key)
            if missing := set(getattr(entry, key) or default) - set(getattr(needed, key) or default):
                raise InputError(f'compute_of: "{needed.name}" has no {key} {", ".join(map(str, missing))}')
