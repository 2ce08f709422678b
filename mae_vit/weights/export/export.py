"""Puts an export in place: written under a temporary name, verified there, then renamed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path, replace_folder, temporary_name
from mae_vit.core.hub import HubName
from mae_vit.core.messages import error_reason
from mae_vit.weights.export import to_timm
from mae_vit.weights.export.card import CARD, SIGNATURE, write_card
from mae_vit.weights.export.formats import FORMATS
from mae_vit.weights.export.source import ExportSource
from mae_vit.weights.export.to_hf import MAE_FOLDER
from mae_vit.weights.export.written import Written
from mae_vit.weights.start import name_of

# What `load_encoder` looks for first in a repository of the Hub.
NATIVE = "encoder.safetensors"
# All that exports consist of. --force replaces folders that hold nothing else, and a card of ours.
EXPORTED = {
    CARD, "model.safetensors", "config.json", "preprocessor_config.json", MAE_FOLDER, "model.pth", "model.onnx",
    "model.onnx.data", "model.pt2", NATIVE,
}  # fmt: skip
_FILES = (".safetensors", ".pth", ".pt", ".onnx", ".pt2")


@dataclass(frozen=True)
class Export:
    """An export in its place.

    Attributes:
        folder: that holds it.
        files: in the folder, the card last.
        library: that verified it, with its version.
        difference: the largest absolute one of its outputs from ours.
        written: what the format's writer returned.
    """

    folder: Path
    files: tuple[Path, ...]
    library: str
    difference: float
    written: Written


def default_folder(asked: str, target: str) -> Path:
    """Where an export goes if nothing else is said: RUN/TARGET of a run folder, else NAME-TARGET in the current one."""
    if (Path(asked) / "config.yaml").is_file():
        return Path(asked) / target
    return Path(f"{name_of(asked)}-{target}")


def check_place(out: Path, *, force: bool) -> None:
    """Looks at the place before anything is computed.

    Raises:
        InputError: if something is there that may not be replaced, or `out` is no folder's name.
    """
    if out.suffix in _FILES:
        raise InputError(
            f"--out {out}: an export is a folder, which holds its files and a card: give {out.stem}"
        )
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise InputError(f"--out {out} exists and is no folder: give another name")
    names = {path.name for path in out.iterdir()}
    if strangers := sorted(names - EXPORTED):
        raise InputError(
            f"--out {out} holds {strangers[0]}, which no export wrote: move it elsewhere, or give another folder"
        )
    if names and SIGNATURE not in _read_card(out):
        raise InputError(f"--out {out} is no export: it has no {CARD} of one: give another folder")
    if names and not force:
        raise InputError(f"--out {out} exists: --force replaces it, or give another folder")


def write_export(
    source: ExportSource, target: str, out: Path, *, force: bool, hub: HubName | None = None
) -> Export:
    """Writes, verifies, and puts in place; whatever goes wrong, nothing half-written is left.

    Args:
        source: what is exported.
        target: a key of `FORMATS`.
        out: the folder to be.
        force: replace an earlier export.
        hub: the repository that it is for: the card names it, and what `load_encoder` reads goes along.

    Raises:
        InputError: if the other library has no such network, computes something else, or is
            missing; or if the folder cannot be written.
    """
    check_place(out, force=force)
    library = FORMATS[target].library_version()
    partial = temporary_name(out)
    try:
        partial.mkdir(parents=True)
        with torch.no_grad():
            written = FORMATS[target].write(source, partial)
        if any(name.startswith("decode_head.") for name in source.weights.tensors):
            left_out = "without the head of its masks, which the run's model.safetensors has"
            written = replace(written, notes=(*written.notes, left_out))
        difference = written.largest_difference(library.split()[0])
        if hub is not None and target != "timm":  # which is what `load_encoder` reads
            to_timm.write_weights(source, partial / NATIVE)
        write_card(partial, source, written, target=target, library=library, difference=difference, hub=hub)
        for path in partial.rglob("*"):
            if path.is_file():
                fsync_path(path)
        replace_folder(partial, out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error_reason(error)}; give --out DIR") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = sorted(
        (path for path in out.rglob("*") if path.is_file()), key=lambda path: (path.name == CARD, path)
    )
    return Export(out, tuple(files), library, difference, written)


def _read_card(folder: Path) -> str:
    try:
        return (folder / CARD).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
