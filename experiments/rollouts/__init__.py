"""Sampling responses, in this process or from a server.

Entry points: `engine.make_sampler` for a run, `sampler.LocalSampler` and
`generate.generate` otherwise. May import `models`, `tasks` and the packages
below them, but not `rewards`.
"""
