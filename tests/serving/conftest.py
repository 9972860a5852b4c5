import pytest
import torch

from cli.commands import save_model
from lynxkv.engine.transformers import TransformersEngine


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Folder of a tiny random model that reads and writes bytes."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def eng(tiny_folder):
    """Its engine."""
    torch.set_num_threads(1)
    return TransformersEngine.load(tiny_folder)
