"""What is known of weights: from their metadata, and from the run folder that they lie in."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mae_vit.config.load import read_run_config
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.objectives import OBJECTIVES
from mae_vit.weights.export.network import ExportSource, metadata_of
from mae_vit.weights.start import name_of

_UNKNOWN = "not known"
_FINETUNING = (
    "pool", "label_smoothing", "mixup", "cutmix", "distillation", "distillation_weight", "holdout"
)  # fmt: skip
_MEASURED = {
    "test_top1": ("top-1 on the test split", "{:.2%}"),
    "test_top5": ("top-5 on the test split", "{:.2%}"),
    "val_top1": ("top-1 on held-out labels", "{:.2%}"),
    "train_top1": ("top-1 on training images", "{:.2%}"),
    "calibration_error": ("calibration error", "{:.4f}"),
    "psnr_db": ("held-out PSNR on masked patches", "{:.2f} dB"),
    "psnr_baseline_db": ("the same without learning", "{:.2f} dB"),
    "accuracy_on_mask": ("held-out accuracy on [mask] positions", "{:.2%}"),
    "accuracy_nearest_visible": ("the same by copying the nearest visible patch", "{:.2%}"),
    "accuracy": ("held-out accuracy", "{:.2%}"),
    "loss": ("held-out loss", "{:.4f}"),
    "top1": ("held-out top-1", "{:.2%}"),
    "few_shot_top1": ("few-shot top-1 of frozen features (online probe)", "{:.2%}"),
    "knn_top1": ("nearest-neighbor top-1 of frozen features (online probe)", "{:.2%}"),
    "chance_top1": ("the same by naming the most frequent class", "{:.2%}"),
}
_PROBED = ("few_shot_top1", "knn_top1")


@dataclass(frozen=True)
class Facts:
    """What a card tells.

    Attributes:
        name: of the run, the file, or timm's model.
        objective: what the weights were trained by.
        history: rows of a table: data, recipe, length, versions.
        results: rows of a table, empty where nothing was measured.
        limits: sentences.
    """

    name: str
    objective: str
    history: list[tuple[str, str]]
    results: list[tuple[str, str]]
    limits: list[str]


_WITHOUT_LABELS = {name for name, section in OBJECTIVES.items() if not section.uses_labels}


def collect_history(handed: ExportSource) -> Facts:
    """Gathers what files tell; what they do not tell is said to be unknown."""
    folder = _run_folder(handed)
    config = _config(folder) if folder else {}
    summary = _json(folder / "summary.json") if folder else {}
    environment = _json(folder / "environment.json") if folder else {}
    history = [
        ("data", _data(config, summary)),
        ("objective", _objective(handed, config)),
        *_recipe(config),
        ("length", _length(handed, config, summary)),
        ("begun from", _begun_from(config)),
        ("made with", _versions(environment)),
    ]
    return Facts(
        name=name_of(handed.asked),
        objective=_objective_name(handed, config),
        history=[(name, value) for name, value in history if value],
        results=_results(folder, summary),
        limits=_limits(handed, summary),
    )


def _run_folder(handed: ExportSource) -> Path | None:
    """The run that the weights lie in, or are the result of."""
    path = handed.start.path
    for folder in (Path(handed.asked), path, *path.parents[:2]):
        if (folder / "config.yaml").is_file() and (folder / "summary.json").is_file():
            return folder
    return None


def _config(folder: Path) -> dict[str, Any]:
    with suppress(InputError):
        return read_run_config(folder)
    return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _objective_name(handed: ExportSource, config: dict[str, Any]) -> str:
    if "finetune" in config or handed.network.head is not None:
        return "fine-tuning"
    name = _section(config, "objective").get("name") or handed.encoder.info.objective
    return _UNKNOWN if name == "unknown" else str(name)


def _objective(handed: ExportSource, config: dict[str, Any]) -> str:
    name = _objective_name(handed, config)
    if "finetune" in config:
        section = _section(config, "finetune")
        shown = {key: section.get(key) for key in _FINETUNING}
    else:
        shown = {key: value for key, value in _section(config, "objective").items() if key != "name"}
    return f"{name}: {_listed(shown)}" if shown else name


def _data(config: dict[str, Any], summary: dict[str, Any]) -> str:
    """The name of the data alone: its path says something of a machine."""
    data = _section(config, "data")
    path = data.get("path")
    if not isinstance(path, str):
        return _UNKNOWN
    name = PurePosixPath(path.rstrip("/")).name
    labels = (
        f", {summary['train_size']:,} labeled images" if isinstance(summary.get("train_size"), int) else ""
    )
    return f'{name}, split "{data.get("split", "train")}"{labels}'


def _recipe(config: dict[str, Any]) -> list[tuple[str, str]]:
    train = _section(config, "train")
    chosen = ("effective_batch_size", "warmup_epochs", "warmup_steps", "precision", "ema_decay")
    return [
        ("augmentation", _listed(_section(_section(config, "data"), "augment"))),
        ("optimizer", _listed(_section(config, "optim"))),
        ("training", _listed({key: train.get(key) for key in chosen})),
    ]


def _length(handed: ExportSource, config: dict[str, Any], summary: dict[str, Any]) -> str:
    info, metadata = handed.encoder.info, metadata_of(handed.start.path)
    steps = info.step or metadata.get("step") or summary.get("steps")
    if not steps:
        return _UNKNOWN
    batch = _section(config, "train").get("effective_batch_size")
    images = info.images_seen or (steps * batch if isinstance(batch, int) else None)
    per_step = summary.get("flops_per_step")
    flops = info.flops or (steps * per_step if per_step else None)
    return (
        f"{steps:,} steps"
        + (f", {images:,} images seen (each time counted)" if images else "")
        + (f", {flops:.3g} model FLOPs" if flops else "")
    )


def _begun_from(config: dict[str, Any]) -> str:
    start = _section(config, "finetune").get("start") or _section(config, "model").get("init")
    return name_of(str(start)) if start else "random weights" if config else ""


def _versions(environment: dict[str, Any]) -> str:
    packages = _section(environment, "packages")
    shown = [f"{name} {packages[name]}" for name in ("mae-vit", "torch", "timm") if name in packages]
    for name, what in (("git_commit", "commit"), ("source_digest", "sources")):
        if environment.get(name):
            return ", ".join([*shown, f"{what} {environment[name]}"])
    return ", ".join(shown)


def _listed(values: dict[str, Any]) -> str:
    """Options that are in use, by the names of the config."""
    parts = []
    for key, value in values.items():
        if isinstance(value, dict):
            parts.append(f"{key} ({_listed(value)})")
        elif value is not None:
            parts.append(f"{key} {json.dumps(value) if not isinstance(value, str) else value}")
    return ", ".join(parts)


def _results(folder: Path | None, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Numbers of `results.json` and `summary.json`, under names for people."""
    if folder is None:
        return []
    rows = []
    found = {
        **_section(summary, "heldout"),
        **_section(summary, "probe"),
        **summary,
        **_json(folder / "results.json"),
    }
    # The loss of a summary is of training images; what chose the epoch is named as such.
    found["loss"] = _section(summary, "heldout").get("loss")
    if "val_top1" in summary:
        found.pop("top1", None)
    for key, (name, form) in _MEASURED.items():
        for prefix in ("", "mae_", "masked_patch_"):
            value = found.get(prefix + key)
            if isinstance(value, int | float):
                text = form.format(value) + (_probed(summary) if key in _PROBED else "")
                rows.append((f"{prefix.rstrip('_')}: {name}" if prefix else name, text))
    return rows


def _probed(summary: dict[str, Any]) -> str:
    """Of how many images and classes the probe's scores are; without that they cannot be read."""
    sizes = _section(summary, "probed")
    if not all(isinstance(sizes.get(name), int) for name in ("images", "fitted_on", "classes")):
        return ""
    return f" of {sizes['images']:,} images of {sizes['classes']:,} classes, fitted on {sizes['fitted_on']:,} others"


def _limits(handed: ExportSource, summary: dict[str, Any]) -> list[str]:
    info = handed.encoder.info
    height, width = info.img_size
    limits = [
        f"Made for images of {height} x {width} px ({count_of(info.in_chans, 'channel')}); other sizes need "
        "interpolated positions.",
        "What the training images did not show it does not know; their biases it does.",
    ]
    if handed.start.mean is None:
        limits.append("The file does not tell its normalization: ImageNet's is assumed.")
    if handed.start.labels is not None:
        limits.append("It was trained on labels: do not select or test it on the same images.")
    elif info.objective in _WITHOUT_LABELS:
        limits.append("It has seen no labels: for classes, train a head on its features, or fine-tune it.")
    if summary.get("status", "done") != "done":
        limits.append(f"Its run was not finished ({summary['status']}) when it was exported.")
    return limits
