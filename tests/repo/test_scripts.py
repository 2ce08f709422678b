"""Scripts: no personal paths, help that needs no installation; extras and files that pages name are there."""

import os
import re
import subprocess
import sys

import pytest
from helpers.commands import ROOT

SCRIPTS = [
    *sorted((ROOT / "slurm").rglob("*.sh")),
    ROOT / "tests" / "slurm" / "cluster.sh",
    ROOT / "demo.sh",
    ROOT / ".ci" / "run",
]


RESULTS = [
    path
    for path in sorted((ROOT / "docs" / "results").rglob("*"))
    if path.suffix in (".json", ".csv", ".md", ".txt")
]


def test_no_file_names_a_machine():
    for path in (*SCRIPTS, *RESULTS, ROOT / "README.md", ROOT / "Makefile"):
        # Of links the way up to other pages is fine.
        text = re.sub(r"\]\((\.\./)+", "](", path.read_text(encoding="utf-8"))
        found = re.search(r"/(home|root|Users|scratch|tmp|work)/\w|\.\./\w|Linux-\d", text)
        assert not found, (path, found)


BENCHMARKS = ["step", "objectives", "engine", "profile_step", "loader"]


@pytest.mark.parametrize(
    "script",
    [
        "pretrain/run.py",
        # Each imports torch in a process of its own.
        *(pytest.param(f"benchmarks/{name}.py", marks=pytest.mark.slow) for name in BENCHMARKS),
    ],
)
def test_help_needs_no_installation_and_explains_each_option(script, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -I: neither the current folder nor PYTHONPATH.
    words, place = [sys.executable, "-I", ROOT / script, "--help"], {"cwd": tmp_path, "env": environment}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=500, **place)
    assert ended.returncode == 0, ended.stderr
    # An option without a help text is a line of its own that another option, or nothing, follows.
    options = ended.stdout.partition("options:")[2].partition("\n\n")[0]
    lines = options.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        assert (
            not re.fullmatch(r"  -\S.*", line) or re.search(r"\S  +\S", line[2:]) or after.startswith("   ")
        ), line


def test_help_of_the_job_lists_sections_and_shipped_files():
    ended = subprocess.run(
        [sys.executable, ROOT / "pretrain/run.py", "--help"], capture_output=True, text=True, timeout=500
    )
    for text in ("sections of a config: run, ", "mae-vit config KEY", "null restores"):
        assert text in ended.stdout
    assert ".data/" not in ended.stdout


def test_pip_installs_no_other_than_the_extras_that_there_are():
    extras = {"test", "dev"}
    listed = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras |= set(re.findall(r"^(\w+) = \[", listed.partition("\n[")[0], flags=re.M))
    named = 0
    for folder, ending in (("", "md"), ("docs", "md"), ("docs", "ipynb"), ("mae_vit", "py")):
        for path in (ROOT / folder).glob(f"{'**/' if folder else ''}*.{ending}"):
            text = path.read_text()
            # The package is not on an index yet.
            assert not re.search(r"pip install mae-vit\b(?!\[)", text), path
            for group in re.findall(r"mae-vit\[([a-z,]+)\]", text):
                named += 1
                assert set(group.split(",")) <= extras, path
    assert named > 10
    table = (ROOT / "docs" / "install.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]+)\|", table, flags=re.M)
    assert (
        {"hf", "onnx", "dicom"} <= {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} <= extras
    )


def test_the_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"(?:configs|slurm|docs|pretrain)/[\w./-]+\.(?:yaml|sh|py|png|json)", text)):
        assert (ROOT / name).exists(), name
