#!/bin/sh
# Removes what a serving process never reads from the environment $1: torch's C++ tests, headers and tools, the tests
# of other packages, and type stubs.
set -eu
site=$(echo "$1"/lib/python3*/site-packages)
rm -rf "$site"/torch/include "$site"/torch/test "$site"/torch/share
find "$site"/torch/bin -type f ! -name torch_shm_manager -delete
find "$site" -name '*.a' -delete
find "$site"/sympy "$site"/networkx "$site"/numpy "$site"/mpmath -type d -name tests -prune -exec rm -rf {} +
find "$site" -name '*.pyi' -delete
