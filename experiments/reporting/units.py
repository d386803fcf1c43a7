"""Units of memory."""

MIB = 2**20  # Bytes.
GIB = 2**30  # Bytes.
