"""GPU memory in several pieces: a single array in every mapping; each piece also works alone."""

from __future__ import annotations

import os

import pytest

from coarse.client.memory.tensor_bytes import gpu_bytes
from coarse.proxy.memory.cuda import CudaMemory
from coarse.wire.segments import Segment


@pytest.fixture
def joined(cuda):
    cuda.init()
    memory = CudaMemory(0)
    page_bytes = memory.page_bytes()
    segment = Segment.joined(
        [memory.allocate("test", num_bytes) for num_bytes in (page_bytes, 2 * page_bytes)]
    )
    yield segment
    segment.close()


def tensor_of(segment):
    import torch

    return torch.from_dlpack(gpu_bytes(segment))


def test_tensors_and_kernels_go_across_from_piece_to_piece(cuda, joined):
    import torch

    expected = torch.randint(256, (joined.num_bytes,), dtype=torch.uint8)
    whole = tensor_of(joined)
    whole.copy_(expected)  # one copy from the host to all pieces
    assert whole.device == torch.device("cuda:0")
    whole.add_(whole)  # one kernel over all pieces
    expected += expected
    assert torch.equal(whole.cpu(), expected)
    assert torch.equal(whole.clone().cpu(), expected)  # one copy on the GPU of all pieces


def test_pieces_have_what_was_written_to_the_whole(cuda, joined):
    import torch

    tensor_of(joined).copy_(torch.randint(256, (joined.num_bytes,), dtype=torch.uint8))
    cuda.synchronize()
    alone = [Segment(os.dup(fd), extent.num_bytes, extent) for fd, extent in joined.pieces]
    parts = [tensor_of(each) for each in alone]
    for each in alone:
        each.close()
    assert torch.equal(torch.cat(parts), tensor_of(joined))


def test_memory_is_free_again_when_nobody_maps_it(cuda):
    import torch

    # Loading kernels takes memory.
    torch.zeros(8, dtype=torch.uint8, device="cuda").sum().item()
    cuda.empty_cache()
    memory = CudaMemory(0)
    free_bytes = memory.available_bytes()
    segment = memory.allocate("test", 256 << 20)
    whole = tensor_of(segment)
    segment.close()
    assert int(whole.sum()) == 0  # mapped and valid without any descriptor
    assert memory.available_bytes() <= free_bytes - (256 << 20)
    del whole
    assert memory.available_bytes() > free_bytes - (128 << 20)
