"""Hooks of mkdocs: notebooks are pages with the outputs that they store, words of the glossary have tooltips."""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Other words of the glossary have their usual meaning, too.
EXPLAINED = "global order|data step|lanes|held-out images|online probe|guard|rollback|quarantine"


class _Notebook(File):
    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Replaces each notebook by a page that is written from it."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            blocks = map(_blocks, json.loads(file.content_string)["cells"])
            content = "\n\n".join(chain.from_iterable(blocks))
            files.remove(file)
            files.append(_Notebook.generated(config, file.src_uri, content=content))


def _blocks(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        data = output.get("data", output)
        text = "".join(data.get("text/plain", output.get("text", ""))).strip()
        if image := "".join(data.get("image/png", "")).strip():
            yield f"![Output](data:image/png;base64,{image}{'#chart' if 'Figure' in text else ''})"
        else:
            yield f"```text\n{text}\n```"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adds the meanings of words to a page, for the extension abbr."""
    if page.file.src_uri in ("glossary.md", "config.md", "commands.md"):
        return markdown
    glossary = files.src_uris["glossary.md"].content_string
    meanings = re.findall(rf"^\| \*\*({EXPLAINED})\*\* \| (.*) \|$", glossary, re.M)
    return "\n".join([markdown, "", *(f"*[{word}]: {text.replace('`', '')}" for word, text in meanings)])
