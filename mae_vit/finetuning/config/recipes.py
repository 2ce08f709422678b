"""Chooses the config of `--ckpt RUN` without a config: the run's data, and the recipe for its model's size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.config.load import read_run_config
from mae_vit.config.plugins import import_plugins, named_plugins
from mae_vit.config.presets import PRESETS
from mae_vit.config.typed_yaml import parse_value, write_value
from mae_vit.core.errors import InputError
from mae_vit.data.data_path import check_recorded, resolve_data_path
from mae_vit.data.shards.dataset_json import Dataset, read_dataset
from mae_vit.finetuning.config.modes import MODES, Mode
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.models.sizes import TIMM_PREFIX
from mae_vit.weights.read import read_weights

# Keys of a run's data that its fine-tuning needs too.
_KEPT = ("path", "split", "cache_dir", "cache_gib")
_PASS = "give a config and data.path=DIR, such as finetune_cifar_tiny data.path=data/cifar10"
# Model size -> configs of mode "finetune" and of modes that train nothing, each for images of up to so many pixels.
_RECIPES = {
    "tiny-cifar": {40: "finetune_cifar_tiny", 80: "finetune_photos_64", math.inf: "finetune_photos_96"},
    "Ti": {40: "finetune_cifar_vit_t2", 128: "finetune_tiny_imagenet", math.inf: "finetune_base"},
    "S": {math.inf: "finetune_photos_224"},
    "B": {math.inf: "finetune_base"},
    "L": {math.inf: "finetune_large"},
    "H": {math.inf: "finetune_huge"},
}
# With fewer labeled images a linear probe is trained by SGD: ten batches of linear_probe_base, which takes LARS.
_FEWEST_FOR_LARS = 10 * 16_384


def find_recipe(ckpt: str | None, given: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Returns the config and overrides for the pretrained weights `--ckpt`, a run folder.

    `given` are overrides of the command line; a mode among them may have recipes of its own.

    Raises:
        InputError: if the run does not determine everything; names the options to pass.
    """
    if ckpt is None:
        raise InputError(f"no weights and no config; {_PASS}, or --ckpt RUN (see --help)")
    # A plug-in may define the data.
    import_plugins(named_plugins({}, given))
    folder = Path(ckpt)
    if not ckpt.startswith(TIMM_PREFIX) and not (folder / "config.yaml").is_file():
        # Fails if there are no weights: a config would not help.
        read_weights(ckpt)
    if not folder.is_dir():
        raise InputError(f"--ckpt {ckpt} is not a run folder, so its data and recipe are not known; {_PASS}")
    try:
        run = read_run_config(folder)
        model, data = dict(run["model"]), dict(run["data"])
        augment = dict(data["augment"])
    except InputError as error:
        raise InputError(f"{error}; {_PASS}") from None
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{folder / 'config.yaml'} is not the config of a run; {_PASS}") from None
    where = f"the data of {folder}, {data['path']},"
    if (other := _given(given, "data.path")) is not None:
        data = {"path": other, "split": _given(given, "data.split") or "train"}
        where = f"data.path={other}"
    else:
        check_recorded(data["path"], folder, "give data.path=DIR")
    cache: dict[str, Any] = {name: data.get(name) for name in ("cache_dir", "cache_gib")}
    cache |= {name: value for name in cache if (value := _given(given, f"data.{name}")) is not None}
    dataset = read_dataset(resolve_data_path(data["path"], **cache).folder)
    mode = MODES.get(_given(given, "finetune.mode") or "finetune")
    masks = mode is not None and mode.labels == "mask"
    if missing := what_is_missing(dataset, data["split"], masks=masks):
        raise InputError(f"{where} {missing}, in another folder, and give data.path=DIR")
    if model["name"] not in _RECIPES:
        size = f"model.img_size={write_value(model['img_size'])}"
        raise InputError(f'no recipe for model.name="{model["name"]}" of {folder}; {_PASS} {size}')
    taken = {f"data.{name}": data[name] for name in _KEPT if data.get(name) is not None}
    name, overrides = _recipe(model, mode, sum(dataset.splits[data["split"]].class_counts))
    if mode != MODES["linear_probe"]:
        # The data determine how images may be cropped and flipped; the recipe, how small a crop may be.
        asked = any(text.startswith("data.augment.crop=") for text in given)
        of_crop = () if asked else ("crop", "pad_px")
        views = {key: augment.get(key) for key in (*of_crop, "flip")}
        taken |= {f"data.augment.{key}": value for key, value in views.items() if value is not None}
    taken["model.img_size"] = model["img_size"]
    return PRESETS / "finetune" / f"{name}.yaml", [
        *overrides,
        *(f"{key}={write_value(value)}" for key, value in taken.items()),
    ]


def _recipe(model: Mapping[str, Any], mode: Mode | None, images: int) -> tuple[str, Sequence[str]]:
    """Returns the config for a run's network in a mode, with so many labeled images, and overrides of it."""
    size, side = model["name"], max(np.atleast_1d(model["img_size"]))
    if mode == MODES["linear_probe"]:
        # L and H take 50 epochs: official MAE code, FINETUNE.md.
        longer = ["train.epochs=50"] if size in ("L", "H") else []
        small = size == "tiny-cifar" or images < _FEWEST_FOR_LARS
        return "linear_probe_cifar_tiny" if small else "linear_probe_base", longer
    if mode is not None and mode.labels == "mask":
        tiny = size == "tiny-cifar"
        return ("finetune_cifar_tiny", []) if tiny else ("segment_base", [f"model.name={size}"])
    return next(name for most, name in _RECIPES[size].items() if side <= most), []


def what_is_missing(dataset: Dataset, split: str, *, masks: bool) -> str:
    """Says that data lack labels, or masks, to train or to measure on, and the remedy; else empty."""
    what, how = "labels", "from class folders (photos/CLASS/*.jpg) or with --labels"
    if masks:
        what, how = "masks", "with --masks DIR --mask-classes FILE"
    lacks = {} if dataset.is_labeled(split, masks) else {f"no {what}": how}
    if dataset.test_split(split, masks=masks) is None:
        # A val can be drawn only where there is none, and from a train that has labels.
        drawn = "val" not in dataset.splits and not (lacks and "test" in dataset.splits)
        lacks[f'no split "test" or "val" with {what} to measure on'] = "with --holdout 1/10" if drawn else how
    remedies = ", and ".join(dict.fromkeys(lacks.values()))
    return f"has {' and '.join(lacks)}; prepare it {remedies}" if lacks else ""


def _given(overrides: Sequence[str], key: str) -> Any:
    """Returns the last value of a key on the command line."""
    values = [text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")]
    return parse_value(FinetuneConfig, key, values[-1], f"command line: {key}") if values else None
