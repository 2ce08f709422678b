"""What is wrong with a command line is said before torch, which takes seconds, is imported."""

import gc
import sys

import pytest
from helpers.commands import run

from mae_vit.runtime.imports import slow_imports

_SCRIPT = """
import sys
from mae_vit.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
slow = ["torch", "torchvision", "timm", "scipy"]
slow += ["numpy", "pydantic", "ruamel.yaml"] if sys.argv[1:] == ["--help"] else []
print(code, [name for name in slow if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("pretrain", "mae_digits", "train.epoch=3"), 2),
        (("finetune", "finetune_cifar_tiny", "train.epoch=3"), 2),
        (("compare", "compare_demo", "sed=1"), 2),
        (("--help",), 0),
        (("pretrain", "--help"), 0),
        (("presets",), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_typo_is_answered_without_torch(words, code):
    done = run("-c", _SCRIPT, *words)
    assert done.stdout.splitlines()[-1] == f"{code} []", done.stdout + done.stderr


def test_slow_imports_wait_for_no_garbage_and_no_wandb(monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with slow_imports():
        assert (gc.isenabled(), sys.modules["wandb"]) == (False, None)
    assert (gc.isenabled(), "wandb" in sys.modules) == (True, False)
    gc.unfreeze()
    monkeypatch.setitem(sys.modules, "wandb", sys)
    with slow_imports():
        assert sys.modules["wandb"] is sys
    gc.unfreeze()
