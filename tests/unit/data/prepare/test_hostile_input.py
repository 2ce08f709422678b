"""Hostile archives, folders and images: one line, nothing outside OUT, nothing that blocks."""

import io
import os
import stat
import struct
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from helpers.damage import bomb_png
from helpers.images import encoded, picture, read_back, write_files, write_tar, write_zip

from mae_vit.cli.main import main
from mae_vit.data.images.decode import DecodeError, decode
from mae_vit.data.prepare.entries import unique_key
from mae_vit.data.prepare.sources import archives
from mae_vit.data.shards.tar_headers import DamagedTar, walk_tar

# What blocks fails.
pytestmark = pytest.mark.timeout(60)

IMAGE = encoded(picture(), "png")
TRICKS = [
    "../evil/cat/x.png",
    "cat/../../evil/x.png",
    "/evil/cat/x.png",
    "C:/evil/cat/x.png",
    "C:\\evil\\cat\\x.png",
    "..\\evil\\cat\\x.png",
    "\\evil\\cat\\x.png",
]
WRITERS = {
    "tar": write_tar,
    "tar.gz": lambda path, files: write_tar(path, files, "w:gz"),
    "zip": write_zip,
}


def prepare(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments)])


def everything(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", TRICKS)
def test_paths_that_leave_their_folder_are_refused(tmp_path, capsys, monkeypatch, kind, name):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    archive = WRITERS[kind](tmp_path / f"hostile.{kind}", {"cat/1.png": IMAGE, name: IMAGE})
    before = everything(tmp_path)
    assert prepare(archive, "out") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "leaves its folder: refused" in lines[0]
    assert everything(tmp_path) - before <= {str(tmp_path / "work" / "out")}
    assert not Path("/evil").exists()


# A name that begins with dots, and no slash after them, belongs to no sample of webdataset's.
@pytest.mark.parametrize("name", ["../../up/a.png", *(name for name in TRICKS if name[:3] != "..\\")])
def test_paths_that_leave_their_folder_are_refused_in_shards(tmp_path, capsys, name):
    label = f"{name.removesuffix('.png')}.cls"
    for archive in ("folder/train-000000.tar", "lone.tar"):
        write_tar(tmp_path / archive, [("1.png", IMAGE), ("1.cls", b"0"), (name, IMAGE), (label, b"1")])
    before = everything(tmp_path)
    for source in ("folder", "lone.tar"):
        assert prepare(tmp_path / source, tmp_path / "out") == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert "leaves its folder: refused" in lines[0]
        assert everything(tmp_path) == before


def test_links_devices_and_pipes_in_a_tar_are_skipped_and_counted(tmp_path, capsys):
    (tmp_path / "secret.png").write_bytes(IMAGE)
    archive = tmp_path / "links.tar"
    with tarfile.open(archive, "w") as tar:
        for number, kind in enumerate(
            (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
        ):
            member = tarfile.TarInfo(f"cat/{number}.png")
            member.type, member.linkname = kind, str(tmp_path / "secret.png")
            tar.addfile(member)
        member = tarfile.TarInfo("cat/real.png")
        member.size = len(IMAGE)
        tar.addfile(member, io.BytesIO(IMAGE))
        member = tarfile.TarInfo("dog/real.png")
        member.size = len(IMAGE)
        tar.addfile(member, io.BytesIO(IMAGE))
    before = everything(tmp_path)
    assert prepare(archive, tmp_path / "out") == 0
    assert "skipped 5 members that are links, devices or pipes" in capsys.readouterr().out
    assert set(read_back(tmp_path / "out")) == {"cat/real", "dog/real"}
    assert all(path.startswith(str(tmp_path / "out")) for path in everything(tmp_path) - before)


def test_links_in_a_zip_are_skipped_and_counted(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "links.zip", "w") as archive:
        link = zipfile.ZipInfo("cat/link.png")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        for name in ("cat", "dog"):
            archive.writestr(f"{name}/real.png", IMAGE)
    assert prepare(tmp_path / "links.zip", tmp_path / "out") == 0
    assert "skipped 1 members that are links" in capsys.readouterr().out
    assert set(read_back(tmp_path / "out")) == {"cat/real", "dog/real"}


def test_pipes_devices_and_dead_links_in_a_folder_do_not_block(tmp_path, capsys):
    cat = write_files(tmp_path / "src", {"cat/real.png": IMAGE, "dog/real.png": IMAGE}) / "cat"
    os.mkfifo(cat / "pipe.png")
    (cat / "zero.png").symlink_to("/dev/zero")
    (cat / "dead.png").symlink_to("nowhere")
    (cat / "itself.png").symlink_to("itself.png")
    assert prepare(tmp_path / "src", tmp_path / "out") == 0
    assert "skipped 4 that are no regular files" in capsys.readouterr().out
    assert set(read_back(tmp_path / "out")) == {"cat/real", "dog/real"}


def test_a_file_that_becomes_a_pipe_does_not_block(tmp_path):
    from mae_vit.data.prepare.sources.folders import open_folder

    source = write_files(tmp_path / "src", {"cat/1.png": IMAGE})
    ((_, read),) = open_folder(source).images
    (source / "cat" / "1.png").unlink()
    os.mkfifo(source / "cat" / "1.png")
    with pytest.raises(DecodeError, match="no regular file"):
        read()


def test_links_to_folders_are_followed_once(tmp_path):
    write_files(tmp_path / "elsewhere", {"1.png": IMAGE, "2.png": IMAGE})
    source = write_files(tmp_path / "src", {"real/1.png": IMAGE})
    (source / "cat").symlink_to(tmp_path / "elsewhere")
    (source / "again").symlink_to(tmp_path / "src" / "real")
    (source / "real" / "loop").symlink_to(source)
    assert prepare(source, tmp_path / "out") == 0
    assert set(read_back(tmp_path / "out")) == {"cat/1", "cat/2", "real/1"}


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_equal_names_the_last_is_taken_and_it_is_said(tmp_path, capsys, kind):
    other = encoded(picture(1), "png")
    files = [("cat/1.png", IMAGE), ("dog/1.png", IMAGE), ("./cat//1.png", IMAGE), ("cat/1.png", other)]
    archive = WRITERS[kind](tmp_path / f"twice.{kind}", files)
    assert prepare(archive, tmp_path / "out") == 0
    assert "skipped 2 earlier copies of members of the same path" in capsys.readouterr().out
    found = read_back(tmp_path / "out")
    assert set(found) == {"cat/1", "dog/1"}
    assert found["cat/1"]["png"] == other


def test_images_of_too_many_pixels_are_left_out_unread(tmp_path, capsys):
    files = {
        "cat/1.png": IMAGE,
        "cat/bomb.png": bomb_png(60_000, 60_000),
        "dog/large.png": encoded(picture(0, (90, 90)), "png"),
    }
    source = write_files(tmp_path / "src", files)
    assert prepare(source, tmp_path / "a") == 0
    assert "left out 1 unreadable image:\n  cat/bomb.png: " in capsys.readouterr().out
    assert prepare(source, tmp_path / "b", "--max-pixels", 90 * 90 - 1) == 0
    assert "dog/large.png: 90x90 pixels are over the bound of 8099" in capsys.readouterr().out


def test_a_compressed_bomb_is_refused_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(archives, "_SMALL_BYTES", 1 << 20)
    zeros = {"cat/1.png": bytes(8 << 20)}
    for archive in (
        WRITERS["tar.gz"](tmp_path / "bomb.tar.gz", zeros),
        write_zip(tmp_path / "bomb.zip", zeros, compression=zipfile.ZIP_DEFLATED),
    ):
        assert archive.stat().st_size < 20_000
        assert prepare(archive, tmp_path / "out") == 2
        assert "a bomb, refused" in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_a_zip_that_lies_about_sizes_gives_no_more_than_it_says(tmp_path, capsys):
    write_zip(tmp_path / "a.zip", {"cat/1.png": IMAGE, "dog/1.png": IMAGE}, compression=zipfile.ZIP_DEFLATED)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    at = data.index(b"PK\1\2") + 24
    data[at : at + 4] = struct.pack("<I", 10)
    (tmp_path / "a.zip").write_bytes(data)
    assert prepare(tmp_path / "a.zip", tmp_path / "out") == 0
    assert "cat/1.png: " in capsys.readouterr().out
    assert set(read_back(tmp_path / "out")) == {"dog/1"}


def test_encrypted_and_damaged_members_are_left_out_and_named(tmp_path, capsys):
    files = {f"{name}/1.png": IMAGE for name in ("cat", "dog", "eel")}
    write_zip(tmp_path / "a.zip", files)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    first = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 4)
    data[first + 8] |= 1
    data[second + 10 : second + 12] = struct.pack("<H", 97)
    (tmp_path / "a.zip").write_bytes(data)
    assert prepare(tmp_path / "a.zip", tmp_path / "out") == 0
    output = capsys.readouterr().out
    assert "cat/1.png: encrypted" in output
    assert "dog/1.png: " in output
    assert set(read_back(tmp_path / "out")) == {"eel/1"}


@pytest.mark.parametrize("data", [b"", b"PK\3\4 and no more", b"x" * 500])
def test_what_is_no_zip_is_one_line(tmp_path, capsys, data):
    (tmp_path / "a.zip").write_bytes(data)
    assert prepare(tmp_path / "a.zip", tmp_path / "out") == 2
    assert (
        capsys.readouterr().err
        == f"mae-vit: error: archive {tmp_path}/a.zip is damaged: File is not a zip file\n"
    )


def test_header_records_of_a_tar_are_bounded(tmp_path):
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 2 << 20
    (tmp_path / "t.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(4 << 20))
    with pytest.raises(DamagedTar, match="the header at offset 0 has 2097152 bytes"):
        list(walk_tar(tmp_path / "t.tar"))


def test_many_header_records_and_equal_names_take_no_long_time(tmp_path):
    records = b"".join(b"%d k%d=v\n" % (12 if n > 9999 else 11, n) for n in range(1000, 80_000))
    header, image = tarfile.TarInfo("x"), tarfile.TarInfo("c/a.png")
    header.type, header.size, image.size = b"x", len(records), 3
    blocks = [header.tobuf(tarfile.USTAR_FORMAT), records, image.tobuf(tarfile.USTAR_FORMAT), b"abc"]
    (tmp_path / "t.tar").write_bytes(b"".join(b + bytes(-len(b) % 512) for b in blocks) + bytes(1024))
    begun = time.process_time()
    assert [member.name for member in walk_tar(tmp_path / "t.tar")] == ["c/a.png"]
    taken: dict[str, int] = {}
    assert len({unique_key("a", taken) for _ in range(20_000)}) == 20_000
    assert time.process_time() - begun < 1
    taken = {}
    assert [unique_key(name, taken) for name in ("a_3", "a", "a", "a", "a_3", "a", "a_3_2")] == [
        *("a_3", "a", "a_2", "a_4", "a_3_2", "a_5", "a_3_2_2")
    ]


def test_names_cannot_speak_to_the_terminal(tmp_path, capsys):
    files = {"cat/\x1b[2J\n.png": b"no image", "cat/1.png": IMAGE, "dog/\x1b]0;x\x07.png": IMAGE}
    source = write_files(tmp_path / "src", files)
    assert prepare(source, tmp_path / "out") == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert r"cat/\x1b[2J\n.png: not an image" in output
    assert set(read_back(tmp_path / "out")) == {"cat/1", r"dog/\x1b]0;x\x07"}


def test_formats_that_start_other_programs_are_not_opened():
    with pytest.raises(DecodeError, match="a drawing in PostScript"):
        decode(encoded(picture(), "eps"), 3)


def test_keys_that_webdataset_would_hide_or_split_are_changed(tmp_path):
    source = write_files(
        tmp_path / "src", {"__meta__/a.b.png": IMAGE, "cat/a_b.png": IMAGE, "cat/a.b.png": IMAGE}
    )
    assert prepare(source, tmp_path / "out") == 0
    assert set(read_back(tmp_path / "out")) == {"x__meta__/a_b", "cat/a_b", "cat/a_b_2"}
