"""`mae-vit export --push`: one private commit that `load_encoder` reads to the bit, or one line and no commit."""

import pytest
import torch
from helpers.commands import one_line
from helpers.export import classifier_file, export, images_for, mae_run
from helpers.servers.hub_server import TOKEN

import mae_vit

FILES = {"README.md", "config.json", "preprocessor_config.json", "model.safetensors", "encoder.safetensors"}


@pytest.fixture(autouse=True)
def token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def run(tmp_path):
    mae_run(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("{}")  # a run folder: exports go into it
    return tmp_path / "run"


def same(loaded, ours):
    images = images_for(ours.info)
    with torch.no_grad():
        assert torch.equal(loaded(images), ours(images))


def test_a_push_is_private_and_loads_to_the_bit(hub, run, tmp_path, capfd):
    assert export(run, "--to", "hf", "--push", "anna/mae") == 0
    repo = hub.repos["model", "anna/mae"]
    assert repo.private
    commit = repo.refs["main"]
    assert {file for file in repo.files if not file.startswith("mae/")} == FILES | {".gitattributes"}
    assert repo.files["mae/model.safetensors"]
    assert 'mae_vit.load_encoder("hf:anna/mae")' in repo.files["README.md"].decode()
    for file, content in repo.files.items():
        if file != ".gitattributes":
            assert (run / "hf" / file).read_bytes() == content
    said = "".join(capfd.readouterr())
    assert f'load_encoder("hf:anna/mae@{commit}")' in said
    loaded = mae_vit.load_encoder(f"hf:anna/mae@{commit}")
    same(loaded, mae_vit.load_encoder(run))
    assert loaded.info.step == 7
    # The token was sent, and is nowhere else.
    assert hub.tokens == {TOKEN}
    assert TOKEN not in said
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]


def test_a_classifier_pushed_to_timm_loads_to_the_bit_and_is_sent_once(hub, tmp_path):
    file = tmp_path / "run" / "model.safetensors"
    classifier_file(file, pool="mean")
    assert (
        export(file, "--to", "timm", "--out", tmp_path / "out", "--push", "hf:anna/mae@tries", "--public")
        == 0
    )
    repo = hub.repos["model", "anna/mae"]
    assert not repo.private
    files = {".gitattributes", "README.md", "config.json", "model.safetensors"}
    assert set(repo.commits[repo.refs["tries"]]) == files
    assert set(repo.files) == {".gitattributes"}  # the branch alone
    same(mae_vit.load_encoder("hf:anna/mae@tries"), mae_vit.load_encoder(file))


def test_a_second_push_in_another_form_leaves_no_encoder_of_the_first(hub, run, tmp_path):
    assert export(run, "--to", "hf", "--push", "anna/mae", "--out", tmp_path / "a") == 0
    mae_run(tmp_path / "other", mlp_ratio=2.0)
    hub.repos["model", "anna/mae"].commit({**hub.repos["model", "anna/mae"].files, "notes.md": b"mine"})
    assert export(tmp_path / "other", "--to", "timm", "--push", "anna/mae", "--out", tmp_path / "b") == 0
    files = hub.repos["model", "anna/mae"].files
    assert set(files) == {".gitattributes", "README.md", "config.json", "model.safetensors", "notes.md"}
    same(mae_vit.load_encoder("hf:anna/mae"), mae_vit.load_encoder(tmp_path / "other"))


def test_a_dry_run_lists_files_and_sizes_and_leaves_nothing(hub, run, capsys):
    before = sorted(run.rglob("*"))
    assert export(run, "--to", "timm", "--push", "anna/mae", "--dry-run") == 0
    said = capsys.readouterr().out
    assert sorted(run.rglob("*")) == before
    assert not hub.requests
    assert "anna/mae (private)" in said
    listed = {
        line.split()[-1]: int(line.split()[0].replace(",", ""))
        for line in said.splitlines()
        if " B  " in line
    }
    assert export(run, "--to", "timm") == 0
    written = {path.name: path.stat().st_size for path in (run / "timm").iterdir()}
    # The card of a push has a line more.
    assert listed.keys() == written.keys()
    assert listed["model.safetensors"] == written["model.safetensors"]


BEFORE = {
    "a wrong token": (["--push", "anna/mae"], {"HF_TOKEN": "hf_wrong"}),
    "no token": (["--push", "anna/mae"], {"HF_TOKEN": ""}),
    "no user": (["--push", "mae"], {}),
    "a public repo": (["--push", "anna/public"], {}),
    "no push": (["--public"], {}),
}


@pytest.mark.parametrize("case", BEFORE)
def test_what_is_refused_is_refused_before_the_export(hub, run, capfd, monkeypatch, case, said):
    options, environment = BEFORE[case]
    hub.add("anna/public", {"notes.md": b"mine"})
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert export(run, "--to", "timm", *options) == 2
    said(one_line(capfd))
    assert not (run / "timm").exists()
    assert hub.repos.keys() == {("model", "anna/public")}
    assert set(hub.repos["model", "anna/public"].files) == {"notes.md"}


@pytest.mark.parametrize(
    ("name", "fault", "code"),
    [
        ("others/mae", {}, 2),
        *(("anna/mae", {call: ["always drop"]}, 75) for call in ("/commit/", "PUT /lfs")),
        *(("anna/mae", {"/commit/": ["always 503"]}, 75), ("anna/mae", {"/commit/": ["always echo"]}, 2)),
    ],
)
def test_a_push_that_fails_commits_nothing_and_says_how_to_repeat_it(
    hub, run, capfd, name, fault, code, said
):
    hub.faults = fault
    assert export(run, "--to", "timm", "--push", name) == code
    said(one_line(capfd).replace(hub.url, "HUB"))
    assert all(set(repo.files) == {".gitattributes"} for repo in hub.repos.values())
    if code == 75:
        hub.faults = {}
        assert export(run, "--to", "timm", "--push", name, "--force") == 0
        assert "model.safetensors" in hub.repos["model", name].files
