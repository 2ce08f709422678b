import shutil

import pytest
from helpers.report_files import train


@pytest.fixture(scope="session")
def trained(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert train(digits, folder, "monitor.evaluate_every_steps=1") == 0
    return folder


@pytest.fixture
def run_folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "small")
