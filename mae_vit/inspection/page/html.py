"""Pages that need nothing beside them: pictures and style lie inside. Light and dark, wide and narrow."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1, h2 { overflow-wrap: anywhere; } h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.headline { font-size: 1.1rem; border-left: .25rem solid #0072b2; padding-left: .8rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; } td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 9rem; }
tr.reference { background: var(--soft); }
figure { margin: 0; } svg { width: 100%; max-width: 46rem; height: auto; } img { max-width: 100%; height: auto; }
img.squares { image-rendering: pixelated; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.2rem; }
.charts.large { grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); }
.charts figure { min-width: 0; } .charts h3 { font-size: .95rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
pre { font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.note { opacity: .75; font-size: .9rem; overflow-wrap: anywhere; max-width: 60rem; }
code { font-size: .9em; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1.5rem; }
.pair > div { min-width: 0; } .pair td { white-space: normal; overflow-wrap: anywhere; }
.side { font-weight: 600; margin: 0 0 .4rem; overflow-wrap: anywhere; }
@media (max-width: 48rem) {  /* nothing side by side */ .pair { grid-template-columns: 1fr; } }
@media (max-width: 48rem) {  /* a card for each row: no column is out of sight */
  thead, td:empty { display: none; }
  table, tbody, tr { display: block; }
  tr { border: 1px solid var(--line); border-radius: .3rem; margin-bottom: .6rem; padding: .2rem 0; }
  td { display: flex; justify-content: space-between; gap: 1rem; white-space: normal; overflow-wrap: anywhere; }
  td { border: 0; padding: .15rem .6rem; }
  td:first-child { font-weight: 600; }
  .facts tr { display: grid; grid-template-columns: 2fr 3fr; } .facts td { display: block; text-align: left; }
  td:not(:first-child)::before { content: attr(data-head); text-align: left; opacity: .75; overflow-wrap: normal; }
}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """Returns a whole page of parts that are HTML already."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def image(png: bytes, alternative: str, *, squares: bool = True) -> str:
    """Returns a picture, inside the page; `squares`: made of small images, which stay sharp when enlarged."""
    data = base64.b64encode(png).decode()
    kind = ' class="squares"' if squares else ""
    return f'<img{kind} alt="{escape(alternative)}" src="data:image/png;base64,{data}">'


def figure(drawn: str, caption: str) -> str:
    """Returns a drawing (HTML) with its caption (text)."""
    return f'<figure>{drawn}<figcaption class="note">{escape(caption)}</figcaption></figure>'


def charts(drawn: Sequence[tuple[str, str]], *, large: bool = False) -> str:
    """Returns charts or pictures (title as text, HTML) side by side where there is room; `large` ones take more."""
    return (
        f'<div class="charts{" large" if large else ""}">'
        + "\n".join(f"<figure><h3>{escape(title)}</h3>{inner}</figure>" for title, inner in drawn)
        + "</div>"
    )


def facts(rows: Mapping[str, str]) -> str:
    """Returns a table without a head: what is said of each name (texts)."""
    body = "\n".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows.items()
    )
    return f'<div class="wide"><table class="facts"><tbody>\n{body}\n</tbody></table></div>'


def table(head: Sequence[str], body: Sequence[Sequence[str]], marked: Sequence[int] = ()) -> str:
    """Returns a table of texts; the rows of these numbers are marked."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = "\n".join(
        f"<tr{' class=reference' if number in marked else ''}>"
        + "".join(
            f'<td data-head="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for number, row in enumerate(body)
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
