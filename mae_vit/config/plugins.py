"""Imports the user's own modules, which add to the library's dictionaries: `run.plugins`.

A module is imported before the config is checked, and adds by `register_encoder`, `register_objective`,
`register_policy`, `register_source`, `register_tracker`, or an entry of a dictionary. It is code that the user runs:
only a command's own config or an option names it, never a run folder or a file of weights.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from mae_vit.config.keys import value_at
from mae_vit.config.typed_yaml import parse_yaml
from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest_path, error_reason

# Name in `run.plugins` -> the first 16 hexadecimal digits of the SHA-256 of its source.
_loaded: dict[str, str] = {}
_KEY = "run.plugins="


def named_plugins(raw: Any, overrides: Sequence[str]) -> list[str]:
    """Returns the modules that a config, or the last override of `run.plugins`, names."""
    names = value_at(raw, ("run", "plugins"))
    for override in overrides:
        if override.startswith(_KEY):
            names = parse_yaml(override.removeprefix(_KEY), f'override "{override}"')
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def import_plugins(names: Sequence[str]) -> None:
    """Imports modules, each once; raises InputError if a module is missing, or fails."""
    for name in not_imported(names):
        _loaded[name] = _digest(_import(name))


def not_imported(names: Sequence[str]) -> list[str]:
    """Returns the modules that are not imported yet."""
    return [name for name in names if name not in _loaded]


def add_plugins(schema: type[BaseModel]) -> bool:
    """Rebuilds a config class if there are plug-ins, which may have added to it; returns whether it did."""
    if _loaded:
        schema.model_rebuild(force=True)
    return bool(_loaded)


def plugin_digests(names: Sequence[str]) -> dict[str, str]:
    """Returns the digest of each plug-in's source, as it was when it was imported."""
    return {name: _loaded[name] for name in names}


def _import(name: str) -> ModuleType:
    if name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise InputError(
                f"run.plugins: there is no file {name}; {closest_path(path) or 'give a .py file or a module'}"
            )
        if "." in path.stem:
            raise InputError(f"run.plugins: {name}: the name of a module has no dot; rename the file")
        folder, module = str(path.resolve().parent), path.stem
    else:
        folder, module = str(Path.cwd()), name
    # Processes that load data import it by the same name.
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise InputError(f"run.plugins: importing {name} fails: {error_reason(error)}") from None
        raise InputError(
            f"run.plugins: no module {name} is installed or in {folder}; give a module, or a file that ends in .py"
        ) from None
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        file = f"{module.rpartition('.')[2]}.py"
        lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename.endswith(file)]
        at = f" in line {lines[-1]}" if lines else ""
        raise InputError(
            f"run.plugins: {name} fails{at} ({type(error).__name__}: {error_reason(error)})"
        ) from None
    if not getattr(imported, "__file__", None):
        raise InputError(f"run.plugins: {name} is no file, and no folder with an __init__.py")
    if name.endswith(".py") and Path(imported.__file__ or "").resolve() != path.resolve():
        raise InputError(f"run.plugins: {name} has the name of another module, {module}; rename the file")
    return imported


def _digest(module: ModuleType) -> str:
    """Returns a digest of a module's source; of a package, of all its files."""
    file = Path(module.__file__ or "")
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    source = hashlib.sha256()
    for path in files:
        source.update(path.read_bytes())
    return source.hexdigest()[:16]
