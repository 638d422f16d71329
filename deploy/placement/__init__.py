"""The placement file: which services there are, how many, and with what settings; read, checked, started, rendered."""
