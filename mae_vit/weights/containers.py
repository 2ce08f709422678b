"""Reads a file or folder of weights by its first bytes and names; anything else is an error that names the remedy.

Nothing that is read can execute code: safetensors hold no objects, and torch's restricted reader reads pickles.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mae_vit.core.errors import InputError
from mae_vit.core.user_files import image_kind, what_is
from mae_vit.models.encoder_file import read_metadata
from mae_vit.weights.names import FORMS

# tar's signature ends here.
_HEAD_BYTES = 512
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
_UNPACK = "packed; unpack it, and give the file of weights in it"
# torch.save never compresses, and a small file could fill the memory.
_PACKED_AGAIN = "compressed, unlike what torch.save writes; give the original file"
_CUT_SHORT = "cut short; download or copy it again"
_SAVE = "if you trust its author, save only its tensors with torch.save(network.state_dict(), NEW)"
_JAX = "a file of JAX; timm has Google's weights in PyTorch, such as timm:vit_base_patch16_224.augreg_in21k"
# Files of ONNX and torch.export.
_PROGRAMS = (".onnx", ".pt2")
_PROGRAM = "a program that was exported from weights; give those weights"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.(safetensors|bin)$")
# DeepSpeed's names for the weights of the first process, without and with ZeRO-3.
_DEEPSPEED = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_ADAPTER = re.compile(r"^base_model\.model\.|\.(lora_\w+|base_layer)\.")
# Names of optimizer states.
_OPTIMIZER = re.compile(r"(^|\.)(state\.\d+\.\w+|exp_avg(_sq)?|momentum_buffer)$")


def file_in(folder: Path) -> Path | None:
    """Returns the file of weights in a third-party folder; None if no known file is there.

    Raises InputError if the weights have an unsupported form.
    """
    if (folder / ".metadata").is_file() or any(folder.glob("*.distcp")):
        raise InputError(
            f"{folder} is a distributed checkpoint of PyTorch; convert it with `python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE.pth`, and give FILE.pth"
        )
    for name in _INDEXES:
        if (folder / name).is_file():
            return folder / name
    with suppress(OSError, UnicodeDecodeError):  # DeepSpeed's name of its newest checkpoint
        folder = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    return next((folder / name for name in _DEEPSPEED if (folder / name).is_file()), None)


def read_content(path: Path) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Reads a file of weights in any supported container.

    Returns:
        Our metadata, empty for third-party files; and tensors by name, in mappings of any depth.

    Raises:
        InputError: if it is no file of weights; the message says what it is.
        OSError: if it cannot be read.
    """
    if path.name in _INDEXES:
        return {}, _join(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        try:
            return read_metadata(path), load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path} is {_CUT_SHORT} ({error})") from None
    if kind := _describe(path, head):
        raise InputError(f"{path} is {kind}")
    content = _unpickle(path, pickled=head[:1] == b"\x80" or head[:2] == b"PK")
    module = content.get("module") or {}
    if path.name in _DEEPSPEED and not any(
        isinstance(v, torch.Tensor) and v.numel() for v in module.values()
    ):
        raise InputError(
            f"{path} has no weights, since ZeRO-3 keeps them in a file per process; join them with DeepSpeed's "
            "zero_to_fp32.py, which is next to them, and give the result"
        )
    return {}, content


def _join(index: Path) -> dict[str, Any]:
    """Reads and joins the files in an index of transformers."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        parts = [index.parent / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{index} lists no files of weights; download it again") from None
    if missing := [part.name for part in parts if not part.is_file()]:
        raise InputError(f"{index} lists {missing[0]}, which is missing; download it too")
    joined: dict[str, Any] = {}
    for part in parts:
        joined |= read_content(part)[1]
    return joined


def _describe(path: Path, head: bytes) -> str | None:
    """Describes a file that holds no weights; None if it may be one of torch's pickles."""
    if path.suffix in _PROGRAMS:
        return _PROGRAM
    if head.startswith(_PACKED) or head[257:262] == b"ustar":
        return _UNPACK
    if head[:4] != b"PK\x03\x04":
        return "an image" if image_kind(head) else what_is(head)
    try:
        members = zipfile.ZipFile(path).infolist()
    except zipfile.BadZipFile:
        return _CUT_SHORT
    names = [member.filename for member in members]
    if any(name.endswith("/constants.pkl") for name in names):
        return f"a program of TorchScript, which is not run here; {_SAVE}"
    if any(name.endswith("/data.pkl") for name in names):
        return _PACKED_AGAIN if any(member.compress_type for member in members) else None
    return _JAX if names and all(name.endswith(".npy") for name in names) else _UNPACK


def check_whole(path: Path, names: Collection[str]) -> None:
    """Raises InputError for a part of a network, adapters, optimizer states or FSDP's flat parameters."""
    problem = None
    if any(name.endswith("flat_param") for name in names):
        problem = "has FSDP's flat parameters, without shapes; save it with StateDictType.FULL_STATE_DICT"
    elif any(map(_ADAPTER.search, names)):
        problem = (
            "has only adapters of PEFT (LoRA); merge them with merge_and_unload(), and give what "
            "save_pretrained(NEW) writes"
        )
    elif names and all(map(_OPTIMIZER.search, names)):
        problem = "has the state of an optimizer; give the file of the network, usually next to it"
    elif (part := _PART.search(path.name)) and int(part[1]) > 1:
        problem = f"is one of {int(part[1])} files of weights; give their folder {path.parent}"
    if problem:
        raise InputError(f"{path} {problem}")


class _Inert:
    """Replaces an object in a pickle that is no tensor, such as options or a logger; keeps its values only."""

    def __new__(cls, *_args: Any, **_options: Any) -> _Inert:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.__dict__ |= state if isinstance(state, dict) else {}


class _InertDict:
    """Replaces a subclass of dict, such as Lightning's options, since torch's reader fills only its own kinds."""

    def __new__(cls, *_args: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


def _unpickle(path: Path, *, pickled: bool) -> dict[Any, Any]:
    """Reads a pickle by torch's restricted reader. Other objects (options of Lightning) become inert."""
    others = {"argparse.Namespace"}
    with suppress(Exception), path.open("rb") as file:  # an old format, or no pickle: torch.load raises below
        others |= {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}
    inert: list[Any] = [(_InertDict if name.lower().endswith("dict") else _Inert, name) for name in others]
    try:
        # An open file, because torch treats some names specially.
        with torch.serialization.safe_globals(inert), warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # about pickle protocols of files that are then rejected
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # malformed content of any kind
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise InputError(f"{path} is refused, because it contains more than weights; {_SAVE}") from None
        if pickled and re.search("EOF|truncated|corrupted|archive", str(error)):
            raise InputError(f"{path} is {_CUT_SHORT}") from None
        raise InputError(f"{path} is not a file of weights; give {FORMS}") from None
    if not isinstance(content, dict):
        kind = "one object" if isinstance(content, _Inert) else f"a {type(content).__name__}"
        raise InputError(f"{path} contains {kind}, not named tensors; {_SAVE}")
    return content
