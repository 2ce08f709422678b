"""What all command lines share."""

from __future__ import annotations

import argparse
from typing import NoReturn

from mae_vit.errors import InputError


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are an `InputError`: one line instead of a usage page."""

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(f"{message} (see --help)")
