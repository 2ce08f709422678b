"""Names of pretrained weights, as users write them; importing this module imports no torch.

A name is a path, "FILE@NETWORK", "timm:NAME" or "hf:USER/NAME[@REVISION]". "frozen:timm:NAME[@FILE]" and "frozen:FILE"
or "frozen:FOLDER" are third-party weights that are evaluated and never trained (`mae_vit.weights.foreign`).
"""

from __future__ import annotations

import re
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name, parse_hub_name
from mae_vit.core.messages import closest_path
from mae_vit.core.urls import is_url, redact_url
from mae_vit.core.user_files import expand_path
from mae_vit.models.sizes import TIMM_PREFIX

FROZEN_PREFIX = "frozen:"
# Origin of such weights in tables, summaries and reports.
FOREIGN_ORIGIN = "trained by others on other data"
# Uses of such weights, for messages.
MEASURED_BY = (
    "`mae-vit embed`, or to fine-tuning with finetune.mode=knn, few_shot, linear_probe or segment_probe (in a "
    "comparison: modes of its entry)"
)
# How a user can state the number of heads, for messages.
HEADS_BESIDE = (
    'put a config.json next to it: {"architecture": "vit_small_patch16_224", "model_args": {"num_heads": 12}}'
)
# The same for the size of images that are not square.
SIZE_BESIDE = HEADS_BESIDE.replace('{"num_heads"', '{"img_size": [192, 224], "num_heads"')
# Networks and tensors in memory are given as files.
GIVEN = 'a run folder, a file of weights (torch.save(network.state_dict(), "x.pth") writes one) or a name'
FORMS = f'a run folder, an encoder.safetensors, a file of a Vision Transformer, "{TIMM_PREFIX}NAME" or "hf:USER/NAME"'


def is_frozen(name: str | None) -> bool:
    """Returns True for `frozen:...`: third-party weights, for evaluation only."""
    return name is not None and name.startswith(FROZEN_PREFIX)


def origin_of(name: str | None) -> str | None:
    """Returns `FOREIGN_ORIGIN` for `frozen:...`, else None."""
    return FOREIGN_ORIGIN if is_frozen(name) else None


def as_it_is(source: str) -> str:
    """Returns the end of a message that says how to use weights of another network as frozen ones."""
    file = source if source.endswith(".safetensors") else "FILE.safetensors"
    named = f"{FROZEN_PREFIX}{TIMM_PREFIX}NAME"
    config = Path(source).with_name("config.json")
    beside = config.is_file() and '"architecture"' in config.read_text(encoding="utf-8", errors="replace")
    if beside or source.startswith(TIMM_PREFIX):
        choices = f'"{FROZEN_PREFIX}{source}"'
    else:
        choices = f'"{named}" (timm\'s own weights) or "{named}@{file}" (these, by timm\'s names)'
    return f"to measure it unchanged, give {choices} to {MEASURED_BY}"


def another_kind(source: str, difference: str) -> InputError:
    """Returns the error for a network that computes another function than ours; it names the remedy."""
    return InputError(f"{source} is another kind of encoder ({difference}); {as_it_is(source)}")


def split_frozen(name: str) -> tuple[str | None, Path | None]:
    """Splits "frozen:timm:NAME", "frozen:timm:NAME@FILE" or "frozen:FILE" into timm's name and the file, or None."""
    text = name.removeprefix(FROZEN_PREFIX)
    if not text.startswith(TIMM_PREFIX):
        return None, expand_path(text)
    model, at, file = text.removeprefix(TIMM_PREFIX).partition("@")
    return model, expand_path(file) if at else None


def split_network(name: str) -> tuple[Path, str | None]:
    """Splits "FILE@NETWORK" into the path and a network in the file, None without one."""
    file, at, network = name.rpartition("@")
    if at and network and not Path(name).exists() and Path(file).is_file():
        return Path(file), network
    return Path(name), None


def check_exists(name: str) -> None:
    """Raises InputError if a name is a path with nothing there, a URL, or `frozen:...`."""
    if is_frozen(name):
        raise InputError(f"{name} is {FOREIGN_ORIGIN}, and only measured here; give it to {MEASURED_BY}")
    if name.startswith(TIMM_PREFIX) or is_hub_name(name):
        return
    if is_url(name):
        raise InputError(f"{redact_url(name)} is a URL; download it and give the file, or give {FORMS}")
    if not split_network(name)[0].exists():
        hint = closest_path(Path(name)) or _with_prefix(name) or f"give {FORMS}"
        raise InputError(f"weights {name} do not exist; {hint}")


def _with_prefix(name: str) -> str:
    """Returns a hint for a name of timm or the Hub without its prefix; empty for other names."""
    if re.fullmatch(r"(vit|deit\d?|beit\w*|eva\d*)_\w+(\.\w+)?", name):
        return f'for timm give "{TIMM_PREFIX}{name}"'
    is_repo = re.fullmatch(r"(?!runs/)[\w-]+/[\w.-]+", name) and not Path(name).parent.exists()
    file = Path(name).suffix in (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".tar")
    return f'for the Hub give "hf:{name}"' if is_repo and not file else ""


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
