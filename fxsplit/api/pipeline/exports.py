"""Give the stages of a pipeline to torch's own pipeline runtime, and its figures to an experiment tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxsplit.api.compiler.compiler import get_mode
from fxsplit.api.pipeline.tracker import Tracker
from fxsplit.api.pipeline.weights import WithWeights
from fxsplit.errors import InputError
from fxsplit.runtime.ranks.gradients.bytes_sent import BytesSent
from fxsplit.torch_internals.scopes.undo import restores_all

if TYPE_CHECKING:
    import torch.distributed as dist

    from fxsplit.api.to_torch import TorchStages


class WithExports(WithWeights):
    """Base of Pipeline: gives the compiled stages to another runtime, and figures to a tracker."""

    tracker: Tracker | None = None
    """The tracker that `track` has set."""

    def track(self, to: Any, *, every: int = 1) -> None:
        """Report the figures of every N-th training batch: the time of the step, idle share, stage times, memory.

        to: a function of (figures, number of the batch), a `SummaryWriter` of TensorBoard, a logger of Lightning, or
            None to end. `figures` maps names such as "fxsplit/step_ms" to numbers; `tracker.measure` lists them.
        every: the N of "every N-th". With 10, batches 1, 11, 21 and so on are timed.

        A batch is a call of `step`, or a call of the pipeline with its backward(). The latter is reported at the next
        call of the pipeline, and at `track(None)` and `close()`. An error of `to` is a warning, and training goes on.
        Each call replaces the tracker before. Raises InputError for another `to` or `every`.
        """
        before, self.tracker = self.tracker, None if to is None else Tracker(to, every)
        if before is not None:
            before.deliver()

    @property
    def gradient_traffic(self) -> BytesSent | None:
        """The bytes of gradients that this rank has sent to add them up, and the bytes that a hook has saved; print it.

        None if gradients are not added over ranks: see compile(gradient_hook=).
        """
        compile_group = self.compiler.compile_group
        return None if compile_group is None or not compile_group.reduction.adds else compile_group.reduction.traffic

    @restores_all
    def to_torch_stages(self, group: dist.ProcessGroup | None = None) -> TorchStages:
        """Return this rank's stages, and the schedule, for torch's runtime (torch.distributed.pipelining).

        Rank r of the group (default: all ranks) runs the stages of device r of the plan. `made.step(x, target=y)` runs
        a step, and `made.schedule.step(...)` is torch's own. The modules in `made.stages` hold the model's parameters,
        and gradients are added to their `.grad`. Shapes are those of the example inputs. All ranks need the same plan:
        compile for "world", or with `costs=` from a file.

        Raises NotExportable for features that torch's runtime does not have: replicas, versions of weights, weights
        tied over stages, batches that do not divide evenly, dropout, recomputation, and values other than tensors that
        cross stages and do not follow from a shape.
        """
        # Imported only here: torch's pipelining takes a second to load.
        from fxsplit.api.to_torch import export_stages

        compiler = self.compiler
        compiled = compiler.get_compiled(get_mode(self.model))
        if compiled is None:
            raise InputError(
                "nothing is compiled yet: pass example_inputs= to compile(), or call the pipeline once, before "
                "to_torch_stages()"
            )
        return export_stages(compiled, compiler.options, group)
