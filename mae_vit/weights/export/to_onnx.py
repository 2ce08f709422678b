"""`--to onnx`: a program for onnxruntime and other runtimes."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from mae_vit.weights.export.network import ExportSource
from mae_vit.weights.export.to_torch import trace
from mae_vit.weights.export.verify import Verification, expected, largest_difference, library, random_images

PROGRAM = "model.onnx"
# A file of ONNX is a protocol buffer, which ends at 2 GiB; larger weights lie beside it.
_MAX_BYTES_INSIDE = 1_800_000_000


def write(handed: ExportSource, folder: Path) -> Verification:
    """Writes the program, checks it, and runs it with onnxruntime.

    Raises:
        InputError: if the libraries for it are not installed.
    """
    onnx, runtime = library("onnx", "onnx"), library("onnxruntime", "onnx")
    library("onnxscript", "onnx")
    what = handed.network.output_name
    with _quiet():
        program = torch.onnx.export(trace(handed), input_names=["images"], output_names=[what], verbose=False)
    assert program is not None
    for node in program.model.graph:
        # Where each was traced, which names files of this machine.
        node.metadata_props.clear()
    program.model.metadata_props.update(handed.metadata())
    weights = sum(value.nbytes for value in handed.network.state_dict().values())
    program.save(folder / PROGRAM, external_data=weights > _MAX_BYTES_INSIDE)
    onnx.checker.check_model(folder / PROGRAM)
    session = runtime.InferenceSession(folder / PROGRAM, providers=["CPUExecutionProvider"])
    (theirs,) = session.run([what], {"images": random_images(handed).numpy()})
    difference = largest_difference(expected(handed), torch.from_numpy(theirs), f"onnxruntime's {what}")
    code = f"""import onnxruntime

model = onnxruntime.InferenceSession("{PROGRAM}", providers=["CPUExecutionProvider"])
({what},) = model.run(["{what}"], {{"images": images.numpy()}})
"""
    (opset,) = (entry.version for entry in onnx.load(folder / PROGRAM, load_external_data=False).opset_import)
    notes = (f"opset {opset}; input images float32 (batch, {', '.join(map(str, handed.image_shape()))})",)
    line = f'onnxruntime.InferenceSession("{PROGRAM}").run(["{what}"], {{"images": images.numpy()}})'
    return Verification(f"onnxruntime {runtime.__version__}", what, difference, code, line, notes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the exporter says of its progress, and of libraries that are not ours."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
