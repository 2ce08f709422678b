"""Data sets of the Hugging Face Hub: the Parquet files of one commit, each fetched, read and removed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.files import write_json
from mae_vit.core.hub import HubName, hub_errors, hub_library, is_offline, parse_hub_name
from mae_vit.core.messages import closest
from mae_vit.core.user_files import split_named
from mae_vit.data.prepare.entries import ImageSource
from mae_vit.data.prepare.sources.foreign_shards import split_of
from mae_vit.data.prepare.sources.parquet import SPOOL, ParquetFile, check_ready, find_parquet, open_parquet
from mae_vit.data.prepare.sources.parquet_columns import ParquetOptions
from mae_vit.data.shards.dataset_json import file_digest

# Where the Hub keeps what it converted itself: CONFIG/SPLIT/0000.parquet.
_CONVERTED = "refs/convert/parquet"
# Of data sets of which the Hub converted the first gigabytes alone.
_PARTIAL = "partial-"


def open_hub_dataset(
    spec: str, out: Path, *, split: str, options: ParquetOptions, labels: bool = True
) -> ImageSource:
    """Reads a data set of the Hub.

    Args:
        spec: "hf:USER/NAME" or "hf:USER/NAME@REVISION".
        out: the output folder. It remembers the commit until all is prepared, so that a killed call resumes with it.
        split: of files whose names tell none.
        options: columns, and which configuration.
        labels: whether labels are read.

    Raises:
        InputError: if there is no such data set, no access, or no Parquet file of images.
        FetchUnavailable: if the Hub cannot be reached, or the connection breaks.
    """
    asked = parse_hub_name(spec, kind="dataset")
    state = out / SPOOL / f"hub-{hashlib.blake2b(str(asked).encode(), digest_size=8).hexdigest()}.json"
    begun = _begun(state)
    name, digests = _list_files(replace(asked, revision=begun) if begun else asked)
    files, note = _of_config(sorted(digests), name, options.config_name)
    notes = [note] if note else []
    wanted = [
        ParquetFile(
            file,
            _split_of(file, split),
            f"{name}:{file}",
            partial(_fetched, name, file, digests[file], out / SPOOL / "download"),
        )
        for file in files
    ]
    check_ready(wanted, out, options)
    if begun:
        notes.append(f"resumed at {name}, with which an earlier call began")
    else:
        state.parent.mkdir(parents=True, exist_ok=True)
        write_json(state, {"asked": str(asked), "commit": name.revision})
    config = f", {options.config_name}" if options.config_name else ""

    def discard() -> None:
        state.unlink(missing_ok=True)

    source = open_parquet(
        wanted, out, name=f"{name}{config}", options=options, labels=labels, discard=discard
    )
    return replace(source, notes=(*notes, *source.notes))


def _begun(state: Path) -> str | None:
    """The commit that an earlier call, which did not end, read from."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(state.read_text())["commit"])
    return None


def _list_files(name: HubName) -> tuple[HubName, dict[str, str | None]]:
    """Returns the name at its commit, and the Parquet files there with their SHA-256 where the Hub tells it."""
    hub = hub_library()
    with hub_errors(name):
        if is_offline():
            snapshot = Path(
                hub.snapshot_download(
                    name.repo, repo_type=name.kind, revision=name.revision, allow_patterns="*.parquet"
                )
            )
            files = [path.relative_to(snapshot).as_posix() for path in find_parquet(snapshot)]
            return replace(name, revision=snapshot.name), dict.fromkeys(files)
        api = hub.HfApi()
        for revision in (name.revision, _CONVERTED):
            try:
                info = api.dataset_info(name.repo, revision=revision, files_metadata=True)
            except hub.errors.RevisionNotFoundError:
                if revision == name.revision:
                    raise
                break
            found = {
                file.rfilename: file.lfs.sha256 if file.lfs else None
                for file in info.siblings
                if file.rfilename.endswith(".parquet") and not f"/{file.rfilename}".count("/.")
            }
            if found:
                return replace(name, revision=info.sha), found
            if name.revision is not None:
                break  # what the Hub converted is of another revision
    raise InputError(f"{name} has no Parquet files: download it, and prepare its folder or its archives")


def _of_config(files: list[str], name: HubName, asked: str | None) -> tuple[list[str], str]:
    """The files of one configuration, which the first folder names; and a note if there are others."""
    configs: dict[str, list[str]] = {}
    for file in files:
        configs.setdefault(_config_of(file), []).append(file)
    if asked is not None:
        if asked not in configs:
            hint = closest(asked, configs) or f"it has {', '.join(configs)}"
            raise InputError(f"--config-name {asked}: {name} has no such configuration: {hint}")
        return configs[asked], ""
    if len(configs) == 1:
        return files, ""
    if "default" in configs:
        others = ", ".join(config for config in configs if config != "default")
        return configs["default"], f"of the configuration default, not of {others} (--config-name)"
    raise InputError(f"{name} has the configurations {', '.join(configs)}: choose by --config-name")


def _config_of(file: str) -> str:
    folders = PurePosixPath(file).parts[:-1]
    own = [part for part in folders if part != "data" and not split_named(part.removeprefix(_PARTIAL))]
    return own[0] if own else "default"


def _split_of(file: str, default: str) -> str:
    return split_of(Path(file.replace(_PARTIAL, "")), Path("."), default)


@contextmanager
def _fetched(name: HubName, file: str, sha256: str | None, folder: Path) -> Iterator[Path]:
    """Yields a file of huggingface_hub's cache, if it is there, else of a folder that is then removed."""
    hub = hub_library()
    cached = hub.try_to_load_from_cache(name.repo, file, revision=name.revision, repo_type=name.kind)
    if isinstance(cached, str):
        yield Path(cached)
        return
    try:
        with hub_errors(name):
            path = Path(
                hub.hf_hub_download(
                    name.repo, file, repo_type=name.kind, revision=name.revision, local_dir=folder
                )
            )
        if sha256 is not None and file_digest(path) != sha256:
            raise FetchUnavailable(f"{name}: {file} arrived damaged: run the command again")
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)
