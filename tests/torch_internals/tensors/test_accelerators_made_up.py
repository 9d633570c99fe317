"""The made-up accelerator of tests/support behaves like a real one, and detects errors that a real one would hide."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fxsplit.torch_internals.tensors import accelerators
from tests.support.accelerator import FREED, RACE, REUSED, use_accelerator

FIRST, SECOND = "toy:0", "toy:1"


def make_stream(device: str) -> torch.Stream:
    return accelerators.make_stream(torch.device(device))


def current(device: str) -> torch.Stream:
    return accelerators.find_current_stream(torch.device(device))


def test_tensors_have_a_true_device_and_values() -> None:
    with use_accelerator() as record:
        torch.manual_seed(3)
        x = torch.rand(3, device=SECOND)
        torch.manual_seed(3)
        assert str(x.device) == SECOND and torch.equal(x.cpu(), torch.rand(3))
        assert torch.equal(x.to(FIRST).cpu(), x.cpu())
        assert torch.zeros_like(x, device="toy:2").device == torch.device("toy:2")
        assert torch.tensor([1.0, 2.0], device=FIRST).tolist() == [1.0, 2.0]
        assert record.copies["toy:1", "toy:0"] == 1 and record.draws == {"toy:1": 1}
        record.check()


def test_two_devices_in_one_operator_are_refused() -> None:
    with use_accelerator():
        x = torch.rand(3, device=FIRST)
        assert (x + torch.tensor(1.0)).device == x.device
        for other in (torch.rand(3), torch.rand(3, device=SECOND)):
            with pytest.raises(RuntimeError, match="same device"):
                x + other


def test_modules_train_there_as_on_the_cpu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2))
    twin, x = copy.deepcopy(model), torch.randn(5, 3, 4, 4)
    twin(x).square().mean().backward()
    with use_accelerator() as record:
        model.to(SECOND)(x.to(SECOND)).square().mean().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert isinstance(a, nn.Parameter) and str(a.device) == SECOND and a.grad is not None and b.grad is not None
            assert torch.allclose(a.grad.cpu(), b.grad, atol=1e-6)
        assert all(torch.allclose(a.cpu(), b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
        record.check()


def test_data_moves_a_parameter_that_stays_the_same_object() -> None:
    with use_accelerator():
        layer = nn.Linear(2, 2)
        weight, before = layer.weight, layer.weight.detach().clone()
        seen: list[str] = []
        weight.register_hook(lambda g: seen.append(str(g.device)))
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(FIRST)
        layer(torch.ones(1, 2, device=FIRST)).sum().backward()
        assert layer.weight is weight and type(weight).__name__ == "Toy" and seen == [FIRST]
        weight.grad = layer.bias.grad = None
        weight.data = weight.data.to("cpu")
        assert layer.weight is weight and torch.equal(weight.detach(), before)


def test_a_race_is_found_and_an_event_ends_it() -> None:
    with use_accelerator() as record:
        x, stream = torch.rand(3, device=FIRST), make_stream(FIRST)
        with accelerators.use_stream(stream):
            x * 2
        assert record.count(RACE) == 1
        with pytest.raises(AssertionError, match="race"):
            record.check()
        record.settle()
        y = torch.rand(3, device=FIRST)
        stream.wait_event(current(FIRST).record_event())
        with accelerators.use_stream(stream):
            y * 2
        record.check()
        y.zero_()
        assert record.count(RACE) == 1, "written while the other stream may still read it"


def test_memory_given_back_too_early_is_found_and_keeping_it_helps() -> None:
    with use_accelerator() as record:
        for keeps in (True, False):
            x, stream = torch.rand(3, device=FIRST), make_stream(FIRST)
            stream.wait_event(current(FIRST).record_event())
            with accelerators.use_stream(stream):
                x * 2
            if keeps:
                accelerators.keep_until_read(x, stream)
            del x
            torch.zeros(3, device=FIRST)
            assert record.count(FREED) == record.count(REUSED) == (0 if keeps else 1)


def test_a_view_keeps_the_memory_of_its_base() -> None:
    with use_accelerator() as record:
        x, stream = torch.rand(2, 3, device=FIRST), make_stream(FIRST)
        view = x[0]
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        del x
        with accelerators.use_stream(stream):
            view.zero_()
        assert record.count(FREED) == 0 and record.count(RACE) == 1


def test_copies_order_the_current_streams_of_both_devices() -> None:
    with use_accelerator() as record:
        out, into = make_stream(FIRST), make_stream(SECOND)
        x = torch.rand(3, device=FIRST)
        out.wait_event(current(FIRST).record_event())
        for stream in (into, out):
            accelerators.set_current_stream(stream)
        y = x.to(SECOND, non_blocking=True)
        y * 2
        record.check()
        with accelerators.use_stream(make_stream(SECOND)):
            y * 2
        assert record.count(RACE) == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.tensor([1.0], device=x.device),
    ],
)
def test_waits_of_the_host_are_counted(ask: object) -> None:
    with use_accelerator() as record:
        x = torch.rand(3, device=FIRST)
        assert not record.waits
        assert callable(ask) and ask(x) is not None
        assert sum(record.waits.values()) == 1
        ((_, place),) = record.waits
        assert "test_accelerators_made_up.py" in place


def test_the_host_reads_a_copy_only_when_it_is_there() -> None:
    with use_accelerator() as record:
        x = torch.rand(3, device=FIRST).to("cpu", non_blocking=True)
        event = current(FIRST).record_event()
        x + 1
        assert record.count(RACE) == 1
        event.synchronize()
        x + 1
        assert record.count(RACE) == 1 and sum(record.waits.values()) == 1


def test_without_the_block_there_is_no_accelerator() -> None:
    with use_accelerator():
        assert torch.accelerator.device_count() == 4
    assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
