"""Run a model so that no row depends on random draws or, through batch norm, on other rows.

Every random number is replaced by its average: dropout keeps everything, and noise is zero. Batch norms that would
normalise by their batch normalise each row by itself. After that, a batch differs from its microbatches only if the
model itself makes rows depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.torch_internals.thread_modes import enter_dispatch_mode, enter_function_mode

Given = dict[str, Any]


def _pick(given: Given) -> Tensor:
    """Return the indices that a multinomial draw would draw most often, instead of random indices."""
    weights: Tensor = given["self"]
    count: int = given["num_samples"]
    if given.get("replacement"):
        return weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], count)
    return weights.topk(count, -1).indices


def _read_options(given: Given) -> Given:
    """Return the dtype and device that a draw asks for."""
    dtype = given.get("dtype")
    # A default from the schema is an integer code, which always means int64 here.
    return {"dtype": torch.int64 if isinstance(dtype, int) else dtype, "device": given.get("device")}


def _make_like_draw(average: Any, given: Given) -> Tensor:
    """Return an uninitialised tensor with the shape and dtype of a draw."""
    if isinstance(average, Tensor):
        return torch.empty_like(average)
    like = next((given[name] for name in ("self", "std") if isinstance(given.get(name), Tensor)), None)
    options = _read_options(given)
    return torch.empty(given["size"], **options) if like is None else torch.empty_like(like, **options)


AVERAGES: dict[str, Callable[[Given], Any]] = {
    "bernoulli": lambda given: given["self"] if given.get("p") is None else given["p"],
    "bernoulli_": lambda given: given["p"],
    "uniform_": lambda given: (given["from"] + given["to"]) / 2,
    "normal_": lambda given: given["mean"],
    "normal": lambda given: given["mean"],
    "exponential_": lambda given: 1 / given["lambd"],
    "log_normal_": lambda given: math.exp(given["mean"] + given["std"] ** 2 / 2),
    "geometric_": lambda given: 1 / given["p"],
    "cauchy_": lambda given: given["median"],
    "_standard_gamma": lambda given: given["self"],
    "rand": lambda given: 0.5,
    "rand_like": lambda given: 0.5,
    "randn": lambda given: 0.0,
    "randn_like": lambda given: 0.0,
    "randint": lambda given: (given.get("low", 0) + given["high"] - 1) // 2,
    "randint_like": lambda given: (given.get("low", 0) + given["high"] - 1) // 2,
    "randperm": lambda given: torch.arange(given["n"], **_read_options(given)),
    "multinomial": _pick,
    "poisson": lambda given: given["self"],
}
"""The average of each random operator, computed from its arguments by name."""
DRAWING = ("rrelu_with_noise", "native_dropout")
"""The first parts of the names of operators that draw by themselves, and have another average."""


@cache
def _is_random(operator: torch._ops.OpOverload) -> bool:
    """Return whether an operator may draw random numbers. Most do not, and a model calls each of them many times."""
    names = {argument.name for argument in operator._schema.arguments}
    name = operator.overloadpacket.__name__
    return name in AVERAGES or name.startswith(DRAWING) or "dropout_p" in names


class Averages(TorchDispatchMode):
    """Replaces random draws by their averages. `met`: whether there was any."""

    supports_higher_order_operators = True
    met = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, or return its average."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # torch.cond and the like, which run operators themselves
            return func(*args, **kwargs)
        if not _is_random(func):
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        name = func.overloadpacket.__name__
        self.met |= name in AVERAGES or name.startswith(DRAWING)
        # Attention kernels apply dropout internally, so turn it off by their argument.
        if "dropout_p" in names:
            self.met |= bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"))
            args = tuple(0.0 if name == "dropout_p" else a for name, a in zip(names, args, strict=False))
            kwargs = {name: 0.0 if name == "dropout_p" else a for name, a in kwargs.items()}
        # In training the negative slope is random; in evaluation it is the average slope.
        if name.startswith("rrelu_with_noise") and "training" in names:
            args, kwargs = args[: names.index("training")], {**kwargs, "training": False}
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name not in AVERAGES:  # such as attention, or a slope
            return func(*args, **kwargs)
        given: Given = {a.name: a.default_value for a in func._schema.arguments}
        given |= {**dict(zip(names, args, strict=False)), **kwargs}
        average = AVERAGES[name](given)
        # Draw nothing: the generator is the caller's, and other threads may be drawing from it.
        drawn = given["self"] if name.endswith("_") else _make_like_draw(average, given)
        return drawn.copy_(average) if isinstance(average, Tensor) else drawn.fill_(average)


class RowwiseNorm(TorchFunctionMode):
    """Makes batch norms divide each row by its own root mean square. The statistics of the batch are not used.

    met: whether there was any batch norm that would have used them.
    """

    met = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Given | None = None
    ) -> Any:
        """Call `func`, or normalise each row if it is batch norm. nn.BatchNorm passes most arguments by position."""
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given: Given = {"weight": None, "bias": None, "training": False, "eps": 1e-5}
        given |= dict(zip(names, args, strict=False)) | (kwargs or {})
        x: Any = given["input"]
        if not given["training"] and given["running_mean"] is not None:
            return func(*args, **(kwargs or {}))
        self.met = True
        # Not layer norm, which would turn a row with a single channel and position into zeros.
        x = x * (x.square().mean(tuple(range(1, x.ndim)), keepdim=True) + given["eps"]).rsqrt()
        shape = (1, -1, *[1] * (x.ndim - 2))
        for weight, join in ((given["weight"], torch.mul), (given["bias"], torch.add)):
            x = x if weight is None else join(x, weight.view(shape))
        return x


@contextmanager
def expect_averages() -> Iterator[Averages]:
    """Replace random draws by their averages inside the block, on this thread. Yields the mode that does."""
    mode = Averages()  # type: ignore[no-untyped-call]
    with enter_dispatch_mode(mode):
        yield mode


@contextmanager
def normalise_rows_alone() -> Iterator[RowwiseNorm]:
    """Make batch norms normalise each row by itself inside the block, on this thread. Yields the mode that does."""
    mode = RowwiseNorm()
    with enter_function_mode(mode):
        yield mode
