"""Who may import whom."""

import ast
import re
from pathlib import Path

import pytest
from commands import ROOT

# A module's part of the library -> the parts that it may import. Longest prefix wins.
ALLOWED = {
    "mae_vit": ("pretrained",),
    "mae_vit.errors": (),
    "mae_vit.files": (),
    "mae_vit.keyed": (),
    "mae_vit.locks": (),
    "mae_vit.machine": (),
    "mae_vit.progress": (),
    "mae_vit.signals": ("commandline",),
    "mae_vit.skipping": (),
    "mae_vit.batch": ("errors", "keyed"),
    "mae_vit.urls": ("errors",),
    "mae_vit.config_base": (),
    "mae_vit.config_data": ("config_base", "urls"),
    "mae_vit.config_optim": ("config_base",),
    "mae_vit.config": ("config_base", "config_data", "config_optim"),
    "mae_vit.config_keys": (),
    "mae_vit.config_errors": ("config_keys", "errors"),
    "mae_vit.config_file": ("config", "config_errors", "config_keys", "errors"),
    "mae_vit.commandline": ("errors",),
    "mae_vit.plan": ("config", "config_data", "errors", "urls"),
    "mae_vit.patches": (),
    "mae_vit.masking": ("keyed",),
    "mae_vit.encoder": (),
    "mae_vit.weights": ("encoder",),
    "mae_vit.checkpoint_files": (),
    "mae_vit.seen_labels": (),
    "mae_vit.starts": ("baselines", "checkpoint_files", "encoder", "errors", "seen_labels", "weights"),
    "mae_vit.coverage": ("encoder", "errors", "starts"),
    "mae_vit.pretrained": ("checkpoint_files", "coverage", "data", "encoder", "errors", "starts", "weights"),
    "mae_vit.baselines": ("encoder", "errors"),
    "mae_vit.geometry": ("config", "encoder", "errors", "weights"),
    "mae_vit.objectives": (
        *("batch", "config_base", "encoder", "keyed", "masking", "patches", "objectives"),
    ),
    "mae_vit.pretrain_config": ("config", "objectives"),
    "mae_vit.data": (
        *("batch", "keyed", "errors", "files", "locks", "signals", "skipping", "data", "urls"),
        *("progress", "__version__"),
    ),
    "mae_vit.training": (
        "batch",
        "checkpoint_files",
        "commandline",
        "config",
        "config_file",
        "encoder",
        "errors",
        "evaluation",
        "files",
        "keyed",
        "locks",
        "machine",
        "objectives.base",
        "pictures",
        "plan",
        "signals",
        "skipping",
        "training",
        "urls",
    ),
    "mae_vit.training_data": (
        "batch",
        "config",
        "data",
        "machine",
        "plan",
        "skipping",
        "training.distributed",
    ),
    "mae_vit.evaluation": ("keyed",),
    "mae_vit.decoder": ("checkpoint_files", "encoder", "errors", "objectives.mae", "starts", "weights"),
    "mae_vit.devices": ("errors",),
    "mae_vit.html": (),
    "mae_vit.reference_curves": ("pretrain_config",),
    "mae_vit.pictures": ("objectives.base",),
    "mae_vit.inspection": (
        *(
            "batch",
            "checkpoint_files",
            "config_file",
            "coverage",
            "data",
            "decoder",
            "encoder",
            "errors",
            "evaluation",
            "files",
            "html",
            "inspection",
        ),
        *("keyed", "masking", "objectives", "pictures", "pretrain_config", "pretrained", "starts", "urls"),
    ),
    "mae_vit.embedding": (
        *("data", "embedding", "errors", "files", "locks", "pretrained", "signals", "urls"),
        *("progress", "__version__"),
    ),
    "mae_vit.curve_command": ("commandline", "config_file", "errors", "files", "reference_curves"),
    "mae_vit.embed_command": (
        *("commandline", "data", "devices", "embedding", "errors", "pretrained"),
        *("machine", "signals"),
    ),
    "mae_vit.inspect_command": (
        *("commandline", "config_file", "devices", "errors", "inspection", "starts", "urls"),
    ),
    "mae_vit.prepare_command": ("commandline", "data", "errors", "machine"),
    "mae_vit.export": (
        *(
            "config_file",
            "decoder",
            "encoder",
            "errors",
            "export",
            "files",
            "objectives",
            "pretrained",
            "starts",
            "weights",
        ),
        "__version__",
    ),
    "mae_vit.export_command": ("commandline", "errors", "export"),
    "mae_vit.cli": (
        *("commandline", "data", "errors", "urls", "__version__"),
        *(f"{name}_command" for name in ("curve", "embed", "export", "inspect", "prepare")),
    ),
}
ONLY_IN = {
    "deepspeed": {"mae_vit/training/deepspeed_engine.py"},
    "pyarrow": {"mae_vit/embedding/parquet_file.py"},
    "torch.utils.tensorboard": {"mae_vit/training/monitor.py"},
    "webdataset": {"mae_vit/data/remote/streams.py", "mae_vit/data/shard_writer.py"},
}
FILES = sorted(
    [*ROOT.glob("mae_vit/**/*.py"), *ROOT.glob("pretrain/**/*.py"), *ROOT.glob("finetune/**/*.py")]
)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path):
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    imported = imports_of(path)
    for package, places in ONLY_IN.items():
        if any(module == package or module.startswith(package + ".") for module in imported):
            assert path.relative_to(ROOT).as_posix() in places, f"{package} is imported in {path}"
    ours = {module for module in imported if module.split(".")[0] in ("mae_vit", "pretrain", "finetune")}
    for job, other in (("pretrain", "finetune"), ("finetune", "pretrain")):
        if name.split(".")[0] == job:
            assert not any(module.startswith(other) for module in ours)
            return
    assert not any(module.startswith(("pretrain", "finetune")) for module in ours)
    keys = [key for key in ALLOWED if name == key or name.startswith(key + ".")]
    allowed = ALLOWED[max(keys, key=len)] if keys else ()
    for module in ours:
        part = module.removeprefix("mae_vit.")
        assert any(part == one or part.startswith(one + ".") for one in allowed), f"{name} imports {module}"


def test_what_the_command_line_imports_late():
    """What stands in the jobs' folders and is a command of the library: by name alone, and only there."""
    late = {
        path: re.findall(r'_beside\("((?:pretrain|finetune)\.\w+)"\)', path.read_text()) for path in FILES
    }
    assert {path.name: names for path, names in late.items() if names} == {
        "cli.py": ["pretrain.replay", "pretrain.doctor"]
    }
    by_name = {path.name for path in FILES if "import_module(" in path.read_text()}
    assert by_name == {"checking.py", "cli.py"}  # the former: onnxruntime and others' libraries


def test_the_whole_tree_is_covered():
    assert len(FILES) > 25
