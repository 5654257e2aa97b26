"""Stand-ins for torch DDP's `reducer` and `logger`, for libraries that access them."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch.distributed as dist


class _Facade:
    _torch_name = ""

    def __init__(self, model: Any) -> None:
        self._model_reference = weakref.ref(model)

    @property
    def _model(self) -> Any:
        model = self._model_reference()
        assert model is not None, "the model owns this object"
        return model

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"coarse.torch.DistributedDataParallel has no {self._torch_name}.{name}: gradients are averaged "
            "by memory devices, not by torch's Reducer"
        )


class ReducerFacade(_Facade):
    """The methods of torch's Reducer that training loops with a custom backward call."""

    _torch_name = "reducer"

    def prepare_for_forward(self) -> None:
        """Does nothing."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """Averages gradients in the next backward through `outputs`."""
        self._model.prepare_for_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        self._model._check_reducer_finalized()
        return False

    def _check_reducer_finalized(self) -> None:
        self._model._check_reducer_finalized()

    def _remove_autograd_hooks(self) -> None:
        self._model._remove_autograd_hooks()

    def _delay_all_reduce(self) -> None:
        """Does nothing: the first backward of a static graph also averages gradients at its end."""

    def _set_static_graph(self) -> None:
        self._model._set_static_graph()


class LoggerFacade(_Facade):
    """Reports the data of torch's Logger about the construction of a model."""

    _torch_name = "logger"

    def data(self) -> dict[str, Any]:
        """The data under torch's names, without figures of buckets and of torch's timers."""
        model = self._model
        return {
            "module_name": type(model.module).__name__,
            "backend_name": "coarse",
            "world_size": dist.get_world_size(model.process_group),
            "rank": dist.get_rank(model.process_group),
            "dtypes": ", ".join(sorted({str(p.dtype) for p in model._module_parameters})),
            "num_parameter_tensors": sum(p.requires_grad for p in model._module_parameters),
            "total_parameter_size_bytes": sum(
                p.numel() * p.element_size() for p in model._module_parameters if p.requires_grad
            ),
            "broadcast_buffers": int(model.broadcast_buffers),
            "find_unused_parameters": int(model.find_unused_parameters),
            "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
            "static_graph": int(model.static_graph),
        }
