"""`--to onnx`: a program for onnxruntime and other runtimes."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import torch

from mae_vit.weights.export.source import ExportSource
from mae_vit.weights.export.to_torch import trace
from mae_vit.weights.export.written import Written

PROGRAM = "model.onnx"
# A file of ONNX is a protocol buffer, which ends at 2 GiB; larger weights lie beside it.
_MAX_BYTES_INSIDE = 1_800_000_000


def write(source: ExportSource, folder: Path) -> Written:
    """Writes the program, checks it, and runs it with onnxruntime."""
    import onnx  # optional
    import onnxruntime

    what = source.network.output_name
    # The exporter reports its progress, and what it thinks of other libraries.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(trace(source), input_names=["images"], output_names=[what], verbose=False)
    assert program is not None
    for node in program.model.graph:
        # Where each was traced, which names files of this machine.
        node.metadata_props.clear()
    program.model.metadata_props.update(source.metadata())
    weights = sum(value.nbytes for value in source.network.state_dict().values())
    program.save(folder / PROGRAM, external_data=weights > _MAX_BYTES_INSIDE)
    onnx.checker.check_model(folder / PROGRAM)
    images = source.random_images()
    session = onnxruntime.InferenceSession(folder / PROGRAM, providers=["CPUExecutionProvider"])
    (theirs,) = session.run([what], {"images": images.numpy()})
    code = f"""import onnxruntime

model = onnxruntime.InferenceSession("{PROGRAM}", providers=["CPUExecutionProvider"])
({what},) = model.run(["{what}"], {{"images": images.numpy()}})
"""
    opset = program.model.opset_imports[""]
    note = f"opset {opset}; input images float32 (batch, {', '.join(map(str, source.image_shape))})"
    return Written({what: (source.network(images), torch.from_numpy(theirs))}, code, (note,))
