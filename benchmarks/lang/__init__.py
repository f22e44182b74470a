"""Programs as benchmarks: the language beside the same prompts sent by hand."""
