"""The Dockerfile and the Apptainer definition: every path and command in them is there.

No container is built here: that takes a daemon, base images and gigabytes.
"""

import re
import subprocess
import sys

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
    ignored = (CONTAINERS / "Dockerfile.dockerignore").read_text().splitlines()
    assert {".git", ".venv", "data", "runs"} <= set(ignored)
    assert not sources & set(ignored)


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
    (user,) = re.findall(r"(?m)^USER (.+)$", DOCKERFILE.read_text())
    assert int(user) > 0
    assert f"useradd --uid {user} " in DOCKERFILE.read_text()
