"""Executors by name; each is imported when first asked for."""

from branchline.registry import executors

executors.register_lazy("torch", "branchline.engine.executor.pytorch:build_executor")
executors.register_lazy("transformers", "branchline.engine.executor.fallback:build_executor")
executors.register_lazy("native", "branchline.engine.executor.native:build_executor")
executors.register_lazy("torch-cuda", "branchline.engine.executor.cuda.build:build_executor")
