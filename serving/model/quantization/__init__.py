"""INT8 from outside: a built decoder's linear layers replaced by ones of 8-bit weights and 8-bit activations.

`scheme` says what is done, `search` finds scales, `apply` changes the model, `folder` writes and `convention` reads and
writes the config. This module imports none of them: specs read the convention, and specs must not need torch.
"""
