"""Prefill: computes prompts in chunks, draws the first token, and hands the KV over."""
