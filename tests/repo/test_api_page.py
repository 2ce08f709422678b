"""The examples of docs/api.md run as they stand."""

import contextlib
import doctest
import io
import re

import pytest
from helpers.commands import ROOT

PAGE = ROOT / "docs" / "api.md"


@pytest.mark.docs
def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Fences are no output; what a block prints ends with an empty line.
    text = re.sub(r"^```.*$", "", PAGE.read_text(), flags=re.M)
    found = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(found.examples) > 12
    problems = []
    # What goes to stderr, where the examples show none, is no part of them.
    with contextlib.redirect_stderr(io.StringIO()):
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found, out=problems.append)
    assert not problems, "".join(problems)


def test_every_function_is_named():
    import mae_vit

    text = PAGE.read_text()
    for name in mae_vit.__all__:
        assert name == "__version__" or f"`{name}" in text or f"mae_vit.{name}" in text, name
        assert getattr(mae_vit, name) is not None
