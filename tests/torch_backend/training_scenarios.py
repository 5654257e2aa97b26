"""torch features that use collectives, under either backend; each returns parameters or tensors to compare."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


class Branches(nn.Module):
    """A model of which each step uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])

    def forward(self, inputs: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.norm(self.first(inputs)).relu())


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def _train(
    model: nn.Module, *, steps: int = STEPS, arguments: Callable[[int], tuple[Any, ...]] = lambda _: ()
) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        model(torch.randn(4, 8), *arguments(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def ddp() -> Any:
    return _train(DistributedDataParallel(_mlp()))


def ddp_with_unused_parameters_and_buffers() -> Any:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    return [
        _train(model, arguments=lambda step: ((step + dist.get_rank()) % 2,)),
        model.module.norm.running_mean,
    ]


def ddp_with_bucket_views_in_small_buckets() -> Any:
    return _train(DistributedDataParallel(_mlp(), gradient_as_bucket_view=True, bucket_cap_mb=0.001))


def ddp_of_bfloat16() -> Any:
    model = DistributedDataParallel(_mlp().to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def ddp_with_a_hook_that_reduces_itself() -> Any:
    model = DistributedDataParallel(_mlp())

    def reduce(_state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, which are texts here
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    model.register_comm_hook(None, reduce)
    return _train(model)


def ddp_compiled() -> Any:
    return _train(torch.compile(DistributedDataParallel(_mlp()), backend="aot_eager"))


def ddp_joins_uneven_inputs() -> Any:
    model = DistributedDataParallel(_mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for _ in range(2 + 2 * dist.get_rank()):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def zero_redundancy_optimizer() -> Any:
    model = DistributedDataParallel(_mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(STEPS):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _sharded() -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    return model


def fsdp2() -> Any:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(STEPS):
        model(torch.randn(4, 8)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def dtensors() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).reshape(7, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    product = (rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])).full_tensor()
    return [rows.full_tensor(), columns.to_local(), columns.sum().full_tensor(), product]


def distributed_checkpoints() -> Any:
    model = _sharded()
    folder = [tempfile.mkdtemp(prefix="coarse-test-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        expected = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
        state = {"model": model.state_dict()}
        checkpoint.save(state, checkpoint_id=folder[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpoint.load(state, checkpoint_id=folder[0])
        model.load_state_dict(state["model"])
        found = [parameter.full_tensor().detach() for parameter in model.parameters()]
        assert all(map(torch.equal, expected, found))
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
    return found


TRAINING: dict[str, Callable[[], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        ddp,
        ddp_with_unused_parameters_and_buffers,
        ddp_with_bucket_views_in_small_buckets,
        ddp_of_bfloat16,
        ddp_with_a_hook_that_reduces_itself,
        ddp_compiled,
        ddp_joins_uneven_inputs,
        zero_redundancy_optimizer,
        fsdp2,
        dtensors,
        distributed_checkpoints,
    )
}
