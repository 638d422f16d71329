"""Other systems whose runs were recorded, replayed with our schedulers and KV blocks in their order of admission."""
