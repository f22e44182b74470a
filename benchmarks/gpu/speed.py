"""What single kernels reach on the device, and flashinfer's beside ours where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.model import device_ms
from benchmarks.gpu.oracles import Paged, Place
from benchmarks.gpu.whole import Machine

HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 16


def attention_shapes(machine: Machine) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """(rows, context) of decode, and (prompts, tokens) of prefill."""
    return ([(2, 40)], (1, 40)) if machine.dry else ([(1, 16384), (8, 4096), (64, 4096), (256, 1024)], (4, 2048))


def paged_of(machine: Machine, count: int, context: int, *, e4m3: bool = False) -> Paged:
    """Sequences of an 8B-shaped model's attention, or of a small one's."""
    heads, kv_heads, width = (4, 2, 16) if machine.dry else (HEADS, KV_HEADS, WIDTH)
    dtype = "float32" if machine.dry else "bfloat16"
    return Paged(Place(machine.device, machine.dry), [context] * count, heads, kv_heads, width, PAGE, dtype, e4m3=e4m3)


def kv_bytes(paged: Paged, count: int, context: int) -> float:
    """Bytes of keys and values that a decode reads."""
    return 2.0 * count * context * paged.kv_heads * paged.width * paged.keys.element_size()


def attention(report: Any, machine: Machine) -> None:
    """Our decode and prefill attention of one layer."""
    from branchline.engine.kernels.attention import split_size

    rows, (prompts, tokens) = attention_shapes(machine)
    for e4m3 in (False, True):
        for count, context in rows:
            paged = paged_of(machine, count, context, e4m3=e4m3)
            queries = paged.queries(count)
            for invariant in (False,) if e4m3 or machine.dry else (False, True):
                split = split_size(paged.longest)
                spent = device_ms(lambda: paged.decode(queries, split, invariant=invariant), machine.device)  # noqa: B023
                reached = kv_bytes(paged, count, context) / spent / 1e6
                name = (
                    f"decode attention {count} x {context}{' e4m3' if e4m3 else ''}{' invariant' if invariant else ''}"
                )
                report.figure(
                    name, 1e3 * spent, "us", gb_s=round(reached), roofline=round(reached / machine.bandwidth_gb_s, 3)
                )
    paged = paged_of(machine, prompts, tokens)
    queries = paged.queries(prompts * tokens)
    for name, split in (("", 0),) if machine.dry else (("", 0), (" invariant", 256)):
        spent = device_ms(lambda: paged.prefill(queries, [tokens] * prompts, split), machine.device, times=5)  # noqa: B023
        tell_prefill(report, machine, f"prefill attention {prompts} x {tokens}{name}", paged, prompts, tokens, spent)


def tell_prefill(
    report: Any, machine: Machine, name: str, paged: Paged, prompts: int, tokens: int, spent: float
) -> None:
    """A row of causal attention over whole prompts."""
    work = 2.0 * prompts * tokens * tokens * paged.heads * paged.width / 1e9
    report.figure(name, spent, "ms", tflop_s=round(work / spent, 1), peak=round(work / spent / machine.peak_tflop_s, 3))


def flashinfer(report: Any, machine: Machine) -> None:
    """The same attention by flashinfer's wrappers, and how far its numbers are from ours."""
    try:
        import flashinfer as library
    except Exception as error:  # what it does while it is imported is its own, and no fault of ours
        report.absent("flashinfer", f"{type(error).__name__}: {error}"[:200])
        return
    if machine.dry:
        report.absent("flashinfer", "it needs a GPU")
        return
    try:
        _flashinfer(report, machine, library)
    except Exception as error:  # it may have to compile, and lack the means
        report.absent("rest of flashinfer", f"{type(error).__name__}: {error}"[:200])


def _flashinfer(report: Any, machine: Machine, library: Any) -> None:
    import torch
    from branchline.engine.kernels.attention import split_size

    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=machine.device)
    rows, (prompts, tokens) = attention_shapes(machine)
    for count, context in rows:
        paged = paged_of(machine, count, context)
        queries = paged.queries(count)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        tables = csr(paged, count, context)
        wrapper.plan(*tables, HEADS, KV_HEADS, WIDTH, PAGE, q_data_type=queries.dtype, kv_data_type=queries.dtype)
        pool = tuple(part.view(-1, PAGE, KV_HEADS, WIDTH) for part in (paged.keys, paged.values))
        spent = device_ms(lambda: wrapper.run(queries, pool), machine.device)  # noqa: B023
        reached = kv_bytes(paged, count, context) / spent / 1e6
        report.figure(
            f"flashinfer decode attention {count} x {context}", 1e3 * spent, "us", gb_s=round(reached),
            roofline=round(reached / machine.bandwidth_gb_s, 3),
        )  # fmt: skip
        ours = paged.decode(queries, split_size(paged.longest))
        gap = float((wrapper.run(queries, pool).float() - ours.float()).abs().max())
        report.check(f"flashinfer and ours, decode {count} x {context}", gap, 3e-2)
    paged = paged_of(machine, prompts, tokens)
    queries = paged.queries(prompts * tokens)
    starts = torch.arange(prompts + 1, dtype=torch.int32, device=machine.device) * tokens
    prompt = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prompt.plan(
        starts, *csr(paged, prompts, tokens), HEADS, KV_HEADS, WIDTH, PAGE, causal=True, q_data_type=queries.dtype,
        kv_data_type=queries.dtype,
    )  # fmt: skip
    pool = tuple(part.view(-1, PAGE, KV_HEADS, WIDTH) for part in (paged.keys, paged.values))
    spent = device_ms(lambda: prompt.run(queries, pool), machine.device, times=5)
    tell_prefill(report, machine, f"flashinfer prefill attention {prompts} x {tokens}", paged, prompts, tokens, spent)


def csr(paged: Paged, count: int, context: int) -> tuple[Any, Any, Any]:
    """Page tables as flashinfer takes them: starts, pages, tokens of the last page."""
    import torch

    pages = paged.table.shape[1]
    starts = torch.arange(count + 1, dtype=torch.int32, device=paged.table.device) * pages
    last = torch.full((count,), context - (pages - 1) * PAGE, dtype=torch.int32, device=paged.table.device)
    return starts, paged.table.reshape(-1), last


def products(report: Any, machine: Machine) -> None:
    """Float8 and invariant products of an 8B-shaped MLP beside torch's own."""
    import torch
    from branchline.engine.kernels.compiled.linear import multiply
    from branchline.engine.kernels.linear import quantize_e4m3

    place = Place(machine.device, machine.dry)
    dtype = "float32" if machine.dry else "bfloat16"
    inner, columns = (200, 70) if machine.dry else (4096, 28672)
    weight = place.noise(columns, inner, dtype=dtype) * inner**-0.5
    held, scales = quantize_e4m3(weight)
    for rows in (2,) if machine.dry else (1, 64, 2048):
        x = place.noise(rows, inner, dtype=dtype, seed=1)
        out = torch.empty(rows, columns, dtype=x.dtype, device=machine.device)
        calls: dict[str, Callable[[], object]] = {
            "torch": lambda: torch.nn.functional.linear(x, weight),  # noqa: B023
            "invariant": lambda: multiply(x, weight, None, None, out, invariant=True),  # noqa: B023
            "e4m3": lambda: multiply(x, held, scales, None, out, invariant=False),  # noqa: B023
        }
        for name, call in calls.items():
            spent = device_ms(call, machine.device)
            read = (held if name == "e4m3" else weight).nbytes / spent / 1e6
            work = 2.0 * rows * inner * columns / 1e9 / spent
            report.figure(
                f"product {rows} x {inner} x {columns} {name}", 1e3 * spent, "us", gb_s=round(read),
                roofline=round(read / machine.bandwidth_gb_s, 3), peak=round(work / machine.peak_tflop_s, 3),
            )  # fmt: skip


def sampling(report: Any, machine: Machine) -> None:
    """One step's sampling over the vocabulary."""
    import torch
    from branchline.engine.kernels.compiled.sampling import sample
    from branchline.engine.kernels.sampling import Rules

    place = Place(machine.device, machine.dry)
    vocab = 500 if machine.dry else 128256
    for rows in (2,) if machine.dry else (1, 64, 256):
        logits = place.noise(rows, vocab) * 3
        index = torch.arange(rows, device=machine.device)
        column = torch.full((rows,), 0.8, device=machine.device)
        for name, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("plain", 0.8, 0, 1.0),
            ("top-k, top-p", 0.8, 50, 0.9),
        ):
            rules = Rules(
                torch.full_like(column, temperature), torch.full_like(index, top_k).int(),
                torch.full_like(column, top_p), torch.zeros_like(column), index, index, None,
            )  # fmt: skip
            spent = device_ms(lambda: sample(logits, rules, logits, True), machine.device)  # noqa: B023
            report.figure(f"sample {rows} rows, {name}", 1e3 * spent, "us")


def host_tier(report: Any, machine: Machine) -> None:
    """Pages of an 8B-shaped model to pinned host memory and back, in one launch and by torch's copies."""
    import torch
    from branchline.engine.kernels.compiled.pages import copy_pages
    from branchline.engine.kernels.pages import copy_pages_reference

    layers, count, width = (2, 2, 16) if machine.dry else (32, 64, WIDTH)
    place = Place(machine.device, machine.dry)
    pool = place.noise(layers, 2, count * PAGE, KV_HEADS, width, dtype="float16")
    host = torch.zeros(count, layers, 2, PAGE, KV_HEADS, width, dtype=pool.dtype, pin_memory=not machine.dry)
    pages = torch.randperm(count, device=machine.device)
    for store in (True, False):
        for name, copy in (("one launch", copy_pages), ("torch", copy_pages_reference)):
            spent = device_ms(lambda: copy(pool, host, pages, pages, PAGE, store), machine.device, times=5)  # noqa: B023
            way = "to the host" if store else "from the host"
            report.figure(f"copy {count} pages {way}, {name}", spent, "ms", gb_s=round(host.nbytes / spent / 1e6, 1))
