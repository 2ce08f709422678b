"""Who may import whom: the contracts of pyproject.toml; entry scripts hold no logic."""

from helpers.commands import ROOT
from importlinter.cli import lint_imports


def test_imports_keep_the_contracts(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0, capsys.readouterr().out


def test_the_root_holds_folders_alone():
    assert {path.name for path in (ROOT / "mae_vit").iterdir() if path.is_file()} == {"__init__.py"}


def test_entry_scripts_hold_no_logic():
    for script in ("pretrain/run.py", "finetune/run.py", "finetune/compare.py"):
        assert len((ROOT / script).read_text().splitlines()) <= 25
