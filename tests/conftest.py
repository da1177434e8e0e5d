import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny products gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
