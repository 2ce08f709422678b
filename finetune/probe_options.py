"""Which options a linear probe obeys; every other one is refused where it is not as it is by default."""

from __future__ import annotations

from pydantic import BaseModel

# A list of what is obeyed rather than of what is not: an option that is new elsewhere is refused here.
_OBEYED = {
    "model": {"name", "img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio"}
    | {"pos_embed"},
    "data": {"path", "cache_dir", "cache_gib", "split", "source", "order", "lanes", "block_shards", "workers"}
    | {"memory_limit_gib", "normalize", "labels_per_class", "augment"},
    # Features are cached: images are as they are, and `flip` is the one option that is on by default.
    "data.augment": set(),
    "optim": {"name", "blr", "lr", "min_lr", "schedule", "decay_share", "betas", "eps", "momentum"}
    | {"nesterov", "trust_coefficient", "weight_decay"},
    "train": {"steps", "epochs", "samples", "warmup_steps", "warmup_epochs", "warmup_samples"}
    | {"effective_batch_size", "batch_size_per_device", "precision"},
    # Nothing is saved on the way, gone back to or logged: `tensorboard`, on by default, has nothing to write.
    "checkpoint": set(),
    "guard": set(),
    "monitor": {"tensorboard"},
    "finetune": {"mode", "start", "pool", "head_init", "label_smoothing", "holdout", "test", "test_split"}
    | {"train_images", "lr_factors"},
}
_NEUTRAL = {"data.augment.flip": False}


def unused_options(config: BaseModel) -> list[str]:
    """Lists, as `key=value`, what a config asks for and a linear probe does not do."""
    found = []
    for path, obeyed in _OBEYED.items():
        section: BaseModel = config
        for part in path.split("."):
            section = getattr(section, part)
        for name, field in type(section).model_fields.items():
            key, value = f"{path}.{name}", getattr(section, name)
            if name not in obeyed and value != _NEUTRAL.get(
                key, field.get_default(call_default_factory=True)
            ):
                found.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return found
