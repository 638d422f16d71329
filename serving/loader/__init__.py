"""From a path to a model that can run: checkpoint, decoder, and INT8 quantization while loading."""
