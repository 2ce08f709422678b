"""Pushes an export to the Hugging Face Hub: one commit, private unless asked otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mae_vit.core import __version__
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.hub import HUB_PREFIX, HubName, hub_errors, hub_library, is_offline, parse_hub_name


@dataclass(frozen=True)
class Pushed:
    """A commit on the Hub.

    Attributes:
        url: of the repository.
        name: of the repository at the new commit.
        private: whether others cannot see it.
        removed: files of an earlier export that the new one does not have.
    """

    url: str
    name: HubName
    private: bool
    removed: tuple[str, ...]


def check_push(asked: str, *, public: bool) -> HubName:
    """Looks at the Hub before anything is computed; changes nothing there.

    Args:
        asked: "USER/NAME" or "USER/NAME@BRANCH", with or without "hf:".
        public: whether everyone may see the push.

    Raises:
        InputError: if the name, the token or the repository's visibility does not allow it.
        FetchUnavailable: if the Hub cannot be reached.
    """
    name = parse_push_name(asked)
    hub = hub_library()
    if is_offline():
        raise InputError("--push needs the Hub, which HF_HUB_OFFLINE forbids")
    with hub_errors(name, task="write"):
        if hub.get_token() is None:
            raise InputError("--push needs a token: set HF_TOKEN, or run `hf auth login`")
        try:
            found = hub.HfApi().model_info(name.repo)  # which a wrong token fails too
        except hub.errors.RepositoryNotFoundError:
            return name
    if not found.private and not public:
        raise InputError(f"{name.repo} is public: --public pushes to it, or give another name")
    return name


def parse_push_name(asked: str) -> HubName:
    """Reads "USER/NAME[@BRANCH]".

    Raises:
        InputError: for another form.
    """
    if "/" not in asked.removeprefix(HUB_PREFIX).strip("/"):
        raise InputError(
            f"--push {asked}: give USER/NAME, the user or the organization that it belongs to first"
        )
    return parse_hub_name(asked)


def push(
    files: Sequence[Path], folder: Path, name: HubName, *, public: bool, ours: Collection[str]
) -> Pushed:
    """Uploads files as one commit, into a repository that is created where there is none.

    Args:
        files: of the export.
        folder: that they lie in.
        name: of the repository, and of a branch, which is created too.
        public: visibility of a repository that is created.
        ours: names that exports write at the top: such files of an earlier export are removed.

    Raises:
        InputError: if the Hub refuses it; then nothing is committed.
        FetchUnavailable: if the connection breaks.
    """
    hub = hub_library()
    paths = {path.relative_to(folder).as_posix(): path for path in files}
    with _errors_name_the_export(folder), hub_errors(name, task="write"):
        api = hub.HfApi()
        url = api.create_repo(name.repo, private=not public, exist_ok=True)
        if name.revision:
            api.create_branch(name.repo, branch=name.revision, exist_ok=True)
        found = api.model_info(name.repo, revision=name.revision)
        # Else `load_encoder` may read the encoder of an earlier export.
        stale = [
            file.rfilename
            for file in found.siblings
            if file.rfilename.split("/")[0] in ours and file.rfilename not in paths
        ]
        commit = api.create_commit(
            name.repo,
            [
                *(hub.CommitOperationAdd(file, path) for file, path in paths.items()),
                *(hub.CommitOperationDelete(file) for file in stale),
            ],
            commit_message=f"Export by mae-vit {__version__}",
            revision=name.revision,
        )
    return Pushed(str(url), HubName(name.repo, commit.oid), bool(found.private), tuple(stale))


@contextmanager
def _errors_name_the_export(folder: Path) -> Iterator[None]:
    """Adds to an error where the export is, which is whole."""
    again = f"the export is whole in {folder}, --force pushes it again"
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}; nothing was pushed: {again}") from None
    except FetchUnavailable as error:
        raise FetchUnavailable(f"{error}; the push is not confirmed: {again}") from None
