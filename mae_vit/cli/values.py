"""Values of options: an error repeats the text and says what to give."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

from mae_vit.core.bands import DTYPES


@contextmanager
def _reading(text: str, usage: str) -> Iterator[None]:
    """Turns errors of the context into argparse's, which repeats the text and the usage."""
    try:
        yield
    except (ValueError, LookupError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; give {usage}") from None


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Returns a reader of whole numbers."""

    def read(text: str) -> int:
        with _reading(text, f"a whole number, {f'at least {low}' if high is None else f'{low} to {high}'}"):
            _require(low <= int(text) <= (high or 1 << 62))
        return int(text)

    return read


def word(text: str) -> str:
    """Reads a word."""
    with _reading(text, "letters, digits and _ only"):
        _require(text.replace("_", "").isalnum())
        return text


def share(text: str) -> Fraction:
    """Reads a share."""
    with _reading(text, "a share above 0 and at most 1, such as 0.1 or 1/10"):
        _require(0 < Fraction(text) <= 1)
        return Fraction(text)


def bands(text: str) -> tuple[str, ...]:
    """Reads numbers or names of bands."""
    with _reading(text, "numbers from 1, ranges or names: 4,3,2 or 1-4 or red,nir"):
        names = tuple(part.strip() for part in text.split(","))
        _require(all(names))
        return names


def scale(text: str) -> str | tuple[float, float]:
    """Reads a kind of scale, or its bounds."""
    with _reading(text, "percentiles, none or LOW,HIGH (LOW below HIGH)"):
        if text in ("percentiles", "none"):
            return text
        low, high = map(float, text.split(","))
        _require(math.isfinite(low) and math.isfinite(high) and low < high)
        return low, high


def window(text: str) -> tuple[float, float]:
    """Returns the lowest and the highest value."""
    with _reading(text, "CENTER,WIDTH (WIDTH above 0)"):
        center, width = map(float, text.split(","))
        _require(math.isfinite(center) and 0 < width < math.inf)
        return center - width / 2, center + width / 2


def nodata(text: str) -> float:
    """Reads the value of missing pixels."""
    with _reading(text, "a finite number, or nan"):
        _require(not math.isinf(float(text)))
        return float(text)


def kind(text: str) -> str:
    """Reads bands and type."""
    with _reading(text, f"8-bit, or bands and type such as 13xuint16 ({', '.join(DTYPES)})"):
        _require(text == "8-bit" or bool(re.fullmatch(rf"[1-9]\d{{0,3}}x({'|'.join(DTYPES)})", text)))
        return text
