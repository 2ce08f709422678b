"""Everybody has a cache folder, also a container's user id without an account, a name or a home folder."""

import getpass
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from mae_vit.core.errors import InputError
from mae_vit.core.files import settle_nameless_user, user_cache


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """A user id without an entry in passwd, as `docker run --user 1234` gives it."""

    def unknown(user: object) -> None:
        raise KeyError(f"uid not found: {user}")

    # Recorded, so that they are taken back.
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"mae-vit-{os.getuid()}"


def test_a_user_without_an_account_gets_a_private_home_and_a_name(nobody):
    with pytest.raises(RuntimeError):
        Path.home()
    settle_nameless_user()
    assert Path.home() == nobody
    assert nobody.stat().st_mode & 0o777 == 0o700
    assert getpass.getuser() == str(os.getuid())
    assert user_cache() == nobody / ".cache" / "mae-vit"


def test_a_user_with_an_account_keeps_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "me")
    before = dict(os.environ)
    settle_nameless_user()
    assert dict(os.environ) == before


def test_a_home_folder_that_cannot_be_written(nobody, monkeypatch):
    """A container without an account has "/" there."""
    monkeypatch.setenv("HOME", "/")
    # The test's own user may be root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path("/"))
    assert user_cache() == nobody / ".cache" / "mae-vit"


def test_no_place_at_all_names_the_remedy(nobody, monkeypatch):
    nobody.write_text("a file")
    settle_nameless_user()
    assert "HOME" not in os.environ
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        user_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert user_cache() == Path("/caches/mae-vit")


def test_a_folder_of_another_user_is_not_trusted(nobody, monkeypatch):
    stranger = os.getuid() + 1
    nobody.with_name(f"mae-vit-{stranger}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        user_cache()


def test_a_home_folder_in_the_variable_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert user_cache() == tmp_path / "cache" / "mae-vit"
