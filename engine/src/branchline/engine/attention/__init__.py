"""Attention backends by name; each is imported when first asked for."""

from branchline.registry import attention_backends

attention_backends.register_lazy("torch_paged", "branchline.engine.attention.paged:build")
attention_backends.register_lazy("reference", "branchline.engine.attention.reference:build")
