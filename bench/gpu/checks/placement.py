"""Checks of values in host memory while stages are on the GPU."""

from __future__ import annotations

import copy
import warnings

import torch
from torch.nn import functional as F

import fxsplit
from bench.gpu.checks.equality import CLOSE
from bench.gpu.setting import FAST, MICROBATCHES, Net, Setting
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step


def stages_on_the_cpu_and_on_the_gpu(setting: Setting) -> tuple[bool, str]:
    """Compare a step over one CPU device and one GPU, in either order, with the unsplit model's on the CPU."""
    x, y = (t.cpu() for t in setting.make_batch())
    found = []
    # In either order: values go from host memory to the GPU, and back.
    for devices in (["cpu", setting.name], [setting.name, "cpu"]):
        model = Net().double()
        expected = run_unsplit_step(copy.deepcopy(model), [x], y, F.cross_entropy, MICROBATCHES)
        with fxsplit.compile(
            model, devices, n_microbatches=MICROBATCHES, example_inputs=x, passes=FAST, loss_fn=F.cross_entropy
        ) as pipe:
            outcome = run_pipeline_step(pipe, [x], y.to(devices[-1]))
        found.append(compare(outcome, expected).largest)
    return max(found) < CLOSE, f"differences {found}"


def inputs_and_targets_in_host_memory(setting: Setting) -> tuple[bool, str]:
    """Compare a step with inputs and targets on the CPU with the unsplit model's: fxsplit moves both to the GPU."""
    x, y = (t.cpu() for t in setting.make_batch())
    model = Net().double()
    expected = run_unsplit_step(copy.deepcopy(model), [x], y, F.cross_entropy, MICROBATCHES)
    # Inputs go to the first stage. The loss is computed on the last stage, so the target goes there.
    with setting.compile(model.to(setting.device), 2, example_inputs=x) as pipe:
        outcome = run_pipeline_step(pipe, [x], y)
    devices = {str(t.device) for t in outcome.outputs.values() if t is not None}
    difference = compare(outcome, expected).largest
    # On the CPU the step would be right as well, and would prove nothing about moving values.
    return difference < CLOSE and devices == {setting.name}, f"outputs on {devices}, difference {difference:.1e}"


def gradient_of_an_input_in_host_memory(setting: Setting) -> tuple[bool, str]:
    """Ask for the gradient of an input on the CPU: the gradient lies on the CPU too."""
    x, y = setting.make_batch()
    wanted = x.cpu().requires_grad_()
    with setting.compile(Net().double().to(setting.device), 2, example_inputs=wanted.detach()) as pipe:
        F.cross_entropy(pipe(wanted), y).backward()
    device = None if wanted.grad is None else wanted.grad.device
    return device is not None and device.type == "cpu", f"the gradient is on {device}"


def pinned_input_overwritten_after_the_call(setting: Setting) -> tuple[bool, str]:
    """Fill a pinned input with zeros as soon as the call returns, like a data loader that reuses its buffer."""
    if setting.dry:
        return True, "needs a GPU"
    x, _ = setting.make_batch(torch.float32)
    pinned = x.cpu().pin_memory()
    with setting.compile(Net().to(setting.device), 2, example_inputs=x.cpu()) as pipe, torch.no_grad():
        pipe.eval()
        expected = pipe(x.cpu()).clone()
        setting.synchronize()
        # The copy from the pinned input is queued after this kernel.
        setting.occupy(1e8)
        found = pipe(pinned)
        pinned.zero_()
        setting.synchronize()
    difference = float((found - expected).abs().max())
    return difference < 1e-3, f"outputs differ by {difference:.1e}: was the input copied before the call returned?"


def a_number_of_devices_is_the_gpu(setting: Setting) -> tuple[bool, str]:
    """Ask for twice as many devices as the machine has GPUs: the model stays on GPUs, and a warning says so."""
    if setting.dry:
        return True, "needs a GPU"
    count = 2 * torch.cuda.device_count()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        machine = fxsplit.Machine.of(count, model=Net().to(setting.device))
    kinds = {device.type for device in machine.torch_devices()}
    # Free memory is less than the total, and two devices share it.
    total = torch.cuda.get_device_properties(setting.device).total_memory
    share = machine.devices[0].memory_bytes / total
    holds = kinds == {"cuda"} and len(caught) == 1 and 0.0 < share < 0.5
    return holds, f"{len(machine)} devices on {kinds}, {len(caught)} warning, {share:.2f} of the memory for each"
