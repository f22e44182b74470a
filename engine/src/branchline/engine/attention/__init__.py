"""Attention backends by name; each is imported when first asked for."""

from branchline.registry import attention_backends

attention_backends.register_lazy("torch_paged", "branchline.engine.attention.paged:build")
attention_backends.register_lazy("reference", "branchline.engine.attention.reference:build")
attention_backends.register_lazy("fixed", "branchline.engine.attention.fixed:build")
attention_backends.register_lazy("flashinfer", "branchline.engine.attention.flashinfer:build")
attention_backends.register_lazy("triton", "branchline.engine.attention.triton:build")
attention_backends.register_lazy("triton_invariant", "branchline.engine.attention.triton:build_invariant")
