"""Units that numbers are shown in."""

MIB = 2**20  # Bytes.
GIB = 2**30  # Bytes.
