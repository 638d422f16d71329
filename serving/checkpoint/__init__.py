"""Checkpoint formats: safetensors folders and GGUF files, read tensor by tensor, and the model's fingerprint."""
