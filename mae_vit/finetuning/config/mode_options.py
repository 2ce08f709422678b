"""Which options the modes on frozen features obey: any other that is not as by default does nothing there."""

from __future__ import annotations

from pydantic import BaseModel

from mae_vit.models.geometry import GEOMETRY_KEYS

# Lists options with an effect, so that a new option counts as one without.
_IMAGES = {"path", "cache_dir", "cache_gib", "split", "source", "memory_limit_gib", "workers", "normalize"}
_OBEYED_BY_ALL: dict[str, set[str]] = {
    "model": {"name", *GEOMETRY_KEYS},
    "data": _IMAGES | {"labels_per_class", "label_draw", "augment"},
    # Features are of images as they are; `flip` is the one option that is on by default.
    "data.augment": set(),
    "optim": set(),
    "train": {"effective_batch_size", "batch_size_per_device", "precision"},
    # Nothing is saved on the way, gone back to or logged: `tensorboard`, on by default, has nothing to write,
    # nor have the trackers of a comparison's other cells.
    "checkpoint": set(),
    "guard": set(),
    "monitor": {"tensorboard", "trackers", "tracker_group"},
    "finetune": {"mode", "start", "pool", "test", "test_split"},
}
# The options of the section `finetune` that only one mode has. With another mode they are refused.
MODE_OPTIONS: dict[str, tuple[str, ...]] = {
    "few_shot": ("shots", "draws"),
    "knn": ("neighbors",),
    "linear_probe": ("lr_factors",),
}
# What a mode obeys beside these and `_OBEYED_BY_ALL`.
_OBEYED = {
    "linear_probe": {
        "data": {"order", "lanes", "block_shards"},
        "optim": {"name", "blr", "lr", "min_lr", "betas", "momentum", "weight_decay"},
        "train": {"steps", "epochs", "samples", "warmup_steps", "warmup_epochs", "warmup_samples"},
        "finetune": {"head_init", "label_smoothing", "holdout", "train_images"},
    },
}
_NEUTRAL = {"data.augment.flip": False}


def unused_options(config: BaseModel, mode: str) -> list[str]:
    """Lists, as `key=value`, the options of a config that have no effect in a mode on frozen features."""
    unused = []
    for path, obeyed in _OBEYED_BY_ALL.items():
        section: BaseModel = config
        for part in path.split("."):
            section = getattr(section, part)
        obeyed_in_mode = _OBEYED.get(mode, {}).get(path, set())
        if path == "finetune":
            obeyed_in_mode = obeyed_in_mode | set(MODE_OPTIONS.get(mode, ()))
        for name, field in type(section).model_fields.items():
            key, value = f"{path}.{name}", getattr(section, name)
            if name not in obeyed | obeyed_in_mode and value != _NEUTRAL.get(
                key, field.get_default(call_default_factory=True)
            ):
                unused.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return unused
