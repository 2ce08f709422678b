"""What a run's outputs keep over a resume."""

import json
from types import SimpleNamespace

import pytest

from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import ALONE
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.run_outputs import RunOutputs


@pytest.mark.parametrize("start_step", [0, 5])
def test_the_first_probe_is_kept_from_whatever_step_a_run_resumes(tmp_path, start_step):
    """A checkpoint of step 0 is resumed from, too, and the weights are not measured again."""
    config = load_config(PretrainConfig, find_config("mae_digits"), [])
    plan = SimpleNamespace(total_steps=9, effective_batch_size=4)
    folder = RunFolder(tmp_path)
    first = RunOutputs(config, plan, folder, ALONE, start_step=0, facts={}, damaged=())
    first.note_first_probe({"few_shot_top1": 0.25, "images": 40})
    first.begin(0, "starting", "")
    resumed = RunOutputs(config, plan, folder, ALONE, start_step=start_step, facts={}, damaged=())
    resumed.begin(start_step, "resuming", "")
    assert json.loads(folder.summary.read_text())["probe_at_start"] == {"few_shot_top1": 0.25, "images": 40}
