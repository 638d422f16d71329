"""The bytes of KV on a worker: device tensors, host memory, and conversion between KV dtypes."""
