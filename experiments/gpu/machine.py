"""What the machine is, and its measured limits."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpu import Context
from lab.metrics.roofline import DeviceFacts, measure_device

PACKAGES = ("torch", "triton", "transformers", "numpy", "lab-bench")


def facts_of(context: Context) -> DeviceFacts:
    """The device's limits; made-up ones in a dry run, which measures nothing."""
    if context.is_dry:
        rates = {"float32": 1e11, "bfloat16": 1e11, "float16": 1e11}
        return DeviceFacts("dry run", "cpu", 1, 1 << 30, 1e10, rates, "never")
    return measure_device("cuda", log=print)


def machine(context: Context) -> dict[str, Any]:
    """Versions, the device and its limits."""
    context.data["versions"] = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    context.say(", ".join(f"{name} {number}" for name, number in context.data["versions"].items()))
    if not context.is_dry:
        gpu = torch.cuda.get_device_properties(0)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        context.say(f"{gpu.name}: sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, {memory}")
        context.data["shared_bytes"] = gpu.shared_memory_per_block_optin
        context.data["cuda"] = torch.version.cuda
    facts = facts_of(context)
    context.data["limits"] = {"bandwidth": facts.bandwidth, "flops": facts.flops}
    rates = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in facts.flops.items())
    context.say(f"measured limits: {facts.bandwidth / 1e9:.0f} GB/s; TFLOP/s {rates}")
    return context.result()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"
