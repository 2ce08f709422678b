"""The formats of `mae-vit export`, its folder with the model card, and the push of the folder to the Hub.

The folder is written under a temporary name, verified, then renamed. A push is one commit, private by default.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData

from mae_vit.core import __version__
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.files import check_not_current, fsync_path, replace_folder, temporary_name
from mae_vit.core.hub import HUB_PREFIX, HubName, hub_errors, hub_library, is_offline, parse_hub_name
from mae_vit.core.messages import error_reason
from mae_vit.core.preprocessing import UNCHANGED
from mae_vit.weights.export import programs, to_hf, to_timm
from mae_vit.weights.export.source import ExportSource, Written
from mae_vit.weights.names import name_of

CARD = "README.md"
# Marks a folder as an export of ours.
SIGNATURE = "Exported by mae-vit"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
# Pillow's resampling differs from ours; prepared JPEGs, encoded again, add rounding.
_PIXELS_WITHIN, _PIXELS_WITHIN_PREPARED = 2, 6
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

        Raises InputError if a package is not installed; names the command that installs it.
        """
        try:
            version = importlib.import_module(self.library).__version__
            for package in self.needs:
                importlib.import_module(package)
        except ImportError as error:
            missing = error.name or self.library
            raise InputError(f'{missing} is not installed; pip install "mae-vit[{self.extra}]"') from None
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
        files: files in the folder, the card last.
        verified: library and largest difference, as a sentence.
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
    check_not_current(out)
    if out.suffix in _FILES or out.is_file() or out.is_symlink():
        raise InputError(f"--out {out}: an export is a folder; give --out {out}-export")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if not names:
        return
    card = out / CARD
    if names - EXPORTED or not card.is_file() or SIGNATURE not in card.read_text(errors="replace"):
        other = min(names - EXPORTED, default=f"no {CARD} of one")
        raise InputError(f"--out {out} is not an export (it contains {other}); give another folder")
    if not force:
        raise InputError(f"--out {out} exists; --force replaces it, or give another folder")


def write_export(
    source: ExportSource, target: str, out: Path, *, force: bool, hub: HubName | None = None
) -> Export:
    """Writes an export, verifies it and moves it to `out`; leaves nothing half-written after an error.

    With `hub` the card names the repository, and the file for `load_encoder` is added. Raises InputError if the other
    library has no such network, computes another function or is missing, or if the folder cannot be written.
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
            left_out = "without the head for masks, which is in the run's model.safetensors"
            written = replace(written, notes=(*written.notes, left_out))
        difference = written.largest_difference(library.split()[0])
        outputs = ", ".join(written.outputs)
        verified = f"{library}: {outputs} of random images differ by at most {difference:.2g} from ours"
        if hub is not None and target != "timm":  # `load_encoder` reads timm's format itself
            to_timm.write_weights(source, partial / NATIVE)
        name = chosen.library.removesuffix("runtime") if chosen.on_hub else None
        _write_card(partial, source, written, library_name=name, verified=verified, hub=hub)
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


def _write_card(
    folder: Path,
    source: ExportSource,
    written: Written,
    *,
    library_name: str | None,
    verified: str,
    hub: HubName | None,
) -> None:
    """Writes the card; its code makes `images` of a file as `PretrainedEncoder.transform` does, by Pillow or NumPy."""
    info, bands = source.info, source.info.bands
    tags = ["vision-transformer", "image-feature-extraction"]
    card = ModelCard.from_template(
        ModelCardData(library_name=library_name, tags=tags),
        template_path=str(_TEMPLATE),
        source=source,
        info=info,
        bands=bands,
        name=name_of(source.asked),
        description=describe(source),
        written=written,
        hub=hub,
        height=info.img_size[0],
        width=info.img_size[1],
        mean=_rounded(info.mean),
        std=_rounded(info.std),
        low=_rounded(bands.low),
        high=_rounded(bands.high),
        within=_PIXELS_WITHIN if info.preprocessing == UNCHANGED else _PIXELS_WITHIN_PREPARED,
        verified=verified,
        signature=f"{SIGNATURE} {__version__}",
    )
    card.save(folder / CARD)


def describe(source: ExportSource) -> str:
    """Describes the network in one line."""
    info, network, vit = source.info, source.network, source.info.vit
    parameters = sum(parameter.numel() for parameter in network.parameters())
    cls = "[CLS]" if vit.class_tokens == 1 else f"mean of {vit.class_tokens} class tokens"
    pooling = cls if source.encoder.pool == "cls" else "mean of the patches"
    size = vit.embed_dim if network.head is None else network.head.out_features
    return (
        f"Vision Transformer, {vit.depth} blocks of width {vit.embed_dim}, {vit.num_heads} heads, "
        f"{info.img_size[0]} x {info.img_size[1]} px in patches of {vit.patch_size}, "
        f"{parameters / 1e6:.3g} M parameters; {network.output_name} (B, {size}) from {pooling}"
    )


def _rounded(values: Sequence[float]) -> list[float]:
    """Rounds values for the card, precise enough for float32."""
    return [float(f"{value:.7g}") for value in values]


def parse_push_name(asked: str) -> HubName:
    """Reads "USER/NAME[@BRANCH]", with or without "hf:"; raises InputError for another form."""
    if "/" not in asked.removeprefix(HUB_PREFIX).strip("/"):
        raise InputError(f"--push {asked}: must be USER/NAME, with the user or organization first")
    return parse_hub_name(asked)


def check_push(name: HubName, *, public: bool) -> None:
    """Checks, without changing anything on the Hub, that `push` is possible.

    Raises InputError if the token or the repository's visibility does not allow it, FetchUnavailable if the Hub cannot
    be reached.
    """
    hub = hub_library()
    if is_offline():
        raise InputError("--push needs the Hub, which HF_HUB_OFFLINE forbids; unset it")
    with hub_errors(name, task="write"):
        if hub.get_token() is None:
            raise InputError("--push needs a token; set HF_TOKEN, or run `hf auth login`")
        try:
            info = hub.HfApi().model_info(name.repo)  # also fails for a wrong token
        except hub.errors.RepositoryNotFoundError:
            return
    if not info.private and not public:
        raise InputError(f"{name.repo} is public; --public pushes to it, or give another name")


def push(folder: Path, name: HubName, *, public: bool) -> tuple[str, HubName]:
    """Uploads an export as one commit; creates repository and branch if needed.

    It removes the files of an earlier export, which `load_encoder` would read. Returns the repository's URL, with its
    visibility, and its name at the new commit. Raises InputError if the Hub refuses the push (then nothing is
    committed), FetchUnavailable if the connection breaks.
    """
    hub = hub_library()
    again = f"but the export is in {folder}. Run it again with --force"
    try:
        with hub_errors(name, task="write"):
            api = hub.HfApi()
            url = api.create_repo(name.repo, private=not public, exist_ok=True)
            if name.revision:
                api.create_branch(name.repo, branch=name.revision, exist_ok=True)
            visibility = "private" if api.model_info(name.repo).private else "public"
            commit = api.upload_folder(
                repo_id=name.repo,
                folder_path=folder,
                commit_message=f"Export by mae-vit {__version__}",
                revision=name.revision,
                delete_patterns=[*EXPORTED, f"{to_hf.MAE_FOLDER}/*"],
            )
    except InputError as error:
        raise InputError(f"{error}; nothing was pushed, {again}") from None
    except FetchUnavailable as error:
        raise FetchUnavailable(f"{error}; the push is not confirmed, {again}") from None
    return f"{url} ({visibility})", HubName(name.repo, commit.oid)
