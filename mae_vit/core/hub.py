"""Repositories of the Hugging Face Hub: their names here, downloads, and failures as one line.

huggingface_hub talks to the Hub: it keeps the cache, takes the token of `HF_TOKEN` or of a login, and
obeys HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE. No token is printed or written here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.messages import error_reason

HUB_PREFIX = "hf:"
_LOGIN = "set HF_TOKEN, or run `hf auth login`"
# Too many requests, and failures of the server: the same request may succeed later.
_BUSY = (408, 429, *range(500, 600))
_LONGEST_REASON = 160
_CONNECT_S = 10.0


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub, USER/NAME, at a branch, tag or commit; `kind` is "model" or "dataset"."""

    repo: str
    revision: str | None = None
    kind: str = "model"

    def __str__(self) -> str:
        return f"{HUB_PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def is_hub_name(text: str) -> bool:
    """Whether a text names a repository of the Hub."""
    return text.startswith(HUB_PREFIX)


def parse_hub_name(text: str, *, kind: str = "model") -> HubName:
    """Reads "hf:USER/NAME" or "hf:USER/NAME@REVISION"; raises InputError for another form."""
    repo, at, revision = text.removeprefix(HUB_PREFIX).partition("@")
    if repo.startswith("//"):
        meant = repo.strip("/").removeprefix(f"{kind}s/")
        raise InputError(f'{text} is a URL; give "{HUB_PREFIX}{meant}{at}{revision}"')
    parts = repo.split("/")
    if not 1 <= len(parts) <= 2 or not all(parts) or (at and not revision):
        raise InputError(_no_name(text))
    return HubName(repo, revision or None, kind)


def _no_name(text: str) -> str:
    return f'{text} is not a repository of the Hub; give "{HUB_PREFIX}USER/NAME[@REVISION]"'


def hub_library() -> ModuleType:
    """Imports huggingface_hub, which is slow."""
    import huggingface_hub
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def is_offline() -> bool:
    """True if HF_HUB_OFFLINE is set."""
    return bool(hub_library().constants.HF_HUB_OFFLINE)


def check_reachable(name: HubName, files: Sequence[str]) -> None:
    """Raises FetchUnavailable at once if the Hub cannot be reached; huggingface_hub itself tries each file for 23 s.

    If one of the files is in the cache, no connection is needed.
    """
    hub = hub_library()
    if is_offline():
        return
    with hub_errors(name):
        where = {"repo_type": name.kind, "revision": name.revision}
        if not any(isinstance(hub.try_to_load_from_cache(name.repo, file, **where), str) for file in files):
            hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=_CONNECT_S)


def download(name: HubName, files: Sequence[str]) -> tuple[Path, str]:
    """Downloads the first of `files`, in a repository's top folder, that exists; returns its path and commit.

    Raises:
        InputError: if there is no such repository, revision or file, or no access to it.
        FetchUnavailable: if the Hub cannot be reached, or the connection breaks.
    """
    hub = hub_library()
    check_reachable(name, files)
    with hub_errors(name):
        for file in files:
            try:
                path = Path(hub.hf_hub_download(name.repo, file, repo_type=name.kind, revision=name.revision))
            except hub.errors.LocalEntryNotFoundError:
                # Not in the cache; a file that was never asked for raises it too.
                if not is_offline() or file == files[-1]:
                    raise
            except hub.errors.EntryNotFoundError:
                continue
            else:
                # .../snapshots/COMMIT/FILE
                return path, path.parent.name
    raise InputError(f"{name} has no {' or '.join(files)}, and others are not read; give another repository")


@contextmanager
def hub_errors(name: HubName, *, task: str = "read") -> Iterator[None]:
    """Turns errors of huggingface_hub into one line, and silences its log of retries.

    Raises:
        InputError: for what the user can fix.
        FetchUnavailable: for what another try may fix.
    """
    with _quiet():
        try:
            yield
        except (InputError, FetchUnavailable):
            raise
        except Exception as error:
            raise _translated(error, name, task) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings of huggingface_hub, and its progress bars if stderr is no terminal."""
    utils = hub_library().utils
    level = utils.logging.get_verbosity()
    without_bars = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()
    utils.logging.set_verbosity_error()
    if without_bars:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.logging.set_verbosity(level)
        if without_bars:
            utils.enable_progress_bars()


def _translated(error: Any, name: HubName, task: str) -> Exception:
    """Returns an InputError or a FetchUnavailable; any other error is a bug, and returned as it is."""
    hub = hub_library()
    kinds, cause = hub.errors, error.__cause__
    offline = isinstance(error, kinds.LocalEntryNotFoundError) and is_offline()
    kind = kinds.OfflineModeIsEnabled if offline else type(error)
    messages = {
        kinds.GatedRepoError: f"{name} is gated; ask for access on its page, then {_LOGIN}",
        kinds.RevisionNotFoundError: f'{name.kind} {name.repo} has no revision "{name.revision}"; check its name',
        kinds.RepositoryNotFoundError: f"the Hub has no {name.kind} {name.repo}, or it is private ({_LOGIN})",
        kinds.OfflineModeIsEnabled: f"{name} is not in the cache, and HF_HUB_OFFLINE forbids downloads; unset it",
        kinds.HFValidationError: _no_name(str(name)),
        UnicodeError: f"HF_TOKEN contains characters that a token cannot have; {_LOGIN}",
    }
    for known, message in messages.items():
        if issubclass(kind, known):
            return InputError(message)
    if isinstance(error, kinds.HfHubHTTPError):
        status = error.response.status_code
        if status in _BUSY:
            return FetchUnavailable(f"the Hub does not serve {name.repo} now (status {status}); try again")
        if status in (401, 403):
            return InputError(f"the token may not {task} {name.repo}, or is not valid; {_LOGIN}")
        return InputError(f"the Hub refuses to {task} {name.repo}: {_short(error.server_message or error)}")
    if isinstance(error, kinds.LocalEntryNotFoundError | RuntimeError) and isinstance(cause, Exception):
        return _translated(cause, name, task)
    if isinstance(error, kinds.EntryNotFoundError):
        return InputError(f"{name} has no such file: {_short(error)}")
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return InputError(f"cannot write {error.filename or 'the cache'}: {error_reason(error)}")
    if isinstance(error, OSError | RuntimeError | kinds.HTTPError | kinds.XetDownloadError):
        return FetchUnavailable(
            f"{hub.constants.ENDPOINT} cannot be reached, or the connection broke ({_short(error)}); try again"
        )
    return error


def _short(error: Exception | str) -> str:
    """Returns the first line of an error, in short, without the token."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    with suppress(Exception):  # the token may be unreadable
        if token := hub_library().get_token():
            line = line.replace(token, "TOKEN")
    return line[:_LONGEST_REASON]
