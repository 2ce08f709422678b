"""What a file of weights is: it is read in whatever container, or a line says what it is and the remedy."""

import gzip
import json
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from helpers.encoders import encoder_file, info_of
from safetensors.torch import load_file, save_file

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import to_metadata
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.weights.encoder import load_encoder
from mae_vit.weights.load import load_weights
from mae_vit.weights.read import read_weights


def encoder():
    torch.manual_seed(0)
    return ViTEncoder(
        img_size=(16, 16), patch_size=4, embed_dim=128, depth=6, num_heads=4, pos_embed="learnable"
    )


TENSORS = {name: value + 0.01 for name, value in encoder().state_dict().items()}
NAMES = sorted(TENSORS)


def sharded(folder, kind):
    stem, index = {"safetensors": ("model", "model.safetensors"), "bin": ("pytorch_model",) * 2}[kind]
    where = {}
    for number, names in enumerate((NAMES[:9], NAMES[9:]), 1):
        file = f"{stem}-0000{number}-of-00002.{kind}"
        (save_file if kind == "safetensors" else torch.save)(
            {name: TENSORS[name] for name in names}, folder / file
        )
        where |= dict.fromkeys(names, file)
    suffix = "" if kind == "safetensors" else ".bin"
    (folder / f"{index}{suffix}.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def deepspeed(folder, name="mp_rank_00_model_states.pt", module=TENSORS):
    step = folder / "global_step100"
    step.mkdir()
    (folder / "latest").write_text("global_step100\n")
    torch.save({"module": module, "ds_version": "0.17"}, step / name)
    return folder


def saved(folder, tensors, name="file.pth"):
    (save_file if name.endswith("safetensors") else torch.save)(tensors, folder / name)
    return folder / name


def in_chunks(folder):
    def chunk(name):
        first, _, rest = name.partition(".")
        return f"blocks.{int(rest.split('.')[0]) // 3}.{rest}" if first == "blocks" else name

    return saved(folder, {chunk(name): value for name, value in TENSORS.items()})


def renamed(file, name):
    return file.rename(file.with_name(name))


def shared(folder):
    """Each level names the one below twice: 16 names."""
    level = TENSORS
    for _ in range(4):
        level = {"a": level, "b": level}
    return saved(folder, level)


READ = {
    "sharded safetensors": lambda folder: sharded(folder, "safetensors"),
    "an index": lambda folder: sharded(folder, "safetensors") / "model.safetensors.index.json",
    "sharded pickles": lambda folder: sharded(folder, "bin"),
    "DeepSpeed": deepspeed,
    "one step of DeepSpeed": lambda folder: deepspeed(folder) / "global_step100",
    "DINOv2's chunks of blocks": in_chunks,
    "safetensors named .pth": lambda folder: renamed(saved(folder, TENSORS, "a.safetensors"), "a.pth"),
    "a pickle named .safetensors": lambda folder: renamed(saved(folder, TENSORS), "a.safetensors"),
    "mappings that share their content": shared,
    "bfloat16": lambda folder: saved(folder, {name: value.bfloat16() for name, value in TENSORS.items()}),
}


@pytest.mark.parametrize("kind", READ)
def test_what_is_read(tmp_path, kind):
    path = READ[kind](tmp_path)
    ours = encoder()
    assert load_weights(read_weights(str(path)), ours).share == 1
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if kind == "bfloat16" else {"rtol": 0, "atol": 0}
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, TENSORS[name], **tolerance)


def written(folder, content, name="file.pth"):
    (folder / name).write_bytes(content)
    return folder / name


def cut(folder, name):
    file = saved(folder, TENSORS, name)
    return written(folder, file.read_bytes()[:-300], name)


def zipped(folder):
    with zipfile.ZipFile(folder / "file.zip", "w") as file:
        file.write(saved(folder, TENSORS), "file.pth")
    return folder / "file.zip"


def deflated(folder):
    with (
        zipfile.ZipFile(saved(folder, TENSORS)) as stored,
        zipfile.ZipFile(folder / "small.pth", "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for name in stored.namelist():
            file.writestr(name, stored.read(name))
    return folder / "small.pth"


def tarred(folder):
    with tarfile.open(folder / "file.tar", "w") as file:
        file.add(saved(folder, TENSORS), "file.pth")
    return folder / "file.tar"


def jax(folder):
    np.savez(folder / "B_16.npz", **{"embedding/kernel": np.zeros((4, 4, 3, 8), np.float32)})
    return folder / "B_16.npz"


def script(folder):
    torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(str(folder / "model.pt"))
    return folder / "model.pt"


def distributed(folder):
    (folder / "__0_0.distcp").write_bytes(b"x")
    return folder


def cast(folder, dtype):
    return saved(folder, {key: value.to(dtype) for key, value in TENSORS.items()})


def adam():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


ADAPTER = {"base_model.model.encoder.layer.0.attention.query.lora_A.weight": torch.zeros(8, 128)}
FSDP = {"_fsdp_wrapped_module._flat_param": torch.zeros(9)}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
EMPTY = {name: torch.empty(0) for name in NAMES}
REFUSED = {
    "a web page": lambda d: written(d, b"\n<!DOCTYPE html><html>"),
    "an error of a server": lambda d: written(d, b'{"error": "Not Found"}'),
    "LFS": lambda d: written(d, LFS, "a.safetensors"),
    "empty": lambda d: written(d, b"", "a.safetensors"),
    "an image": lambda d: written(d, b"\xff\xd8\xff\xe0 0123456789"),
    "gzip": lambda d: written(d, gzip.compress(b"weights")),
    "zip": zipped,
    "a torch file packed again": deflated,
    "tar": tarred,
    "a torch file cut short": lambda d: cut(d, "a.pth"),
    "safetensors cut short": lambda d: cut(d, "a.safetensors"),
    "JAX": jax,
    "TorchScript": script,
    "one of two files": lambda d: sharded(d, "safetensors") / "model-00001-of-00002.safetensors",
    "ZeRO-3": lambda d: deepspeed(d, "zero_pp_rank_0_mp_rank_00_model_states.pt", EMPTY),
    "FSDP": lambda d: saved(d, FSDP),
    "a distributed checkpoint": distributed,
    "int8": lambda d: cast(d, torch.int8),
    "float8": lambda d: cast(d, torch.float8_e4m3fn),
    "an adapter": lambda d: saved(d, ADAPTER, "adapter_model.safetensors"),
    "an adapter in its network": lambda d: saved(
        d, {**TENSORS, "blocks.0.attn.qkv.lora_A.default.weight": torch.zeros(8, 128)}
    ),
    "NumPy by torch": lambda d: saved(d, {"model": {name: value.numpy() for name, value in TENSORS.items()}}),
    "NumPy by pickle": lambda d: written(
        d, pickle.dumps({name: value.numpy() for name, value in TENSORS.items()})
    ),
    "a list": lambda d: saved(d, [*TENSORS.values()]),
    "an optimizer": lambda d: saved(d, {"epoch": 3, "optimizer": adam()}),
    "ONNX": lambda d: written(d, b"\x08\x0a", "a.onnx"),
    "a folder of ONNX": lambda d: written(d, b"\x08\x0a", "a.onnx").parent,
    "no tensors": lambda d: saved(d, {"epoch": 3}),
    "sparse": lambda d: saved(d, {**TENSORS, "norm.weight": TENSORS["norm.weight"].to_sparse()}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_and_why(tmp_path, kind, said):
    with pytest.raises(InputError) as error:
        read_weights(str(REFUSED[kind](tmp_path)))
    said(error)
    assert "\n" not in str(error.value)


def test_a_missing_file_of_several_is_named(tmp_path, said):
    (sharded(tmp_path, "bin") / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(InputError) as error:
        read_weights(str(tmp_path))
    said(error)


def test_positions_without_the_class_tokens_row_are_the_same_function(tmp_path):
    with_row = {**TENSORS, "pos_embed": TENSORS["pos_embed"].clone()}
    with_row["pos_embed"][:, 0] = 0
    expected = load_encoder(saved(tmp_path, with_row))
    without = load_encoder(saved(tmp_path, {**with_row, "pos_embed": with_row["pos_embed"][:, 1:]}))
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(without(images), expected(images), rtol=0, atol=0)
    report = load_weights(without.weights, encoder())
    assert set(report.adapted) == {"pos_embed"}


def test_as_many_rows_as_a_square_has_may_be_those_of_the_model(tmp_path):
    # 3 x 5 patches and the class token are 16 rows.
    torch.manual_seed(0)
    options = {"img_size": (12, 20), "patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4}
    ours = ViTEncoder(**options, pos_embed="learnable")
    path = saved(tmp_path, ours.state_dict())
    assert "pos_embed" in load_weights(read_weights(str(path)), ours).loaded


def test_what_a_file_does_not_say_is_said_to_be_assumed(tmp_path):
    model = load_encoder(saved(tmp_path, TENSORS))
    assert "num_heads=4 and square" in load_weights(model.weights, encoder()).remarks["assumed"]
    heads, normalization = model.notes("a.pth")
    assert "num_heads=4 and square" in heads
    assert "ImageNet" in normalization


@pytest.mark.parametrize(
    "lost",
    [
        *("blocks.5.norm2.weight", "norm.", "fc_norm.bias", "blocks.0.", "blocks.3.", "pos_embed"),
        "blocks.3.attn.qkv.bias",
    ],
)
def test_an_encoder_that_lacks_a_tensor_gives_no_features(tmp_path, lost, said):
    behind = {f"fc_{name}": TENSORS[name] for name in ("norm.weight", "norm.bias") if lost.startswith("fc_")}
    left = {name: value for name, value in (TENSORS | behind).items() if not name.startswith(lost)}
    with pytest.raises(InputError) as error:
        load_encoder(saved(tmp_path, left))
    said(error)


def test_what_others_keep_elsewhere_or_compute_is_not_missing(tmp_path):
    """A norm behind the mean, in place of that before it; a table of positions that follows from its size."""
    behind = {
        name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: value
        for name, value in TENSORS.items()
    }
    images = torch.randn(2, 3, 16, 16)
    expected = load_encoder(saved(tmp_path, TENSORS, "whole.pth"), pool="cls")(images)
    torch.testing.assert_close(load_encoder(saved(tmp_path, behind), pool="cls")(images), expected)
    left = load_file(encoder_file(tmp_path / "whole.safetensors"))
    del left["pos_embed"]
    save_file(left, tmp_path / "left.safetensors", metadata=to_metadata(info_of().to_dict()))
    whole, short = (load_encoder(tmp_path / f"{name}.safetensors") for name in ("whole", "left"))
    assert torch.equal(short(images), whole(images))
