"""What stands in for parts of the system in tests, one module for each thing stood in for (tests/README.md)."""
