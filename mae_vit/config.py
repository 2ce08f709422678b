"""Strict configuration: one YAML file per run, checked before anything is built.

An unknown key, a wrong type or an impossible value is one readable line that names
the key, the value and the nearest valid choice (`InputError`). Command-line
overrides `key.path=value` go through the same check. Derived values (learning
rate, steps) live in `mae_vit.plan`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mae_vit.errors import InputError, nearest

# A config is a page of text; a larger one is a wrong file.
MAX_CONFIG_BYTES = 1 << 20


class Section(BaseModel):
    """A part of the configuration: frozen, strictly typed, unknown keys forbidden."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# Ways of giving one thing; an override takes the place of the file's way.
_ALTERNATIVES = (
    ("train.steps", "train.epochs", "train.samples"),
    ("train.warmup_steps", "train.warmup_epochs", "train.warmup_samples"),
    ("optim.lr", "optim.blr"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
    ("monitor.evaluate_every_steps", "monitor.evaluate_every_epochs"),
)


def exactly_one(section: BaseModel, names: Sequence[str], *, required: bool) -> None:
    """Raises ValueError unless exactly one (or, if not required, at most one) is given."""
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(names)}, not {' and '.join(given)}")
    if required and not given:
        raise ValueError(f"give one of {', '.join(names)}")


class RunSection(Section):
    """What the run is called, where it lives, and its seed."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    deterministic: bool = False


class ModelSection(Section):
    """The encoder; `name` sets width, depth and heads, which may be given apart."""

    name: Literal["tiny-cifar", "Ti", "S", "B", "L", "H"]
    img_size: int | list[int]
    patch_size: int = Field(gt=0)
    in_chans: Literal[1, 3] = 3
    embed_dim: int | None = Field(default=None, gt=0)
    depth: int | None = Field(default=None, gt=0)
    num_heads: int | None = Field(default=None, gt=0)
    mlp_ratio: float = Field(default=4.0, gt=0)
    pos_embed: Literal["learnable", "sincos"] = "learnable"

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if isinstance(self.img_size, list) and len(self.img_size) != 2:
            raise ValueError(f"img_size={self.img_size}: give one number or [height, width]")
        for side in self.image_hw:
            if side <= 0 or side % self.patch_size:
                near = max(1, round(side / self.patch_size)) * self.patch_size
                raise ValueError(
                    f"patch_size={self.patch_size} does not divide img_size={self.img_size} "
                    f"(nearest side that fits: {near})"
                )
        return self

    @property
    def image_hw(self) -> tuple[int, int]:
        """Height and width in pixels."""
        if isinstance(self.img_size, int):
            return self.img_size, self.img_size
        return self.img_size[0], self.img_size[1]


# MAE Sec. A.1 crops 20 to 100 % of the area; torchvision's shapes; CIFAR's usual shift.
_CROP_OPTIONS: dict[str, dict[str, Any]] = {
    "pad": {"pad_px": 4},
    "random_resized": {"scale": [0.2, 1.0], "ratio": [3 / 4, 4 / 3]},
}


class AugmentSection(Section):
    """Keyed augmentation; the same sample gets the same crop whoever computes it."""

    crop: Literal["none", "pad", "random_resized"] = "none"
    pad_px: int | None = Field(default=None, gt=0)
    scale: list[float] | None = Field(default=None, min_length=2, max_length=2)
    ratio: list[float] | None = Field(default=None, min_length=2, max_length=2)
    flip: bool = True

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        """Each crop has its own options; those of the others stay unset."""
        if not isinstance(raw, dict):
            return raw
        defaults = _CROP_OPTIONS.get(str(raw.get("crop")), {})
        return {**raw, **{name: value for name, value in defaults.items() if raw.get(name) is None}}

    @model_validator(mode="after")
    def _check(self) -> AugmentSection:
        for crop, options in _CROP_OPTIONS.items():
            for name in options:
                if crop != self.crop and getattr(self, name) is not None:
                    raise ValueError(
                        f'{name} has no effect with crop="{self.crop}"; it belongs to crop="{crop}"'
                    )
        if self.scale and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale={self.scale}: needs 0 < low <= high <= 1 (shares of the image's area)")
        if self.ratio and not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio={self.ratio}: needs 0 < low <= high (width over height)")
        return self


class DataSection(Section):
    """Where images come from and how they reach the model."""

    path: str
    split: str = "train"
    source: Literal["auto", "memory", "tar"] = "auto"
    order: Literal["global"] = "global"
    workers: int | Literal["auto"] = "auto"
    memory_limit_gib: float = Field(default=4.0, gt=0)
    normalize: Literal["dataset", "imagenet", "half"] | list[list[float]] = "dataset"
    augment: AugmentSection = AugmentSection()

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if isinstance(self.workers, int) and not 0 <= self.workers <= 512:
            raise ValueError(f"workers={self.workers}: 0 to 512")
        return self


class OptimSection(Section):
    """The optimizer; `blr` is the rate per 256 samples of effective batch (MAE Sec. A.1)."""

    name: Literal["adamw"] = "adamw"
    blr: float | None = Field(default=None, gt=0)
    lr: float | None = Field(default=None, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.05, ge=0)
    clip_grad: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> OptimSection:
        exactly_one(self, ("blr", "lr"), required=True)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each needs 0 <= beta < 1")
        return self


class TrainSection(Section):
    """How long, how large a batch, in which precision, on which engine."""

    steps: int | None = Field(default=None, gt=0)
    epochs: float | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, gt=0)
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_epochs: float | None = Field(default=None, ge=0)
    warmup_samples: int | None = Field(default=None, ge=0)
    effective_batch_size: int = Field(gt=0)
    batch_size_per_device: int | None = Field(default=None, gt=0)
    precision: Literal["fp32", "bf16"] = "bf16"
    engine: Literal["deepspeed", "torch"] = "deepspeed"
    zero_stage: Literal[0, 1] = 0

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        exactly_one(self, ("steps", "epochs", "samples"), required=True)
        exactly_one(self, ("warmup_steps", "warmup_epochs", "warmup_samples"), required=False)
        if self.engine == "torch" and self.zero_stage:
            raise ValueError(f'zero_stage={self.zero_stage} needs engine="deepspeed"')
        return self


class CheckpointSection(Section):
    """When to save and what to keep: the last K, and every M-th of those saved."""

    every_steps: int | None = Field(default=None, gt=0)
    every_epochs: float | None = Field(default=None, gt=0)
    keep_last: int = Field(default=2, gt=0)
    keep_every: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> CheckpointSection:
        exactly_one(self, ("every_steps", "every_epochs"), required=False)
        return self


class MonitorSection(Section):
    """What is logged, and how often."""

    log_every_steps: int = Field(default=20, gt=0)
    evaluate_every_steps: int | None = Field(default=None, gt=0)
    evaluate_every_epochs: float | None = Field(default=None, gt=0)
    evaluate_split: str | None = None
    evaluate_images: int = Field(default=512, gt=0)
    probe_images: int = Field(default=8, gt=0, le=64)
    tensorboard: bool = True

    @model_validator(mode="after")
    def _check(self) -> MonitorSection:
        exactly_one(self, ("evaluate_every_steps", "evaluate_every_epochs"), required=False)
        return self


class Config(Section):
    """The sections that every training run has."""

    run: RunSection
    model: ModelSection
    data: DataSection
    optim: OptimSection
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()
    monitor: MonitorSection = MonitorSection()


ConfigType = TypeVar("ConfigType", bound=Config)


def load_config(schema: type[ConfigType], path: Path, overrides: Sequence[str] = ()) -> ConfigType:
    """Reads, overrides and checks a config.

    Args:
        schema: the config class of the job.
        path: a YAML 1.2 file (so that `1e-3` is a number and `no` a string).
            `run.name` defaults to its stem.
        overrides: `key.path=value`, the value in YAML.

    Raises:
        InputError: naming the key, the value and the nearest valid choice.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: not a config")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read config {path}: {_reason(error)}") from None
    raw = _parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a config is a mapping of sections, not {type(raw).__name__}")
    _drop_alternatives(raw, {override.partition("=")[0] for override in overrides})
    for override in overrides:
        _apply_override(raw, override)
    run = raw.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    return validate(schema, raw, where=str(path))


def validate(schema: type[ConfigType], raw: dict[str, Any], *, where: str) -> ConfigType:
    """Checks plain data against a schema; all problems become one line."""
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        # Unknown keys first: they are mostly what makes others missing.
        found = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        problems = _merge(_explain(schema, raw, problem) for problem in found)
        raise InputError(f"{where}: {'; '.join(problems[:5])}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None


def dump_config(config: Config) -> str:
    """Returns the resolved config as YAML."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"{where}{place}: not valid YAML: {problem}") from None
    except (RecursionError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(f"{where}: not valid YAML: {_reason(error)}") from None


def _drop_alternatives(raw: dict[str, Any], overridden: set[str]) -> None:
    """Takes out of the file what an override gives in another way."""
    for group in _ALTERNATIVES:
        if overridden & set(group):
            for key in group:
                section, _, name = key.partition(".")
                if isinstance(raw.get(section), dict):
                    raw[section].pop(name, None)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    path = key.split(".")
    if not separator or not all(path):
        raise InputError(f'override "{override}": write key.path=value, e.g. train.epochs=10')
    node: Any = raw
    for depth, name in enumerate(path[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise InputError(f'override "{override}": {".".join(path[: depth + 1])} is not a section')
    node[path[-1]] = _parse_yaml(text, f'override "{override}"')


def _merge(problems: Iterable[str]) -> list[str]:
    """Joins what each branch of a union has to say of one value."""
    merged: dict[str, list[str]] = {}
    for problem in problems:
        key, _, message = problem.partition(": ")
        merged.setdefault(key, []).append(message)
    return [
        ": ".join([key, " or ".join(messages)]) if messages != [""] else key
        for key, messages in merged.items()
    ]


def _explain(schema: type[BaseModel], raw: dict[str, Any], problem: Any) -> str:
    """Writes one pydantic problem as: key, what is wrong, nearest right thing."""
    location = [str(part) for part in problem["loc"]]
    kind = problem["type"]
    key = ".".join(_written_location(location, raw))
    if kind == "extra_forbidden":
        known = _known_keys(schema, location[:-1])
        return f'unknown key "{key}": {nearest(location[-1], known)}'
    if kind == "missing":
        return f'"{key}" is missing'
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{key}: {message}" if key else message
    if kind == "union_tag_invalid":
        tag, tags = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f'{key}.name="{tag}": {nearest(tag, tags)}'
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    value = problem["input"]
    shown = (
        repr(value) if len(repr(value)) <= 80 else f"{type(value).__name__} of {len(repr(value))} characters"
    )
    choices = problem.get("ctx", {}).get("expected")
    hint = ""
    if isinstance(value, str) and isinstance(choices, str):
        hint = f"; {nearest(value, choices.replace(' or ', ', ').replace(chr(39), '').split(', '))}"
    return f"{key}={shown}: {message}{hint}"


def _written_location(location: Sequence[str], raw: Any) -> list[str]:
    """Drops the parts of a location that name union branches rather than keys in the file."""
    written: list[str] = []
    node = raw
    for depth, part in enumerate(location):
        last = depth == len(location) - 1
        if isinstance(node, dict) and (part in node or last):
            node = node.get(part)
            written.append(part)
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
            written.append(part)
    return written


def _known_keys(schema: type[BaseModel], location: Sequence[str]) -> list[str]:
    """Lists the valid keys of the section at `location` (union branches count as a level)."""
    current: list[Any] = [schema]
    for part in location:
        found: list[Any] = []
        for item in current:
            if isinstance(item, type) and issubclass(item, BaseModel) and part in item.model_fields:
                found += _models_in(item.model_fields[part].annotation)
            elif isinstance(item, type) and issubclass(item, BaseModel):
                name = item.model_fields.get("name")
                if name is not None and part in getattr(name.annotation, "__args__", ()):
                    found.append(item)
        current = found
    keys = {key for item in current for key in item.model_fields}
    return sorted(keys)


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).splitlines()[0] if str(error) else type(error).__name__
