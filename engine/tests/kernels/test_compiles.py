"""The kernels compile for the GPU that they are written for, from the very launches that a model makes."""

from __future__ import annotations

import pytest

from benchmarks.gpu.offline import SHARED_BYTES, compile_all


@pytest.mark.timeout(600)  # eight seconds of work, more where others compile too
def test_launches_of_a_model_compile_for_a_hopper_and_fit_its_shared_memory(compiling: None) -> None:
    found = compile_all(brief=True)
    assert {name for name, _ in found} == {
        "choose_row", "copy_piece", "decode_join", "decode_part", "norm_row", "prefill_tile", "product_join",
        "product_tile", "turn_head",
    }  # fmt: skip
    assert max(shared for _, shared in found) <= SHARED_BYTES
