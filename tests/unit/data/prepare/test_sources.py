"""Every kind of source: what it becomes."""

import hashlib
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from helpers.images import encoded, img2dataset, labeled_shards, picture, write_files, write_tar, write_zip
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10, CIFAR100

from mae_vit.cli.main import main
from mae_vit.data.prepare.sources.downloads import digits

PHOTOS = {f"{n:03d}.jpg": encoded(picture(n)) for n in range(12)}
CLASSES = {f"c{n % 3}/{n:03d}.jpg": encoded(picture(n)) for n in range(12)}
FLAT, FOUR = "train: - 12", "train: c0 4, c1 4, c2 4"
ELEVEN = f"train: 0 2, {', '.join(f'{n} 1' for n in range(1, 11))}"
# Builder of the source, and the classes of its images.
SOURCES = {
    "folder": (lambda path: write_files(path, CLASSES), FOUR),
    "tar": (lambda path: write_tar(path / "a.tar", CLASSES), FOUR),
    "tar.gz": (lambda path: write_tar(path / "a.tar.gz", CLASSES, "w:gz"), FOUR),
    "zip": (lambda path: write_zip(path.with_suffix(".zip"), {f"top/train/{n}": d for n, d in CLASSES.items()}), FOUR),
    "flat folder": (lambda path: write_files(path, PHOTOS), FLAT),
    "flat tar": (lambda path: write_tar(path / "a.tar", {f"photos/{n}": d for n, d in PHOTOS.items()}), FLAT),
    "flat zip": (lambda path: write_zip(path.with_suffix(".zip"), PHOTOS), FLAT),
    "img2dataset": (img2dataset, FLAT),
    "shards": (labeled_shards, f"{ELEVEN} | val: 0 1, 1 1"),
    "one shard": (lambda path: labeled_shards(path) / "imagenet-train-000000.tar", ELEVEN),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_sources(tmp_path, call, name):
    make, expected = SOURCES[name]
    result = call(make(tmp_path / "src"))
    assert result.counts() == expected
    assert not [path for path in result.out.glob(".*") if path.name != ".index"]
    assert main(["check", str(result.out)]) == 0
    images = {key: sample["jpg"] for key, sample in result.images().items() if "jpg" in sample}
    if expected in (FLAT, FOUR) and name != "img2dataset":
        assert images == {file[:-4]: data for file, data in (PHOTOS if expected == FLAT else CLASSES).items()}
    if name == "flat zip":
        samples = list(wds.WebDataset([str(path) for path in result.out.glob("*.tar")], shardshuffle=False))
        assert {s["__key__"]: s["jpg"] for s in samples} == images
        assert all("cls" not in sample for sample in samples)
    if "shard" in name or name == "img2dataset":
        assert call(make(tmp_path / "src"), options="--no-labels", out="b").counts().startswith("train: - 12")


def test_our_own_shards_are_a_source_with_their_classes(call, said):
    first = call(CLASSES, options="--holdout 1/4", out="first")
    second = call(first.out, options="--resize 16", out="second")
    assert first.counts() == second.counts() == "train: c0 3, c1 3, c2 3 | val: c0 1, c1 1, c2 1"
    assert set(second.images()) == set(first.images())
    assert second.dataset.splits["train"].height == (16, 16)
    third = call(second.out, options="--exif-orientation apply", out="third").dataset.splits["val"].processing
    assert (third.holdout, third.resize, third.exif_orientation) == ("1/4", 16, "apply")
    options = "--resize {} --quality {} --fraction 2/3 --limit-per-class {}"
    once = call(second.out, options=options.format(16, 80, 1), out="once")
    twice = call(once.out, options=options.format(20, 70, 2), out="twice")
    done = twice.dataset.splits["train"].processing
    assert (done.resize, done.quality, done.fraction, done.limit_per_class) == (16, 90, "4/9", 1)
    for name in ("a", "b"):
        both = call(first.out, out=f"both/{name}").out.parent
    for source in (first.out, both):
        refused = call(source, options="--overwrite", out="first")
        said(refused.text)
        assert refused.code == 2
    for split in ("val", "train"):
        (twice.out / f"{split}-000000.tar").unlink()
        said(call(twice.out, out="cut").text)


def test_a_folder_with_the_name_of_a_data_set_is_told_how_to_be_named(tmp_path, call, said, monkeypatch):
    monkeypatch.chdir(
        write_files(tmp_path / "here", {f"digits/{path}": data for path, data in CLASSES.items()})
    )
    said(call("digits").text)
    assert call("./digits", out="own").counts() == FOUR


def fake_cifar(folder: Path, kind: type, classes: list[str], monkeypatch) -> None:
    """A tiny copy in torchvision's layout, with its own checksums in torchvision's lists."""
    (folder / kind.base_folder).mkdir(parents=True)
    labels, names = ("fine_labels", "fine_label_names") if kind is CIFAR100 else ("labels", "label_names")

    def put(name: str, content: object) -> str:
        data = pickle.dumps(content)
        (folder / kind.base_folder / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 4)):
        batch = {"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8)}
        batch[labels] = [n % len(classes) for n in range(count)]
        monkeypatch.setattr(kind, f"{split}_list", [[f"{split}_batch", put(f"{split}_batch", batch)]])
    meta = {"filename": "names", "key": names, "md5": put("names", {names: classes})}
    monkeypatch.setattr(kind, "meta", meta)


@pytest.mark.parametrize(("name", "kind"), [("cifar10", CIFAR10), ("cifar100", CIFAR100)])
def test_cifar_is_read_and_a_changed_pickle_is_not_loaded(tmp_path, call, monkeypatch, name, kind):
    class Hostile:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "loaded",))

    fake_cifar(tmp_path / "src", kind, ["apple", "bee", "cup"], monkeypatch)
    result = call(name, options=f"--root {tmp_path}/src")
    assert result.dataset.classes == ["apple", "bee", "cup"]
    assert [info.class_counts for info in result.dataset.splits.values()] == [[2, 1, 1], [3, 3, 2]]
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    for path in (tmp_path / "src").rglob("train_batch"):
        path.write_bytes(pickle.dumps(Hostile()))
    refused = call(name, options=f"--root {tmp_path}/src", out="b")
    assert refused.code == 2
    assert "--root" in refused.text
    assert not (tmp_path / "loaded").exists()


def test_the_digits_are_scikit_learns():
    theirs = load_digits()
    ours = sorted(digits().entries, key=lambda entry: entry.key.partition("/")[2])
    pixels = [np.asarray(Image.open(io.BytesIO(entry.read()))) for entry in ours]
    assert np.array_equal(np.rint(theirs.images * (255 / 16)), pixels)
    assert [entry.class_name for entry in ours] == [str(label) for label in theirs.target]
