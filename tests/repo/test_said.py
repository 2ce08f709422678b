"""tests/said.json: each sentence belongs to a test that is there."""

from helpers.said import ROOT, read_snapshot


def test_each_sentence_has_its_test():
    for name in read_snapshot():
        path, _, test = name.partition("::")
        function = test.rpartition("::")[2].partition("[")[0]
        text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        assert f"def {function}(" in text, f"no such test: {name}"
