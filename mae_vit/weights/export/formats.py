"""The formats of `mae-vit export --to`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.weights.export import to_hf, to_hf_pixio, to_official, to_onnx, to_timm, to_torch
from mae_vit.weights.export.source import ExportSource
from mae_vit.weights.export.written import Written


@dataclass(frozen=True)
class Format:
    """A format, and what verifies it.

    Attributes:
        write: writes an encoder to a folder, and returns what the library computes of it.
        library: loads and verifies the export.
        needs: other packages that writing takes.
        extra: of mae-vit, that installs them; None if mae-vit itself needs them.
        hub_name: of the library on the Hub; None if it has none.
    """

    write: Callable[[ExportSource, Path], Written]
    library: str
    needs: tuple[str, ...] = ()
    extra: str | None = None
    hub_name: str | None = None

    def library_version(self) -> str:
        """Imports the library and all that writing needs; returns `timm 1.0.20`.

        Raises:
            InputError: if one is not installed, with the command that installs it.
        """
        try:
            version = importlib.import_module(self.library).__version__
            for package in self.needs:
                importlib.import_module(package)
        except ImportError as error:
            missing = error.name or self.library
            raise InputError(f'{missing} is not installed: pip install "mae-vit[{self.extra}]"') from None
        return f"{self.library} {version}"


def _write_hf(source: ExportSource, folder: Path) -> Written:
    """Writes the class of transformers that has as many class tokens."""
    several = source.info.vit.class_tokens > 1
    return (to_hf_pixio if several else to_hf).write(source, folder)


FORMATS = {
    "timm": Format(to_timm.write, "timm", hub_name="timm"),
    "hf": Format(_write_hf, "transformers", extra="hf", hub_name="transformers"),
    "official": Format(to_official.write, "timm"),
    "onnx": Format(to_onnx.write, "onnxruntime", ("onnx", "onnxscript"), extra="onnx", hub_name="onnx"),
    "torch": Format(to_torch.write, "torch"),
}
