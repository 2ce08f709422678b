"""`mae-vit report`: one page on a pretraining run. `mae-vit curve`: the run beside its preset's reference curves."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae_vit.config.command_line import OneLineParser, as_path
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json_lines, write_atomically
from mae_vit.core.messages import count_of, error_reason
from mae_vit.runtime.exit_codes import EXIT_FAILED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mae_vit.pretraining.reference_curves import Reference

_SHOWN_DIFFERENCES = 6
# Drawn and printed without a band: the references are older than these measures of the features.
_OF_FEATURES = {"heldout.rankme": "effective rank (RankMe)", "heldout.feature_std": "standard deviation"}
_DESCRIPTION = """Write one HTML page on a pretraining run: a verdict in one sentence, curves (over the reference
curves of its preset, if there are any), pictures over time, plan, environment, damaged images, incidents. The page is
one file that needs no other. The run may be finished, running, interrupted or failed."""


def add_report(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `report`."""
    parser = commands.add_parser(
        "report", help="write a page on a run: verdict, curves, pictures", description=_DESCRIPTION
    )
    parser.add_argument("path", type=as_path, metavar="RUN", help="the run's folder")
    parser.add_argument("--out", type=as_path, metavar="FILE.html", help="file to write (RUN/report.html)")
    parser.set_defaults(run=run_report, parser=parser)


def run_report(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        InputError: if there is no such run, or if the page cannot be written.
    """
    # Imports matplotlib: not for --help.
    from mae_vit.pretraining.report.page import write_page
    from mae_vit.pretraining.report.run_record import read_run
    from mae_vit.pretraining.report.verdict import compare, verdict

    record = read_run(arguments.path)
    out: Path = arguments.out or arguments.path / "report.html"
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: give a file, such as {out / 'report.html'}")
    comparison = compare(record)
    page = write_page(record, comparison)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error_reason(error)}; give --out FILE") from None
    print(f"verdict   {verdict(record, comparison)}")
    print(f"page      {out} (open in a browser)")
    return 0


def add_curve(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `curve`."""
    parser = commands.add_parser(
        "curve",
        help="compare a run's curves with those of its preset",
        description="Draw a pretraining run's curves over the reference curves of the preset with the nearest recipe. "
        "Print at which step and by how much the run leaves their band, and exit with 1 if it does.",
    )
    parser.add_argument("path", type=as_path, metavar="RUN", help="the run's folder, finished or not")
    parser.add_argument(
        "--preset", metavar="NAME", help="compare with this preset (docs/reference_curves has their curves)"
    )
    parser.add_argument("--out", type=as_path, metavar="FILE.png", help="file to write (RUN/curve.png)")
    parser.set_defaults(run=run_curve, parser=parser)


def run_curve(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 1 if the run is outside.

    Raises:
        InputError: if there is no run, or nothing to compare it with.
    """
    from mae_vit.config.load import read_run_config
    from mae_vit.pretraining.reference_curves import deviations
    from mae_vit.pretraining.report.verdict import choose_reference

    run: Path = arguments.path
    lines = _lines_of(run)
    reference, differing = choose_reference(read_run_config(run), run, arguments.preset)
    departures, compared = deviations(reference, lines)
    if not compared:
        raise InputError(
            f"{run} has nothing in common with the curves of {reference.name} ({reference.total_steps:,} steps, "
            "evaluated at steps of its own): the same length and at least as many log steps are compared"
        )
    out = arguments.out or run / "curve.png"
    _draw(reference, lines, out, run.name)
    known = max(int(band.steps[-1]) for band in reference.bands.values())
    part = "" if known == reference.total_steps else f"the first {known:,} of "
    seeds = count_of(len(reference.seeds), "seed")
    print(f"reference  {reference.name}, {seeds}, {part}{reference.total_steps:,} steps")
    for text in differing[:_SHOWN_DIFFERENCES]:
        print(f"  differs  {text}")
    if len(differing) > _SHOWN_DIFFERENCES:
        print(f"  differs  in {len(differing) - _SHOWN_DIFFERENCES} more values")
    if not departures:
        print(
            f"normal     within the band at all {compared} places up to step {min(known, lines[-1]['step']):,}"
        )
    for departure in departures:
        print(f"outside    {departure}")
    if features := _describe_features(lines, reference.total_steps):
        print(f"features   {features}")
    print(f"picture    {out}")
    return EXIT_FAILED if departures else 0


def _lines_of(run: Path) -> list[dict[str, Any]]:
    if not (run / "metrics.jsonl").is_file():
        raise InputError(f"{run} is no run folder: it has no metrics.jsonl")
    lines = read_json_lines(run / "metrics.jsonl")
    if not lines:
        raise InputError(f"{run} has logged nothing yet")
    return lines


def _describe_features(lines: Sequence[Mapping[str, Any]], total_steps: int) -> str:
    """Returns first and last values of the features' measures; empty if none were logged."""
    from mae_vit.pretraining.reference_curves import curves_of

    curves = curves_of(lines, total_steps)
    return "; ".join(
        f"{title} {curves[key].values[0]:.4g} at step {curves[key].steps[0]:,}, "
        f"{curves[key].values[-1]:.4g} at step {curves[key].steps[-1]:,}"
        for key, title in _OF_FEATURES.items()
        if key in curves
    )


def _draw(reference: Reference, lines: Sequence[Mapping[str, Any]], out: Path, name: str) -> None:
    """Draws a panel for each curve that both have."""
    from matplotlib.figure import Figure

    from mae_vit.inspection.page import svg
    from mae_vit.pretraining.reference_curves import curves_of
    from mae_vit.pretraining.report.curves import draw_band, draw_curve

    curves = {
        key: value
        for key, value in curves_of(lines, reference.total_steps).items()
        if key in reference.bands or key in _OF_FEATURES
    }
    figure = Figure(figsize=(5.2 * max(1, len(curves)), 3.4), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, max(1, len(curves)), squeeze=False)[0]
    for axes, (key, curve) in zip(panels, curves.items(), strict=False):
        if key in reference.bands:
            draw_band(
                axes, reference.bands[key], f"{reference.name}, {count_of(len(reference.seeds), 'seed')}"
            )
        draw_curve(axes, curve, svg.plain(name))
        axes.set(xlabel="step", title=key)
        axes.grid(alpha=0.2)
        axes.legend(fontsize=8)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error_reason(error)}") from None
