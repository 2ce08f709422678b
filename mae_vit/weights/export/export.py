"""Puts an export in place: written under a temporary name, verified there, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path, replace_folder, temporary_name
from mae_vit.core.hub import HubName
from mae_vit.core.messages import error_reason
from mae_vit.weights.export import to_hf, to_hf_pixio, to_official, to_onnx, to_timm, to_torch
from mae_vit.weights.export.history import collect_history
from mae_vit.weights.export.model_card import CARD, SIGNATURE, card
from mae_vit.weights.export.network import ExportSource
from mae_vit.weights.export.verify import Verification
from mae_vit.weights.start import name_of


def _write_hf(handed: ExportSource, folder: Path) -> Verification:
    """Writes the class of transformers that has as many class tokens."""
    several = handed.encoder.info.vit.class_tokens > 1
    return (to_hf_pixio if several else to_hf).write(handed, folder)


TARGETS: dict[str, Callable[[ExportSource, Path], Verification]] = {
    "timm": to_timm.write,
    "hf": _write_hf,
    "official": to_official.write,
    "onnx": to_onnx.write,
    "torch": to_torch.write,
}
# All that exports consist of. --force replaces folders that hold nothing else, and a card of ours.
EXPORTED = {
    CARD, "model.safetensors", "config.json", "preprocessor_config.json", "mae", "model.pth", "model.onnx",
    "model.onnx.data", "model.pt2", "encoder.safetensors",
}  # fmt: skip
_FILES = (".safetensors", ".pth", ".pt", ".onnx", ".pt2")


@dataclass(frozen=True)
class Export:
    """An export in its place.

    Attributes:
        folder: that holds it.
        files: in the folder, the card last.
        verified: what it was found to be.
    """

    folder: Path
    files: tuple[Path, ...]
    verified: Verification


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
    strangers = sorted(path.name for path in out.iterdir() if path.name not in EXPORTED)
    if strangers:
        more = f" and {len(strangers) - 1} more" if strangers[1:] else ""
        raise InputError(
            f"--out {out} holds {strangers[0]}{more}, which no export wrote: move it elsewhere, or give another folder"
        )
    if any(out.iterdir()) and not _is_export(out):
        raise InputError(f"--out {out} is no export: it has no {CARD} of one: give another folder")
    if not force and any(out.iterdir()):
        raise InputError(f"--out {out} exists: --force replaces it, or give another folder")


def write_export(
    handed: ExportSource, target: str, out: Path, *, force: bool, hub: HubName | None = None
) -> Export:
    """Writes, verifies, and puts in place; whatever goes wrong, nothing half-written is left.

    Args:
        handed: what is exported.
        target: a key of `TARGETS`.
        out: the folder to be.
        force: replace an earlier export.
        hub: the repository that it is for: the card names it, and what `load_encoder` reads goes along.

    Raises:
        InputError: if the other library has no such network, computes something else, or is
            missing; or if the folder cannot be written.
    """
    check_place(out, force=force)
    partial = temporary_name(out)
    try:
        partial.mkdir(parents=True)
        verified = TARGETS[target](handed, partial)
        if any(name.startswith("decode_head.") for name in handed.network.encoder.start.tensors):
            left_out = "without the head of its masks, which the run's model.safetensors has"
            verified = replace(verified, notes=(*verified.notes, left_out))
        if hub is not None and target != "timm":  # which is what `load_encoder` reads
            to_timm.write_native(handed, partial / to_timm.NATIVE)
        (partial / CARD).write_text(card(handed, target, verified, collect_history(handed), hub))
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
    return Export(out, tuple(files), verified)


def _is_export(folder: Path) -> bool:
    try:
        return SIGNATURE in (folder / CARD).read_text()
    except (OSError, UnicodeDecodeError):
        return False
