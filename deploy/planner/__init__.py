"""Which workers with what parallelism give the most goodput: the search behind `millrace plan`."""
