"""The GPU check: every kernel beside its oracle, whole models beside the CPU, and what they reach; see check.sh.

Each row is printed as soon as it is known; the JSON is written after every section. A section that breaks or has no
time left is a row of its own and the next one begins. Exit 0 if no comparison failed and nothing broke, else 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import oracles, speed, whole
from benchmarks.gpu.model import device_ms, executor_kind
from benchmarks.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
COMPILE_S = 600.0  # of the clock: what compiling waits for on a busy machine is not its own work
PACKAGES = ("torch", "triton", "flashinfer-python", "numpy", "nvidia-cuda-nvcc")


def facts(report: Report, *, dry: bool) -> whole.Machine | None:
    """What is installed and what the device is; None without torch."""
    report.fact("python", sys.version.split()[0])
    for name in PACKAGES:
        try:
            report.fact(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            report.absent(name, "not installed")
    try:
        from branchline import _native

        report.fact("branchline._native", Path(str(_native.__file__)).name)
    except ImportError as error:
        report.absent("branchline._native", f"{error}; nothing here needs it")
    try:
        import torch
    except ImportError:
        return None
    report.fact("executor", executor_kind())
    torch.backends.cuda.matmul.allow_tf32 = False
    if dry or not torch.cuda.is_available():
        if not dry:
            report.absent("GPU", "torch finds none; the dry form runs instead")
        torch.set_num_threads(1)
        return whole.Machine("cpu", True, 10.0, 0.1, 0.0)
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    report.fact("GPU", name)
    report.fact("compute capability", torch.cuda.get_device_capability())
    report.figure("GPU memory", total / 2**30, "GiB", free=round(free / 2**30, 1))
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(block)
    copied = 2 * block.nbytes / device_ms(lambda: other.copy_(block), "cuda") / 1e6
    bandwidth, peak = next((peaks for known, peaks in whole.PEAKS.items() if known in name), (round(copied), 0))
    report.figure("bandwidth of a copy on the device", copied, "GB/s", stated=bandwidth)
    if not peak:
        report.absent("peak arithmetic", f"{name} is not in the table; shares of peak are of 989 TFLOP/s")
    return whole.Machine("cuda", False, float(bandwidth), float(peak or 989), float(free))


def compiles(report: Report) -> None:
    """Every launch of a model compiled for sm_90, in a process of its own where Triton is not the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.offline"], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=COMPILE_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    shared = [int(line.split()[1]) for line in done.stdout.splitlines()]
    report.check(f"shared bytes of {len(shared)} launches compiled for sm_90", max(shared), 227 * 1024)


def sections(report: Report, machine: whole.Machine) -> list[tuple[str, float, Callable[[], None]]]:
    """(name, seconds, what is done) in the order of what is most worth knowing."""
    place = oracles.Place(machine.device, machine.dry)
    made: list[tuple[str, float, Callable[[], None]]] = []

    def add(name: str, seconds: float, call: Callable[..., None], *given: Any) -> None:
        made.append((name, seconds, lambda: call(report, *given)))

    for check in oracles.CHECKS:
        add(f"kernels: {(check.__doc__ or '').splitlines()[0]}", 40, check, place)
    add("generation beside the CPU", 45, whole.generation, machine)
    add("decode", 80, whole.decode, machine)
    add("prefill", 25, whole.prefill, machine)
    add("kernels: attention", 25, speed.attention, machine)
    add("kernels: sampling", 10, speed.sampling, machine)
    add("kernels: products", 15, speed.products, machine)
    add("kernels: host tier", 10, speed.host_tier, machine)
    add("modes", 60, whole.modes, machine)
    add("flashinfer", 45, speed.flashinfer, machine)
    if machine.dry:
        add("kernels compile for sm_90", 60, compiles)
    return made


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small shapes on the CPU, kernels in Triton's interpreter")
    parser.add_argument("--out", type=Path, help="write the report as JSON to this file")
    arguments = parser.parse_args()
    report = Report(arguments.out, by_cpu=arguments.dry)
    machine = None
    with report.section("machine", 30):
        machine = facts(report, dry=arguments.dry)
    if machine is None:
        print("FAILED: no torch, or it did not answer", flush=True)
        return 1
    for name, seconds, call in sections(report, machine):
        with report.section(name, seconds):
            call()
    print("passed" if report.passed else "FAILED", flush=True)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
