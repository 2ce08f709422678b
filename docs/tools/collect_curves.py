"""Makes a preset's reference curves of runs that differ in their seed alone.

    python docs/tools/collect_curves.py --name mae_digits runs/mae_digits_0 runs/mae_digits_1 runs/mae_digits_2

Runs that were stopped give the beginning: as far as all of them came.
Writes docs/reference_curves/NAME.json, which `mae-vit curve` and the training log compare runs with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mae_vit.config.load import read_run_config
from mae_vit.core.files import read_json_lines
from mae_vit.pretraining.reference_curves import FOLDER, curves_of, recipe_of


def read(run: Path) -> dict[str, Any]:
    """Reads a run."""
    total = json.loads((run / "summary.json").read_text())["total_steps"]
    config = read_run_config(run)
    lines = read_json_lines(run / "metrics.jsonl")
    return {
        "seed": config["run"]["seed"],
        "recipe": recipe_of(config),
        "total_steps": total,
        "curves": curves_of(lines, total),
        "environment": json.loads((run / "environment.json").read_text()),
    }


def collect(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts runs of one recipe together."""
    first = runs[0]
    for run in runs[1:]:
        if (run["recipe"], run["total_steps"]) != (first["recipe"], first["total_steps"]):
            sys.exit("the runs are not of one recipe and length")
    if len({run["seed"] for run in runs}) < len(runs):
        sys.exit("two runs have the same seed")
    curves = {}
    for name, curve in first["curves"].items():
        several = [run["curves"][name] for run in runs]
        shared = min(len(one.steps) for one in several)
        if not shared:
            continue
        assert all(one.steps[:shared].tolist() == curve.steps[:shared].tolist() for one in several)
        curves[name] = {
            "steps": curve.steps[:shared].tolist(),
            "lines": curve.lines[:shared].tolist(),
            "values": [[float(f"{value:.6g}") for value in one.values[:shared]] for one in several],
        }
    return {
        "seeds": [run["seed"] for run in runs],
        "total_steps": first["total_steps"],
        "commits": sorted({run["environment"]["git_commit"] for run in runs}),
        "torch": first["environment"]["packages"]["torch"],
        "recipe": first["recipe"],
        "curves": curves,
    }


def main() -> None:
    """Collects the runs named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs of one recipe and length")
    parser.add_argument("--name", required=True, help="of the preset: the stem of its config")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{arguments.name}.json"
    path.write_text(json.dumps(collect([read(run) for run in arguments.runs])) + "\n")
    print(path)


if __name__ == "__main__":
    main()
