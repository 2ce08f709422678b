"""check: every damage is found and named."""

import numpy as np
from helpers.damage import description

from mae_vit.cli.main import main
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import file_digest


def test_a_damaged_image_is_named_by_its_key(copy, capsys):
    index = open_index(copy, "train")
    row = index._rows[0]
    path = copy / index.split_info.shards[int(row["shard"])].file
    data = bytearray(path.read_bytes())
    data[int(row["offset"]) : int(row["offset"]) + 30] = bytes(30)
    path.write_bytes(data)
    assert main(["check", str(copy)]) == 1
    key = index.damage(0, "why").key
    assert f"{key}.png at offset {row['offset']}" in capsys.readouterr().out


def test_missing_and_truncated_shards(copy, capsys):
    (copy / "train-000000.tar").unlink()
    path = copy / "test-000000.tar"
    path.write_bytes(path.read_bytes()[:-4000])
    assert main(["check", str(copy)]) == 1
    output = capsys.readouterr().out
    assert "train-000000.tar: " in output
    assert "test-000000.tar: " in output


def test_a_class_without_a_name_is_found(copy, capsys):
    with description(copy) as described:
        described["classes"].pop()
    assert main(["check", str(copy)]) == 1
    assert "class 9" in capsys.readouterr().out


def test_an_index_that_says_other_samples_is_found(copy, capsys, said):
    path = copy / "train-index.npy"
    rows = np.load(path)
    rows["label"][401] ^= 1
    np.save(path, rows)
    with description(copy) as described:
        described["splits"]["train"]["index"]["sha256"] = file_digest(path)
    assert main(["check", str(copy)]) == 1
    said(capsys.readouterr().out)


def test_the_count_and_the_names_read_well(copy, capsys, said):
    path = copy / "train-000002.tar"
    data = bytearray(path.read_bytes())
    data[600] ^= 1  # in an image, not in a header
    path.write_bytes(data)
    assert main(["check", str(copy)]) == 1
    said(capsys.readouterr().out)
    path.write_bytes(b"x" * 512 + bytes(data[512:]))
    assert main(["check", str(copy)]) == 1
    said(capsys.readouterr().out)
