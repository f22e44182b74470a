"""From logits to tokens and logprobs; see `branchline.engine.sampling.sampler`."""
