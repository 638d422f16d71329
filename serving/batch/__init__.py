"""One step's work as tensors, and what the kernels below the engine need of it. It imports nothing above itself."""
