"""What all command lines share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from mae_vit.errors import InputError, closest, nearest


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are an `InputError`: one line with a hint instead of a usage page."""

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        hint = self._hint(message)
        raise InputError(f"{message}{f': {hint}' if hint else ''} (see --help)")

    def unrecognized(self, words: Sequence[str]) -> NoReturn:
        """Raises InputError for words that this parser does not know."""
        self.error(f"unrecognized arguments: {' '.join(words)}")

    def _hint(self, message: str) -> str:
        """What was meant by an option or a choice that argparse does not know, as far as it says which."""
        if option := re.match(r"unrecognized arguments: (?:.*? )?(--?[A-Za-z][\w-]*)", message):
            known = [
                name
                for action in self._actions
                if action.help != argparse.SUPPRESS
                for name in action.option_strings
            ]
            return nearest(option[1], [name for name in known if name.startswith("--")])
        if choice := re.search(r"invalid choice: '([^']*)'", message):
            # argparse lists the choices itself.
            return closest(choice[1], [str(one) for action in self._actions for one in action.choices or ()])
        return ""
