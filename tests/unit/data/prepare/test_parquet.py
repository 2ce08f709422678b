"""Parquet files and data sets of the Hub: each image byte for byte, read once; one line for what goes wrong."""

import base64
import json
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.images import encoded, img2dataset, picture, read_back
from helpers.servers.hub_server import TOKEN, Hub, use_hub

from mae_vit.cli.main import main
from mae_vit.data.prepare.sources import parquet
from mae_vit.data.shards.dataset_json import read_dataset

JPEGS = [encoded(picture(n)) for n in range(12)]
NAMED = {"_type": "ClassLabel", "names": ["cat", "dog", "eel"]}


def prepare(*arguments: object) -> int:
    return main(["prepare", "--workers", "0", *map(str, arguments)])


def table(images, labels=None, *, paths=None, features=None, image="image", label="label") -> pa.Table:
    """As the datasets library writes them: {bytes, path}, ClassLabel, and a note on both."""
    paths = paths or [None] * len(images)
    rows = [
        None if data is None else {"bytes": data, "path": path}
        for data, path in zip(images, paths, strict=True)
    ]
    columns = {image: pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))}
    if labels is not None:
        columns[label] = pa.array(labels)
    found = pa.table(columns)
    if features is not None:
        found = found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    return found


def written(found: pa.Table, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(found, path, **{"row_group_size": 5, **options})
    return path


def content(found: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(found, sink, row_group_size=5)
    return sink.getvalue().to_pybytes()


def by_image(out, split="train") -> dict[bytes, str]:
    """Class of each image of a split, by its bytes."""
    classes = read_dataset(out).classes
    return {
        next(data for name, data in sample.items() if name != "cls"): (
            classes[int(sample["cls"])] if "cls" in sample else ""
        )
        for sample in read_back(out, split).values()
    }


def hidden(out) -> list[str]:
    return sorted(path.name for path in out.rglob("*") if "/." in f"/{path.relative_to(out)}")


def test_rows_become_shards_byte_for_byte(tmp_path):
    labels = [n % 3 for n in range(12)]
    found = table(
        JPEGS, labels, paths=[f"/cache/of.others/../{n}.jpg" for n in range(12)], features={"label": NAMED}
    )
    written(found.slice(0, 8), tmp_path / "src" / "data" / "train-00000-of-00002.parquet")
    written(found.slice(8, 2), tmp_path / "src" / "data" / "train-00001-of-00002.parquet")
    written(found.slice(10), tmp_path / "src" / "data" / "validation-00000-of-00001.parquet")
    out = tmp_path / "out"
    assert prepare(tmp_path / "src", out) == 0
    assert by_image(out) == {JPEGS[n]: NAMED["names"][n % 3] for n in range(10)}
    assert by_image(out, "val") == {JPEGS[n]: NAMED["names"][n % 3] for n in (10, 11)}
    assert set(read_back(out)) == {str(n) for n in range(10)}
    dataset = read_dataset(out)
    assert dataset.classes == NAMED["names"]
    assert dataset.splits["train"].source == "src"
    assert not hidden(out)


def test_files_that_a_shell_lists_are_one_source(tmp_path):
    for part in range(3):
        written(table(JPEGS[4 * part : 4 * part + 4]), tmp_path / "src" / f"{part}.parquet")
    out = tmp_path / "out"
    assert prepare(*sorted((tmp_path / "src").glob("*.parquet")), out) == 0
    assert by_image(out) == dict.fromkeys(JPEGS, "")
    assert read_dataset(out).splits["train"].source == "3 files of src"
    # Rows that tell no path are named by file and place.
    assert {"0-000000", "2-000003"} <= set(read_back(out))


@pytest.mark.parametrize(
    ("found", "options", "classes"),
    [
        (pa.table({"jpg": JPEGS, "md5": [b"x"] * 12, "class_name": ["b", "a", None] * 4}), [], ["a", "b"]),
        (table(JPEGS, [0, 2, -1] * 4), [], ["0", "1", "2"]),
        (table(JPEGS, [0, 2, 1] * 4), ["--no-labels"], []),
        (
            pa.table({"jpg": JPEGS, "kind": pa.array(["b", "a"] * 6).dictionary_encode()}),
            ["--label-column", "kind"], ["a", "b"],
        ),
        (pa.table({"left": JPEGS, "right": JPEGS[::-1]}), ["--image-column", "left"], []),
        (table(JPEGS, [1, 0] * 6, features={"label": {"_type": "Value"}}, label="target"), [], ["0", "1"]),
    ],
)  # fmt: skip
def test_columns_are_found_or_chosen(tmp_path, found, options, classes):
    out = tmp_path / "out"
    assert prepare(written(found, tmp_path / "a.parquet"), out, *options) == 0
    assert read_dataset(out).classes == classes
    assert set(by_image(out)) == set(JPEGS)
    if classes == ["a", "b"]:
        assert by_image(out)[JPEGS[0]] == "b"


def test_the_image_is_preferred_to_other_pictures_with_a_note(tmp_path, capsys):
    both = table(JPEGS).append_column("mask", table(JPEGS[::-1])["image"])
    assert prepare(written(both, tmp_path / "a.parquet"), tmp_path / "out") == 0
    assert "images are of column image, not of mask" in capsys.readouterr().out


TWO_LABELS = {"fine": NAMED, "coarse": NAMED}
REFUSED = {
    "no images": (
        pa.table({"label": [1, 2]}), [], "no column of images, which are {bytes, path}, binary or base64: it has label",
    ),
    "two of images": (
        pa.table({"left": JPEGS, "right": JPEGS}), [], "columns of images, left, right: choose by --image-column",
    ),
    "two of labels": (
        table(JPEGS[:2], [0, 1], label="fine", features=TWO_LABELS).append_column("coarse", pa.array([0, 1])),
        [], "several columns of labels, fine, coarse: choose by --label-column",
    ),
    "paths": (pa.table({"image": ["1.jpg"], "label": [1]}), [], "of paths, write them and the labels as a CSV"),
    "misspelled": (table(JPEGS), ["--image-column", "imgae"], 'no such column: did you mean "image"?'),
    "of another type": (table(JPEGS, [0.5] * 12), ["--label-column", "label"], "which is no class"),
    "no such class": (
        table(JPEGS[:2], [0, 3], features={"label": NAMED}), [], "row 1: its label says class 3; there are 3",
    ),
    "no such number": (table(JPEGS[:2], [0, 1 << 40]), [], "at most 1000000 are taken"),
    "of no Hub": (table(JPEGS), ["--config-name", "x"], "--config-name changes nothing: no source is hf:USER/NAME"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line_and_leaves_nothing(tmp_path, capfd, case):
    found, options, line = REFUSED[case]
    out = tmp_path / "out"
    assert prepare(written(found, tmp_path / "a.parquet"), out, *options) == 2
    said = capfd.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1
    assert not out.exists()


def test_whole_numbers_with_gaps_are_labels_and_the_gaps_are_said(tmp_path, capsys):
    written(table(JPEGS[:5], [1.0, None, 0.0, float("nan"), -1.0]), tmp_path / "a.parquet")
    assert prepare(tmp_path / "a.parquet", tmp_path / "out") == 0
    assert by_image(tmp_path / "out") == dict(zip(JPEGS[:5], ["1", "", "0", "", ""], strict=True))
    assert "3 images without a label: the column holds none, or a negative number" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"label": [[0, 2], [1]]}, "column label holds list<"),
        ({"label": [{"a": 0}, {"a": 1}]}, "column label holds struct<"),
        ({"label": [0.5, 1.0]}, "column label holds 0.5, which is no class"),
        (
            {"fine_label": [3, 4], "coarse_label": [0, 1]},
            "several columns of labels, fine_label, coarse_label: choose",
        ),
    ],
)
def test_labels_that_are_not_one_class_are_a_question(tmp_path, capsys, columns, expected):
    found = table(JPEGS[:2])
    for name, values in columns.items():
        found = found.append_column(name, pa.array(values))
    written(found, tmp_path / "a.parquet")
    assert prepare(tmp_path / "a.parquet", tmp_path / "out") == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert prepare(tmp_path / "a.parquet", tmp_path / "out", "--no-labels") == 0


def test_a_column_of_splits_is_read(tmp_path):
    found = table(JPEGS, [0, 1] * 6).append_column(
        "split", pa.array([*["train"] * 8, *["validation"] * 3, None])
    )
    assert prepare(written(found, tmp_path / "a.parquet"), tmp_path / "out") == 0
    assert {name: len(by_image(tmp_path / "out", name)) for name in ("train", "val")} == {
        "train": 9,
        "val": 3,
    }


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_a_column_of_splits_may_be_of_any_kind_of_text(tmp_path, kind):
    splits = pa.array([*["train"] * 8, *["test"] * 4]).cast(kind)
    assert (
        prepare(
            written(table(JPEGS).append_column("Split", splits), tmp_path / "a.parquet"), tmp_path / "out"
        )
        == 0
    )
    assert {name: len(by_image(tmp_path / "out", name)) for name in ("train", "test")} == {
        "train": 8,
        "test": 4,
    }


def test_truth_values_are_labels(tmp_path):
    path = written(table(JPEGS, [n % 3 == 0 for n in range(12)]), tmp_path / "a.parquet")
    assert prepare(path, tmp_path / "out") == 0
    assert by_image(tmp_path / "out") == {image: str(n % 3 == 0) for n, image in enumerate(JPEGS)}


def test_columns_that_are_not_read_are_named(tmp_path, capsys):
    found = table(JPEGS).append_column("species", pa.array(["x", "y"] * 6))
    path = written(found.append_column("id", pa.array(range(12))), tmp_path / "a.parquet")
    said = "no labels; columns that are not read: species, id (--label-column NAME takes one)"
    assert prepare(path, tmp_path / "out") == 0
    assert said in capsys.readouterr().out
    assert prepare(path, tmp_path / "out", "--overwrite", "--label-column", "species") == 0
    assert prepare(path, tmp_path / "out", "--overwrite", "--no-labels") == 0
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize("before", ["", "data:image/jpeg;base64,"])
@pytest.mark.parametrize("options", [[], ["--image-column", "picture"]])
def test_images_in_base64_are_read(tmp_path, capsys, before, options):
    texts = [before + base64.b64encode(data).decode() for data in JPEGS]
    texts[3] = "nothing"
    path = written(pa.table({"caption": ["a cat"] * 12, "picture": texts}), tmp_path / "a.parquet")
    assert prepare(path, tmp_path / "out", *options) == 0
    assert set(by_image(tmp_path / "out")) == {*JPEGS} - {JPEGS[3]}
    assert "a.parquet, row 3: it holds no image" in capsys.readouterr().out


def test_paths_without_bytes_name_the_remedy(tmp_path, capsys):
    rows = [{"bytes": JPEGS[0], "path": "0.jpg"}, {"bytes": None, "path": "1.jpg"}]
    found = pa.table({"image": pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))})
    assert prepare(written(found, tmp_path / "a.parquet"), tmp_path / "out") == 0
    assert (
        "it holds a path and no bytes: write paths and labels as a CSV, and give that"
        in capsys.readouterr().out
    )


def test_two_configurations_are_a_question(tmp_path, capsys):
    files = [
        written(table(JPEGS, [0, 1] * 6), tmp_path / "a" / name / "0.parquet") for name in ("full", "small")
    ]
    assert prepare(tmp_path / "a", tmp_path / "out") == 2
    assert "full and small hold files of one name, 0.parquet: of a data set in" in capsys.readouterr().err
    assert prepare(*files, tmp_path / "out") == 0
    for name in ("train", "test"):
        written(table(JPEGS, [0, 1] * 6), tmp_path / "b" / name / "0.parquet")
    assert prepare(tmp_path / "b", tmp_path / "two") == 0


def test_a_file_that_is_no_parquet_is_one_line(tmp_path, capfd):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    assert prepare(tmp_path / "a.parquet", tmp_path / "out") == 2
    said = capfd.readouterr().err
    assert "a.parquet is no whole Parquet file" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_damaged_rows_and_row_groups_are_counted_and_the_others_written(tmp_path, capsys):
    rows = list(JPEGS)
    rows[1], rows[2], rows[3] = None, JPEGS[2][:100], b""
    found = table(rows, paths=[f"{n}.jpg" for n in range(12)])
    path = written(found, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    assert prepare(path, tmp_path / "out") == 0
    assert set(by_image(tmp_path / "out")) == {JPEGS[0], *JPEGS[4:]}
    said = capsys.readouterr().out
    assert "left out 3 unreadable images" in said
    assert "a.parquet, row 1: it holds no image" in said
    assert "a.parquet, row 2 (2.jpg):" in said

    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[group.data_page_offset : group.data_page_offset + 40] = b"\xff" * 40
    path.write_bytes(data)
    assert prepare(path, tmp_path / "out2") == 0
    assert set(by_image(tmp_path / "out2")) == {JPEGS[0], JPEGS[4], JPEGS[10], JPEGS[11]}
    assert "row group 1 is damaged" in capsys.readouterr().out


def test_tables_beside_shards_are_not_read(tmp_path):
    """img2dataset writes one beside each shard."""
    source = img2dataset(tmp_path / "src")
    written(pa.table({"url": ["x"]}), source / "00000.parquet")
    assert prepare(source, tmp_path / "out") == 0
    assert read_dataset(tmp_path / "out").splits["train"].samples == 12


def test_a_split_that_exists_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys):
    path, out = written(table(JPEGS), tmp_path / "a.parquet"), tmp_path / "out"
    assert prepare(path, out) == 0
    before = sorted(out.iterdir())
    monkeypatch.setattr(parquet, "read_rows", None)
    assert prepare(path, out) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert sorted(out.iterdir()) == before


def test_what_prepare_refuses_leaves_no_copy(tmp_path):
    path, out = written(table(JPEGS), tmp_path / "a.parquet"), tmp_path / "out"
    assert prepare(path, out, "--exclude", tmp_path / "nowhere") == 2
    assert not out.exists()
    assert prepare(written(table([]), tmp_path / "empty.parquet"), out) == 2
    assert not out.exists()


def test_files_read_whole_are_not_read_again_after_a_kill(tmp_path, monkeypatch):
    paths = [written(table(JPEGS[6 * n : 6 * n + 6]), tmp_path / "src" / f"{n}.parquet") for n in range(2)]
    out, real, read = tmp_path / "out", parquet.read_rows, []

    def dies_in_the_second(opened, columns):
        read.append(opened)
        for row in real(opened, columns):
            if len(read) == 2:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(parquet, "read_rows", dies_in_the_second)
    assert prepare(*paths, out) == 130
    assert not list(out.glob("*"))[1:]
    assert len(hidden(out)) == 3
    monkeypatch.setattr(parquet, "read_rows", lambda *given: (read.append(given), real(*given))[1])
    assert prepare(*paths, out) == 0
    assert len(read) == 3
    assert set(by_image(out)) == set(JPEGS)
    assert not hidden(out)
    # Another content is read again.
    read.clear()
    written(table(JPEGS[:2]), paths[0])
    assert prepare(*paths, out, "--overwrite") == 0
    assert len(read) == 2


# -- data sets of the Hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    use_hub(server, monkeypatch, tmp_path / "hub_cache")
    yield server
    server.stop()


def shards(start=0) -> dict[str, bytes]:
    features = {"image": {"_type": "Image"}, "label": NAMED}
    labels = [n % 3 for n in range(12)]
    found = table(JPEGS[start:] + JPEGS[:start], labels, features=features)
    return {
        "README.md": b"# cats",
        "data/train-00000-of-00002.parquet": content(found.slice(0, 5)),
        "data/train-00001-of-00002.parquet": content(found.slice(5, 5)),
        "data/test-00000-of-00001.parquet": content(found.slice(10)),
    }


def test_a_data_set_of_the_hub_is_prepared_at_its_commit(hub, tmp_path):
    repo = hub.add("anna/cats", shards(), kind="dataset")
    out = tmp_path / "out"
    assert prepare("hf:anna/cats", out) == 0
    assert by_image(out) == {JPEGS[n]: NAMED["names"][n % 3] for n in range(10)}
    assert set(by_image(out, "test")) == set(JPEGS[10:])
    assert {info.source for info in read_dataset(out).splits.values()} == {
        f"hf:anna/cats@{repo.refs['main']}"
    }
    assert len(hub.downloads(".parquet")) == 3
    assert not hidden(out)
    assert not list((tmp_path / "hub_cache").rglob("*.parquet"))


def test_what_the_hub_converted_serves_where_there_is_no_parquet(hub, tmp_path, capsys):
    repo = hub.add("anna/cats", {"images.zip": b"zip"}, kind="dataset")
    converted = {
        "default/train/0000.parquet": content(table(JPEGS[:6])),
        "default/partial-validation/0000.parquet": content(table(JPEGS[6:8])),
        "small/train/0000.parquet": content(table(JPEGS[8:])),
    }
    commit = repo.commit(converted, "refs/convert/parquet")
    assert prepare("hf:anna/cats", tmp_path / "out") == 0
    assert set(by_image(tmp_path / "out")) == set(JPEGS[:6])
    assert set(by_image(tmp_path / "out", "val")) == set(JPEGS[6:8])
    assert "of the configuration default, not of small" in capsys.readouterr().out
    assert prepare("hf:anna/cats", tmp_path / "small", "--config-name", "small") == 0
    assert set(by_image(tmp_path / "small")) == set(JPEGS[8:])
    assert read_dataset(tmp_path / "small").splits["train"].source == f"hf:anna/cats@{commit}, small"


def test_a_dropped_connection_leaves_no_split_and_the_next_call_resumes_at_the_commit(hub, tmp_path, capfd):
    repo = hub.add("anna/cats", shards(), kind="dataset")
    first, out = repo.refs["main"], tmp_path / "out"
    hub.faults["GET /datasets/anna/cats/resolve/" + first + "/data/train-00001"] = ["always 503"]
    assert prepare("hf:anna/cats", out) == 75
    said = capfd.readouterr().err
    assert "status 503" in said
    assert len(said.splitlines()) == 1
    assert not [path for path in out.glob("*") if not path.name.startswith(".")]
    hub.faults.clear()
    repo.commit(shards(start=3))
    hub.requests.clear()
    assert prepare("hf:anna/cats", out) == 0
    assert f"resumed at hf:anna/cats@{first}" in capfd.readouterr().out
    assert len(hub.downloads(".parquet")) == 1
    assert by_image(out) == {JPEGS[n]: NAMED["names"][n % 3] for n in range(10)}
    assert read_dataset(out).splits["train"].source == f"hf:anna/cats@{first}"
    assert not hidden(out)
    # What is asked for anew is of the newer commit.
    assert prepare("hf:anna/cats", out) == 2
    assert not hidden(out)
    assert prepare("hf:anna/cats", out, "--overwrite") == 0
    assert read_dataset(out).splits["train"].source == f"hf:anna/cats@{repo.refs['main']}"


def test_offline_the_cache_serves(hub, tmp_path, monkeypatch, capfd):
    from huggingface_hub import constants, snapshot_download

    repo = hub.add("anna/cats", shards(), kind="dataset")
    snapshot_download("anna/cats", repo_type="dataset")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert prepare("hf:anna/cats", tmp_path / "out") == 0
    assert set(by_image(tmp_path / "out")) == set(JPEGS[:10])
    assert read_dataset(tmp_path / "out").splits["train"].source == f"hf:anna/cats@{repo.refs['main']}"
    capfd.readouterr()
    assert prepare("hf:anna/dogs", tmp_path / "dogs") == 2
    assert "hf:anna/dogs is not in the cache, and HF_HUB_OFFLINE" in capfd.readouterr().err
    assert not hub.requests


WRONG = {
    "hf:anna/dogs": (2, "there is no dataset anna/dogs on the Hub, or it is private"),
    "hf:anna/cats@mian": (2, 'has no revision "mian": did you mean "main"?'),
    "hf:anna/private": (2, "there is no dataset anna/private on the Hub"),
    "hf:anna/gated": (2, "is gated: ask for access on its page"),
    "hf:anna/texts": (2, "has no Parquet files"),
    "hf:anna/columns": (2, "has no column of images"),
    "hf:anna/configs": (2, "has the configurations a, b: choose by --config-name"),
    "hf:a/b/c": (2, 'give "hf:USER/NAME[@REVISION]"'),
    "hf:anna/lies": (75, "arrived damaged: run the command again"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_one_line(hub, tmp_path, capfd, name):
    code, line = WRONG[name]
    for one in ("cats", "private", "gated", "lies"):
        options = {one: True} if one in ("private", "gated") else {}
        hub.add(f"anna/{one}", shards(), kind="dataset", **options)
    hub.add("anna/texts", {"a.txt": b"text"}, kind="dataset")
    hub.add("anna/columns", {"a.parquet": content(pa.table({"text": ["x"]}))}, kind="dataset")
    hub.add("anna/configs", {f"{c}/train-0.parquet": content(table(JPEGS)) for c in "ab"}, kind="dataset")
    hub.wrong_digests = name == "hf:anna/lies"
    out = tmp_path / "out"
    assert prepare(name, out) == code
    said = capfd.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1
    assert not out.exists() or (code == 75 and not list(out.glob("*.*"))[1:])


@pytest.mark.parametrize("token", [TOKEN, "hf_wrong"])
def test_the_token_opens_what_is_gated_and_a_wrong_one_is_one_line(hub, tmp_path, capfd, monkeypatch, token):
    hub.add("anna/gated", shards(), kind="dataset", gated=True)
    monkeypatch.setenv("HF_TOKEN", token)
    assert prepare("hf:anna/gated", tmp_path / "out") == (0 if token == TOKEN else 2)
    captured = capfd.readouterr()
    assert token not in captured.out + captured.err
    if token != TOKEN:
        assert "the Hub refuses the token" in captured.err
        assert len(captured.err.splitlines()) == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_preparation_resumes(hub, tmp_path):
    """SIGKILL in a process of its own, in the middle of the second file."""
    repo = hub.add("anna/cats", shards(), kind="dataset")
    first, out = repo.refs["main"], tmp_path / "out"
    environment = {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin", "PYTHONPATH": ".",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "mae_vit.cli.main",
        "prepare",
        "hf:anna/cats",
        str(out),
        "--workers",
        "0",
    ]
    hub.faults["GET /datasets/anna/cats/resolve/" + first + "/data/train-00001"] = ["always stall"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    for _ in range(1200):
        if any("train-00001" in path for _, path in hub.requests if "/resolve/" in path and _ == "GET"):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not [path for path in out.glob("*") if not path.name.startswith(".")]
    hub.faults.clear()
    repo.commit(shards(start=3))
    hub.requests.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"resumed at hf:anna/cats@{first}" in done.stdout
    assert len(hub.downloads(".parquet")) == 1
    assert by_image(out) == {JPEGS[n]: NAMED["names"][n % 3] for n in range(10)}
    assert not hidden(out)
