"""The command line of benchmarks, and the report that they leave: the figures and what they were measured on."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from mae_vit.config.command_line import OneLineParser
from mae_vit.core.errors import EXIT_INPUT, InputError
from mae_vit.core.files import to_json, write_json
from mae_vit.runtime.failures import print_error
from mae_vit.training.engines.precision import choose_precision
from mae_vit.training.outputs.environment import describe_environment

ROOT = Path(__file__).resolve().parents[2]
# Files that decide what is measured. Results are none: one benchmark's result makes no other one dirty.
_SOURCES = ("mae_vit", "benchmarks", "configs", "pretrain", "finetune", "pyproject.toml")
# A benchmark itself is a load: this is the load before it.
_LOAD_AT_START = round(psutil.getloadavg()[0], 2)
# Instruction sets that decide how fast matrix products are in fp32, bf16 and int8.
_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
_OPTIONS: dict[str, dict[str, Any]] = {
    "config": {"type": Path, "metavar": "FILE", "help": "config of a pretraining run"},
    "batch": {"type": int, "metavar": "N", "help": "images per step"},
    "precision": {"choices": ("auto", "fp32", "bf16"), "help": "of steps; auto: as of runs here"},
    "device": {"choices": ("cpu", "cuda"), "help": "where it runs"},
    "threads": {"type": int, "metavar": "N", "help": "torch's, in each process that is measured"},
    "rounds": {"type": int, "metavar": "N", "help": "turns of each contender that count"},
    "steps": {"type": int, "metavar": "N", "help": "steps in a turn"},
}


def make_parser(description: str | None, **defaults: Any) -> OneLineParser:
    """A parser with some of the shared options and their defaults, and `--out`; with a config, overrides of it."""
    parser = OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        shown = default.stem if isinstance(default, Path) else default
        options = {**_OPTIONS[name], "help": f"{_OPTIONS[name]['help']} ({shown})"}
        parser.add_argument(f"--{name}", default=default, **options)
    if "config" in defaults:
        parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="change a value of it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here too")
    return parser


def parse(parser: OneLineParser) -> argparse.Namespace:
    """Reads the command line, makes this process and its children run on the device, and settles the precision.

    Raises InputError for anything that does not fit, or a GPU that is not there.
    """
    arguments = parser.parse_intermixed_args()
    if "device" in arguments:
        if arguments.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        elif not torch.cuda.is_available():
            raise InputError("--device cuda: no GPU is seen here")
        if isinstance(getattr(arguments, "precision", None), str):
            device = torch.device(arguments.device)
            arguments.precision = choose_precision(arguments.precision, device).precision
    return arguments


def run(main: Callable[[], None]) -> None:
    """Runs a benchmark; what does not fit is one line, and the exit code of runs."""
    try:
        main()
    except InputError as error:
        print_error(error)
        sys.exit(EXIT_INPUT)


def publish(
    report: dict[str, Any], arguments: argparse.Namespace, *names: str, threads: int | None = None
) -> None:
    """Prints a report with the options `names` and its environment, and writes it to `--out`.

    `threads` are torch's in each process that is measured, by default `--threads`.
    """
    options = {name: getattr(arguments, name) for name in names}
    if "config" in options:
        options["config"] = options["config"].stem
    threads = arguments.threads if threads is None else threads
    whole = {**options, **report, "environment": measured_on(threads=threads)}
    print(to_json(whole, indent=2))
    if arguments.out is not None:
        write_json(arguments.out, whole)


def measured_on(*, threads: int) -> dict[str, Any]:
    """Command, commit, versions, processor, threads, load of a measurement; no path and no name of the machine."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    described = describe_environment([name, *map(_without_folder, sys.argv[1:])], 1)
    for hidden in ("platform", "processor", "cores", "slurm_job"):
        del described[hidden]
    commit, changes = described["git_commit"], git(ROOT, "status", "--porcelain", "--", *_SOURCES)
    return {
        **described,
        # Without "+changes": a result that is written beside the sources changes none of them.
        "git_commit": commit and commit.removesuffix("+changes"),
        "dirty": None if changes is None else bool(changes),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _describe_processor(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch_threads": threads,
        "load_1min_at_start": _LOAD_AT_START,
    }


def git(folder: Path, *words: str) -> str | None:
    """What git says of a folder; None outside a checkout."""
    try:
        said = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if said.returncode else said.stdout.strip()


def _without_folder(word: str) -> str:
    """A word of a command whose absolute path, if it is one, is cut to its last name."""
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if value.startswith("/") else word


def _describe_processor() -> dict[str, Any]:
    """Name, family, model and flags that matter; where a virtual machine hides the name, the others still tell."""
    info = Path("/proc/cpuinfo")
    first = info.read_text().split("\n\n")[0] if info.exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (s.partition(":") for s in first.splitlines())}
    named = {"family": "cpu family", "mhz": "cpu MHz", "vendor": "vendor_id", "cache": "cache size"}
    return {
        "name": fields.get("model name") or platform.processor(),
        **{key: fields.get(named.get(key, key)) for key in (*named, "model", "stepping")},
        "flags": [flag for flag in _FLAGS if flag in fields.get("flags", "").split()],
    }
