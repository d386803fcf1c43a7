"""Sampling responses, in this process or from a server.

Entry points: `sampler.LocalSampler` and `generate.generate`. May import
`models`, `tasks` and what lies below them, but not `rewards`.
"""
