"""Load, convert and save the weights of a pipeline like its model's, each on the device of its stage."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import nn

from fxsplit.api.compiler.compiler import Compiler, get_mode
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
    """A facade that keeps each weight on a device that `compiler` chooses, and loads, converts and saves weights."""

    compiler: Compiler
    _parted: bool = False
    """Whether an exception has ended the pipeline's `with` block. Ranks may then never finish a checkpoint together."""

    def finish_saving(self) -> None:
        """Wait until all checkpoints of the pipeline are written. Raises the error that stopped one."""
        if not self._parted:
            finish_saving(self)

    @abstractmethod
    def close(self) -> None:
        """End the pipeline, after all its checkpoints are written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._parted = kind is not None
        self.close()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters whose values are in this process, in the model's order.

        Over ranks: those of its stages.
        """
        return (weight for weight in self.model.parameters() if not is_remote(weight))

    @abstractmethod
    def keep_idle(self) -> AbstractContextManager[None]:
        """Return a block during which no batch runs, so that no batch sees weights that are only partly changed."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the unsplit model's state_dict. Over ranks all ranks call this, and each gets all weights.

        Weights of other ranks come in host memory. With keep_vars=True the parameters themselves are returned;
        parameters of other ranks then have no values.
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
        """Wait until no batch runs, then load a state_dict of the unsplit model. Batches that come later wait."""
        with self.keep_idle():
            result = self.model.load_state_dict(state_dict, strict=strict, assign=assign)
            # With assign=True the model holds other tensors now, which may be on other devices.
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

        path: a .safetensors file, an index (.safetensors.index.json) next to its files, or the folder of either, with
            the names and dtypes of the model's state_dict. Parameters stay the same objects, even on the meta device.
        dtype: the dtype of the model's weights, such as torch.float32: tensors of the checkpoint that have another
            floating-point dtype are converted to it as they are read (default: they are refused).
        strict: refuse tensors that the model does not have and does not say to ignore; with False they are left out.

        Raises InputError, before anything is loaded, for missing tensors, other shapes or dtypes, or, if `strict`,
        extra tensors.
        """
        files = WeightFiles(path, dtype)
        # Each tensor goes to the device of its stage, so there must be a plan.
        if self.compiler.get_compiled(get_mode(self.model)) is None:
            raise InputError(
                "this pipeline compiles on its first call, and its weights have no devices yet: compile with "
                "example_inputs=, or give the checkpoint as compile(weights=path)"
            )
        with self.keep_idle():
            files.load(self.model, self.compiler.list_placed(), Extra.REFUSE if strict else Extra.IGNORE)

    @lose_no_interrupt
    @restores_all
    def save_weights(self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Write the model's state_dict as a safetensors checkpoint, as Hugging Face's `from_pretrained` reads it.

        folder: gets `model.safetensors`, or, if the tensors have more than `max_shard_bytes`,
            `model-00001-of-0000N.safetensors` and so on with their index. They replace an earlier checkpoint in the
            folder; other files there, such as config.json, stay. A tied weight is written once, under its first name.

        The checkpoint is written whole, or the folder is as it was. One tensor at a time is copied to host memory. Over
        ranks all of them call this, and the first rank writes. Raises InputError for weights without values and for
        values that are not tensors, and FileError.
        """
        compile_group = self.compiler.compile_group
        if compile_group is None:
            save_checkpoint(self.model, folder, max_shard_bytes)
            return
        with compile_group.placement.agree(
            "save_weights()", f"saves files of {max_shard_bytes} bytes", COMPILE_LIMIT_S
        ):
            save_checkpoint(self.model, folder, max_shard_bytes, compile_group.placement.write_together)
