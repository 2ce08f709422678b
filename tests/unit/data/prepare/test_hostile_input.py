"""Hostile archives, folders and images: one line, nothing outside OUT, nothing that blocks."""

import os
import stat
import struct
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from helpers.damage import bomb_png
from helpers.images import encoded, picture, write_files, write_tar, write_zip

from mae_vit.data.images.decode import DecodeError, decode
from mae_vit.data.prepare.entries import unique_key
from mae_vit.data.prepare.sources import archives
from mae_vit.data.prepare.sources.folders import open_folder
from mae_vit.data.shards.tar_headers import DamagedTar, walk_tar

# What blocks fails.
pytestmark = pytest.mark.timeout(60)

IMAGE = encoded(picture(0, (8, 8)), "png")
TRICKS = [
    *(
        "../evil/cat/x.png",
        "cat/../../evil/x.png",
        "/evil/cat/x.png",
        "C:/evil/cat/x.png",
        "C:\\evil\\cat\\x.png",
    ),
    *("..\\evil\\cat\\x.png", "\\evil\\cat\\x.png"),
]
DEFLATED = {"compression": zipfile.ZIP_DEFLATED}


def everything(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", TRICKS)
def test_paths_that_leave_their_folder_are_refused(tmp_path, call, monkeypatch, name):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    files = {"cat/1.png": IMAGE, name: IMAGE}
    sources = [write_tar(tmp_path / "h.tar", files), write_zip(tmp_path / "h.zip", files)]
    # A name that begins with dots, and no slash after them, belongs to no sample of webdataset's.
    shard = [("1.png", IMAGE), ("1.cls", b"0"), (name.replace("..\\", "../"), IMAGE)]
    sources.append(write_tar(tmp_path / "folder" / "train-000000.tar", shard).parent)
    before = everything(tmp_path)
    for source in sources:
        result = call(source)
        assert (result.code, len(result.text.splitlines())) == (2, 1)
        assert "refused" in result.text
        assert everything(tmp_path) - before <= {str(tmp_path / "out")}
    assert not Path("/evil").exists()


def test_links_and_devices_in_an_archive_are_skipped_and_counted(tmp_path, call):
    (tmp_path / "secret.png").write_bytes(IMAGE)
    write_tar(tmp_path / "links.tar", {"cat/real.png": IMAGE, "dog/real.png": IMAGE})
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    with tarfile.open(tmp_path / "links.tar", "a") as tar:
        for number, kind in enumerate(kinds):
            member = tarfile.TarInfo(f"cat/{number}.png")
            member.type, member.linkname = kind, str(tmp_path / "secret.png")
            tar.addfile(member)
    write_zip(tmp_path / "links.zip", {"cat/real.png": IMAGE, "dog/real.png": IMAGE})
    with zipfile.ZipFile(tmp_path / "links.zip", "a") as archive:
        link = zipfile.ZipInfo("cat/link.png")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    for name, count in (("links.tar", 5), ("links.zip", 1)):
        result = call(tmp_path / name, out=name[6:])
        assert f"skipped {count} " in result.text
        assert set(result.images()) == {"cat/real", "dog/real"}


def test_a_file_that_becomes_a_pipe_does_not_block(tmp_path):
    source = write_files(tmp_path / "src", {"cat/1.png": IMAGE})
    ((_, read),) = open_folder(source).images
    (source / "cat" / "1.png").unlink()
    os.mkfifo(source / "cat" / "1.png")
    with pytest.raises(DecodeError, match="regular"):
        read()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_equal_names_the_last_is_taken_and_it_is_noted(tmp_path, call):
    other = encoded(picture(1), "png")
    files = [("cat/1.png", IMAGE), ("dog/1.png", IMAGE), ("./cat//1.png", IMAGE), ("cat/1.png", other)]
    for archive in (write_tar(tmp_path / "twice.tar", files), write_zip(tmp_path / "twice.zip", files)):
        result = call(archive, out=archive.suffix[1:])
        assert "skipped 2 " in result.text
        assert set(result.images()) == {"cat/1", "dog/1"}
        assert result.images()["cat/1"]["png"] == other


def test_images_of_too_many_pixels_are_left_out_unread(call, said):
    files = {
        "cat/1.png": IMAGE,
        "cat/bomb.png": bomb_png(60_000, 60_000),
        "dog/large.png": encoded(picture(0, (90, 90)), "png"),
    }
    said(call(files).text)


def test_a_compressed_bomb_is_refused_and_leaves_nothing(tmp_path, call, monkeypatch):
    monkeypatch.setattr(archives, "_SMALL_BYTES", 1 << 20)
    zeros = {"cat/1.png": bytes(8 << 20)}
    packed = [
        write_tar(tmp_path / "b.tar.gz", zeros, "w:gz"),
        write_zip(tmp_path / "b.zip", zeros, **DEFLATED),
    ]
    for archive in packed:
        assert archive.stat().st_size < 20_000
        result = call(archive)
        assert (result.code, list(result.out.glob("*"))) == (2, [])
        assert "bomb" in result.text


def test_damaged_members_of_a_zip_are_left_out_and_named(tmp_path, call, said):
    path = write_zip(
        tmp_path / "a.zip", {f"{n}/1.png": IMAGE for n in ("cat", "dog", "eel", "fox")}, **DEFLATED
    )
    data = bytearray(path.read_bytes())
    at = [n for n in range(len(data)) if data[n : n + 4] == b"PK\1\2"]
    data[at[0] + 8] |= 1  # encrypted
    data[at[1] + 10 : at[1] + 12] = struct.pack("<H", 97)  # an unknown compression
    data[at[2] + 24 : at[2] + 28] = struct.pack("<I", 10)  # a size that is none
    path.write_bytes(data)
    result = call(path)
    said(result.text)
    assert set(result.images()) == {"fox/1"}


def test_header_records_of_a_tar_are_bounded(tmp_path):
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 2 << 20
    (tmp_path / "t.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(4 << 20))
    with pytest.raises(DamagedTar, match="2097152"):
        list(walk_tar(tmp_path / "t.tar"))


def test_many_header_records_and_equal_names_take_no_long_time(tmp_path):
    records = b"".join(b"%d k%d=v\n" % (12 if n > 9999 else 11, n) for n in range(1000, 30_000))
    header, image = tarfile.TarInfo("x"), tarfile.TarInfo("c/a.png")
    header.type, header.size, image.size = b"x", len(records), 3
    blocks = [header.tobuf(tarfile.USTAR_FORMAT), records, image.tobuf(tarfile.USTAR_FORMAT), b"abc"]
    (tmp_path / "t.tar").write_bytes(b"".join(b + bytes(-len(b) % 512) for b in blocks) + bytes(1024))
    begun = time.process_time()
    assert [member.name for member in walk_tar(tmp_path / "t.tar")] == ["c/a.png"]
    taken: dict[str, int] = {}
    assert len({unique_key("a", taken) for _ in range(9_000)}) == 9_000
    assert time.process_time() - begun < 1
    taken = {}
    assert [unique_key(name, taken) for name in ("a_3", "a", "a", "a", "a_3", "a", "a_3_2")] == [
        *("a_3", "a", "a_2", "a_4", "a_3_2", "a_5", "a_3_2_2")
    ]


def test_formats_that_start_other_programs_are_not_opened():
    with pytest.raises(DecodeError, match="PostScript"):
        decode(encoded(picture(), "eps"), 3)
