"""examples/extending: every diff applies to this tree, and what follows it works there."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers.commands import ROOT, SMALL_MAE, run

FOLDER = ROOT / "examples" / "extending"
# The command of each diff stands above it, indented.
ENTRIES = {
    path.name: (path.read_text(), re.findall(r"^    (\S.+)$", path.read_text(), re.M)[0])
    for path in sorted(FOLDER.glob("*.diff"))
}


def test_the_page_lists_every_entry():
    page = (ROOT / "docs" / "extending.md").read_text()
    assert len(ENTRIES) == 6
    assert set(re.findall(r"`(\w+\.diff)`", page)) == set(ENTRIES)
    for name in re.findall(r"`(examples/\w+\.py)`", page):
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("title", ENTRIES)
def test_the_diff_applies(title):
    checked = subprocess.run(
        ["git", "apply", "--check", "-"], input=ENTRIES[title][0], text=True, cwd=ROOT, capture_output=True
    )
    assert checked.returncode == 0, checked.stderr


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """A short run on the digits."""
    folder = tmp_path_factory.mktemp("trained") / "mae_digits"
    small = [*SMALL_MAE, "train.steps=4", "train.warmup_steps=1", "monitor.tensorboard=false"]
    done = run("pretrain/run.py", "mae_digits", *small, f"data.path={digits}", f"run.dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.docs
@pytest.mark.parametrize("title", ENTRIES)
def test_what_it_adds_works(title, digits, trained, tmp_path):
    diff, command = ENTRIES[title]
    tree = tmp_path / "tree"
    for name in ("mae_vit", "pretrain", "finetune", "configs", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "data").mkdir()
    (tree / "data" / "digits").symlink_to(digits)
    shutil.copytree(trained, tree / "runs" / "mae_digits")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tree, check=True)
    program, *words = shlex.split(command)
    start = {"python": [], "mae-vit": ["-m", "mae_vit.cli.main"]}[program]
    words += ["run.dir=runs/extended"] if words[0] in ("pretrain/run.py", "finetune/run.py") else []
    done = subprocess.run(
        [sys.executable, *start, *words],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
