"""The command `mae-vit`: prepares data, trains, compares, inspects runs and exports encoders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mae_vit.cli.training import add_config_key, add_doctor, add_jobs, add_presets, add_verify_resume, run_job
from mae_vit.config.command_line import OneLineParser, add_local_rank
from mae_vit.core import __version__
from mae_vit.runtime.failures import EXIT_CODES, find_exit_code, ignore_closed_terminal, print_error

EXAMPLES = """  mae-vit prepare digits data/digits               handwritten digits; needs no network
  mae-vit prepare cifar10 data/cifar10             downloads CIFAR-10; also cifar100
  mae-vit prepare photos/ data/photos --holdout 1/10           photos/CLASS/*.jpg or photos/*.jpg
  mae-vit prepare photos/ data/mine --labels labels.csv --unlabeled more/ --preview
  mae-vit prepare train.tar.gz test.zip data/mine  archives of such folders
  mae-vit prepare hf:USER/NAME data/cats           a data set of the Hugging Face Hub
  mae-vit prepare --in-place laion/                existing webdataset shards, where they are
  mae-vit check data/mine                          verifies every shard
  mae-vit recommend data/photos                    the preset that fits, its time here, the gain
  mae-vit presets mae cifar                        included configs with these words in their names
  mae-vit config mask_ratio                        explains a key, and which presets set it
  mae-vit pretrain mae_photos_64 data.path=data/photos         a preset or a YAML file, then keys
  mae-vit finetune --ckpt runs/mae_digits          on the run's data, by the recipe for its size
  mae-vit compare compare_photos data.path=data/photos         was pretraining worth it?
  deepspeed --num_accelerators 2 --module mae_vit.cli pretrain mae_digits
  mae-vit doctor mae_base data.path=data/mine      checks config, data, memory, disk and ranks
  mae-vit verify-resume                            ten kills change nothing: see for yourself
  mae-vit replay runs/mae_base --step 1200         the images, crops and masks of that step
  mae-vit inspect runs/mae_base                    a page: what the encoder has learned
  mae-vit report runs/mae_base                     a page: verdict, curves, pictures, plan
  mae-vit embed runs/mae_base photos/ --out features           features of images
  mae-vit predict runs/finetune_mine photos/ --out classes.csv classes of images
  mae-vit export runs/mae_base --to hf             also timm, official (MAE), onnx, torch
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (`mae_vit.core.errors`)."""
    words = sys.argv[1:] if argv is None else argv
    if (job_code := run_job(words)) is not None:
        return job_code
    ignore_closed_terminal()
    try:
        arguments = parse(words)
        if plugins := getattr(arguments, "plugin", ()):
            # Imports pydantic: not for --help.
            from mae_vit.config.plugins import import_plugins

            import_plugins(plugins)
        return arguments.run(arguments)
    except tuple(EXIT_CODES) as error:
        print_error(error, interrupted="interrupted; no partial files were left")
        return find_exit_code(error)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the command line of any command except the jobs, or raises InputError; `run` of the result runs it."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    arguments.typed = words
    # argparse does not collect paths that have options between them.
    if rest and hasattr(arguments, "paths") and not any(word.startswith("-") for word in rest):
        arguments.paths += rest
    elif rest:
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _parser() -> OneLineParser:
    # Imported here: jobs need none of them.
    from mae_vit.cli.embed import add_embed
    from mae_vit.cli.export import add_export
    from mae_vit.cli.inspect import add_inspect
    from mae_vit.cli.predict import add_predict
    from mae_vit.cli.prepare import add_prepare
    from mae_vit.cli.reading import add_check, add_recommend, add_replay, add_report

    parser = OneLineParser(
        prog="mae-vit",
        description="Self-supervised pretraining of Vision Transformers. Commands to prepare data, pretrain, "
        "fine-tune, compare, inspect runs and export encoders.",
        examples=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"mae-vit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    add_local_rank(parser)
    add_prepare(commands)
    add_check(commands)
    add_recommend(commands)
    add_presets(commands)
    add_config_key(commands)
    add_jobs(commands)
    add_replay(commands)
    add_doctor(commands)
    add_verify_resume(commands)
    add_inspect(commands)
    add_report(commands)
    add_embed(commands)
    add_predict(commands)
    add_export(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
