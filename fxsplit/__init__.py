"""fxsplit: cut a PyTorch model into stages and run it as a pipeline, exactly equal to the model it came from.

pipe = fxsplit.compile(model, 2)
loss = criterion(pipe(x), y); loss.backward(); optimizer.step()
"""

from fxsplit.costs import Costs
from fxsplit.driver import DEFAULT, compile
from fxsplit.errors import FxsplitError
from fxsplit.ir import IR, Fact, Pass
from fxsplit.machine import Device, Machine
from fxsplit.plan import Plan
from fxsplit.runtime import Pipeline
from fxsplit.spec import Chain
from fxsplit.stages import Stages
from fxsplit.workload import Pins

__version__ = "0.1.0"

__all__ = [
    "compile",
    "Pipeline",
    "Machine",
    "Device",
    "DEFAULT",
    "Chain",
    "IR",
    "Fact",
    "Pass",
    "Pins",
    "Costs",
    "Plan",
    "Stages",
    "FxsplitError",
]
