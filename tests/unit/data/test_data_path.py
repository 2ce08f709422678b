"""A folder of images is enough: it is prepared once, into the cache folder."""

import shutil
from pathlib import Path

import pytest
from helpers.encoders import info_of
from helpers.images import encoded, picture, write_files

from mae_vit.cli.main import main
from mae_vit.core.errors import InputError
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.index import open_index
from mae_vit.data.prepare import cached
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.inspection.images import draw_samples

CLASSES = {f"{'cat' if n % 2 else 'dog'}/{n:03d}.jpg": encoded(picture(n)) for n in range(24)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path):
    write_files(tmp_path / "photos", CLASSES)
    return tmp_path / "photos"


def test_a_folder_is_prepared_once_into_the_cache(photos, cache, capsys):
    folder = resolve_data_path(str(photos)).folder
    said = capsys.readouterr().out
    assert cache in folder.parents
    assert str(photos) in said
    assert str(folder) in said
    dataset = read_dataset(folder)
    assert dataset.classes == ["cat", "dog"]
    assert {name: split.samples for name, split in dataset.splits.items()} == {"train": 22, "val": 2}
    index = open_index(folder, "train")
    assert {index.read(n) for n in range(len(index))} < set(CLASSES.values())
    assert resolve_data_path(str(photos)).folder == folder
    assert not capsys.readouterr().out


def test_a_changed_folder_is_prepared_anew(photos, monkeypatch):
    before = resolve_data_path(str(photos)).folder
    (photos / "cat" / "new.jpg").write_bytes(encoded(picture(99)))
    after = resolve_data_path(str(photos)).folder
    assert before.exists()  # a run may still read it
    assert sum(split.samples for split in read_dataset(after).splits.values()) == 25
    monkeypatch.setattr(cached, "_UNUSED_S", -1)
    (photos / "cat" / "new.jpg").unlink()
    resolve_data_path(str(photos))
    assert not after.exists()


def test_splits_of_its_own_are_kept(tmp_path):
    """And only train decides on a held-out tenth."""
    files = {f"{split}/{name}": data for split in ("train", "test") for name, data in CLASSES.items()}
    few = {f"train/{n}.jpg": encoded(picture(n)) for n in range(3)}
    many = {f"unlabeled/{n}.jpg": encoded(picture(n + 3)) for n in range(9)}
    for name, content in (("photos", files), ("few", few | many)):
        folder = resolve_data_path(str(write_files(tmp_path / name, content))).folder
        assert list(read_dataset(folder).splits) == sorted({path.split("/")[0] for path in content})


def test_prepared_shards_are_used_where_they_lie(digits, tmp_path):
    assert resolve_data_path(str(digits)).folder == digits
    with pytest.raises(InputError, match="cache_dir"):
        resolve_data_path(str(digits), cache_dir=str(tmp_path))


def test_options_in_an_error_are_those_of_prepare(tmp_path):
    write_files(tmp_path / "my photos", {"a/1.jpg": encoded(picture()), "2.jpg": encoded(picture())})
    with pytest.raises(
        InputError, match=r"--no-labels \(options of `mae-vit prepare '.*my photos' OUT`; then give OUT\)"
    ):
        resolve_data_path(str(tmp_path / "my photos"))


def test_what_cannot_be_prepared_leaves_nothing(tmp_path, cache, monkeypatch):
    write_files(tmp_path / "texts", {"a.txt": b"no image"})
    write_files(tmp_path / "broken", {"a.jpg": b"\xff\xd8\xffno image"})
    for name, word in (("texts", "a.txt|texts"), ("broken", "a.jpg")):
        with pytest.raises(InputError, match=word):
            resolve_data_path(str(tmp_path / name))
    write_files(tmp_path / "photos", CLASSES)
    full = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(InputError, match="GiB free"):
        resolve_data_path(str(tmp_path / "photos"))
    assert not list(cache.rglob("*.tar"))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs an unreadable file")
def test_an_error_that_may_pass_ends_the_preparation(photos, cache):
    (photos / "cat" / "new.jpg").symlink_to("/proc/self/mem")
    with pytest.raises(InputError, match=r"cat/new\.jpg cannot be read: input/output error"):
        resolve_data_path(str(photos))
    assert not list(cache.rglob("dataset.json"))


def test_a_killed_preparation_leaves_no_part_of_the_splits(tmp_path, cache, monkeypatch):
    def killed(*arguments, **options):
        prepare(*arguments, **options)
        raise KeyboardInterrupt

    write_files(tmp_path / "photos", CLASSES)
    monkeypatch.setattr(cached, "prepare", killed)
    with pytest.raises(KeyboardInterrupt):
        resolve_data_path(str(tmp_path / "photos"))
    assert not list(cache.rglob("dataset.json"))
    monkeypatch.undo()


def test_a_folder_called_like_a_download_is_that_folder(photos, tmp_path, monkeypatch):
    photos.rename(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    assert read_dataset(resolve_data_path("digits").folder).classes == ["cat", "dog"]


def test_check_and_inspection_know_a_folder(photos):
    assert main(["check", str(photos)]) == 0
    assert len(draw_samples(str(photos), count=9, encoder=info_of(), split="val").images) == 2


def test_hidden_files_are_no_change_and_short_names_are_not_hidden(photos, monkeypatch):
    monkeypatch.chdir(photos)
    before = resolve_data_path(str(photos)).folder
    write_files(photos, {".DS_Store": b"1", "cat/.thumbnails/a.jpg": b"2"})
    assert resolve_data_path(str(photos)).folder == resolve_data_path(".").folder == before
    write_files(photos, {"1.txt": b"new"})
    assert resolve_data_path(".").folder != before


def test_the_cache_does_not_lie_among_the_images(photos):
    with pytest.raises(InputError, match="cache_dir"):
        resolve_data_path(str(photos), cache_dir=str(photos / "cache"))


def test_what_lies_beside_shards_names_their_folder(digits, photos, said):
    (photos / "old.tar").write_bytes(b"")
    for path in (digits / "dataset.json", digits / "train", photos):
        with pytest.raises(InputError) as caught:
            read_dataset(path)
        said(str(caught.value).replace(str(digits), "DIGITS"))


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_a_table_of_paths_and_labels_is_a_source(photos, delimiter):
    rows = ["Path,label", *(f"{path},{path[:3]}" for path in CLASSES), "cat/gone.jpg,cat"]
    table = photos / "labels.csv"
    table.write_text("\n".join(row.replace(",", delimiter) for row in rows))
    folder = resolve_data_path(str(table)).folder
    assert read_dataset(folder).classes == ["cat", "dog"]
    assert sum(split.samples for split in read_dataset(folder).splits.values()) == 24
    (photos / "cat" / "001.jpg").write_bytes(encoded(picture(99)))
    assert resolve_data_path(str(table)).folder != folder


def test_a_changed_image_of_a_table_is_read_anew(tmp_path):
    """Also where its path without the table's is as short as a hidden file's name."""
    images = {f"image_{n}.png": encoded(picture(n), "png") for n in range(4)}
    rows = "\n".join(["path,label", *(f"{name},{n % 2}" for n, name in enumerate(images))])
    source = write_files(tmp_path / "src", {**images, "tab.csv": rows.encode()})
    folder = resolve_data_path(str(source / "tab.csv")).folder
    (source / "image_0.png").write_bytes(encoded(picture(9), "png"))
    assert resolve_data_path(str(source / "tab.csv")).folder != folder
