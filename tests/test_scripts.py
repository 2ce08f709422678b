"""Shell scripts and shipped text hold no personal paths and pass shellcheck."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted((ROOT / "slurm").glob("*.sh")), ROOT / "demo.sh", ROOT / ".ci" / "run"]


def test_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (extra: dev)")
    found = subprocess.run([shellcheck, *SCRIPTS], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    "path", [*SCRIPTS, ROOT / "README.md", ROOT / "Makefile"], ids=lambda path: path.name
)
def test_no_personal_paths(path):
    assert not re.search(r"/(home|root|Users|scratch|tmp)/\w", path.read_text())


def test_the_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"(?:configs|slurm|docs|pretrain)/[\w./-]+\.(?:yaml|sh|py|png|json)", text)):
        assert (ROOT / name).exists(), name
