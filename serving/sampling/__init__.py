"""From logits to tokens: the sampler, its backends, penalties, and counter-based random numbers."""
