"""A run names the commit of its own sources, never that of a repository that they happen to lie in."""

import json
import os
import shutil
import subprocess

import pytest
from helpers.commands import ROOT, run

_DESCRIBE = """
import json
from mae_vit.training.outputs import environment
print(json.dumps([environment.__file__, environment._git_commit(), environment._source_digest()]))
"""


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def described(folder):
    """The commit and the digest that sources in a folder name."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = run("-c", _DESCRIBE, env=environment, cwd=folder, check=True)
    file, commit, digest = json.loads(ended.stdout)
    assert file.startswith(str(folder))
    return commit, digest


@pytest.fixture
def project(tmp_path):
    """Another project, with a copy of the sources that it does not track."""
    git(tmp_path, "init", "-q")
    (tmp_path / "theirs.py").write_text("a = 1\n")
    git(tmp_path, "add", "theirs.py")
    git(tmp_path, "commit", "-qm", "theirs")
    for name in ("core", "training/outputs"):
        shutil.copytree(
            ROOT / "mae_vit" / name,
            tmp_path / "mae_vit" / name,
            ignore=shutil.ignore_patterns("__pycache__", "trackers"),
        )
    for name in ("__init__.py", "training/__init__.py"):
        shutil.copy(ROOT / "mae_vit" / name, tmp_path / "mae_vit" / name)
    return tmp_path


def test_sources_in_anothers_repository_have_a_digest_and_no_commit(project):
    commit, digest = described(project)
    assert commit is None
    # Once they are tracked there, that commit says which they are.
    git(project, "add", ".")
    git(project, "commit", "-qm", "ours too")
    assert described(project) == (git(project, "rev-parse", "HEAD"), digest)
    (project / "mae_vit" / "core" / "more.py").write_text("b = 2\n")
    (project / "theirs.py").write_text("a = 2\n")
    changed, other_digest = described(project)
    assert changed == f"{git(project, 'rev-parse', 'HEAD')}+changes"
    assert other_digest != digest
