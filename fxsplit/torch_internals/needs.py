"""The private names of torch that fxsplit uses. They are looked up once, and a missing name is reported.

The lookup happens when this room is first imported, before any file uses the names. Names in modules that take seconds
to load are looked up at their first use, with `require`. `probes` checks how torch behaves.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn

import torch

from fxsplit.errors import TorchError

TRIED = "torch 2.11, 2.13, 2.14 and 2.15"
"""The releases with which the tests were run."""

NEEDED = (
    # Containers, modules and tensors
    "torch.utils._pytree",
    "torch.nn.Module.register_parameter",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.nn.RNNBase._update_flat_weights",
    "torch.nn.modules.transformer._detect_is_causal_mask",
    "torch.nn.functional._canonical_mask",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.Tensor._make_subclass",
    "torch.Tensor._make_wrapper_subclass",
    "torch.Tensor._values",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.Tensor._version",
    "torch.Tensor._is_view",
    "torch.Tensor._base",
    "torch.Tensor._use_count",
    "torch.UntypedStorage._cdata",
    "torch._C._storage_Use_Count",
    "torch._C._swap_tensor_impl",
    "torch.jit._recursive.create_script_module_impl",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._set_pg_timeout",
    "torch.distributed.distributed_c10d._world.group_count",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch._C._disabled_torch_function_impl",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._nn._parse_to",
    "torch._debug_has_internal_overlap",
    # Operators
    "torch._ops.OpOverload",
    "torch.ops.aten.add.Tensor._schema",
    "torch._ops.OpOverloadPacket",
    "torch._ops.HigherOrderOperator",
    "torch._foreach_add_",
    "torch._foreach_norm",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch.ops.aten._foreach_norm.Scalar",
    "torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default",
    "torch._foreach_copy_",
    "torch.ops.aten._assert_async",
    "torch.ops.aten._assert_scalar",
    "torch.ops.aten._assert_tensor_metadata",
    "torch.ops.aten._local_scalar_dense",
    # Fake tensors
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._subclasses.fake_tensor.disable_fake_tensor_cache",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.Tensor._has_symbolic_sizes_strides",
    "torch.fx.experimental.proxy_tensor._extract_tensor_metadata",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._inner_evaluate_expr",
    "torch.utils._sympy.functions.FloorDiv",
    "torch.utils._sympy.functions.Mod",
    "torch.utils._sympy.functions.PythonMod",
    # Autograd
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.autograd.graph._engine_run_backward",
    "torch.autograd.Variable._execution_engine.run_backward",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd.is_multithreading_enabled",
    "torch.autograd.set_multithreading_enabled",
    "torch._C._current_graph_task_id",
    "torch._C._will_engine_execute_node",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    # What operators allocate
    "torch._C._profiler.ProfilerConfig",
    "torch._C._profiler.ProfilerState",
    "torch._C._autograd._profiler_enabled",
    "torch._C._autograd._enable_profiler_legacy",
    "torch._C._autograd._disable_profiler_legacy",
    "torch._C._profiler._ExperimentalConfig",
    # Modes of a thread
    "torch._C._len_torch_function_stack",
    "torch._C._pop_torch_function_stack",
    "torch._C._get_function_stack_at",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._pop_torch_dispatch_stack",
    "torch._C._get_dispatch_stack_at",
    "torch._C._only_lift_cpu_tensors",
    "torch._C._set_only_lift_cpu_tensors",
    "torch._C._get_tracing_state",
    "torch._C._functorch._vmap_decrement_nesting",
    "torch._C._functorch.maybe_current_level",
    "torch.autograd.forward_ad._current_level",
    "torch._functorch.vmap.lazy_load_decompositions",
    "torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._is_in_torch_dispatch_mode",
    "torch.utils._python_dispatch._is_in_non_infra_torch_dispatch_mode",
    "torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals",
    "torch.utils._device.DeviceContext",
    # Tracing
    "torch.utils._traceback._extract_symbolized_tb",
    "torch.fx._symbolic_trace.CURRENT_PATCHER",
    "torch.fx._symbolic_trace._is_fx_tracing_tls or torch.fx._symbolic_trace._is_fx_tracing_flag",
    "torch._disable_dynamo",
    # Accelerators
    "torch.Stream",
    "torch.Event",
    "torch.Tensor.record_stream",
    "torch.accelerator.current_stream",
    "torch.accelerator.set_stream",
    "torch.accelerator.synchronize",
    "torch.accelerator.empty_cache",
    "torch.accelerator.get_memory_info",
    "torch.cuda._sleep",
    "torch._C._get_privateuse1_backend_name",
)
"""Names that exist once torch is imported; "a or b" if the name depends on the release."""

COMPILERS = (
    "torch._dynamo.eval_frame._stance",
    "torch._dynamo.eval_frame._set_stance",
    "torch._dynamo.eval_frame.DynamoStance",
)
INDUCTOR = ("torch._inductor.config.triton.cudagraphs",)
STAGE_COMPILERS = (
    "torch._dynamo.lookup_backend",
    "torch._dynamo.maybe_mark_dynamic",
    "torch._functorch.config.force_non_lazy_backward_lowering",
    "torch._functorch.config.patch",
    "torch.compiler.config.recompile_limit",
)
PIPELINING = (
    "torch.distributed.pipelining.microbatch._Replicate",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
)
LATE = (*COMPILERS, *INDUCTOR, *STAGE_COMPILERS, *PIPELINING)
"""Names in modules that take seconds to load."""


def require(names: Iterable[str]) -> None:
    """Raise TorchError if torch lacks any of these names."""
    missing = [name for name in names if not any(map(_exists, name.split(" or ")))]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        refuse(f"has no {missing[0]}{more}")


def refuse(what: str, cause: Exception | None = None) -> NoReturn:
    """Raise TorchError that says what this torch lacks or does differently.

    cause: the error that showed the difference.
    """
    raise TorchError(
        f"torch {torch.__version__} {what}, on which fxsplit relies: install a release that fxsplit was tried with, "
        f"{TRIED}, or an fxsplit that knows this one"
    ) from cause


def _exists(name: str) -> bool:
    """Return whether torch has a name. Imports the modules on the way to the name."""
    found: Any = torch
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 2):
        try:
            found = operator.attrgetter(part)(found)
        except AttributeError:
            path = ".".join(parts[:i])
            try:
                found = sys.modules.get(path) or import_module(path)
            except ImportError:
                return False
    return True


require(NEEDED)
