"""check: every damage is found and named."""

import numpy as np
from helpers.damage import description

from mae_vit.cli.main import main
from mae_vit.data.shards.dataset_json import file_digest


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
