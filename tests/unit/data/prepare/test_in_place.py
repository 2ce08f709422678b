"""Shards made by others, described where they lie."""

import pytest
from helpers.images import encoded, img2dataset, labeled_shards, picture, write_tar

from mae_vit.cli.main import main
from mae_vit.data.shards.dataset_json import read_dataset


def prepare(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments)])


def test_in_place_is_measured_like_prepared(tmp_path):
    folder = labeled_shards(tmp_path / "src")
    assert prepare(folder, tmp_path / "out") == 0
    assert prepare("--in-place", folder) == 0
    one, two = read_dataset(tmp_path / "out"), read_dataset(folder)
    assert (one.mean, one.std, one.channels, one.classes) == (two.mean, two.std, two.channels, two.classes)
    for name in ("train", "val"):
        a, b = one.splits[name], two.splits[name]
        assert (a.height, a.width, a.formats, a.class_counts) == (
            b.height,
            b.width,
            b.formats,
            b.class_counts,
        )


def test_a_fresh_folder_of_tars_says_what_to_do(tmp_path, capsys):
    folder = img2dataset(tmp_path / "src")
    assert main(["check", str(folder)]) == 2
    assert f"holds 2 tar files but no dataset.json: make it with `mae-vit prepare --in-place {folder}`" in (
        capsys.readouterr().err
    )


IN_PLACE = {
    "a size": (
        ["{src}", "--shard-mib", "9"],
        "--in-place changes no shards: --shard-mib needs an OUT folder",
    ),
    "with an output": (["{src}", "{tmp}/out"], "--in-place takes one folder, not 2"),
    "with --resize": (
        ["{src}", "--resize", "8"],
        "--in-place changes no shards: --resize needs an OUT folder",
    ),
    "turned": (["{src}", "--exif-orientation", "apply"], "--exif-orientation needs an OUT folder"),
    "no folder": (["{tmp}/none"], "none: is no folder"),
    "no shards": (["{tmp}/empty"], "holds no .tar shards"),
    "no images": (["{tmp}/texts"], "its 1 tars hold no images"),
    "described": (["{tmp}/ours"], "already has dataset.json: --overwrite makes it anew"),
    "words": (["{tmp}/words"], "0.cls is no class number: b'dog'; `mae-vit prepare {tmp}/words OUT`"),
    "huge class": (["{tmp}/huge"], "class 999999999; at most 1000000 are taken"),
    "broken image": (
        ["{tmp}/broken"],
        "1 images cannot be read (a.tar, 1.jpg: not an image): `mae-vit prepare",
    ),
    "damaged": (["{tmp}/damaged"], "a.tar: the member at offset 0 passes the end of the file"),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_cannot_be_used_in_place_is_one_line(tmp_path, capsys, name):
    image = encoded(picture())
    for folder, members in {
        "src": {"1.jpg": image},
        "ours": {"1.jpg": image},
        "texts": {"1.txt": b"x"},
        "broken": {"1.jpg": b"no image", "2.jpg": image},
        "damaged": {"1.jpg": image},
        "huge": {"1.jpg": image, "1.cls": b"999999999"},
        "empty": {},
    }.items():
        write_tar(tmp_path / folder / "a.tar", members)
    labeled_shards(tmp_path / "words", [b"dog"])
    (tmp_path / "empty" / "a.tar").unlink()
    path = tmp_path / "damaged" / "a.tar"
    path.write_bytes(path.read_bytes()[:1200])
    (tmp_path / "ours" / "dataset.json").write_text("{}")
    arguments, expected = IN_PLACE[name]
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert (
        prepare("--in-place", *[part.format(src=tmp_path / "src", tmp=tmp_path) for part in arguments]) == 2
    )
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert expected.format(tmp=tmp_path) in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
