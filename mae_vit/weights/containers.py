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
from safetensors.torch import load_file

from mae_vit.core.errors import InputError
from mae_vit.core.user_files import image_kind, what_is
from mae_vit.models.encoder_file import read_metadata
from mae_vit.weights.start import STARTS

# Where tar's mark ends, the last of those below.
_HEAD_BYTES = 512
_UNPACK = "unpack it, and give the file of weights in it"
_KINDS = (
    (b"\x1f\x8b", f"compressed by gzip: {_UNPACK}"),
    (b"BZh", f"compressed by bzip2: {_UNPACK}"),
    (b"\xfd7zXZ", f"compressed by xz: {_UNPACK}"),
    (b"\x28\xb5\x2f\xfd", f"compressed by zstd: {_UNPACK}"),
    (b"7z\xbc\xaf", f"a 7z archive: {_UNPACK}"),
    (b"\x89HDF", "a file in HDF5, as Keras writes it: weights of PyTorch are read here"),
    (b"GGUF", "a file in GGUF: weights of PyTorch are read here"),
    (b"\x93NUMPY", "an array of NumPy: weights are tensors by name"),
    (b"<?xml", "a text in XML: the download failed"),
    (b"{", "a text in JSON: weights are a binary file; if this came by a download, it failed"),
)
_CUT_SHORT = "cut short: download or copy it again"
_JAX = (
    "an archive of NumPy arrays, as JAX writes weights: timm has those of Google in PyTorch, such as "
    "timm:vit_base_patch16_224.augreg_in21k"
)
# Stands at the head of what torch.save writes, where that is no archive.
_TORCHS_NUMBER = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
# What optimizers keep of each parameter.
_OPTIMIZER = re.compile(r"(^|\.)(state\.\d+\.\w+|exp_avg(_sq)?|momentum_buffer)$")
_ADAPTER = re.compile(r"^base_model\.model\.|\.(lora_\w+|base_layer)\.")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.(safetensors|bin)$")
# Weights by the names that trainers give them, and what else trainers write by such names.
_WEIGHTS = re.compile(r"\.(pth(\.tar)?|pt|bin|ckpt|safetensors|index\.json)$")
_NO_WEIGHTS = re.compile(
    r"(optimi[sz]er|scheduler|scaler|training_args|rng_state|random_states)|" + _PART.pattern
)
# Those that stand for their folder.
_OF_FOLDER = ("encoder.safetensors", "model.safetensors", "pytorch_model.bin", *_INDEXES)
# Files of a folder that are looked through: a folder of images may be given by mistake.
_MAX_NAMES = 10_000
# What ONNX and torch.export write.
_PROGRAMS = (".onnx", ".pt2")
_PROGRAM = "a program that was exported from weights: give those weights"
# What DeepSpeed calls the weights of the first process, without and with ZeRO-3.
_DEEPSPEED = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def file_in(folder: Path) -> Path | None:
    """Returns the file that stands for the weights of a folder of others; None if it holds none that is known.

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
    with suppress(OSError, UnicodeDecodeError):  # what DeepSpeed's newest is called
        folder = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    return next((folder / name for name in _DEEPSPEED if (folder / name).is_file()), None)


def weights_below(folder: Path) -> Path | None:
    """Returns what is probably meant by a folder that others trained into: its best weights, else the newest.

    It is a file, or the folder that a file such as model.safetensors stands for. None if nothing is found.

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
            return best.parent if best.name in _OF_FOLDER else best
    if program := next((path for path in folder.iterdir() if path.suffix in _PROGRAMS), None):
        raise InputError(f"{program} is {_PROGRAM}")
    return None


def read_content(path: Path, *, wanted: str = STARTS) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Reads a file of weights in whatever container.

    Args:
        path: of a file; its name does not matter, but for the index of several files.
        wanted: what a message says to give instead of what holds no weights.

    Returns:
        Our metadata, empty in files of others; and the tensors by name, in any depth of mappings.

    Raises:
        InputError: if it is none: the line says what it is.
        OSError: if it cannot be read.
    """
    if path.name in _INDEXES:
        return {}, _join(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if _is_safetensors(head):
        _check_length(path, head)
        return read_metadata(path), load_file(path)
    if kind := _kind_of(path, head):
        raise InputError(f"{path} is {kind}")
    content = _unpickle(path, pickled=head[:1] == b"\x80" or head[:2] == b"PK", wanted=wanted)
    if path.name in _DEEPSPEED and not any(value.numel() for value in _tensors(content.get("module"))):
        raise InputError(
            f"{path} holds no weights: ZeRO-3 keeps them in the files of the processes; join them by DeepSpeed's "
            "zero_to_fp32.py, which lies beside them, and give what it writes"
        )
    return {}, content


def _tensors(content: Any) -> list[torch.Tensor]:
    return [value for value in content.values() if isinstance(value, torch.Tensor)] if content else []


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


def _is_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32


def _check_length(path: Path, head: bytes) -> None:
    """Says of a file of safetensors how much of it is missing."""
    start, there = 8 + int.from_bytes(head[:8], "little"), path.stat().st_size
    with suppress(ValueError, KeyError, TypeError, AttributeError), path.open("rb") as file:
        header = json.loads(file.read(start)[8:]) if there >= start else {}
        ends = [value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"]
        start += max(ends, default=0)
    if there < start:
        raise InputError(f"{path} is {_CUT_SHORT} (it has {there:,} of at least {start:,} bytes)")


def _kind_of(path: Path, head: bytes) -> str | None:
    """Says what a file is that is no pickle of torch's."""
    if path.suffix in _PROGRAMS:
        return _PROGRAM
    if known := next((kind for mark, kind in _KINDS if head.lstrip().startswith(mark)), None):
        return known
    if head[:1] == b"\x80" and _TORCHS_NUMBER not in head:
        how = _as_tensors("pickle.load(open(FILE, 'rb'))")
        return f"a pickle that torch did not write: {how}"
    if head[257:262] == b"ustar":
        return f"an archive (tar): {_UNPACK}"
    if head[:4] == b"PK\x03\x04":
        return _kind_of_zip(path)
    return "an image" if image_kind(head) else what_is(head)


def _as_tensors(read: str) -> str:
    """How arrays of NumPy become weights, as the end of a line; `read` is how Python reads the file."""
    return (
        "if you trust who made it, write its arrays as tensors: torch.save({name: torch.as_tensor(value) for name, "
        f"value in {read}.items()}}, NEW)"
    )


def _kind_of_zip(path: Path) -> str | None:
    try:
        names = zipfile.ZipFile(path).namelist()
    except zipfile.BadZipFile:
        return _CUT_SHORT
    if any(name.endswith("/constants.pkl") for name in names):
        return (
            "a program of TorchScript, which is not run here: if you trust who made it, write its tensors alone: "
            "torch.save(torch.jit.load(FILE).state_dict(), NEW)"
        )
    if any(name.endswith("/data.pkl") for name in names):
        return None
    return _JAX if names and all(name.endswith(".npy") for name in names) else f"a zip archive: {_UNPACK}"


def check_whole(path: Path, names: Collection[str]) -> None:
    """Refuses a file that has a part of a network only, or all of it in one piece, or something beside it.

    Args:
        path: of the file.
        names: of its tensors.

    Raises:
        InputError: that names what to give instead.
    """
    if any(name.endswith("flat_param") for name in names):
        raise InputError(
            f"{path} holds FSDP's flat parameters, without the shapes: save it under "
            "FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
        )
    if any(map(_ADAPTER.search, names)):
        raise InputError(
            f"{path} holds adapters of PEFT (LoRA), which are no network alone: merge them into theirs, by "
            "PeftModel.from_pretrained(NETWORK, ADAPTERS).merge_and_unload().save_pretrained(NEW), and give NEW"
        )
    if names and all(map(_OPTIMIZER.search, names)):
        raise InputError(
            f"{path} holds the state of an optimizer, not the weights: give the file of the network, which lies "
            "beside it as a rule"
        )
    if (part := _PART.search(path.name)) and int(part[1]) > 1:
        raise InputError(f"{path} is one of {int(part[1])} files of weights: give their folder {path.parent}")


class _Inert:
    """Stands for an object in a pickle that is no tensor: options, a logger. It does nothing."""

    def __new__(cls, *_args: Any, **_options: Any) -> _Inert:
        return object.__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        pass


class _InertArray(_Inert):
    """Stands for an array or a number of NumPy."""


class _InertDict:
    """Stands for a kind of dict, as Lightning's options are: torch's reader puts items into its own kinds alone."""

    def __new__(cls, *_args: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


def _stand_in(name: str) -> type:
    if name.lower().endswith("dict"):
        return _InertDict
    return _InertArray if name.startswith("numpy.") else _Inert


def _holds(content: Any, kind: type) -> bool:
    """Whether a value of a kind is in nested mappings."""
    if isinstance(content, dict):
        return any(_holds(value, kind) for value in content.values())
    return isinstance(content, kind)


def _unpickle(path: Path, *, pickled: bool, wanted: str) -> dict[Any, Any]:
    """Reads a pickle by torch's restricted reader, which calls nothing that it does not know.

    Other objects beside the weights, such as the options of a Lightning checkpoint, become inert.
    """
    others = {"argparse.Namespace"}
    with suppress(Exception), path.open("rb") as file:  # of an old format, or no pickle: the reader says so
        others |= {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}
    inert: list[Any] = [(_stand_in(name), name) for name in others]
    try:
        # As a file, because torch goes by some names.
        with torch.serialization.safe_globals(inert), warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # about pickle protocols, of files that are then refused
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line]
        if not named:
            raise InputError(f"{path} is no file of weights: give {wanted}") from None
        raise InputError(
            f"{path} is refused: it holds more than weights ({named[0][:120]}); if you trust who made it, write its "
            f"tensors alone: torch.save(torch.load(FILE, weights_only=False)[KEY], NEW)"
        ) from None
    except OSError:
        raise
    except Exception as error:  # text, or what torch began and could not end
        if pickled and re.search("EOF|truncated|corrupted|archive", str(error)):
            raise InputError(f"{path} is {_CUT_SHORT}") from None
        raise InputError(f"{path} is no file of weights: give {wanted}") from None
    if isinstance(content, _Inert):
        raise InputError(f"{path} holds a whole object: save the state_dict() of the network alone")
    if not isinstance(content, dict):
        kind = "one tensor" if isinstance(content, torch.Tensor) else f"a {type(content).__name__}"
        raise InputError(f"{path} holds {kind}, not tensors by name: save the state_dict() of the network")
    if _holds(content, _InertArray) and not _holds(content, torch.Tensor):
        how = _as_tensors("torch.load(FILE, weights_only=False)")
        raise InputError(f"{path} holds arrays of NumPy, no tensors: {how}")
    return content
