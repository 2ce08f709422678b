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
    with pytest.raises(InputError, match=r"\$y/z"):
        expand_path("$y/z")


@pytest.mark.parametrize(
    "text",
    [
        "photos\r",
        "runs\r/mae\n1 /x",
        "photos\xa0",
        "\u200bphotos",
        "\u201cphotos\u201d",
        "C:\\photos\\a",
        "D:/photos",
        "",
    ],
)
def test_what_is_pasted_from_elsewhere_is_refused(text, said):
    with pytest.raises(InputError) as caught:
        expand_text(text)
    said(caught)


def test_a_path_that_is_there_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("photos\r", "\u201cphotos\u201d", "C:\\photos"):
        (tmp_path / name).mkdir()
        assert expand_text(name) == name
        assert expand_text(f"{name}/new") == f"{name}/new"
    assert expand_text("new \u2764\ufe0f") == "new \u2764\ufe0f"
