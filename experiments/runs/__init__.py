"""A training run from its first update to its last, and its directory.

Entry points: `loop.train` and `restore.load_run`. May import `learning`,
`evaluation` and what lies below them.
"""
