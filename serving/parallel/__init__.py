"""Tensor, pipeline and sequence parallel forms of a decoder, applied from outside to a built model."""
