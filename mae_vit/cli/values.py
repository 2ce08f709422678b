"""Values of options: an error repeats the text and says what to give."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from mae_vit.core.bands import DTYPES

T = TypeVar("T")


def _reader(usage: str) -> Callable[[Callable[[str], T]], Callable[[str], T]]:
    """Turns a function that raises ValueError into an argparse type, whose error repeats the text and the usage."""

    def decorate(read: Callable[[str], T]) -> Callable[[str], T]:
        def checked(text: str) -> T:
            try:
                return read(text)
            except (ValueError, LookupError, ZeroDivisionError):
                raise argparse.ArgumentTypeError(f"{text!r} is not valid; give {usage}") from None

        return checked

    return decorate


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Returns a reader of whole numbers."""

    @_reader(f"a whole number, {f'at least {low}' if high is None else f'{low} to {high}'}")
    def read(text: str) -> int:
        _require(low <= int(text) <= (high or 1 << 62))
        return int(text)

    return read


@_reader("letters, digits and _ only")
def word(text: str) -> str:
    """Reads a word."""
    _require(text.replace("_", "").isalnum())
    return text


@_reader("a share above 0 and at most 1, such as 0.1 or 1/10")
def share(text: str) -> Fraction:
    """Reads a share."""
    _require(0 < Fraction(text) <= 1)
    return Fraction(text)


@_reader("numbers from 1, ranges or names: 4,3,2 or 1-4 or red,nir")
def bands(text: str) -> tuple[str, ...]:
    """Reads numbers or names of bands."""
    names = tuple(part.strip() for part in text.split(","))
    _require(all(names))
    return names


@_reader("percentiles, none or LOW,HIGH (LOW below HIGH)")
def scale(text: str) -> str | tuple[float, float]:
    """Reads a kind of scale, or its bounds."""
    if text in ("percentiles", "none"):
        return text
    low, high = map(float, text.split(","))
    _require(math.isfinite(low) and math.isfinite(high) and low < high)
    return low, high


@_reader("CENTER,WIDTH (WIDTH above 0)")
def window(text: str) -> tuple[float, float]:
    """Returns the lowest and the highest value."""
    center, width = map(float, text.split(","))
    _require(math.isfinite(center) and 0 < width < math.inf)
    return center - width / 2, center + width / 2


@_reader("a finite number, or nan")
def nodata(text: str) -> float:
    """Reads the value of missing pixels."""
    _require(not math.isinf(float(text)))
    return float(text)


@_reader(f"8-bit, or bands and type such as 13xuint16 ({', '.join(DTYPES)})")
def kind(text: str) -> str:
    """Reads bands and type."""
    _require(text == "8-bit" or bool(re.fullmatch(rf"[1-9]\d{{0,3}}x({'|'.join(DTYPES)})", text)))
    return text
