"""Keeps compiled code, so that a run that resumes does not compile again."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path

import torch
from torch import nn

from mae_vit.core.errors import InputError
from mae_vit.core.files import user_cache
from mae_vit.runtime.locks import try_lock

_PLACE = "TORCHINDUCTOR_CACHE_DIR"
# Folders of compiled code that are kept, and the seconds for which one stays in any case: a run may be using it.
_MOST_KEPT, _IN_USE_S = 8, 86400


def keep_compiled(model: nn.Module, device: torch.device, *options: object) -> None:
    """Makes torch.compile keep its code in the user's cache folder, so that a run that resumes need not compile.

    torch's own place, in /tmp, is lost with the node. Each file is written whole, and found by a hash of the traced
    graph, torch, Triton and device: changed sources compile again. Folders only serve to remove old code: one for each
    torch, device, geometry (shapes of `model`) and `options`.

    The code is run when it is loaded. So the folder must be this user's alone, and a run folder, which may come from
    somebody else, has none. Nothing changes if TORCHINDUCTOR_CACHE_DIR names a place of the user's, or the folder is
    not private or takes no locks.
    """
    # A slow import, which a process with a model has already done.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable to its own place when it is imported.
    if os.environ.get(_PLACE, default_cache_dir()) != default_cache_dir():
        return
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.named_parameters()]
    fingerprint = hashlib.sha256(repr((torch.__version__, kind, shapes, options)).encode()).hexdigest()[:16]
    try:
        root = user_cache() / "compiled"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            return
        own = root / fingerprint
        own.mkdir(mode=0o700, exist_ok=True)
        os.utime(own)
        lock = try_lock(root / ".lock")
        if lock is not None:
            _remove_old(root)
            lock.close()
    except (OSError, InputError):
        return
    os.environ[_PLACE] = str(own.absolute())


def _remove_old(root: Path) -> None:
    used = sorted(((path.stat().st_mtime, path) for path in root.iterdir() if path.is_dir()), reverse=True)
    for when, path in used[_MOST_KEPT:]:
        if time.time() - when > _IN_USE_S:
            shutil.rmtree(path, ignore_errors=True)
