"""`--to torch`: a program of `torch.export`, which needs none of our code to run."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram

from mae_vit.weights.export.network import ExportSource
from mae_vit.weights.export.verify import Verification, expected, largest_difference, random_images

PROGRAM = "model.pt2"


def trace(handed: ExportSource) -> ExportedProgram:
    """Traces the network, with a free number of images."""
    example = torch.zeros(2, *handed.image_shape())
    with torch.no_grad():
        program = torch.export.export(
            handed.network, (example,), dynamic_shapes={"images": {0: Dim("batch", min=1)}}
        )
    for node in program.graph.nodes:
        # It names files of this machine.
        node.meta.pop("stack_trace", None)
    return program


def write(handed: ExportSource, folder: Path) -> Verification:
    """Writes the program, and loads it again."""
    content = io.BytesIO()
    extra_files = {f"{name}.json": value for name, value in handed.metadata().items()}
    torch.export.save(trace(handed), content, extra_files=extra_files)
    (folder / PROGRAM).write_bytes(content.getbuffer())
    program = torch.export.load(folder / PROGRAM).module()
    what = handed.network.output_name
    with torch.no_grad():
        theirs = program(random_images(handed))
    difference = largest_difference(expected(handed), theirs, f"the program's {what}")
    code = f"""import torch

model = torch.export.load("{PROGRAM}").module()
{what} = model(images)
"""
    notes = (
        f"images are {handed.image_shape()}, their number is free; geometry and normalization are in the program's "
        f"extra file {', '.join(extra_files)}",
    )
    line = f'torch.export.load("{PROGRAM}").module()(images)'
    return Verification(f"torch {torch.__version__}", what, difference, code, line, notes)
