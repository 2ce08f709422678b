"""The jobs (`mae-vit pretrain`, `finetune`, `compare`), and `presets`, `doctor` and `verify-resume`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from mae_vit.cli.values import whole
from mae_vit.config.command_line import Arguments, OneLineParser, add_local_rank, as_path
from mae_vit.config.presets import PRESETS, find_config, find_preset, preset_paths, read_header
from mae_vit.core.errors import EXIT_FAILED, InputError
from mae_vit.core.files import leaving_no_empty_folders
from mae_vit.core.messages import error_reason, nearest
from mae_vit.runtime.failures import run_to_exit_code
from mae_vit.runtime.imports import slow_imports
from mae_vit.runtime.signals import install_early_handlers

# Job -> (module, line for --help).
_JOBS = {
    "pretrain": ("mae_vit.pretraining.command", "pretrain an encoder"),
    "finetune": (
        "mae_vit.finetuning.command",
        "fine-tune an encoder, or train a network from scratch, on labels",
    ),
    "compare": (
        "mae_vit.comparison.command",
        "compare pretrained and other networks on the same labels",
    ),
}
_VERIFY_RESUME = """Train a small run undisturbed, on 1 and on 2 ranks. Train it again, kill it (SIGKILL) at random
moments, also changing between 1 and 2 ranks, and resume it by the same command. On the same number of ranks the
weights must be equal to the bit; on another number the order, the images and their crops must be equal, and the
losses (without BatchNorm and noise) up to rounding. Runs on CPUs. Exit with 1 if anything differs, and say what."""
# The `deepspeed` launcher puts this in front of all arguments.
_LOCAL_RANK = ("--local_rank", "--local-rank")


def add_jobs(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Lists the jobs in --help; `run_job` runs them, and each parses its own command line."""
    for name, (_, line) in _JOBS.items():
        commands.add_parser(name, help=line, add_help=False)


def run_job(words: Sequence[str]) -> int | None:
    """Runs the job that a command line names; returns its exit code, or None for other commands."""
    rest = list(words)
    while rest and rest[0].startswith(_LOCAL_RANK):
        # The environment has the same value.
        del rest[: 1 if "=" in rest[0] else 2]
    if not rest or rest[0] not in _JOBS:
        return None
    # Before the import below, which takes seconds.
    install_early_handlers()
    return import_module(_JOBS[rest[0]][0]).main(rest[1:], prog=f"mae-vit {rest[0]}")


def add_presets(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `presets`."""
    parser = commands.add_parser(
        "presets",
        help="list the configs that come with the library",
        examples="  mae-vit presets\n  mae-vit presets photos\n  mae-vit presets mae_photos_64\n"
        "  mae-vit presets --show mae_photos_64 > mine.yaml          to change it",
        description="List the configs that come with the library, or show one with its command, time and result. "
        "pretrain, finetune, compare and doctor accept these names.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="list only names with all these words (mae cifar); a whole name gives its command, time and result",
    )
    parser.add_argument("--show", metavar="NAME", help="print this preset as YAML")
    parser.set_defaults(run=_presets, parser=parser)


def _presets(arguments: argparse.Namespace) -> int:
    names = [path.stem for path in preset_paths()]
    if arguments.show is not None:
        if arguments.words:
            raise InputError(f"{arguments.words[0]} has no effect with --show; leave it out")
        path = find_preset(arguments.show)
        if path is None:
            raise InputError(f'no preset "{arguments.show}" in {PRESETS}; {nearest(arguments.show, names)}')
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    chosen = [path for path in preset_paths() if all(word in path.stem for word in arguments.words)]
    if not chosen:
        words = " and ".join(f'"{word}"' for word in arguments.words)
        raise InputError(f"no preset has {words} in its name; known: {', '.join(names)}")
    if arguments.words in [[path.stem] for path in chosen]:
        chosen = [path for path in chosen if path.stem == arguments.words[0]]
    if len(chosen) == 1:
        print(read_header(chosen[0]).describe())
        return 0
    rows = [("NAME", "HARDWARE", "TOOK", "WHAT"), *(read_header(path).row() for path in chosen)]
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)][:-1]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for *cells, title in rows:
        print(("".join(map(str.ljust, cells, widths)) + title)[:width])
    return 0


def add_config_key(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `config`."""
    parser = commands.add_parser(
        "config",
        help="explain a key of a config",
        examples="  mae-vit config train.effective_batch_size\n"
        "  mae-vit config mask_ratio                a key alone: of each section that has it\n"
        "  mae-vit config optim                     the keys of a section",
        description="Explain a key: its type, default and meaning, and the presets that set it.",
    )
    parser.add_argument("key", metavar="KEY", help="section.key, a key alone, or a section")
    parser.set_defaults(run=_config_key, parser=parser)


def _config_key(arguments: argparse.Namespace) -> int:
    # pydantic: not for --help.
    from mae_vit.comparison.config import CompareConfig
    from mae_vit.config.describe import explain_key
    from mae_vit.config.section import Section
    from mae_vit.finetuning.config.schema import FinetuneConfig
    from mae_vit.objectives.pretrain_config import PretrainConfig

    schemas: dict[str, type[Section]] = {
        "pretraining": PretrainConfig,
        "fine-tuning": FinetuneConfig,
        "comparing": CompareConfig,
    }
    print("\n".join(explain_key(arguments.key, schemas)))
    return 0


def add_doctor(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="check config, data and machine before a run",
        examples="  mae-vit doctor\n  mae-vit doctor mae_base data.path=data/mine\n"
        "  torchrun --nproc-per-node 8 -m mae_vit.cli doctor mae_base",
        description="Check what a pretraining run needs: software, devices, memory, disk, data, and whether the ranks "
        "connect. Exit with 1 if something will fail; a folder with another run in it is only a warning. With a "
        "config it does the same as pretrain --dry-run. Under a launcher all ranks check.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the run's config: a YAML file or a preset's name, also as the first word; without it, check only what "
        "every run needs",
    )
    parser.add_argument(
        "paths", nargs="*", metavar="KEY.PATH=VALUE", help="another value for a key, as in pretraining"
    )
    add_local_rank(parser)
    parser.set_defaults(run=_doctor, parser=parser)


def _doctor(arguments: argparse.Namespace) -> int:
    words = ["--config", arguments.config, *arguments.paths] if arguments.config else arguments.paths
    if words:
        from mae_vit.pretraining.command import main

        return main([*words, "--dry-run"], prog="mae-vit doctor")
    # Imports torch: not for --help.
    with slow_imports():
        from mae_vit.pretraining.doctor import check_all
        from mae_vit.runtime.ranks import find_ranks
    return run_to_exit_code(lambda: check_all(None, find_ranks(), Arguments(None, [])))


def add_verify_resume(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `verify-resume`."""
    parser = commands.add_parser(
        "verify-resume",
        help="kill small runs at random, and compare the results",
        examples="  mae-vit verify-resume                        handwritten digits, about two minutes\n"
        "  mae-vit verify-resume mae_photos_64 data.path=data/photos",
        description=_VERIFY_RESUME,
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PRESET KEY.PATH=VALUE", help="another config, and values (mae_digits)"
    )
    # One on 1 rank, one on 2, one between them.
    parser.add_argument(
        "--kills", type=whole(3), default=10, metavar="N", help="number of kills, 3 or more (10)"
    )
    parser.add_argument(
        "--keep", type=as_path, metavar="DIR", help="keep the runs and their logs in this folder"
    )
    parser.set_defaults(run=_verify_resume, parser=parser)


def _verify_resume(arguments: argparse.Namespace) -> int:
    config, overrides = "mae_digits", arguments.paths
    if overrides and "=" not in overrides[0]:
        config, *overrides = overrides
    if arguments.keep and arguments.keep.exists():
        raise InputError(f"--keep {arguments.keep} exists; choose a new folder")
    # Imports torch: not for --help.
    from mae_vit.pretraining.verify_resume import verify_resume

    with (
        TemporaryDirectory(prefix="mae-vit-verify-") as scratch,
        leaving_no_empty_folders(folder := (arguments.keep or Path(scratch)).absolute()),
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--keep {folder} cannot be written: {error_reason(error)}") from None
        problems = verify_resume(find_config(config), overrides, kills=arguments.kills, folder=folder)
    for problem in problems:
        print(f"FAIL  {problem}")
    if not problems:
        print("ok: killed runs are bit-identical, and equal up to rounding where the number of ranks changed")
    return EXIT_FAILED if problems else 0
