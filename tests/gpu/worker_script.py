"""Trains a model under COARSE and under torch DDP on one GPU and compares parameters bit by bit; run by `coarse run`.

With "graphed", forward and backward of the model are CUDA graphs, captured before the model is wrapped; parameters
are also compared with those of a model without graphs. With "replayed", one graph is a step's computation, and its
gradients are averaged after each replay; for torch, gloo averages those of the same graph. With "compiled_graphs",
torch.compile makes the graphs. With "capture", the script tries to capture a step with its averaging.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import coarse.torch
from coarse.kernels import _native
from coarse.torch.gradients.paths.gpu_gradients import GpuGradients

STEPS = 5
WIDTH = 512


def build(what: str) -> torch.nn.Module:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if what == "bfloat16" else torch.float32
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()] * 4
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 3 << 12)).to("cuda:0", dtype)


def inputs(step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(16, WIDTH, generator=generator).to("cuda:0", dtype)


def train(what: str, wrap: Callable[[torch.nn.Module], Any]) -> list[torch.Tensor]:
    """Parameters after some steps."""
    module = build(what)
    if what == "graphed":
        module = torch.cuda.make_graphed_callables(module, (inputs(0, torch.float32),))
    model = wrap(module)
    run = compiled(model, what)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", enabled=what == "amp")
    dtype = next(model.parameters()).dtype
    # More streams than hardware queues by default: some of them share a queue with COARSE's streams.
    busy = [torch.cuda.Stream() for _ in range(16 if what == "many_streams" else 0)]
    for step in range(STEPS):
        for stream in busy:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
        optimizer.zero_grad()
        autocast = torch.autocast("cuda", torch.float16) if what == "amp" else contextlib.nullcontext()
        with autocast:
            loss = run(inputs(step, dtype)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()]


def compiled(model: torch.nn.Module, what: str) -> Callable[..., torch.Tensor]:
    """`model`, compiled if `what` requires it."""
    if what == "compiled":
        return torch.compile(model)
    if what == "compiled_graphs":
        return torch.compile(model, mode="reduce-overhead")
    return model


def train_by_replays(
    model: torch.nn.Module, average: Callable[[], None], no_sync: contextlib.AbstractContextManager[None]
) -> list[torch.Tensor]:
    """Parameters after some replays of one graph, each followed by averaging its gradients and an update."""
    fed = inputs(0, torch.float32)
    computes = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with no_sync:
        computes.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(computes):  # libraries allocate memory at their first call
            model(fed).square().mean().backward()
        torch.cuda.current_stream().wait_stream(computes)
        model.zero_grad()
        with torch.cuda.graph(graph):
            model(fed).square().mean().backward()
    places = [parameter.grad.data_ptr() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        fed.copy_(inputs(step, torch.float32))
        graph.replay()
        average()
        assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places, (
            "gradients have moved"
        )
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def average_by_gloo(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        gradient = parameter.grad.cpu()
        dist.all_reduce(gradient)
        parameter.grad.copy_(gradient / dist.get_world_size())


def check_replays() -> None:
    module = build("replayed")
    expected = train_by_replays(module, lambda: average_by_gloo(module), contextlib.nullcontext())
    model = wrap_coarse(build("replayed"))
    found = train_by_replays(model, model.average_gradients, model.no_sync())
    assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True)), "replayed: parameters differ"
    print("replayed: equal", flush=True)


def wrap_coarse(module: torch.nn.Module) -> Any:
    model = coarse.torch.DistributedDataParallel(module)
    assert isinstance(model._gradients.rest._path, GpuGradients), "gradients go through the processor"
    return model


def capture() -> None:
    model = wrap_coarse(build("plain"))
    fed = inputs(0, torch.float32)
    model(fed).square().mean().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    error: BaseException | None = None
    try:
        with torch.cuda.graph(graph):
            model(fed).square().mean().backward()
    except RuntimeError as raised:
        error = raised
    while error is not None and not isinstance(error, _native.CudaError):
        error = error.__context__  # torch may raise its own error about the capture
    assert error is not None, "the step was captured"
    assert "no_sync" in str(error)
    print("capture: refused", flush=True)


def main() -> None:
    what = sys.argv[1]
    dist.init_process_group("gloo")
    if what == "capture":
        capture()
        return
    if what == "replayed":
        check_replays()
        return
    expected = train(what, torch.nn.parallel.DistributedDataParallel)
    found = train(what, wrap_coarse)
    assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True)), f"{what}: parameters differ"
    if what == "graphed":  # kernels may differ
        for plain, graphed in zip(train("plain", wrap_coarse), found, strict=True):
            assert float((graphed - plain).norm() / plain.norm()) < 1e-3, f"{what}: trains another model"
    print(f"{what}: equal", flush=True)


if __name__ == "__main__":
    main()
