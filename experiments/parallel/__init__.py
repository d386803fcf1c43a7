"""Where arrays lie on a mesh of devices, and what processes share.

Entry point: `sharding.make_mesh`. Imports nothing of `experiments`.
"""
