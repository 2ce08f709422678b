"""Renders pages from Jinja2 templates: each is one file that opens offline, in light and dark, wide and narrow."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """Fills a template of `mae_vit/pages/templates`; returns the whole page.

    Args:
        template: file name, such as `run.html`; it extends `base.html`.
        values: the template's variables, with `title`. Texts are escaped; `Markup` (an SVG, an `image`) is not.
            The filter `prose` turns text between backticks into code.
    """
    return _environment().get_template(template).render(values)


def image(png: bytes, alternative: str) -> Markup:
    """Returns a PNG file as an element inside the page."""
    data = base64.b64encode(png).decode()
    return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(alternative, data)


def _prose(text: str) -> Markup:
    """Escapes a text and turns what stands between backticks into code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else part for number, part in enumerate(parts)
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("mae_vit.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["prose"] = _prose
    return environment
