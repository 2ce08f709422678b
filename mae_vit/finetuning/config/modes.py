"""The modes of fine-tuning, `finetune.mode`, as far as a config needs to know them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pydantic import BaseModel

from mae_vit.models.geometry import GEOMETRIES

ModeName = Literal["finetune", "few_shot", "knn", "linear_probe", "segment", "segment_probe"]


@dataclass(frozen=True)
class Mode:
    """What a run does with encoder, labels and images.

    Attributes:
        trains: the part that is trained: "all" of the network, its "head", or "nothing".
        labels: what is predicted: the "class" of an image, or the "mask" of its pixels.
        augment: whether training sees new views in each epoch. Otherwise each image is encoded once, as it is.
        options: keys of the section `finetune` that other modes refuse.
    """

    trains: Literal["all", "head", "nothing"]
    labels: Literal["class", "mask"] = "class"
    augment: bool = False
    options: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        """Name of the score, which chooses the best weights on held-out images."""
        return "miou" if self.labels == "mask" else "top1"


MODES: dict[str, Mode] = {
    "finetune": Mode("all", augment=True),
    "few_shot": Mode("nothing", options=("shots", "draws")),
    "knn": Mode("nothing", options=("neighbors",)),
    "linear_probe": Mode("head", options=("lr_factors",)),
    "segment": Mode("all", labels="mask", augment=True),
    "segment_probe": Mode("head", labels="mask", augment=True),
}

# Options with an effect on frozen features. An option that is not listed counts as one without.
_IMAGES = {"path", "cache_dir", "cache_gib", "split", "source", "memory_limit_gib", "workers", "normalize"}
_OBEYED_BY_ALL: dict[str, set[str]] = {
    "model": {"name", "family"},  # and what is of the network itself
    "data": _IMAGES | {"labels_per_class", "label_draw", "augment"},
    # Images are encoded without augmentation; `flip` is the one option that is on by default.
    "data.augment": set(),
    "optim": set(),
    "train": {"effective_batch_size", "batch_size_per_device", "precision"},
    # Nothing is checkpointed, rolled back or logged. `tensorboard` is on by default, and a comparison sets trackers
    # for all its cells: they are accepted.
    "checkpoint": set(),
    "guard": set(),
    "monitor": {"tensorboard", "trackers"},
    "finetune": {"mode", "start", "pool", "test"},
}
# Further options with an effect when one layer is trained on the features.
_OBEYED_BY_PROBE = {
    "data": {"order", "lanes", "block_shards"},
    "optim": {"name", "blr", "lr", "min_lr", "betas", "momentum", "weight_decay"},
    "train": {"steps", "epochs", "samples", "warmup_steps", "warmup_epochs", "warmup_samples"},
    "finetune": {"head_init", "label_smoothing", "holdout"},
}
_NEUTRAL = {"data.augment.flip": False}


def unused_options(config: BaseModel, mode: Mode) -> list[str]:
    """Lists, as `key=value`, the options of a config that have no effect in a mode on frozen features."""
    unused = []
    for path, obeyed in _OBEYED_BY_ALL.items():
        section: BaseModel = config
        for part in path.split("."):
            section = getattr(section, part)
        if path == "model":
            obeyed = obeyed | {key.name for geometry in GEOMETRIES.values() for key in fields(geometry)}
        if mode.trains == "head":
            obeyed = obeyed | _OBEYED_BY_PROBE.get(path, set())
        if path == "finetune":
            obeyed = obeyed | set(mode.options)
        for name, field in type(section).model_fields.items():
            key, value = f"{path}.{name}", getattr(section, name)
            default = _NEUTRAL.get(key, field.get_default(call_default_factory=True))
            if name not in obeyed and value != default:
                unused.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return unused
