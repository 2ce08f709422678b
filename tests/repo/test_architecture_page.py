"""docs/architecture.md: the files that its table points to exist, and hold the names that stand beside them."""

import re

import pytest
from helpers.commands import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
QUESTIONS = re.findall(r"^\| ([^|]+\?) \| (.+) \|$", PAGE, re.M)
# `folder/file.py`, perhaps with "(`name`" or ": `name`" behind it.
POINTER = re.compile(r"`([\w/]+\.py)`(?:(?: \(|: )`(\w+)`)?")


def test_the_table_is_found():
    assert len(QUESTIONS) >= 7
    assert sum(bool(name) for _, answer in QUESTIONS for _, name in POINTER.findall(answer)) >= 4


@pytest.mark.parametrize(("question", "answer"), QUESTIONS)
def test_every_pointer_leads_there(question, answer):
    for path, name in POINTER.findall(answer):
        places = [root / path for root in (ROOT / "mae_vit", ROOT) if (root / path).is_file()]
        assert places, f"{question} {path}"
        assert not name or re.search(rf"^ *(?:def|class) {name}\b", places[0].read_text(), re.M), name
