"""Pages stay short and say each limit once: words, phrases, code blocks, and the tools behind them."""

import re
import sys

import nbformat
import pytest
from helpers.commands import ROOT

sys.path.insert(0, str(ROOT / "docs" / "tools"))
from site_hooks import EXPLAINED

README = ROOT / "README.md"
NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# Written by docs/tools.
GENERATED = ("config.md", "commands.md")
LIMITS = {"README.md": 900, "recipes.md": 900, "performance.md": 900, "extending.md": 900}
# How a result came about stands beside its files: docs/results/NAME/README.md.
BANNED = ("by hand", "was known", "were known", "earlier version", "uncommitted")


def words(page):
    return len(page.read_text(encoding="utf-8").split())


def by_name(page):
    return page.name


def test_all_pages_together_are_short():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    prose = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    assert prose + sum(words(page) for page in PAGES if page.name not in GENERATED) <= 20_000


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=by_name)
def test_a_page_is_short(page):
    assert words(page) <= LIMITS.get(page.name, 1300)


def test_the_readme_has_few_lines():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_no_page_is_a_notebook_of_the_laboratory(page):
    text = " ".join(page.read_text(encoding="utf-8").split()).lower()
    assert [phrase for phrase in BANNED if phrase in text] == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_code_is_highlighted_and_no_command_is_cut(page):
    blocks = re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", page.read_text(encoding="utf-8"), re.M)
    assert [code for language, code in blocks if language in ("", "sh", "console")] == []
    lines = [line for language, code in blocks if language == "bash" for line in code.splitlines()]
    assert [line for line in lines if len(line) > 78 or re.search(r"\S\s+# ", line)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=by_name)
def test_no_block_is_joined_into_its_paragraph(page):
    assert re.findall(r"\S *```|``` ", page.read_text(encoding="utf-8")) == []


def test_the_tools_of_the_pages_are_few():
    tools = (ROOT / "docs" / "tools").glob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tools) <= 700


def test_words_with_tooltips_are_in_the_glossary():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert [word for word in EXPLAINED.split("|") if f"| **{word}** | " not in glossary] == []
