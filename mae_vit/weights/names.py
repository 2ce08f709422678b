"""Names of pretrained weights, as users write them; importing this module imports no torch.

A name is a path, "FILE@NETWORK", "timm:NAME[@FILE]" or "hf:USER/NAME[@REVISION]".
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

# Origin of timm's weights in tables, summaries and reports.
FOREIGN_ORIGIN = "trained by others on other data"
# How a user can state the number of heads, for messages.
HEADS_BESIDE = (
    'put a config.json next to it: {"architecture": "vit_small_patch16_224", "model_args": {"num_heads": 12}}'
)
# The same for the size of images that are not square.
SIZE_BESIDE = HEADS_BESIDE.replace('{"num_heads"', '{"img_size": [192, 224], "num_heads"')
# Networks and tensors in memory are given as files.
GIVEN = 'a run folder, a file of weights (torch.save(network.state_dict(), "x.pth") writes one) or a name'
FORMS = f'a run folder, an encoder.safetensors, a file of a Vision Transformer, "{TIMM_PREFIX}NAME" or "hf:USER/NAME"'


def origin_of(name: str | None) -> str | None:
    """Returns `FOREIGN_ORIGIN` for `timm:...`, else None."""
    return FOREIGN_ORIGIN if name is not None and name.startswith(TIMM_PREFIX) else None


def with_timms_name(source: str) -> str:
    """Returns the end of a message that says how to give weights of another network; empty if timm's name was given."""
    if source.startswith(TIMM_PREFIX):
        return ""
    return f'; if timm has this network, give its name too: "{TIMM_PREFIX}NAME@{source}"'


def another_kind(source: str, difference: str) -> InputError:
    """Returns the error for a network that computes another function than ours; it names the remedy."""
    return InputError(f"{source} is another kind of encoder ({difference}){with_timms_name(source)}")


def split_timm(name: str) -> tuple[str, Path | None]:
    """Splits "timm:NAME[@FILE]" into timm's name and the file, None without one."""
    model, at, file = name.removeprefix(TIMM_PREFIX).partition("@")
    return model, expand_path(file) if at else None


def split_network(name: str) -> tuple[Path, str | None]:
    """Splits "FILE@NETWORK" into the path and a network in the file, None without one."""
    file, at, network = name.rpartition("@")
    if at and network and not Path(name).exists() and Path(file).is_file():
        return Path(file), network
    return Path(name), None


def check_exists(name: str) -> None:
    """Raises InputError if a name is a path with nothing there, or a URL."""
    path = split_timm(name)[1] if name.startswith(TIMM_PREFIX) else split_network(name)[0]
    if path is None or is_hub_name(name):
        return
    if is_url(name):
        raise InputError(f"{redact_url(name)} is a URL; download it and give the file, or give {FORMS}")
    if not path.exists():
        hint = closest_path(path) or _with_prefix(name) or f"give {FORMS}"
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
    if asked.startswith(TIMM_PREFIX):
        name, file = split_timm(asked)
        own = name_of(str(file)) if file else name
        return name.replace("/", "-") if own == name else f"{name}-{own}"
    if is_hub_name(asked):
        return parse_hub_name(asked).repo.rpartition("/")[2]
    path, network = split_network(asked)
    path = path.resolve()
    generic = path.stem in ("encoder", "model", "pytorch_model") and path.suffix
    name = path.parent.name if generic else path.stem if path.is_file() else path.name
    return f"{name}-{network}" if network else name
