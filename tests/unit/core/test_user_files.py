"""What a shell leaves in a path is expanded."""

import pytest

from mae_vit.core.errors import InputError
from mae_vit.core.user_files import expand_path, expand_text


def test_home_and_variables_are_expanded(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    assert [str(expand_path(text)) for text in ("~", "~/x", "$DATA/x", "${DATA}2/$DATA")] == [
        *("/home/me", "/home/me/x", "/data/x", "/data2/data"),
    ]
    # As they are: other places of ~, names, URLs, and a folder that is called so.
    for text in ("a~", "./~", "timm:vit", "hf:a/b", "s3://bucket/$x/~", "x/", "5$"):
        assert expand_text(text) == text
    (tmp_path / "$x").mkdir()
    assert expand_text("$x") == "$x"
    with pytest.raises(InputError, match=r'path "\$y/z": the variable \$y is not set'):
        expand_path("$y/z")
