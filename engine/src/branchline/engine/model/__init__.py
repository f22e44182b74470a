"""Checkpoints: where they come from, what they say about themselves, and their tensors.

Families register here by name; reading a checkpoint starts at `branchline.engine.model.load.load_model`.
"""

from branchline.registry import models

for _family, _target in {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}.items():
    models.register_lazy(_family, f"branchline.engine.model.families:{_target}")
