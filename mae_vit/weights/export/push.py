"""Pushes an export to the Hugging Face Hub: one commit, private unless asked otherwise."""

from __future__ import annotations

from pathlib import Path

from mae_vit.core import __version__
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.hub import HUB_PREFIX, HubName, hub_errors, hub_library, is_offline, parse_hub_name
from mae_vit.weights.export.export import EXPORTED
from mae_vit.weights.export.to_hf import MAE_FOLDER


def parse_push_name(asked: str) -> HubName:
    """Reads "USER/NAME[@BRANCH]", with or without "hf:".

    Raises:
        InputError: for another form.
    """
    if "/" not in asked.removeprefix(HUB_PREFIX).strip("/"):
        raise InputError(
            f"--push {asked}: give USER/NAME, the user or the organization that it belongs to first"
        )
    return parse_hub_name(asked)


def check_push(name: HubName, *, public: bool) -> None:
    """Checks, without changing anything on the Hub, that `push` is possible.

    Raises:
        InputError: if the token or the repository's visibility does not allow it.
        FetchUnavailable: if the Hub cannot be reached.
    """
    hub = hub_library()
    if is_offline():
        raise InputError("--push needs the Hub, which HF_HUB_OFFLINE forbids")
    with hub_errors(name, task="write"):
        if hub.get_token() is None:
            raise InputError("--push needs a token: set HF_TOKEN, or run `hf auth login`")
        try:
            info = hub.HfApi().model_info(name.repo)  # also fails for a wrong token
        except hub.errors.RepositoryNotFoundError:
            return
    if not info.private and not public:
        raise InputError(f"{name.repo} is public: --public pushes to it, or give another name")


def push(folder: Path, name: HubName, *, public: bool) -> tuple[str, HubName]:
    """Uploads an export as one commit; creates repository and branch if needed.

    It removes the files of an earlier export, which `load_encoder` would read.

    Returns:
        The repository's URL, with its visibility, and its name at the new commit.

    Raises:
        InputError: if the Hub refuses the push; then nothing is committed.
        FetchUnavailable: if the connection breaks.
    """
    hub = hub_library()
    again = f"the export is whole in {folder}, --force pushes it again"
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
                delete_patterns=[*EXPORTED, f"{MAE_FOLDER}/*"],
            )
    except InputError as error:
        raise InputError(f"{error}; nothing was pushed: {again}") from None
    except FetchUnavailable as error:
        raise FetchUnavailable(f"{error}; the push is not confirmed: {again}") from None
    return f"{url} ({visibility})", HubName(name.repo, commit.oid)
