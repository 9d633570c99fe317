"""The measured times of nodes on a fake accelerator with known times of kernels and launches."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import fxsplit
from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile.clock import MOST_SWEEPS, PORTION, Clock, make_clock
from fxsplit.passes.profile.time_alone import TimedCall, time_alone
from fxsplit.passes.profile.time_in_step import Sweep, time_nodes
from fxsplit.schedule import generate
from fxsplit.schedule.of_plan import read_times
from fxsplit.torch_internals.fx.observe import observe
from tests.passes.profile.fake_accelerator import CALL_MS, Accelerator, Operator

CPU = torch.device("cpu")
X = torch.randn(2, 3)
# Kernels take longer than their launch, launches longer than the kernel, and a view has no kernel at all.
LARGE = ((5.0,), 0.01), ((6.0, 4.0), 0.02)
SMALL = ((0.003,), 0.05), ((0.001, 0.002), 0.08)
VIEW = ((), 0.004), ((), 0.006)


def graph_of(*operators: Operator) -> fx.GraphModule:
    """A chain of operators, called n0, n1 and so on."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for i, operator in enumerate(operators):
        value = graph.create_node("call_function", operator, (value,), name=f"n{i}")
    graph.output(value)
    return fx.GraphModule({}, graph)


def measure(device: Accelerator, operators: list[Operator], repeats: int = 3) -> dict[str, Measured]:
    """The times that time_nodes measures for a chain of operators."""
    gm, x = graph_of(*operators), X.clone().requires_grad_()
    seen = observe(gm, (x,))
    with device.stand_in():
        timed = {n.name for n in gm.graph.nodes if "n" in n.name[:1]}
        return time_nodes(gm, seen, timed, (x,), CPU, repeats, lambda: None)[0]


def is_told(found: Measured, of: Operator) -> bool:
    """Whether an operator's own times were found, of the device and of the host."""
    (forward, forward_launch), (backward, backward_launch) = of.forward, of.backward
    figures = found.forward_ms, found.backward_ms, found.forward_launch_ms, found.backward_launch_ms
    return figures == pytest.approx((sum(forward), sum(backward), forward_launch, backward_launch), abs=1e-9)


def test_kernels_and_launches_are_told_apart() -> None:
    """Each node gets its own times, forward and backward, without the overhead of events and calls of autograd."""
    device = Accelerator()
    operators = [Operator(device, *times) for times in (SMALL, LARGE, VIEW, SMALL, VIEW, LARGE, SMALL)]
    found = measure(device, operators)
    for i, operator in enumerate(operators):
        assert is_told(found[f"n{i}"], operator), (i, found[f"n{i}"])
    assert max(each.spread_ms or 0.0 for each in found.values()) < 1e-9


@pytest.mark.parametrize("count", [4, 3 * PORTION])
def test_the_host_waits_only_between_portions(count: int) -> None:
    """A wait after each node would show launches as the device's time."""
    device = Accelerator()
    gm, x = graph_of(*(Operator(device, *SMALL) for _ in range(count))), X.clone().requires_grad_()
    seen = observe(gm, (x,))
    with device.stand_in():
        sweep = Sweep(gm, seen, set(seen) - {"x", "output"}, CPU)
        sweep.settle(x)
        device.waits = 0
        assert sweep.run_step(x)
        assert device.waits == -(-2 * count // PORTION)


def test_a_queue_that_is_full_is_divided() -> None:
    """A node of 300 kernels, in a queue of 400: the host came to a stop in the middle of the portion."""
    device = Accelerator(depth=400)
    many = (0.01,) * 300
    large = (many, 0.5), (many, 0.7)
    operators = [Operator(device, *times) for times in (SMALL, large, SMALL, large, VIEW, LARGE)]
    found = measure(device, operators)
    for i, operator in enumerate(operators):
        assert is_told(found[f"n{i}"], operator), (i, found[f"n{i}"])


def test_a_node_that_waits_for_the_device_does_not_spoil_the_others() -> None:
    """As nonzero does. Its host time includes the wait, and its device time the launch."""
    device = Accelerator()
    waiting = Operator(device, ((2.0,), 0.5), ((1.0,), 0.1), waits=True)
    operators = [Operator(device, *SMALL), waiting, Operator(device, *VIEW), Operator(device, *LARGE)]
    found = measure(device, operators)
    for i in (0, 2, 3):
        assert is_told(found[f"n{i}"], operators[i]), (i, found[f"n{i}"])
    own = found["n1"]
    assert (own.forward_ms, own.forward_launch_ms) == pytest.approx((2.5, 2.5), abs=0.01)
    assert (own.backward_ms, own.backward_launch_ms) == pytest.approx((1.0, 0.1))


def test_sweeps_that_never_get_ahead_come_to_an_end() -> None:
    """A queue of ten holds not even one portion's first measurements."""
    device = Accelerator(depth=10)
    found = measure(device, [Operator(device, *SMALL)] * 3, repeats=1)
    assert len(found) == 3 and device.waits < 40 * (MOST_SWEEPS + 4)


def test_operators_alone_on_an_accelerator() -> None:
    device = Accelerator()
    x = X.clone().requires_grad_()
    operators = {"a": Operator(device, *SMALL), "b": Operator(device, *LARGE), "c": Operator(device, *VIEW)}
    waiting = Operator(device, ((2.0,), 0.5), ((1.0,), 0.1), waits=True)
    with device.stand_in():
        calls = {name: TimedCall(operator, (x,), {}) for name, operator in {**operators, "waits": waiting}.items()}
        found = time_alone(calls, CPU, 3, lambda: None)
    for name, operator in operators.items():
        assert is_told(found[name], operator), (name, found[name])
    assert (found["waits"].backward_ms, found["waits"].backward_launch_ms) == pytest.approx((1.0, 0.1))


@pytest.mark.measured
def test_launches_add_up_to_those_of_the_whole_graph() -> None:
    """On an H100 the backwards of a transformer's nodes took 1.8 times as long to launch, one by one, as the whole."""
    device = Accelerator(call_ms=0.07)
    chain = graph_of(*(Operator(device, *SMALL) for _ in range(6)), Operator(device, *VIEW))
    with device.stand_in():
        costs = fxsplit.profile(chain, torch.randn(4, 3, requires_grad=True), device="cpu", n_microbatches=2)
    # One call of autograd for all nodes, in place of one for each.
    whole_ms = 6 * 0.08 + 0.006 + CALL_MS + 0.07
    assert sum(n.forward_launch_ms for n in costs.nodes) == pytest.approx(6 * 0.05 + 0.004)
    assert sum(n.backward_launch_ms for n in costs.nodes) == pytest.approx(whole_ms)
    small, view = costs.nodes[0].backward_launch_ms, costs.nodes[-1].backward_launch_ms
    assert small / view == pytest.approx((0.08 + 0.07) / (0.006 + 0.07))


@pytest.mark.measured
def test_launches_that_wait_for_the_device_lengthen_nothing() -> None:
    """A queue of 40 is full in the middle of the whole graph, and the host waits there."""
    device = Accelerator(depth=40)
    operators = [Operator(device, *LARGE) for _ in range(40)]
    assert all(is_told(found, operators[0]) for found in measure(device, operators).values())
    with device.stand_in():
        x = torch.randn(4, 3, requires_grad=True)
        costs = fxsplit.profile(graph_of(*operators), x, device="cpu", n_microbatches=2)
    assert costs.nodes[0].backward_launch_ms == pytest.approx(0.02)


def test_loading_kernels_does_not_keep_the_device_busy() -> None:
    """The first launches of a process took a second, and the device was then kept busy for two in each portion."""
    device = Accelerator(load_ms=100.0)
    operators = [Operator(device, *SMALL) for _ in range(10)]
    assert all(is_told(found, operators[0]) for found in measure(device, operators).values())
    assert 0.0 < device.occupied_ms < 200.0


def test_a_cpu_launches_nothing() -> None:
    clock = make_clock(CPU)
    assert type(clock) is Clock and not clock.queues and clock.end_sweep()
    span = clock.stop(clock.start(), calls=3)
    assert span.device_ms >= 0 and span.launch_ms == 0


@pytest.mark.measured
def test_a_plan_from_both_figures() -> None:
    """Nodes of 2, 12 and 1 ms are launched in 8, 0.2 and 6: one stage is as slow as its host, one as its device."""
    device = Accelerator()
    times = [(((1.0,), 3.0), ((1.0,), 5.0)), (((6.0,), 0.1), ((6.0,), 0.1)), (((0.5,), 2.0), ((0.5,), 4.0))]
    chain = graph_of(*(Operator(device, *each) for each in times))
    with device.stand_in():
        costs = fxsplit.profile(chain, torch.randn(4, 3, requires_grad=True), device="cpu", n_microbatches=2)
    assert [n.launch_ms for n in costs.nodes] == pytest.approx([8.0, 0.2, 6.0])
    assert (costs.compute_ms, costs.launch_ms) == pytest.approx((15.0, 14.2))
    plan = fxsplit.plan(costs, 2)
    assert [s.nodes for s in plan.stages] == [("n0",), ("n1", "n2")] and plan.optimal
    assert [s.load_ms for s in plan.stages] == pytest.approx([8.0, 13.0])
    found = read_times(plan, generate("1F1B", 2, 4))
    assert found.forward_launch_ms == pytest.approx([3.0, 2.1]) and found.backward_launch_ms == pytest.approx(
        [5.0, 4.1]
    )
