"""The KV cache: which block holds what, where its bytes lie, and how they move between workers."""
