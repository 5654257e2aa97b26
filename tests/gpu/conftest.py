"""Tests that need a GPU. Without a GPU they are skipped, with the reason."""

import pytest


@pytest.fixture(scope="session")
def cuda():
    """torch.cuda on a machine with a GPU that both torch and NVRTC can use."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU that PyTorch can use")
    return torch.cuda


@pytest.fixture(scope="session")
def kernels(cuda):
    from coarse.kernels.cuda_kernels import CudaKernels

    cuda.init()
    return CudaKernels(0)


@pytest.fixture(scope="session")
def nccl(cuda):
    """The NCCL library that COARSE uses."""
    from coarse.kernels import _native
    from coarse.kernels.nccl import find_nccl

    try:
        return find_nccl()
    except _native.NcclError as error:
        pytest.skip(str(error))
