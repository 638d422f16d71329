"""Forward passes: the protocol, its forms (torch, compiled CPU kernels, Triton), and the choice between them."""
