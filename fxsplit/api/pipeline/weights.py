"""The weights of a pipeline: loaded, converted and saved as those of its model, each on the device of its stage."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import nn

from fxsplit.api.compiler.compiled import get_mode
from fxsplit.api.compiler.compiler import Compiler
from fxsplit.api.pipeline.facade import Facade
from fxsplit.api.pipeline.saving import finish_saving
from fxsplit.errors import InputError
from fxsplit.formats.weights.checkpoint_names import Extra
from fxsplit.formats.weights.safetensors_files import WeightFiles
from fxsplit.formats.weights.save_safetensors import save_checkpoint
from fxsplit.runtime.ranks.world.world import COMPILE_LIMIT_S
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from fxsplit.torch_internals.scopes.undo import restores_all


class WithWeights(Facade):
    """A facade whose weights lie where a compiler says; `compiler` is that of the pipeline."""

    compiler: Compiler
    _parted: bool = False
    """Whether an exception has ended the block of the pipeline: ranks that it has parted never write a checkpoint."""

    def finish_saving(self) -> None:
        """Return when all checkpoints of the pipeline are written; raises what stopped one."""
        if not self._parted:
            finish_saving(self)

    @abstractmethod
    def close(self) -> None:
        """End, once all checkpoints are written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._parted = kind is not None
        self.close()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters whose values this process has, in the model's order: over ranks those of its stages."""
        return (weight for weight in self.model.parameters() if not is_remote(weight))

    @abstractmethod
    def keep_idle(self) -> AbstractContextManager[None]:
        """Return a block in which no batch runs, which would read some weights of before and some of afterwards."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the unsplit model's state_dict; over ranks that of all of them, which all call this.

        Weights of other ranks come in host memory. With keep_vars=True the parameters themselves are returned, those of
        other ranks without values.
        """
        found = self.model.state_dict(*args, **kwargs)
        compile_group = self.compiler.compile_group
        if compile_group is None or kwargs.get("keep_vars"):
            return found
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        with compile_group.placement.agree("state_dict()"):
            found.update(compile_group.placement.gather_values(tensors))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict of the unsplit model, after waiting for batches that are under way; others begin later."""
        with self.keep_idle():
            result = self.model.load_state_dict(state_dict, strict=strict, assign=assign)
            # With assign=True the model holds other tensors now, which may lie on other devices.
            self.compiler.place_all()
        return result

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Convert the model's weights, as `.to(...)` and `.half()` do; each stays on the device of its stage."""
        with self.keep_idle():
            self.model._apply(fn, recurse)
            self.compiler.place_all()
        return self

    @lose_no_interrupt
    @restores_all
    def load_weights(
        self, path: str | os.PathLike[str], *, strict: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        """Load a safetensors checkpoint, each tensor straight to the device of its stage, one after another.

        path: a .safetensors file, an index (.safetensors.index.json) beside its files, or the folder of either, with
        the names and dtypes of the model's state_dict. Parameters stay the same objects, those on the meta device too.
        dtype: that of the model's weights, such as torch.float32: tensors of the checkpoint that have another
            floating-point dtype are converted to it as they are read (default: they are refused).

        strict: refuse tensors that the model does not have, and does not say to ignore; with False they are left out.

        Raises InputError, before anything is loaded, for what is missing, of another shape or dtype, or, if `strict`,
        too much.
        """
        files = WeightFiles(path, dtype)
        # Each tensor goes to the device of its stage, which only a plan can tell.
        if self.compiler.get_compiled(get_mode(self.model)) is None:
            raise InputError(
                "this pipeline compiles on its first call, and its weights have no places yet: compile with "
                "example_inputs=, or give the checkpoint as compile(weights=path)"
            )
        with self.keep_idle():
            files.load(self.model, self.compiler.list_placed(), Extra.REFUSE if strict else Extra.IGNORE)

    @lose_no_interrupt
    @restores_all
    def save_weights(self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Write the model's state_dict as a safetensors checkpoint, as Hugging Face's `from_pretrained` reads it.

        folder: where `model.safetensors` is written, or, if the tensors have more than `max_shard_bytes`,
        `model-00001-of-0000N.safetensors` and so on with their index. They take the place of an earlier checkpoint in
        the folder; other files there, such as config.json, stay. A tied weight is written once, under its first name.

        The checkpoint is written whole, or the folder is as it was. One tensor at a time is in host memory, besides
        weights that live there. Over ranks all of them call this, and the first one writes. Raises InputError for
        weights without values and for what is no tensor, and FileError.
        """
        compile_group = self.compiler.compile_group
        if compile_group is None:
            save_checkpoint(self.model, folder, max_shard_bytes)
            return
        with compile_group.placement.agree(
            "save_weights()", f"saves files of {max_shard_bytes} bytes", COMPILE_LIMIT_S
        ):
            save_checkpoint(self.model, folder, max_shard_bytes, compile_group.placement.write_together)
