"""tests/said.json: each sentence belongs to a test that is there."""

from helpers.commands import run
from helpers.said import read_snapshot


def test_each_sentence_has_its_test():
    said = read_snapshot().keys()
    collected = run(
        "-m", "pytest", "--collect-only", "-q", *sorted({name.partition("::")[0] for name in said})
    )
    assert said - set(collected.stdout.splitlines()) == set(), "no such tests"
