"""Writes docs/commands.md from the parsers of all commands: `python docs/tools/command_reference.py`."""

import re
from argparse import SUPPRESS
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from mae_vit.cli.main import main
from mae_vit.config.command_line import OneLineParser

OUT = Path(__file__).resolve().parents[1] / "commands.md"
_HEAD = """# All commands

`mae-vit COMMAND --help` prints the same. A command exits with 0 after success, 1 after a failure, 2 for bad input, and
75 if a run was stopped and saved."""


def render() -> str:
    """Returns the page."""
    (commands,) = (action for action in _parser()._actions if isinstance(action.choices, dict))
    return "\n\n".join((_HEAD, *(part for name in commands.choices for part in _parts(_parser(name))))) + "\n"


def _parser(*words: str) -> OneLineParser:
    """The parser that prints the help of a command; those of jobs exist only while they parse."""
    with patch.object(OneLineParser, "print_help", autospec=True) as shown, suppress(SystemExit):
        main([*words, "--help"])
    return shown.call_args.args[0]


def _parts(parser: OneLineParser) -> list[str]:
    examples = parser.examples.replace("\n  ", "\n").strip()
    examples = re.sub(r"^(\S(?:.*\\\n)*.*?\S) {2,}(\S.*)", r"# \2\n\1", examples, flags=re.M)
    parts = [f"## {parser.prog}", f"{parser.description}", f"```shell\n{examples}\n```"]
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        rows = [
            f"| `{formatter._format_action_invocation(action)}` | {_escape(formatter._expand_help(action))} |"
            for action in group._group_actions
            if action.dest != "help" and action.help != SUPPRESS
        ]
        parts += ["\n".join((f"| | {group.title} |\n| --- | --- |", *rows))] if rows else []
    if "mae-vit config KEY" in (epilog := parser.epilog or ""):
        epilog = "The keys are those of [a config](config.md)."
    # What is indented is code.
    return [*parts, re.sub(r"((^  .*\n?)+)", r"\n```text\n\1```\n", epilog, flags=re.M).strip()]


def _escape(text: str) -> str:
    return re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", re.sub(r"[*|<]", r"\\\g<0>", text))


if __name__ == "__main__":
    print(OUT, OUT.write_text(render()))
