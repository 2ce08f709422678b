"""What users read, in one file: tests/said.json. `pytest --update` rewrites the sentences of the tests that run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = ROOT / "tests" / "said.json"
# How sentences of pydantic, PyYAML, torch and the like begin, which may change with their versions.
OTHERS = re.compile(
    r"((?i:input|list|string) should|not valid YAML:|Expecting|Error while|Error\(s\)|An error|Server disconnected)"
    r" [^;\n]*"
)


def read_snapshot() -> dict[str, list[str]]:
    """Returns the sentences of each test, by its id."""
    return json.loads(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.exists() else {}


class Said:
    """Compares texts, in their order within a test, with those of the snapshot.

    Attributes:
        test: id of the test.
        expected: its sentences; None if they are recorded anew.
        texts: what the test said so far.
        folders: replacements for folders that differ between machines.
    """

    def __init__(self, test: str, expected: list[str] | None, folders: dict[str, str]) -> None:
        self.test = test
        self.expected = expected
        self.texts: list[str] = []
        self.folders = folders

    def __call__(self, text: object) -> None:
        """Compares a message, or an exception's; folders of the machine are TMP, SHARED (by tests) and ROOT."""
        said = str(text.value if isinstance(text, pytest.ExceptionInfo) else text)
        said = OTHERS.sub(r"\1 ...", said)
        for folder, name in self.folders.items():
            said = said.replace(folder, name)
        # By how many tests have run.
        said = re.sub(r"(SHARED/[a-z_]+)\d+", r"\1", said)
        place = len(self.texts)
        self.texts.append(said)
        if self.expected is not None:
            assert place < len(self.expected), f"not in {SNAPSHOT.name} (pytest --update records it): {said}"
            assert said == self.expected[place], f"said: {said}\n{SNAPSHOT.name}: {self.expected[place]}"

    def close(self) -> None:
        """Writes what was recorded; otherwise checks that nothing is left unsaid."""
        if self.expected is not None:
            assert len(self.texts) == len(self.expected), (
                f"no longer said: {self.expected[len(self.texts) :]}"
            )
            return
        with FileLock(f"{SNAPSHOT}.lock"):
            every = read_snapshot() | {self.test: self.texts}
            lines = ",\n".join(f"{json.dumps(test)}: {listed(every[test])}" for test in sorted(every))
            SNAPSHOT.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def listed(texts: list[str]) -> str:
    """Returns a JSON list: one text stands in the line of its test, several have a line each."""
    return json.dumps(texts, ensure_ascii=False, indent=None if len(texts) == 1 else 0)


@pytest.fixture
def said(request, tmp_path, tmp_path_factory):
    """Checks a sentence that users read against tests/said.json: `said(capsys.readouterr().err)`."""
    folders = {
        os.path.relpath(ROOT, tmp_path): "ROOT",
        str(tmp_path): "TMP",
        str(tmp_path_factory.getbasetemp()): "SHARED",
        str(ROOT): "ROOT",
    }
    expected = None if request.config.getoption("--update") else read_snapshot().get(request.node.nodeid, [])
    checked = Said(request.node.nodeid, expected, folders)
    yield checked
    if not getattr(request.node, "failed", False):
        checked.close()
