"""Parquet files and data sets of the Hub: each image byte for byte; one line for what goes wrong."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.images import encoded, picture, write_files
from huggingface_hub import HfFileSystem

from mae_vit.data.prepare.sources import rows

PNG = encoded(picture(40), "png")
JPEGS = [encoded(picture(n, (8, 8))) for n in range(12)]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NAMED = {"_type": "ClassLabel", "names": ["cat", "dog", "eel"]}


def table(images, labels=None, *, paths=None, features=None, label="label", **columns) -> pa.Table:
    """As the datasets library writes them: {bytes, path}, ClassLabel, and a note on both."""
    cells = [
        None if data is None else {"bytes": data, "path": path}
        for data, path in zip(images, paths or [None] * len(images), strict=True)
    ]
    named = {} if labels is None else {label: pa.array(labels)}
    data = pa.table({"image": pa.array(cells, IMAGE), **named, **columns})
    note = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    return data.replace_schema_metadata(note)


def written(data: pa.Table, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(data, path, **{"row_group_size": 5, **options})
    return path


def content(data: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(data, sink, row_group_size=5)
    return sink.getvalue().to_pybytes()


def by_image(result, split="train") -> dict[bytes, str]:
    """Class of each image of a split, by its bytes."""
    classes = result.dataset.classes
    return {
        next(data for name, data in sample.items() if name != "cls"): (
            classes[int(sample["cls"])] if "cls" in sample else ""
        )
        for sample in result.images(split).values()
    }


def test_rows_become_shards_byte_for_byte(tmp_path, call):
    labels = [n % 3 for n in range(12)]
    paths = [f"/cache/of.others/../{n}.jpg" for n in range(12)]
    whole = table(JPEGS, labels, paths=paths, features={"label": NAMED})
    written(whole.slice(0, 8), tmp_path / "src" / "data" / "train-00000-of-00002.parquet")
    written(whole.slice(8, 2), tmp_path / "src" / "data" / "train-00001-of-00002.parquet")
    written(whole.slice(10), tmp_path / "src" / "data" / "validation-00000-of-00001.parquet")
    result = call(tmp_path / "src")
    assert by_image(result) == {JPEGS[n]: NAMED["names"][n % 3] for n in range(10)}
    assert by_image(result, "val") == {JPEGS[n]: NAMED["names"][n % 3] for n in (10, 11)}
    assert set(result.images()) == {str(n) for n in range(10)}
    assert (result.dataset.classes, result.dataset.splits["train"].source) == (NAMED["names"], "src")
    assert {path.name[0] for path in result.out.iterdir()} == {"d", "p", "t", "v"}


def test_pictures_and_tables_beside_parquet_files(tmp_path, call, said):
    """A clone of a data set of the Hub has pictures for its page; a table beside photographs has no images."""
    folder = write_files(tmp_path / "clone", {"assets/banner.png": PNG, "README.md": b"x"})
    written(table(JPEGS), tmp_path / "real" / "A.PARQUET")
    (folder / "data").symlink_to(tmp_path / "real")
    result = call(folder)
    said(result.text)
    assert by_image(result) == dict.fromkeys(JPEGS, "")
    for name in ("cat", "dog"):
        write_files(folder, {f"{name}/1.png": PNG})
    refused = call(folder, out="b")
    said(refused.text)
    assert (refused.code, refused.out.exists()) == (2, False)
    written(pa.table({"path": ["1.png"], "vector": [b"x"]}), tmp_path / "real" / "A.PARQUET")
    assert call(folder, options="--no-labels", out="c").counts() == "train: - 3"


def test_an_image_column_of_an_unlabeled_source_is_chosen_beforehand(tmp_path, call):
    path = written(pa.table({"left": JPEGS, "right": JPEGS[::-1]}), tmp_path / "a.parquet")
    source = write_files(tmp_path / "src", {"a/1.png": PNG, "b/1.png": PNG})
    assert "`mae-vit prepare SRC OUT --image-column NAME`" in call(source, options=f"--unlabeled {path}").text
    alone = call(path, options="--image-column left", out="alone").out
    assert call(source, options=f"--unlabeled {alone}").counts() == "train: a 1, b 1, - 12"
    # One of both is chosen for both.
    other = written(pa.table({"left": JPEGS[:2], "right": JPEGS[:2]}), tmp_path / "b.parquet")
    assert (
        call(other, options=f"--image-column left --unlabeled {path}", out="both").counts() == "train: - 12"
    )


KINDS = pa.array(["b", "a"] * 6)
COLUMNS = {
    "bytes": (pa.table({"jpg": JPEGS, "md5": [b"x"] * 12, "class_name": ["b", "a"] * 6}), [], ["a", "b"]),
    "views": (pa.table({"jpg": pa.array(JPEGS, "binary_view"), "kind": pa.array(["b", "a"] * 6, "string_view")}),
              ["--label-column", "kind"], ["a", "b"]),
    "gaps": (table(JPEGS, [0, 2, -1] * 4), [], ["0", "1", "2"]),
    "not wanted": (table(JPEGS, [0, 2, 1] * 4), ["--no-labels"], []),
    "asked": (table(JPEGS, kind=KINDS.dictionary_encode()), ["--label-column", "kind"], ["a", "b"]),
    "image asked": (pa.table({"left": JPEGS, "right": JPEGS[::-1]}), ["--image-column", "left"], []),
    "target": (table(JPEGS, [1, 0] * 6, label="target", features={"target": {"_type": "Value"}}), [], ["0", "1"]),
    "truth": (table(JPEGS, [True, False] * 6), [], ["False", "True"]),
    "another picture": (table(JPEGS, mask=table(JPEGS[::-1])["image"]), [], []),
    "others": (table(JPEGS, species=["x", "y"] * 6, id=pa.array(range(12))), [], []),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_are_chosen(tmp_path, call, said, case):
    content, options, classes = COLUMNS[case]
    result = call(written(content, tmp_path / "a.parquet"), options=options)
    said(result.text)
    assert result.dataset.classes == classes
    assert set(by_image(result)) == set(JPEGS)
    if classes == ["a", "b"]:
        assert by_image(result)[JPEGS[0]] == "b"


TWO_LABELS = {"fine": NAMED, "coarse": NAMED}
# A table, options, and whether --no-labels helps.
REFUSED = {
    "no images": (pa.table({"label": [1, 2]}), [], False),
    "two of images": (pa.table({"left": JPEGS, "right": JPEGS}), [], False),
    "two of labels": (table(JPEGS[:2], [0, 1], label="fine", features=TWO_LABELS, coarse=[0, 1]), [], True),
    "two by their last words": (table(JPEGS[:2], fine_label=[3, 4], coarse_label=[0, 1]), [], True),
    "lists": (table(JPEGS[:2], [[0, 2], [1]]), [], True),
    "structs": (table(JPEGS[:2], [{"a": 0}, {"a": 1}]), [], True),
    "fractions": (table(JPEGS[:2], [0.5, 1.0]), [], True),
    "paths": (pa.table({"image": ["1.jpg"], "label": [1]}), [], False),
    "misspelled": (table(JPEGS), ["--image-column", "imgae"], False),
    "no such class": (table(JPEGS[:2], [0, 3], features={"label": NAMED}), [], True),
    "no such number": (table(JPEGS[:2], [0, 1 << 40]), [], True),
    "of no Hub": (table(JPEGS), ["--config-name", "x"], False),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line_and_leaves_nothing(tmp_path, call, said, case):
    content, options, unlabeled = REFUSED[case]
    path = written(content, tmp_path / "a.parquet")
    result = call(path, options=options)
    said(result.text)
    assert (result.code, len(result.text.splitlines()), result.out.exists()) == (2, 1, False)
    if unlabeled:
        assert call(path, options="--no-labels").code == 0


def test_whole_numbers_with_gaps_are_labels_and_the_gaps_are_counted(tmp_path, call):
    path = written(table(JPEGS[:5], [1.0, None, 0.0, float("nan"), -1.0]), tmp_path / "a.parquet")
    assert call(path).counts() == "train: 0 1, 1 1, - 3"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_a_column_of_splits_is_read(tmp_path, call, kind):
    splits = pa.array([*["train"] * 8, *["validation"] * 3, None]).cast(kind)
    assert (
        call(written(table(JPEGS, Split=splits), tmp_path / "a.parquet")).counts() == "train: - 9 | val: - 3"
    )


def test_two_configurations_are_a_question(tmp_path, call, said):
    files = [
        written(table(JPEGS, [0, 1] * 6), tmp_path / "a" / name / "0.parquet") for name in ("full", "small")
    ]
    refused = call(tmp_path / "a")
    said(refused.text)
    assert refused.code == 2
    assert call(*files).code == 0
    for name in ("train", "test"):
        written(table(JPEGS, [0, 1] * 6), tmp_path / "b" / name / "0.parquet")
    assert call(tmp_path / "b", out="two").code == 0


def test_damaged_rows_are_left_out_and_a_damaged_file_is_one_line(tmp_path, call, said):
    cells = list(JPEGS)
    cells[1], cells[2], cells[3] = None, JPEGS[2][:100], b""
    content = table(cells, paths=[f"{n}.jpg" for n in range(12)])
    images = pa.chunked_array([[*content["image"].to_pylist()[:-1], {"path": "x"}]], IMAGE)
    content = content.set_column(0, "image", images)
    path = written(content, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    result = call(path)
    said(result.text)
    assert set(by_image(result)) == {JPEGS[0], *JPEGS[4:11]}

    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[group.data_page_offset : group.data_page_offset + 40] = b"\xff" * 40
    for damaged in (bytes(data), b"PAR1 and nothing else"):
        path.write_bytes(damaged)
        refused = call(path, out="out2")
        assert (refused.code, len(refused.text.splitlines()), refused.out.exists()) == (2, 1, False)
        assert "a.parquet" in refused.text


# -- data sets of the Hub


def test_a_split_that_exists_is_refused_before_anything_is_read(tmp_path, call, monkeypatch):
    path = written(table(JPEGS), tmp_path / "a.parquet")
    before = sorted(call(path).out.iterdir())
    monkeypatch.setattr(rows, "_ParquetTable", None)
    result = call(path)
    assert result.code == 2
    assert "--overwrite" in result.text
    assert sorted(result.out.iterdir()) == before


@pytest.fixture
def hub(hub, monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")
    HfFileSystem.clear_instance_cache()
    labels = [n % 3 for n in range(12)]
    data = table(JPEGS, labels, features={"image": {"_type": "Image"}, "label": NAMED})
    files = {
        "README.md": b"# cats",
        "data/train-00000-of-00002.parquet": content(data.slice(0, 5)),
        "data/train-00001-of-00002.parquet": content(data.slice(5, 5)),
        "data/test-00000-of-00001.parquet": content(data.slice(10)),
    }
    hub.add("anna/cats", files, kind="dataset")
    return hub


def test_a_data_set_of_the_hub_is_prepared_at_its_commit(hub, call):
    commit = hub.repos["dataset", "anna/cats"].refs["main"]
    result = call("hf:anna/cats")
    assert by_image(result) == {JPEGS[n]: NAMED["names"][n % 3] for n in range(10)}
    assert set(by_image(result, "test")) == set(JPEGS[10:])
    assert {info.source for info in result.dataset.splits.values()} == {f"hf:anna/cats@{commit}"}
    assert "--overwrite" in call("hf:anna/cats").text


def test_images_in_folders_of_the_hub_are_read(hub, call):
    files = {f"{split}/{'ab'[n]}/{n}.jpg": JPEGS[n] for split in ("train", "test") for n in range(2)}
    hub.add("anna/folders", files, kind="dataset")
    assert call("hf:anna/folders").counts() == "test: a 1, b 1 | train: a 1, b 1"


CONFIGS = b"""---
configs:
- {config_name: a, data_files: a/*.parquet}
- {config_name: b, data_files: b/*.parquet}
---
"""


def test_several_configurations_are_a_question(hub, call):
    files = {f"{name}/0.parquet": content(table(JPEGS[n::2])) for n, name in enumerate("ab")}
    hub.add("anna/configs", {"README.md": CONFIGS, **files}, kind="dataset")
    refused = call("hf:anna/configs")
    assert refused.code == 2
    assert "--config-name" in refused.text
    result = call("hf:anna/configs", options="--config-name b --split val")
    assert set(by_image(result, "val")) == set(JPEGS[1::2])


WRONG = {
    "hf:anna/dogs": (2, "anna/dogs"),
    "hf:anna/texts": (2, "images"),
    "hf:anna/nothing": (2, "data"),
    "hf:anna/broken": (75, "503"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_one_line(hub, call, name):
    code, word = WRONG[name]
    hub.add("anna/texts", {"a.txt": b"text"}, kind="dataset")
    hub.add("anna/nothing", {"a.bin": b"x"}, kind="dataset")
    hub.add("anna/broken", {"a.parquet": content(table(JPEGS))}, kind="dataset")
    hub.faults["GET /datasets/anna/broken/resolve"] = ["always 503"]
    result = call(name)
    assert (result.code, len(result.text.splitlines()), result.out.exists()) == (code, 1, False)
    assert word in result.text


@pytest.mark.parametrize(
    ("module", "source", "extra"),
    [("datasets", "hf:anna/cats", "hub"), ("pyarrow.parquet", "a.parquet", "parquet")],
)
def test_a_missing_library_names_its_extra(hub, tmp_path, call, monkeypatch, module, source, extra):
    written(table(JPEGS), tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    result = call(source)
    assert result.code == 2
    assert f"mae-vit[{extra}]" in result.text
