"""`--to torch` and `--to onnx`: programs that run without our code."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram

from mae_vit.weights.export.source import ExportSource, Written

# An ONNX file is a protocol buffer, limited to 2 GiB; larger weights go into a second file.
_MAX_BYTES_INSIDE = 1_800_000_000


def _trace(source: ExportSource) -> ExportedProgram:
    """Traces the network, with a free number of images."""
    example = torch.zeros(2, *source.image_shape)
    program = torch.export.export(
        source.network, (example,), dynamic_shapes={"images": {0: Dim("batch", min=1)}}
    )
    for node in program.graph.nodes:
        # Names files of this machine.
        node.meta.pop("stack_trace", None)
    return program


def write_torch(source: ExportSource, folder: Path) -> Written:
    """Writes a program of `torch.export`, and loads it again."""
    extra_files = {f"{name}.json": value for name, value in source.metadata().items()}
    content = io.BytesIO()  # on a full disk torch would raise an error that is not an OSError
    torch.export.save(_trace(source), content, extra_files=extra_files)
    (folder / "model.pt2").write_bytes(content.getbuffer())
    images, what = source.random_images(), source.network.output_name
    theirs = torch.export.load(folder / "model.pt2").module()(images)
    code = f"""import torch

model = torch.export.load("model.pt2").module()
{what} = model(images)
"""
    note = f"geometry and normalization are in the program's extra file {', '.join(extra_files)}"
    return Written({what: (source.network(images), theirs)}, code, (note,))


def write_onnx(source: ExportSource, folder: Path) -> Written:
    """Writes a program for onnxruntime and other runtimes, checks it, and runs it with onnxruntime."""
    import onnx  # optional
    import onnxruntime

    path, what = folder / "model.onnx", source.network.output_name
    # Silence the exporter's progress and its remarks on other libraries.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            _trace(source), input_names=["images"], output_names=[what], verbose=False
        )
    assert program is not None
    for node in program.model.graph:
        # Names files of this machine, where the node was traced.
        node.metadata_props.clear()
    program.model.metadata_props.update(source.metadata())
    weights = sum(value.nbytes for value in source.network.state_dict().values())
    program.save(path, external_data=weights > _MAX_BYTES_INSIDE)
    onnx.checker.check_model(path)
    images = source.random_images()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (theirs,) = session.run([what], {"images": images.numpy()})
    code = f"""import onnxruntime

model = onnxruntime.InferenceSession("{path.name}", providers=["CPUExecutionProvider"])
({what},) = model.run(["{what}"], {{"images": images.numpy()}})
"""
    note = f"opset {program.model.opset_imports['']}"
    return Written({what: (source.network(images), torch.from_numpy(theirs))}, code, (note,))
