"""Configs of training runs, a file each.

Entry point: `quickstart.get_config`, whose values are the defaults of the
others. `reference` writes docs/config.md. Imports nothing of `experiments` but
`_cli`.
"""
