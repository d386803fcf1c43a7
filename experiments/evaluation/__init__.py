"""Measuring a model on held-out prompts.

Entry points: `heldout.sample_and_score` and `heldout.summarize`. May import
`rewards`, `rollouts` and the packages below them, but not `learning`.
"""
