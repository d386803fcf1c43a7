"""One claim of the method per folder: a sweep, an analysis, a command.

Entry point: `python -m experiments.studies.NAME.run`. May import everything
but the commands at the top.
"""
