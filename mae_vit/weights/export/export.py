"""The formats of `mae-vit export`, and its folder: written under a temporary name, verified, then renamed."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mae_vit.core.errors import InputError
from mae_vit.core.files import fsync_path, replace_folder, temporary_name
from mae_vit.core.hub import HubName
from mae_vit.core.messages import error_reason
from mae_vit.weights.export import programs, to_hf, to_timm
from mae_vit.weights.export.card import CARD, SIGNATURE, write_card
from mae_vit.weights.export.source import ExportSource, Written
from mae_vit.weights.start import name_of

# File that `load_encoder` looks for first in a repository on the Hub.
NATIVE = "encoder.safetensors"
# All files of exports. --force replaces only folders with our card and no other files.
EXPORTED = {
    CARD, "model.safetensors", "config.json", "preprocessor_config.json", to_hf.MAE_FOLDER, "model.pth", "model.onnx",
    "model.onnx.data", "model.pt2", NATIVE,
}  # fmt: skip
_FILES = (".safetensors", ".pth", ".pt", ".onnx", ".pt2")


@dataclass(frozen=True)
class Format:
    """A format, and the library that loads and verifies it.

    Attributes:
        write: writes an encoder to a folder, and returns what the library computes from it.
        library: module name of the library.
        needs: other packages that writing needs.
        extra: extra of mae-vit that installs them; None if mae-vit itself needs them.
        on_hub: whether the library has a name on the Hub.
    """

    write: Callable[[ExportSource, Path], Written]
    library: str
    needs: tuple[str, ...] = ()
    extra: str | None = None
    on_hub: bool = True

    def library_version(self) -> str:
        """Imports all packages that writing needs; returns library and version, such as `timm 1.0.20`.

        Raises:
            InputError: if a package is not installed; names the command that installs it.
        """
        try:
            version = importlib.import_module(self.library).__version__
            for package in self.needs:
                importlib.import_module(package)
        except ImportError as error:
            missing = error.name or self.library
            raise InputError(f'{missing} is not installed: pip install "mae-vit[{self.extra}]"') from None
        return f"{self.library} {version}"


FORMATS = {
    "timm": Format(to_timm.write, "timm"),
    "hf": Format(to_hf.write, "transformers", extra="hf"),
    "official": Format(to_timm.write_official, "timm", on_hub=False),
    "onnx": Format(programs.write_onnx, "onnxruntime", ("onnx", "onnxscript"), extra="onnx"),
    "torch": Format(programs.write_torch, "torch", on_hub=False),
}


@dataclass(frozen=True)
class Export:
    """A finished export.

    Attributes:
        folder: folder of the export.
        files: files in the folder, the card last.
        verified: library and largest difference, as a sentence.
        written: result of the format's writer.
    """

    folder: Path
    files: tuple[Path, ...]
    verified: str
    written: Written


def default_folder(asked: str, target: str) -> Path:
    """Returns the default folder of an export: RUN/TARGET in a run folder, else NAME-TARGET in the current folder."""
    if (Path(asked) / "config.yaml").is_file():
        return Path(asked) / target
    return Path(f"{name_of(asked)}-{target}")


def check_place(out: Path, *, force: bool) -> None:
    """Raises InputError if `out` holds something that may not be replaced, or is not a folder's name."""
    if out.suffix in _FILES or out.is_file() or out.is_symlink():
        raise InputError(
            f"--out {out}: an export is a folder, which holds its files and a card: give {out.stem}"
        )
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if not names:
        return
    card = out / CARD
    if names - EXPORTED or not card.is_file() or SIGNATURE not in card.read_text(errors="replace"):
        other = min(names - EXPORTED, default=f"no {CARD} of one")
        raise InputError(f"--out {out} is no export, it holds {other}: give another folder")
    if not force:
        raise InputError(f"--out {out} exists: --force replaces it, or give another folder")


def write_export(
    source: ExportSource, target: str, out: Path, *, force: bool, hub: HubName | None = None
) -> Export:
    """Writes an export, verifies it and moves it to `out`; leaves nothing half-written after an error.

    With `hub` the card names the repository, and the file for `load_encoder` is added.

    Raises:
        InputError: if the other library has no such network, computes another function or is missing, or if
            the folder cannot be written.
    """
    check_place(out, force=force)
    chosen = FORMATS[target]
    library = chosen.library_version()
    partial = temporary_name(out)
    try:
        partial.mkdir(parents=True)
        with torch.no_grad():
            written = chosen.write(source, partial)
        if any(name.startswith("decode_head.") for name in source.weights.tensors):
            left_out = "without the head of its masks, which the run's model.safetensors has"
            written = replace(written, notes=(*written.notes, left_out))
        difference = written.largest_difference(library.split()[0])
        outputs = ", ".join(written.outputs)
        verified = f"{library}: {outputs} of random images differ by at most {difference:.2g} from ours"
        if hub is not None and target != "timm":  # `load_encoder` reads timm's format itself
            to_timm.write_weights(source, partial / NATIVE)
        hub_name = chosen.library.removesuffix("runtime") if chosen.on_hub else None
        write_card(partial, source, written, hub_name=hub_name, verified=verified, hub=hub)
        for path in partial.rglob("*"):
            if path.is_file():
                fsync_path(path)
        replace_folder(partial, out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error_reason(error)}; give --out DIR") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = sorted(filter(Path.is_file, out.rglob("*")), key=lambda path: (path.name == CARD, path))
    return Export(out, tuple(files), verified, written)
