"""Jobs and presets as commands of `mae-vit`."""

import re
import subprocess
import sys

import pytest
from helpers.commands import ROOT, one_line

from mae_vit.cli.main import EXAMPLES, main
from mae_vit.comparison.config import CompareConfig
from mae_vit.config.command_line import parse_arguments
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config, preset_paths
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig


def test_presets_are_listed_and_shown(capsys, said):
    assert main(["presets"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "HARDWARE", "TOOK", "WHAT"]
    assert [line.split()[0] for line in lines] == [path.stem for path in preset_paths()]
    (line,) = (line for line in lines if line.startswith("mae_digits "))
    assert re.split(r"  +", line)[1:3] == ["two CPU cores", "4 minutes"]
    assert "  MAE on " in line
    assert main(["presets", "study_length"]) == 0  # a name, though two more have it in theirs
    assert capsys.readouterr().out.startswith("study_length\n  How long")
    assert main(["presets", "cifar", "linear"]) == 0
    assert capsys.readouterr().out.startswith("linear_probe_cifar_tiny\n")
    assert main(["presets", "--show", "mae_digits"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "pretrain" / "mae_digits.yaml").read_text()
    assert main(["presets", "--show", "mae_digit"]) == 2
    said(one_line(capsys))
    assert main(["presets", "nothing"]) == 2
    assert '"nothing"' in one_line(capsys)


@pytest.mark.parametrize(
    "words",
    [
        *("pretrain", "pretrain mae_digit", "pretrain --config mae_digits mae_base", "compare mae_digits"),
        *(
            "pretrain finetune_cifar_tiny",
            "pretrain compare_demo",
            "finetune",
            "finetune --checkpoint runs/a",
        ),
        *(
            "doctor train.epochs=3",
            "doctor train.epochz=3 mae_digits",
            "pretrain mae_digits \u2013resume never",
        ),
        *("pretrain mae_digits --device cuda", "compare compare_demo train.device=cpu"),
        "pretrain mae_digits --run.seed 3",
    ],
)
def test_a_wrong_job_is_one_line(capsys, words, said):
    assert main(words.split()) == 2
    said(one_line(capsys))


def test_a_key_may_be_written_as_an_option():
    words = ["mae_digits", "--run.seed=3", "run.name=a"]
    arguments = parse_arguments(words, description="", sections=(), examples="")
    assert arguments.overrides == ["run.seed=3", "run.name=a"]


def test_the_help_of_every_command_begins_with_examples(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    commands = {line.split()[1] for line in EXAMPLES.splitlines() if line.startswith("  mae-vit")}
    for command in ("", *commands):
        with pytest.raises(SystemExit):
            main([*filter(None, [command]), "--help"])
        text = capsys.readouterr().out
        usage, examples, *_ = text.split("\n\n")
        assert usage.startswith("usage: ")
        assert examples.startswith("examples:\n"), command
        assert f"mae-vit {command}".rstrip() in examples
        assert "run.py" not in examples
        assert max(map(len, text.splitlines())) <= 100, command
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    ([a-z][\w-]*)(?= |$)", capsys.readouterr().out, re.MULTILINE)
    assert set(listed) == commands


@pytest.mark.parametrize(
    ("job", "schema", "preset"),
    [
        ("pretrain", PretrainConfig, "mae_cifar_tiny"),
        ("finetune", FinetuneConfig, "finetune_cifar_vit_t2"),
        ("compare", CompareConfig, "compare_demo"),
    ],
)
def test_every_key_in_the_help_of_a_job_is_one(capsys, job, schema, preset):
    with pytest.raises(SystemExit):
        main([job, "--help"])
    # Without argparse's line breaks.
    text = " ".join(capsys.readouterr().out.split())
    given = re.findall(r"(?<![-\w.])[a-z]+(?:\.\w+)*=[^\s),;']+", text)
    assert len(given) >= 3, given
    refused = {}
    for change in given:
        config = "simple_cnn_cifar" if change.startswith("model.name=timm:") else preset
        try:
            load_config(schema, find_config(config), [change])
        except InputError as error:
            refused[change] = str(error)
    # A mode without training takes few keys of a recipe.
    assert all("finetune.mode" in error for error in refused.values()), refused


def test_the_program_of_a_comparison_runs_from_anywhere(tmp_path):
    """By its path, where another library of the same name may be the current folder's."""
    (tmp_path / "mae_vit").mkdir()
    (tmp_path / "mae_vit" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    done = subprocess.run(
        [sys.executable, ROOT / "mae_vit" / "cli" / "__main__.py", "presets", "mae_digits"],
        capture_output=True, text=True, cwd=tmp_path, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mae_digits\n")
