import pytest
import torch

from kernels import cpu


@pytest.fixture(params=["avx512_vnni", "avx512", "avx2_vnni", "avx2"])
def isa(request):
    """Every instruction set this CPU has."""
    if request.param not in cpu.supported_isas():
        pytest.skip(f"this CPU has no {request.param}")
    works, reason = cpu.available(request.param)
    if not works:
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def _threads():
    torch.manual_seed(0)
    cpu.set_num_threads(2)
    yield
    cpu.set_num_threads(None)
