"""`mae-vit export`: its options and its final output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mae_vit.config.command_line import OneLineParser, add_plugin, as_path, as_path_text
from mae_vit.core.errors import InputError
from mae_vit.core.files import nearest_existing

if TYPE_CHECKING:
    from mae_vit.weights.export.export import Export

_DESCRIPTION = """Write an encoder in the format of another library, with a model card. The command loads each export
with that library and compares the outputs before it gives the folder its final name."""
_FORMS = """formats:
  timm      folder for timm.create_model("local-dir:OUT", pretrained=True), with a classifier's head
  hf        folder for transformers: ViTModel or ViTForImageClassification; OUT/mae is a
            ViTMAEForPreTraining if WEIGHTS has MAE's decoder (a run folder has it, its
            encoder.safetensors does not)
  official  file of the official MAE code, with the decoder: {"model": tensors}; checked with timm
  onnx      model for onnxruntime and others, any number of images (pip install "mae-vit[onnx]")
  torch     program of torch.export (.pt2): needs none of our code, for any number of images
"""
_EXAMPLES = """  mae-vit export runs/mae_base --to hf
  mae-vit export runs/mae_base/encoder.safetensors --to onnx --out mae_base-onnx
  mae-vit export runs/finetuned --to timm --force
  mae-vit export runs/mae_base --to hf --push USER/NAME --dry-run    (pip install "mae-vit[hf,hub]")
"""
_FORMATS = ("timm", "hf", "official", "onnx", "torch")
# Formats that store no pooling, with the reason.
_WITHOUT_POOL = {
    "hf": "a ViTModel returns all tokens",
    "official": "the file has only weights",
}


def add_export(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `export`."""
    parser = commands.add_parser(
        "export",
        help="write an encoder for other libraries: timm, transformers, official MAE, ONNX, torch.export",
        examples=_EXAMPLES,
        description=_DESCRIPTION,
        epilog=_FORMS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "weights",
        type=as_path_text,
        metavar="WEIGHTS",
        help="a run folder (also a fine-tuned one), an encoder.safetensors, an official MAE file (.pth), "
        "timm:NAME, hf:USER/NAME[@REVISION]",
    )
    parser.add_argument("--to", required=True, choices=_FORMATS, help="format, see below")
    parser.add_argument(
        "--out", type=as_path, metavar="DIR", help="folder to write (RUN/FORMAT for a run, else NAME-FORMAT)"
    )
    parser.add_argument(
        "--pool",
        choices=("cls", "mean"),
        help="feature: [CLS] or the mean of the patches (default: mean; for a classifier, as it was trained; for "
        "third-party weights mostly cls)",
    )
    parser.add_argument(
        "--push",
        metavar="USER/NAME[@BRANCH]",
        help="upload the export to the Hugging Face Hub as one commit, with the encoder.safetensors that "
        'load_encoder("hf:USER/NAME") reads; the token comes from HF_TOKEN or `hf auth login`',
    )
    parser.add_argument(
        "--public", action="store_true", help="make the repository of --push public (private)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the files and their sizes; write and push nothing"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export in the folder")
    add_plugin(parser)
    parser.set_defaults(run=run_export, parser=parser)


def run_export(arguments: argparse.Namespace) -> int:
    """Runs the command; raises InputError for every error that the user can fix."""
    if arguments.pool and (why := _WITHOUT_POOL.get(arguments.to)):
        raise InputError(f"--pool has no effect with --to {arguments.to}, because {why}; leave it out")
    if arguments.public and not arguments.push:
        raise InputError("--public has no effect without --push; leave it out, or give --push USER/NAME")
    # Imported here, so that --help is fast.
    from mae_vit.weights.export.export import (
        check_place,
        check_push,
        default_folder,
        describe,
        parse_push_name,
        push,
        write_export,
    )
    from mae_vit.weights.export.source import load_for_export

    target, public = arguments.to, arguments.public
    out = arguments.out or default_folder(arguments.weights, target)
    hub = parse_push_name(arguments.push) if arguments.push else None
    if not arguments.dry_run:
        check_place(out, force=arguments.force)
        if hub:
            check_push(hub, public=public)
    source = load_for_export(arguments.weights, arguments.pool)
    for note in source.encoder.notes(arguments.weights):
        print(note, file=sys.stderr)
    if arguments.dry_run:
        with TemporaryDirectory(prefix=".mae-vit-", dir=nearest_existing(out.absolute().parent)) as folder:
            export = write_export(source, target, Path(folder) / "export", force=False, hub=hub)
            print(f"{out} would contain:")
            for path in export.files:
                print(f"  {path.stat().st_size:>13,} B  {path.relative_to(export.folder)}")
        if hub:
            visibility = "public" if public else "private"
            print(f"  to        {hub.repo} ({visibility}), branch {hub.revision or 'main'}; nothing was sent")
        return 0
    export = write_export(source, target, out, force=arguments.force, hub=hub)
    print(f"{out}: {describe(source)}")
    _report(export)
    if hub:
        url, pushed = push(out, hub, public=public)
        print(f"  pushed    {url}")
        print(f'  load      mae_vit.load_encoder("{pushed}")')
    return 0


def _report(export: Export) -> None:
    for path in export.files:
        print(f"  {'card' if path.suffix == '.md' else 'file':<9} {path}")
    print(f"  verified  {export.verified}")
    load_line = next(line for line in export.written.code.splitlines() if line.startswith("model = "))
    print(f"  use       in that folder: {load_line}")
    for note in export.written.notes:
        print(f"  note      {note}")
