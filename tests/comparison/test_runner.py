"""Runs side by side: what waits for what."""

from pathlib import Path

import pytest

from finetune.comparison.jobs import Bar, Job, Runner

# Notes when it begins and ends; ends as its config says.
_SCRIPT = """
import pathlib, sys, time
name = sys.argv[-1].removeprefix("run.name=")
log = pathlib.Path(__file__).with_name("order")
def note(what):
    with log.open("a") as file:
        file.write(f"{what} {name}\\n")
note("begin")
time.sleep(2.0 if name == "pretrain" else 0.0)
note("end")
sys.exit(int(pathlib.Path(sys.argv[2]).read_text()) if name == "pretrain" else 0)
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_run_waits_for_its_start_and_for_nothing_else(tmp_path: Path, code: int) -> None:
    script, config = tmp_path / "script.py", tmp_path / "config.yaml"
    script.write_text(_SCRIPT)
    config.write_text(str(code))
    before = tmp_path / "pretrain"
    jobs = [
        Job(name, tmp_path / name, str(script), config, (), tmp_path, start)
        for name, start in (("pretrain", None), ("tuned", str(before)), ("scratch", None))
    ]
    runner, bar = Runner(slots=2), Bar(jobs)
    runner.run(jobs, bar)
    bar.close()
    order = (tmp_path / "order").read_text().splitlines()
    assert order.index("end scratch") < order.index("end pretrain")
    if code == 0:
        assert order.index("begin tuned") > order.index("end pretrain")
        assert not runner.failed
    else:
        assert "begin tuned" not in order
        assert runner.failed["tuned"] == f"its start {before} is not there"
