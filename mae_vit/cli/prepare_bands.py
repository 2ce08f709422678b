"""The options of `mae-vit prepare` for images of bands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mae_vit.data.prepare.bands.options import BandOptions


def add_band_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options."""
    group.add_argument(
        "--bands",
        metavar="LIST",
        help="take these bands in this order: numbers from 1, ranges or names (4,3,2 or 1-4 or red,nir)",
    )
    group.add_argument(
        "--scale",
        metavar="BY",
        help="raw values that become 0 and 1: LOW,HIGH, or percentiles (1 and 99 of each band), or none (the range "
        "of their type). The default is percentiles, of 8 bits none. Stored values stay raw",
    )
    group.add_argument(
        "--nodata",
        metavar="V",
        help="raw value of missing pixels, left out of statistics and losses (what GDAL wrote into the files; NaN)",
    )
    group.add_argument(
        "--window",
        metavar="C,W",
        help="clip raw values to a center and a width, such as 40,400 Hounsfield units, which is the scale too",
    )
    group.add_argument(
        "--take",
        metavar="KIND",
        help="where files differ, leave out all but these: bands and type (13xuint16), or 8-bit (16 bits become 8)",
    )


def band_options(arguments: argparse.Namespace) -> BandOptions:
    """Returns the options of a command line.

    Raises:
        InputError: for one that makes no sense.
    """
    # Slow to import, so that --help is not.
    from mae_vit.data.prepare.bands.options import read_options

    return read_options(
        bands=arguments.bands,
        scale=arguments.scale,
        nodata=arguments.nodata,
        window=arguments.window,
        take=arguments.take,
    )
