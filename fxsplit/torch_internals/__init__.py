"""Everything that knows torch's private parts, and nothing of pipelines: the place to look at when torch is bumped.

No other room but `frontend/` names a private part of torch. Those in use here, each with the files that use it:

- torch.utils._pytree: __init__, containers, generators, objects
- torch._subclasses.fake_tensor: fake_weights, generators
- torch._C._get_privateuse1_backend_name: generators
- torch.utils._python_dispatch.TorchDispatchMode: expectations, weight_reads
- torch._ops.OpOverload and its _schema: expectations, fake_weights
- torch._ops.OpOverloadPacket: objects
- torch.Tensor._make_subclass: fake_weights
- torch.Tensor._version: contents, fake_weights, interpret, observe
- torch.Tensor._backward_hooks: grad_leaves
- torch.Tensor._post_accumulate_grad_hooks: grad_leaves
- torch._C._will_engine_execute_node: grad_leaves
- torch.autograd.graph._engine_run_backward: grad_sums
- torch.autograd.Variable._execution_engine: grad_sums
- torch.cuda._sleep: accelerators
- torch._foreach_add_: grad_sums
- torch._debug_has_internal_overlap: grad_sums
- torch.Tensor._use_count: grad_sums
- torch.Tensor._is_view: grad_sums
- torch.Tensor._base: grad_sums
- torch._C._storage_Use_Count: grad_sums
- torch.UntypedStorage._cdata: grad_sums, interpret, observe
- torch._C._len_torch_function_stack: modes, thread_modes
- torch._C._pop_torch_function_stack: modes
- torch._C._len_torch_dispatch_stack: modes, thread_modes
- torch._C._pop_torch_dispatch_stack: modes
- torch.utils._python_dispatch and its flags: modes
- torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals: modes
- torch._C._only_lift_cpu_tensors: modes
- torch._C._set_only_lift_cpu_tensors: modes
- torch._C._autograd._push_saved_tensors_default_hooks: thread_modes
- torch._C._autograd._pop_saved_tensors_default_hooks: modes
- torch.utils._python_dispatch.TorchDispatchMode: thread_modes
- torch._C._autograd._top_saved_tensors_default_hooks: modes
- torch.fx._symbolic_trace.CURRENT_PATCHER and its revert_all_patches: fx_state
- torch.nn.modules.batchnorm._BatchNorm: batch_norm
- torch.nn.modules.dropout._DropoutNd: rng
- torch._disable_dynamo: uncompiled
- torch._dynamo.eval_frame: thread_modes
- torch._inductor.config: stage_backends
- torch.utils._device.DeviceContext: thread_modes
- torch._C._functorch.maybe_current_level: thread_modes
- torch._C._get_tracing_state: thread_modes
- torch._C._get_dispatch_stack_at: thread_modes
- torch._C._get_function_stack_at: thread_modes
- torch.nn.Module: the dictionaries _parameters, _buffers, _modules and those of hooks (`containers.HOOKS`), everywhere
- `Tensor._version` is read in other rooms too: torch's notes on autograd tell users of it
- autograd nodes (public, but bare of types): next_functions, variable and name() in grad_leaves, grad_split
  and grad_shapes
- the attributes _saved_mat1, _saved_self, _saved_alpha and _saved_beta of the nodes of products: grad_products

Rooms take `pytree` from here: a nested container as a flat list of leaves and a spec that rebuilds it. For example,
`pytree.tree_flatten({"a": 1, "b": [2, 3]})` gives the leaves [1, 2, 3] and the spec of a dict with a list in it.
"""

from torch.utils import _pytree as pytree

__all__ = ["pytree"]
