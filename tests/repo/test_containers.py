"""The Dockerfile and the Apptainer definition: every path and command in them is there.

No container is built here: that takes a daemon, base images and gigabytes.
"""

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.commands import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

CONTAINERS = ROOT / "slurm" / "containers"
DOCKERFILE, DEFINITION = CONTAINERS / "Dockerfile", CONTAINERS / "mae-vit.def"
PREFIX = "/opt/mae-vit"
SECTIONS = {"arguments", "files", "post", "environment", "test", "runscript", "help"}


def sections(text: str) -> dict[str, str]:
    """An Apptainer definition's sections, and its header under ""."""
    parts = re.split(r"(?m)^%(\w+)\s*$", text)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def files() -> list[tuple[str, str]]:
    return [
        tuple(line.split()) for line in sections(DEFINITION.read_text())["files"].splitlines() if line.strip()
    ]


def usage(path: Path, word: str) -> list[list[str]]:
    """The commands in a file's comments that begin with `word`."""
    text = path.read_text().replace("\\\n#", " ")
    return [shlex.split(line) for line in re.findall(rf"(?m)^#\s+({word} .*)$", text)]


def test_the_definition_is_well_formed():
    text = DEFINITION.read_text()
    parts = sections(text)
    assert set(parts) == {""} | SECTIONS
    assert re.findall(r"(?m)^(\w+): (.+)$", parts[""]) == [("Bootstrap", "docker"), ("From", "{{ BASE }}")]
    defined = set(re.findall(r"(?m)^\s+(\w+)=", parts["arguments"]))
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == defined
    for section in ("post", "test", "runscript", "environment"):
        assert subprocess.run(["bash", "-n"], input=parts[section], text=True).returncode == 0


def test_what_is_copied_is_there_and_is_all_that_an_installation_needs():
    copied = files()
    for source, target in copied:
        assert (ROOT / source).exists(), source
        assert target == f"{PREFIX}/source/{source}"
    sources = {source for source, _ in copied}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"], "mae_vit"}
    # Of the build, where there are some.
    needed |= {name for name in ("setup.py", "setup.cfg", "MANIFEST.in") if (ROOT / name).exists()}
    assert needed <= sources


def test_both_install_by_the_same_script_and_call_what_the_package_installs():
    for path in (DOCKERFILE, DEFINITION):
        assert f"bash {PREFIX}/source/slurm/containers/install.sh {PREFIX}" in path.read_text()
        assert f"PATH={PREFIX}/bin:$PATH" in path.read_text()
    assert re.search(rf"(?m)^COPY \. {PREFIX}/source$", DOCKERFILE.read_text())
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = re.findall(r'(?m)^ENTRYPOINT \["([^"]+)"\]$', DOCKERFILE.read_text())
    parts = sections(DEFINITION.read_text())
    called = re.findall(r"(?m)^\s+(?:exec )?(\S+) ", parts["runscript"] + parts["test"])
    assert entry in scripts
    assert set(called) <= {*scripts, "python"}


def test_a_container_is_not_run_by_root():
    (user,) = re.findall(r"(?m)^USER (.+)$", DOCKERFILE.read_text())
    assert int(user) > 0
    assert f"useradd --uid {user} " in DOCKERFILE.read_text()


def test_what_stays_outside_is_no_part_of_the_package():
    ignored = (CONTAINERS / "Dockerfile.dockerignore").read_text().splitlines()
    assert {".git", ".venv", "data", "runs"} <= set(ignored)
    assert not {source for source, _ in files()} & set(ignored)


def test_the_build_commands_of_comments_and_documentation_work():
    page = (ROOT / "docs" / "cluster.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"(?m)^((?:docker|apptainer) build .*)$", page)]
    assert {words[0] for words in commands} == {"docker", "apptainer"}
    for path, word in ((DOCKERFILE, "docker"), (DEFINITION, "apptainer")):
        commands += usage(path, word)
    assert len(commands) >= 6
    for words in commands:
        check_build(words)


def check_build(words: list[str]) -> None:
    """A build's files are there, and its arguments are ones that the file takes."""
    docker = words[0] == "docker"
    file = ROOT / (words[words.index("-f") + 1] if docker else words[-1])
    assert file == (DOCKERFILE if docker else DEFINITION)
    known = re.findall(r"(?m)^ARG (\w+)=", file.read_text()) if docker else ["BASE", "TORCH_INDEX"]
    given = [after.partition("=")[0] for word, after in pairwise(words) if word == "--build-arg"]
    assert set(given) <= set(known), words
    if docker:
        assert words[-1] == "."
