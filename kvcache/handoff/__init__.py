"""KV from a prefill worker to a decode worker: chunks with fence and digest, and the transports they travel over."""
