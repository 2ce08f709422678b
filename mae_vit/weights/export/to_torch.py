"""`--to torch`: a program of `torch.export`, which needs none of our code to run."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram

from mae_vit.weights.export.source import ExportSource
from mae_vit.weights.export.written import Written

PROGRAM = "model.pt2"


def trace(source: ExportSource) -> ExportedProgram:
    """Traces the network, with a free number of images."""
    example = torch.zeros(2, *source.image_shape)
    program = torch.export.export(
        source.network, (example,), dynamic_shapes={"images": {0: Dim("batch", min=1)}}
    )
    for node in program.graph.nodes:
        # It names files of this machine.
        node.meta.pop("stack_trace", None)
    return program


def write(source: ExportSource, folder: Path) -> Written:
    """Writes the program, and loads it again."""
    extra_files = {f"{name}.json": value for name, value in source.metadata().items()}
    content = BytesIO()  # of a full disk torch itself raises an error that is no OSError
    torch.export.save(trace(source), content, extra_files=extra_files)
    (folder / PROGRAM).write_bytes(content.getbuffer())
    images, what = source.random_images(), source.network.output_name
    theirs = torch.export.load(folder / PROGRAM).module()(images)
    code = f"""import torch

model = torch.export.load("{PROGRAM}").module()
{what} = model(images)
"""
    note = (
        f"images are {source.image_shape}, their number is free; geometry and normalization are in the program's "
        f"extra file {', '.join(extra_files)}"
    )
    return Written({what: (source.network(images), theirs)}, code, (note,))
