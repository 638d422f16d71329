"""Models that draft for the engine: another model, or the layer of DeepSeek-V3 that predicts further tokens."""
