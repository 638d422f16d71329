"""The KV pool: blocks of computed prefixes (and of weights) kept by services of their own, for every worker."""
