"""The IR: a graph and the facts that are known of it."""

from fxsplit.ir.graph import IR, F, Fact, Pass, Step, name_pass

__all__ = ["IR", "F", "Fact", "Pass", "Step", "name_pass"]
