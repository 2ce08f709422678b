"""What a file or folder of weights is, by its first bytes and names: its tensors, or a line with the remedy.

Nothing read here can execute code: safetensors hold no objects, and pickled files
go through torch's restricted reader.
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
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mae_vit.core.errors import InputError
from mae_vit.core.user_files import image_kind, what_is
from mae_vit.models.encoder_file import read_metadata
from mae_vit.weights.start import STARTS

# Where tar's mark ends.
_HEAD_BYTES = 512
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
_UNPACK = "packed: unpack it, and give the file of weights in it"
_CUT_SHORT = "cut short: download or copy it again"
_SAVE = "if you trust who made it, save its tensors alone, as torch.save(network.state_dict(), NEW) does"
_JAX = "of JAX: timm has Google's weights in PyTorch, such as timm:vit_base_patch16_224.augreg_in21k"
# What ONNX and torch.export write.
_PROGRAMS = (".onnx", ".pt2")
_PROGRAM = "a program that was exported from weights: give those weights"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.(safetensors|bin)$")
# Weights by the names that trainers give them, and what else trainers write by such names.
_WEIGHTS = re.compile(r"\.(pth(\.tar)?|pt|bin|ckpt|safetensors|index\.json)$")
_NO_WEIGHTS = re.compile(
    r"(optimi[sz]er|scheduler|scaler|training_args|rng_state|random_states)|" + _PART.pattern
)
# Files that stand for their folder.
_FOLDER_FILES = ("encoder.safetensors", "model.safetensors", "pytorch_model.bin", *_INDEXES)
# Files of a folder that are looked through: a folder of images may be given by mistake.
_MAX_NAMES = 10_000
# DeepSpeed's names for the weights of the first process, without and with ZeRO-3.
_DEEPSPEED = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_ADAPTER = re.compile(r"^base_model\.model\.|\.(lora_\w+|base_layer)\.")
# What optimizers keep of each parameter.
_OPTIMIZER = re.compile(r"(^|\.)(state\.\d+\.\w+|exp_avg(_sq)?|momentum_buffer)$")


def file_in(folder: Path) -> Path | None:
    """Returns the file that stands for the weights of a third-party folder; None if it holds none that is known.

    Raises:
        InputError: if they are there, in a form that is not read here.
    """
    if (folder / ".metadata").is_file() or any(folder.glob("*.distcp")):
        raise InputError(
            f"{folder} is a distributed checkpoint of PyTorch: convert it by `python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE.pth`, and give FILE.pth"
        )
    for name in _INDEXES:
        if (folder / name).is_file():
            return folder / name
    with suppress(OSError, UnicodeDecodeError):  # DeepSpeed's name of its newest checkpoint
        folder = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    return next((folder / name for name in _DEEPSPEED if (folder / name).is_file()), None)


def weights_below(folder: Path) -> Path | None:
    """Returns what a third-party training folder probably stands for: its best weights, else the newest.

    It is a file, or the folder that a file such as model.safetensors stands for. None if there is nothing.

    Raises:
        InputError: if there are only programs, which are not read here.
    """

    def preference(path: Path) -> tuple[bool, list[int], float]:
        # By number before the time, which copies do not keep: checkpoint-1000 is newer than checkpoint-500.
        numbers = [int(number) for number in re.findall(r"\d+", str(path.relative_to(folder)))]
        return "best" in path.name, numbers, path.stat().st_mtime

    for pattern in ("*", "*/*", "*/*/*"):
        files = [
            path
            for path in islice(folder.glob(pattern), _MAX_NAMES)
            if _WEIGHTS.search(path.name) and not _NO_WEIGHTS.search(path.name) and path.is_file()
        ]
        if files:
            best = max(files, key=preference)
            return best.parent if best.name in _FOLDER_FILES else best
    if program := next((path for path in folder.iterdir() if path.suffix in _PROGRAMS), None):
        raise InputError(f"{program} is {_PROGRAM}")
    return None


def read_content(path: Path, *, wanted: str = STARTS) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Reads a file of weights in whatever container.

    Args:
        path: file to read; its name does not matter, but for the index of several files.
        wanted: what a message says to give instead of a file without weights.

    Returns:
        Our metadata, empty in third-party files; and the tensors by name, in any depth of mappings.

    Raises:
        InputError: if it is none: the line says what it is.
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
    content = _unpickle(path, pickled=head[:1] == b"\x80" or head[:2] == b"PK", wanted=wanted)
    module = content.get("module") or {}
    if path.name in _DEEPSPEED and not any(
        isinstance(v, torch.Tensor) and v.numel() for v in module.values()
    ):
        raise InputError(
            f"{path} holds no weights: ZeRO-3 keeps them in the files of the processes; join them by DeepSpeed's "
            "zero_to_fp32.py, which lies beside them, and give what it writes"
        )
    return {}, content


def _join(index: Path) -> dict[str, Any]:
    """Joins the files that an index of transformers names."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        parts = [index.parent / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{index} names no files of weights: download it again") from None
    if missing := [part.name for part in parts if not part.is_file()]:
        raise InputError(
            f"{index} names {len(parts)} files, and {missing[0]} is not beside it: download it too"
        )
    joined: dict[str, Any] = {}
    for part in parts:
        joined |= read_content(part)[1]
    return joined


def _describe(path: Path, head: bytes) -> str | None:
    """Returns what a file is; None if it may be a pickle of torch's."""
    if path.suffix in _PROGRAMS:
        return _PROGRAM
    if head.startswith(_PACKED) or head[257:262] == b"ustar":
        return _UNPACK
    if head[:4] != b"PK\x03\x04":
        return "an image" if image_kind(head) else what_is(head)
    try:
        names = zipfile.ZipFile(path).namelist()
    except zipfile.BadZipFile:
        return _CUT_SHORT
    if any(name.endswith("/constants.pkl") for name in names):
        return f"a program of TorchScript, which is not run here: {_SAVE}"
    if any(name.endswith("/data.pkl") for name in names):
        return None
    return _JAX if names and all(name.endswith(".npy") for name in names) else _UNPACK


def check_whole(path: Path, names: Collection[str]) -> None:
    """Refuses a file that has a part of a network only, or all of it in one piece, or something beside it.

    Raises:
        InputError: that names what to give instead.
    """
    problem = None
    if any(name.endswith("flat_param") for name in names):
        problem = "holds FSDP's flat parameters, without shapes: save it under StateDictType.FULL_STATE_DICT"
    elif any(map(_ADAPTER.search, names)):
        problem = (
            "holds adapters of PEFT (LoRA), which are no network alone: merge them by merge_and_unload(), and give "
            "what save_pretrained(NEW) writes"
        )
    elif names and all(map(_OPTIMIZER.search, names)):
        problem = (
            "holds the state of an optimizer: give the file of the network, which lies beside it as a rule"
        )
    elif (part := _PART.search(path.name)) and int(part[1]) > 1:
        problem = f"is one of {int(part[1])} files of weights: give their folder {path.parent}"
    if problem:
        raise InputError(f"{path} {problem}")


class _Inert:
    """Stands for an object in a pickle that is no tensor: options, a logger. It keeps its values, and does nothing."""

    def __new__(cls, *_args: Any, **_options: Any) -> _Inert:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.__dict__ |= state if isinstance(state, dict) else {}


class _InertDict:
    """Stands for a kind of dict, as Lightning's options are: torch's reader puts items into its own kinds alone."""

    def __new__(cls, *_args: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


def _unpickle(path: Path, *, pickled: bool, wanted: str) -> dict[Any, Any]:
    """Reads a pickle by torch's restricted reader, which calls nothing that it does not know.

    Other objects beside the weights, such as the options of a Lightning checkpoint, become inert.
    """
    others = {"argparse.Namespace"}
    with suppress(Exception), path.open("rb") as file:  # an old format, or no pickle: the reader says so
        others |= {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}
    inert: list[Any] = [(_InertDict if name.lower().endswith("dict") else _Inert, name) for name in others]
    try:
        # As a file, because torch goes by some names.
        with torch.serialization.safe_globals(inert), warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # about pickle protocols, of files that are then refused
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # text, or what torch began and could not end
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise InputError(f"{path} is refused, because it holds more than weights: {_SAVE}") from None
        if pickled and re.search("EOF|truncated|corrupted|archive", str(error)):
            raise InputError(f"{path} is {_CUT_SHORT}") from None
        raise InputError(f"{path} is no file of weights: give {wanted}") from None
    if not isinstance(content, dict):
        kind = "one object" if isinstance(content, _Inert) else f"a {type(content).__name__}"
        raise InputError(f"{path} holds {kind}, not tensors by name: {_SAVE}")
    return content
