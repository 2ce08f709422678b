"""Parquet files and data sets of the Hub: each image byte for byte; one line for what goes wrong."""

import base64
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.images import encoded, img2dataset, picture, read_back
from helpers.servers.hub_server import TOKEN, Hub, use_hub
from huggingface_hub import HfFileSystem

from mae_vit.cli.main import main
from mae_vit.data.prepare.sources import rows
from mae_vit.data.shards.dataset_json import read_dataset

JPEGS = [encoded(picture(n)) for n in range(12)]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NAMED = {"_type": "ClassLabel", "names": ["cat", "dog", "eel"]}


def prepare(*arguments: object) -> int:
    return main(["prepare", "--workers", "0", *map(str, arguments)])


def table(images, labels=None, *, paths=None, features=None, label="label", **columns) -> pa.Table:
    """As the datasets library writes them: {bytes, path}, ClassLabel, and a note on both."""
    cells = [
        None if data is None else {"bytes": data, "path": path}
        for data, path in zip(images, paths or [None] * len(images), strict=True)
    ]
    named = {} if labels is None else {label: pa.array(labels)}
    found = pa.table({"image": pa.array(cells, IMAGE), **named, **columns})
    note = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    return found.replace_schema_metadata(note)


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


def counts(out) -> dict[str, int]:
    return {name: split.samples for name, split in read_dataset(out).splits.items()}


def refusal(capfd) -> str:
    """The one line of an error."""
    (line,) = capfd.readouterr().err.splitlines()
    return line


def test_rows_become_shards_byte_for_byte(tmp_path):
    labels = [n % 3 for n in range(12)]
    paths = [f"/cache/of.others/../{n}.jpg" for n in range(12)]
    found = table(JPEGS, labels, paths=paths, features={"label": NAMED})
    written(found.slice(0, 8), tmp_path / "src" / "data" / "train-00000-of-00002.parquet")
    written(found.slice(8, 2), tmp_path / "src" / "data" / "train-00001-of-00002.parquet")
    written(found.slice(10), tmp_path / "src" / "data" / "validation-00000-of-00001.parquet")
    out = tmp_path / "out"
    assert prepare(tmp_path / "src", out) == 0
    assert by_image(out) == {JPEGS[n]: NAMED["names"][n % 3] for n in range(10)}
    assert by_image(out, "val") == {JPEGS[n]: NAMED["names"][n % 3] for n in (10, 11)}
    assert set(read_back(out)) == {str(n) for n in range(10)}
    assert read_dataset(out).classes == NAMED["names"]
    assert read_dataset(out).splits["train"].source == "src"
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_files_that_a_shell_lists_are_one_source(tmp_path):
    for part in range(3):
        written(table(JPEGS[4 * part : 4 * part + 4]), tmp_path / "src" / f"{part}.parquet")
    out = tmp_path / "out"
    assert prepare(*sorted((tmp_path / "src").glob("*.parquet")), out) == 0
    assert by_image(out) == dict.fromkeys(JPEGS, "")
    assert read_dataset(out).splits["train"].source == "3 files of src"
    # Rows that tell no path are named by file and place.
    assert {"0-000000", "2-000003"} <= set(read_back(out))


KINDS = pa.array(["b", "a"] * 6)
COLUMNS = {
    "bytes": (pa.table({"jpg": JPEGS, "md5": [b"x"] * 12, "class_name": ["b", "a"] * 6}), [], ["a", "b"]),
    "gaps": (table(JPEGS, [0, 2, -1] * 4), [], ["0", "1", "2"]),
    "not wanted": (table(JPEGS, [0, 2, 1] * 4), ["--no-labels"], []),
    "asked": (table(JPEGS, kind=KINDS.dictionary_encode()), ["--label-column", "kind"], ["a", "b"]),
    "image asked": (pa.table({"left": JPEGS, "right": JPEGS[::-1]}), ["--image-column", "left"], []),
    "target": (table(JPEGS, [1, 0] * 6, label="target", features={"target": {"_type": "Value"}}), [], ["0", "1"]),
    "truth": (table(JPEGS, [True, False] * 6), [], ["False", "True"]),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_are_found_or_chosen(tmp_path, case):
    found, options, classes = COLUMNS[case]
    out = tmp_path / "out"
    assert prepare(written(found, tmp_path / "a.parquet"), out, *options) == 0
    assert read_dataset(out).classes == classes
    assert set(by_image(out)) == set(JPEGS)
    if classes == ["a", "b"]:
        assert by_image(out)[JPEGS[0]] == "b"


def test_the_image_is_preferred_to_other_pictures_with_a_note(tmp_path, capsys):
    both = table(JPEGS, mask=table(JPEGS[::-1])["image"])
    assert prepare(written(both, tmp_path / "a.parquet"), tmp_path / "out") == 0
    assert "column image, not of mask" in capsys.readouterr().out


TWO_LABELS = {"fine": NAMED, "coarse": NAMED}
# A table, options, what the line says, and whether --no-labels helps.
REFUSED = {
    "no images": (pa.table({"label": [1, 2]}), [], "no column of images", False),
    "two of images": (pa.table({"left": JPEGS, "right": JPEGS}), [], "left, right: choose by --image-column", False),
    "two of labels": (
        table(JPEGS[:2], [0, 1], label="fine", features=TWO_LABELS, coarse=[0, 1]), [], "fine, coarse", True,
    ),
    "two by their last words": (table(JPEGS[:2], fine_label=[3, 4], coarse_label=[0, 1]), [], "--label-column", True),
    "lists": (table(JPEGS[:2], [[0, 2], [1]]), [], "column label holds list<", True),
    "structs": (table(JPEGS[:2], [{"a": 0}, {"a": 1}]), [], "column label holds struct<", True),
    "fractions": (table(JPEGS[:2], [0.5, 1.0]), [], "column label holds 0.5", True),
    "paths": (pa.table({"image": ["1.jpg"], "label": [1]}), [], "as a CSV", False),
    "misspelled": (table(JPEGS), ["--image-column", "imgae"], 'did you mean "image"?', False),
    "no such class": (table(JPEGS[:2], [0, 3], features={"label": NAMED}), [], "row 1: its label says class 3", True),
    "no such number": (table(JPEGS[:2], [0, 1 << 40]), [], "at most 1000000", True),
    "of no Hub": (table(JPEGS), ["--config-name", "x"], "--config-name changes nothing", False),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line_and_leaves_nothing(tmp_path, capfd, case):
    found, options, line, unlabeled = REFUSED[case]
    path, out = written(found, tmp_path / "a.parquet"), tmp_path / "out"
    assert prepare(path, out, *options) == 2
    assert line in refusal(capfd)
    assert not out.exists()
    if unlabeled:
        assert prepare(path, out, "--no-labels") == 0


def test_whole_numbers_with_gaps_are_labels_and_the_gaps_are_said(tmp_path, capsys):
    written(table(JPEGS[:5], [1.0, None, 0.0, float("nan"), -1.0]), tmp_path / "a.parquet")
    assert prepare(tmp_path / "a.parquet", tmp_path / "out") == 0
    assert by_image(tmp_path / "out") == dict(zip(JPEGS[:5], ["1", "", "0", "", ""], strict=True))
    assert "3 images without a label" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_a_column_of_splits_is_read(tmp_path, kind):
    splits = pa.array([*["train"] * 8, *["validation"] * 3, None]).cast(kind)
    assert prepare(written(table(JPEGS, Split=splits), tmp_path / "a.parquet"), tmp_path / "out") == 0
    assert counts(tmp_path / "out") == {"train": 9, "val": 3}


def test_columns_that_are_not_read_are_named(tmp_path, capsys):
    path = written(table(JPEGS, species=["x", "y"] * 6, id=pa.array(range(12))), tmp_path / "a.parquet")
    note = "not read: species, id"
    assert prepare(path, tmp_path / "out") == 0
    assert note in capsys.readouterr().out
    assert prepare(path, tmp_path / "out", "--overwrite", "--label-column", "species") == 0
    assert prepare(path, tmp_path / "out", "--overwrite", "--no-labels") == 0
    assert note not in capsys.readouterr().out


@pytest.mark.parametrize("before", ["", "data:image/jpeg;base64,"])
@pytest.mark.parametrize("options", [[], ["--image-column", "picture"]])
def test_images_in_base64_are_read(tmp_path, capsys, before, options):
    texts = [before + base64.b64encode(data).decode() for data in JPEGS]
    texts[3] = "nothing"
    path = written(pa.table({"caption": ["a cat"] * 12, "picture": texts}), tmp_path / "a.parquet")
    assert prepare(path, tmp_path / "out", *options) == 0
    assert set(by_image(tmp_path / "out")) == {*JPEGS} - {JPEGS[3]}
    assert "a.parquet, row 3: " in capsys.readouterr().out


def test_two_configurations_are_a_question(tmp_path, capfd):
    files = [
        written(table(JPEGS, [0, 1] * 6), tmp_path / "a" / name / "0.parquet") for name in ("full", "small")
    ]
    assert prepare(tmp_path / "a", tmp_path / "out") == 2
    assert "full and small hold files of one name, 0.parquet" in refusal(capfd)
    assert prepare(*files, tmp_path / "out") == 0
    for name in ("train", "test"):
        written(table(JPEGS, [0, 1] * 6), tmp_path / "b" / name / "0.parquet")
    assert prepare(tmp_path / "b", tmp_path / "two") == 0


def test_damaged_rows_are_left_out_and_counted_and_a_damaged_file_is_one_line(tmp_path, capfd):
    rows = list(JPEGS)
    rows[1], rows[2], rows[3] = None, JPEGS[2][:100], b""
    found = table(rows, paths=[f"{n}.jpg" for n in range(12)])
    found = found.set_column(
        0, "image", pa.chunked_array([[*found["image"].to_pylist()[:-1], {"path": "x"}]], IMAGE)
    )
    path = written(found, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    assert prepare(path, tmp_path / "out") == 0
    assert set(by_image(tmp_path / "out")) == {JPEGS[0], *JPEGS[4:11]}
    said = capfd.readouterr().out
    assert "left out 4 unreadable images" in said
    for line in ("row 1: it holds no image", "row 2 (2.jpg):", "row 11 (x): it holds a path and no bytes"):
        assert f"a.parquet, {line}" in said

    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[group.data_page_offset : group.data_page_offset + 40] = b"\xff" * 40
    path.write_bytes(data)
    assert prepare(path, tmp_path / "out2") == 2
    assert "a.parquet is damaged" in refusal(capfd)
    path.write_bytes(b"PAR1 and nothing else")
    assert prepare(path, tmp_path / "out2") == 2
    assert "a.parquet is no whole Parquet file" in refusal(capfd)
    assert not (tmp_path / "out2").exists()


def test_tables_beside_shards_are_not_read(tmp_path):
    """img2dataset writes one beside each shard."""
    source = img2dataset(tmp_path / "src")
    written(pa.table({"url": ["x"]}), source / "00000.parquet")
    assert prepare(source, tmp_path / "out") == 0
    assert read_dataset(tmp_path / "out").splits["train"].samples == 12


def test_a_split_that_exists_is_refused_before_anything_is_read(tmp_path, monkeypatch, capfd):
    path, out = written(table(JPEGS), tmp_path / "a.parquet"), tmp_path / "out"
    assert prepare(path, out) == 0
    before = sorted(out.iterdir())
    monkeypatch.setattr(rows, "_ParquetTable", None)
    capfd.readouterr()
    assert prepare(path, out) == 2
    assert "--overwrite" in refusal(capfd)
    assert sorted(out.iterdir()) == before


# -- data sets of the Hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    use_hub(server, monkeypatch, tmp_path / "hub_cache")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", server.url)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")
    HfFileSystem.clear_instance_cache()
    labels = [n % 3 for n in range(12)]
    found = table(JPEGS, labels, features={"image": {"_type": "Image"}, "label": NAMED})
    files = {
        "README.md": b"# cats",
        "data/train-00000-of-00002.parquet": content(found.slice(0, 5)),
        "data/train-00001-of-00002.parquet": content(found.slice(5, 5)),
        "data/test-00000-of-00001.parquet": content(found.slice(10)),
    }
    for name in ("cats", "private", "gated"):
        options = {name: True} if name != "cats" else {}
        server.add(f"anna/{name}", files, kind="dataset", **options)
    yield server
    server.stop()


def test_a_data_set_of_the_hub_is_prepared_at_its_commit(hub, tmp_path, capfd):
    commit, out = hub.repos["dataset", "anna/cats"].refs["main"], tmp_path / "out"
    assert prepare("hf:anna/cats", out) == 0
    assert by_image(out) == {JPEGS[n]: NAMED["names"][n % 3] for n in range(10)}
    assert set(by_image(out, "test")) == set(JPEGS[10:])
    assert {info.source for info in read_dataset(out).splits.values()} == {f"hf:anna/cats@{commit}"}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    capfd.readouterr()
    hub.requests.clear()
    assert prepare("hf:anna/cats", out) == 2
    assert "--overwrite" in refusal(capfd)


def test_images_in_folders_of_the_hub_are_read(hub, tmp_path):
    files = {
        f"{split}/{name}/{n}.jpg": JPEGS[n]
        for split in ("train", "test")
        for n, name in enumerate(("a", "b"))
    }
    hub.add("anna/folders", files, kind="dataset")
    assert prepare("hf:anna/folders", tmp_path / "out") == 0
    assert by_image(tmp_path / "out", "test") == {JPEGS[0]: "a", JPEGS[1]: "b"}


CONFIGS = b"""---
configs:
- {config_name: a, data_files: a/*.parquet}
- {config_name: b, data_files: b/*.parquet}
---
"""


def test_several_configurations_are_a_question(hub, tmp_path, capfd):
    files = {f"{name}/0.parquet": content(table(JPEGS[n::2])) for n, name in enumerate("ab")}
    hub.add("anna/configs", {"README.md": CONFIGS, **files}, kind="dataset")
    assert prepare("hf:anna/configs", tmp_path / "out") == 2
    assert "--config-name NAME" in refusal(capfd)
    assert prepare("hf:anna/configs", tmp_path / "out", "--config-name", "b", "--split", "val") == 0
    assert set(by_image(tmp_path / "out", "val")) == set(JPEGS[1::2])


WRONG = {
    "hf:anna/dogs": (2, "there is no dataset anna/dogs"),
    "hf:anna/cats@mian": (2, 'no revision "mian"'),
    "hf:anna/private": (2, "there is no dataset anna/private"),
    "hf:anna/gated": (2, "gated"),
    "hf:anna/texts": (2, "no column of images"),
    "hf:anna/nothing": (2, "data"),
    "hf:a/b/c": (2, 'give "hf:USER/NAME[@REVISION]"'),
    "hf:anna/broken": (75, "status 503"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_one_line(hub, tmp_path, capfd, name):
    code, line = WRONG[name]
    hub.add("anna/texts", {"a.txt": b"text"}, kind="dataset")
    hub.add("anna/nothing", {"a.bin": b"x"}, kind="dataset")
    hub.add("anna/broken", {"a.parquet": content(table(JPEGS))}, kind="dataset")
    hub.faults["GET /datasets/anna/broken/resolve"] = ["always 503"]
    assert prepare(name, tmp_path / "out") == code
    assert line in refusal(capfd)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("token", [TOKEN, "hf_wrong"])
def test_the_token_opens_what_is_gated_and_a_wrong_one_is_one_line(hub, tmp_path, capfd, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    assert prepare("hf:anna/gated", tmp_path / "out") == (0 if token == TOKEN else 2)
    captured = capfd.readouterr()
    assert token not in captured.out + captured.err
    if token != TOKEN:
        assert "token" in captured.err
        assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "source", "extra"),
    [("datasets", "hf:anna/cats", "hub"), ("pyarrow.parquet", "a.parquet", "parquet")],
)
def test_a_missing_library_names_its_extra(hub, tmp_path, capfd, monkeypatch, module, source, extra):
    written(table(JPEGS), tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert prepare(source, tmp_path / "out") == 2
    assert f'pip install "mae-vit[{extra}]"' in refusal(capfd)
