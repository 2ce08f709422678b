"""The command line of runs, and what all parsers share."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from mae_vit.config.presets import find_config, find_preset
from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest, device_hint
from mae_vit.core.user_files import expand_text

if TYPE_CHECKING:  # slow to import: not for --help
    from mae_vit.config.load import ConfigSource

ResumeMode = Literal["auto", "never"] | Path
_HELP_WIDTH = 100
# What text editors and web pages make of "-" and "--".
_DASHES = tuple("\u2010\u2011\u2012\u2013\u2014\u2212")
_KEY_AS_OPTION = re.compile(r"--\w+(\.\w+)+=")


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises `InputError`, one line with a hint instead of a usage page. Its help has examples first."""

    def __init__(self, *arguments: Any, examples: str = "", **options: Any) -> None:
        """Takes the arguments of argparse; `examples` are command lines, with words on them."""
        kind = options.get("formatter_class", argparse.HelpFormatter)
        width = min(_HELP_WIDTH, shutil.get_terminal_size().columns - 2)
        super().__init__(*arguments, **{**options, "formatter_class": partial(kind, width=width)})
        self.examples = examples

    def format_help(self) -> str:
        """Returns the usage, the examples, and the rest."""
        usage, _, rest = super().format_help().partition("\n\n")
        examples = f"\n\nexamples:\n{self.examples.rstrip()}" if self.examples else ""
        return f"{usage}{examples}\n\n{rest}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses as argparse does; names the nearest option first, and takes --key.path=value for key.path=value."""
        words = sys.argv[1:] if args is None else list(args)
        if self._takes_keys:
            words = [word[2:] if _KEY_AS_OPTION.match(word) else word for word in words]
        commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        # Options after a command's name belong to that command.
        own = takewhile(lambda word: word.startswith("-"), words) if commands else words
        for word in takewhile(lambda word: word != "--", own):
            self._check_option(word)
        return super().parse_known_args(words, namespace)

    @property
    def _takes_keys(self) -> bool:
        return any(action.dest == "overrides" for action in self._actions)

    def _check_option(self, word: str) -> None:
        """Raises InputError for an unknown option; argparse would report missing arguments first."""
        if word.startswith(_DASHES) and not os.path.lexists(word):
            dashes = "".join(_DASHES) + "-"
            raise InputError(f"{word} begins with a typographic dash; write --{word.lstrip(dashes)}")
        name = word.partition("=")[0]
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        known = sorted(name for action in shown for name in action.option_strings if name.startswith("--"))
        every = [name for action in self._actions for name in action.option_strings]
        if not name.startswith("--") or name in every:
            return
        if self._takes_keys and (devices := device_hint(name[2:])):
            hint = devices
        elif "." in name:
            hint = f"write {name[2:]}=VALUE"
        else:
            # Compare without the dashes, which all options share.
            hint = closest(name[2:], [option[2:] for option in known], cutoff=0.55).replace('"', '"--', 1)
        if not hint:
            # An unknown option of a job is usually meant as a key of the config.
            keys = f"; for settings see `mae-vit config {name[2:]}`" if self._takes_keys else ""
            hint = f"known: {', '.join(known)}{keys}"
        self.error(f"unrecognized arguments: {name}; {hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = closest(str(value), map(str, action.choices))
            choices = hint or f"choose from {', '.join(map(str, action.choices))}"
            raise argparse.ArgumentError(action, f"invalid choice {value!r}; {choices}")

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise InputError(f"{message} (see --help)")


def as_path_text(text: str) -> str:
    """Expands ~ and $NAME in an option; argparse's `type`. URLs and names such as timm:NAME stay as they are."""
    try:
        return expand_text(text)
    except InputError as error:  # argparse would hide the message of a ValueError
        raise argparse.ArgumentTypeError(str(error)) from None


def as_path(text: str) -> Path:
    """Expands ~ and $NAME in an option that is a path; argparse's `type`."""
    path = Path(as_path_text(text))
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))  # "." has no name


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """Adds `--plugin`, without which the plug-ins that a run's config names stay out (`mae_vit.config.plugins`)."""
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        type=as_path_text,
        metavar="MODULE|FILE.py",
        help="import a plug-in that the run was trained with",
    )


def add_local_rank(parser: argparse.ArgumentParser) -> None:
    """Accepts the option that the `deepspeed` launcher adds; the environment has its value too."""
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)


@dataclass(frozen=True)
class Arguments:
    """What a training job is to do: a parsed command line, or a call from Python.

    Attributes:
        config: the YAML file, or values; None where the job can do without.
        overrides: `key.path=value`.
        resume: "auto", "never" or a path.
        extend: resume with another length than the run began with.
        dry_run: print the plan and stop.
        ckpt: pretrained weights, for fine-tuning.
        overrides_from: who gave the overrides, for messages.
        same_batch: refuse a batch larger than the data instead of shrinking it.
    """

    config: ConfigSource | None
    overrides: list[str]
    resume: ResumeMode = "auto"
    extend: bool = False
    dry_run: bool = False
    ckpt: str | None = None
    overrides_from: str = "command line"
    same_batch: bool = False

    def __post_init__(self) -> None:
        if self.extend and self.resume == "never":
            raise InputError("--extend resumes a run, and --resume never starts it over; give one of them")


def add_config(parser: argparse.ArgumentParser, *, example: str, default: str) -> None:
    """Adds a config, as --config or the first word, and overrides."""
    parser.add_argument("--config", metavar="FILE", help="the same as CONFIG")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="CONFIG KEY.PATH=VALUE",
        help="the config: a YAML file, or a preset's name (mae-vit presets lists them); then keys with other values, "
        f"such as {example}; null restores a key's default ({default}=null), unless its meaning "
        "says otherwise",
    )


def list_sections(names: Iterable[str]) -> str:
    """Returns the end of a `--help`: the sections of a config, and the command that lists their keys."""
    listed = textwrap.fill(f"sections of a config: {', '.join(names)}", _HELP_WIDTH)
    return f"{listed}\nmae-vit config SECTION lists the keys of one; mae-vit config KEY explains a key"


def take_config(parser: OneLineParser, parsed: argparse.Namespace, *, required: bool) -> Path | None:
    """Returns the config, which may be one of the overrides; raises InputError if a required one is missing.

    The first may be misspelled. Later words are mostly values without their "=".
    """
    given, words = parsed.config, parsed.overrides
    for word in words if given is None else ():
        if "=" not in word and (word is words[0] or word.endswith(".yaml") or find_preset(word)):
            words.remove(given := word)
            break
    if given is None and required:
        parser.error("the following arguments are required: CONFIG")
    return None if given is None else find_config(given)


def parse_arguments(
    argv: Sequence[str] | None,
    *,
    prog: str | None = None,
    description: str,
    sections: Iterable[str],
    examples: str,
    takes_ckpt: bool = False,
) -> Arguments:
    """Parses the command line of a training job; raises InputError. `takes_ckpt`: the config may be left out."""
    parser = OneLineParser(
        prog=prog,
        description=description,
        examples=examples,
        epilog=list_sections(sections),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = "finetune.holdout" if takes_ckpt else "monitor.evaluate_images"
    add_config(parser, example="train.epochs=10 run.name=try", default=default)
    if takes_ckpt:
        parser.add_argument(
            "--ckpt",
            type=as_path_text,
            metavar="WEIGHTS",
            help='pretrained weights: a run folder, an encoder.safetensors, an official MAE file, "timm:NAME", '
            '"timm:NAME@FILE" or "hf:USER/NAME[@REVISION]"; '
            "without this option the network trains from scratch",
        )
        # Comparisons give it.
        parser.add_argument("--same-batch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--resume",
        default="auto",
        type=as_path_text,
        metavar="auto|never|PATH",
        help="auto (default): resume this run if its folder has a checkpoint; never: start over, and move the old run "
        "aside; PATH: resume from that checkpoint or run folder, unless this run has a checkpoint",
    )
    parser.add_argument(
        "--extend",
        action="store_true",
        help="resume this run, even a finished one, with another train.epochs, steps or samples; from here on the "
        "learning rate follows the schedule of the new length",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and its cost, check data and machine; do not train",
    )
    add_local_rank(parser)
    parsed = parser.parse_intermixed_args(argv)
    config = take_config(parser, parsed, required=not takes_ckpt)
    resume: ResumeMode = parsed.resume if parsed.resume in ("auto", "never") else Path(parsed.resume)
    return Arguments(
        config,
        parsed.overrides,
        resume,
        parsed.extend,
        parsed.dry_run,
        parsed.ckpt if takes_ckpt else None,
        same_batch=takes_ckpt and parsed.same_batch,
    )
