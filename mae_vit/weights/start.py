"""Weights that a run begins from, once they are read."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name, parse_hub_name
from mae_vit.core.messages import closest_path
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.core.urls import is_url, redact_url
from mae_vit.core.user_files import expand_path
from mae_vit.models.geometry import Geometry
from mae_vit.models.sizes import TIMM_PREFIX, Pool
from mae_vit.weights.names import FOREIGN_ORIGIN, FROZEN_PREFIX, is_frozen
from mae_vit.weights.seen_labels import SeenLabels

ENCODER_PREFIX = "encoder."
# What takes weights that are measured as they are.
MEASURED_BY = (
    "`mae-vit embed`, or to fine-tuning with finetune.mode=knn, few_shot, linear_probe or segment_probe"
)
# How a user states what no tensor does.
HEADS_BESIDE = (
    'a config.json beside it can: {"architecture": "vit_small_patch16_224", "model_args": {"num_heads": 12}}'
)
STARTS = f'a run folder, an encoder.safetensors, a file of a Vision Transformer, "{TIMM_PREFIX}NAME" or "hf:USER/NAME"'


@dataclass(frozen=True)
class Weights:
    """Named weights, and where they are from.

    Attributes:
        source: the checkpoint or file that was read, "timm:NAME", or "hf:USER/NAME@COMMIT".
        tensors: encoder weights by timm's names; parts of an objective by the names that
            it gives them.
        objective: whose parts those are; None if there are none.
        mean: mean of each channel in its training, None if not known.
        std: standard deviation of each channel.
        num_heads: attention heads, which no shape tells; None if not known.
        geometry: geometry of the encoder; None if not known.
        remarks: facts that a user should know: "found", place in a third-party file; "passed over", damage of newer
            checkpoints of the run; "unfinished", step of an unfinished run.
        labels: those that it was trained on; None if on none, or not known.
        downloaded: where the file lies, of a source that is no path.
        bands: what the raw values of its images mean; `RGB8` if it is not known.
        preprocessing: what `prepare` did to its images; nothing if it is not known.
        pool: what reads a feature from its tokens, unless another pooling is asked for.
    """

    source: str
    tensors: dict[str, Tensor]
    objective: str | None = None
    num_heads: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    geometry: Geometry | None = None
    remarks: dict[str, str] = field(default_factory=dict)
    labels: SeenLabels | None = None
    downloaded: Path | None = None
    bands: Bands = RGB8
    preprocessing: Preprocessing = UNCHANGED
    pool: Pool = "cls"

    @property
    def path(self) -> Path:
        """The checkpoint or file; one that does not exist for timm's models."""
        return self.downloaded or Path(self.source)

    def notes(self, asked: str) -> list[str]:
        """Returns the remarks as lines for a user who asked for these weights."""
        return [f"note: {asked}: {title}: {text}" for title, text in self.remarks.items()]

    def assumes(self, num_heads: int | None) -> str:
        """Returns the assumed number of heads in words; empty if the weights state it, or have no blocks."""
        if self.geometry or self.num_heads or "blocks.0.norm1.weight" not in self.tensors:
            return ""
        return f"num_heads={num_heads}: the file does not say how many its training had; {HEADS_BESIDE}"

    @property
    def digest(self) -> str:
        """Changes when any of the weights does."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().cpu().float().contiguous().numpy().data)
        return digest.hexdigest()


def origin_of(start: str | None) -> str | None:
    """Returns who trained weights, if their name shows that others did."""
    return FOREIGN_ORIGIN if is_frozen(start) else None


def as_it_is(source: str) -> str:
    """Returns how weights of another network are measured as they are: the end of a message."""
    file = source if source.endswith(".safetensors") else "FILE.safetensors"
    named = f"{FROZEN_PREFIX}{TIMM_PREFIX}NAME"
    if source.startswith(TIMM_PREFIX):
        choices = f'"{FROZEN_PREFIX}{source}"'
    else:
        choices = f'"{named}" (timm\'s own weights) or "{named}@{file}" (these, by timm\'s names)'
    return f"to measure it as it is, give {choices} to {MEASURED_BY}"


def another_kind(source: str, difference: str) -> InputError:
    """Returns the error for a network that computes something else than ours, with what takes it."""
    return InputError(f"{source} is an encoder of another kind: {difference}; {as_it_is(source)}")


def split_frozen(start: str) -> tuple[str | None, Path | None]:
    """Splits "frozen:timm:NAME", "frozen:timm:NAME@FILE" or "frozen:FILE": timm's name, and the file.

    Each may be None.
    """
    text = start.removeprefix(FROZEN_PREFIX)
    if not text.startswith(TIMM_PREFIX):
        return None, expand_path(text)
    name, at, file = text.removeprefix(TIMM_PREFIX).partition("@")
    return name, expand_path(file) if at else None


def split_network(start: str) -> tuple[Path, str | None]:
    """Splits "FILE@NAME": the path, and which of the networks in the file is meant."""
    file, at, name = start.rpartition("@")
    if at and name and not Path(start).exists() and Path(file).is_file():
        return Path(file), name
    return Path(start), None


def check_there(start: str) -> None:
    """Checks that there is something at the path of weights.

    Raises:
        InputError: if there is not.
    """
    if start.startswith(TIMM_PREFIX) or is_hub_name(start):
        return
    if is_frozen(start):
        raise InputError(
            f"{start} is {FOREIGN_ORIGIN}: it goes into mae-vit embed, and into fine-tuning and comparisons of frozen "
            "encoders"
        )
    if is_url(start):
        raise InputError(f"{redact_url(start)} is a URL: download it, and give the file, or {STARTS}")
    if not split_network(start)[0].exists():
        hint = closest_path(Path(start)) or _named_elsewhere(start) or f"give {STARTS}"
        raise InputError(f"start {start} does not exist: {hint}")


def _named_elsewhere(start: str) -> str:
    """Returns a hint for a name of timm's or of the Hub without its prefix; empty for others."""
    if re.fullmatch(r"(vit|deit\d?|beit\w*|eva\d*)_\w+(\.\w+)?", start):
        return f'of timm it is "{TIMM_PREFIX}{start}"'
    owner, _, name = start.partition("/")
    is_repo = re.fullmatch(r"[\w.-]+", name) and re.fullmatch(r"[\w-]+", owner) and not Path(owner).exists()
    file = Path(name).suffix in (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".tar")
    return f'of the Hub it is "hf:{start}"' if is_repo and not file else ""


def name_of(asked: str) -> str:
    """Returns a short name for weights: the run's folder, the file, the Hub's repository, or timm's model."""
    if is_frozen(asked):
        name, file = split_frozen(asked)
        return "-".join(filter(None, (name, name_of(str(file)) if file else None)))
    if asked.startswith(TIMM_PREFIX):
        return asked.removeprefix(TIMM_PREFIX).replace("/", "-")
    if is_hub_name(asked):
        return parse_hub_name(asked).repo.rpartition("/")[2]
    path, network = split_network(asked)
    path = path.resolve()
    generic = path.stem in ("encoder", "model", "pytorch_model") and path.suffix
    name = path.parent.name if generic else path.stem if path.is_file() else path.name
    return f"{name}-{network}" if network else name


def describe_unfinished(run: Path, step: int) -> str:
    """Returns the step of an unfinished run's checkpoint in words; empty if the run is finished, or does not say."""
    with suppress(OSError, ValueError, TypeError, KeyError):  # torn, or not there
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        if summary["status"] != "done" and step < summary["total_steps"]:
            return f"its weights are of step {step:,} of {summary['total_steps']:,}"
    return ""
