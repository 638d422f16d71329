"""A worker's part in the KV pool: prefixes in, new blocks out, and whether either pays."""
