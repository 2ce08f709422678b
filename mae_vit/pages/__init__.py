"""Renders pages from Jinja2 templates: each is one file that opens offline, in light and dark, wide and narrow."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


def render(template: str, **values: Any) -> str:
    """Fills a template of `mae_vit/pages/templates`; returns the whole page.

    Args:
        template: file name, such as `run.html`; it extends `base.html`.
        values: the template's variables, with `title`. Texts are escaped; `Markup` (an SVG, an `image`) is not.
    """
    return _environment().get_template(template).render(values)


def image(png: bytes, alternative: str, *, squares: bool = True) -> Markup:
    """Returns a PNG file as an element inside the page; `squares` keeps enlarged pixels sharp."""
    data, css_class = base64.b64encode(png).decode(), ' class="squares"' if squares else ""
    return Markup(f'<img{css_class} alt="{escape(alternative)}" src="data:image/png;base64,{data}">')


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("mae_vit.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
