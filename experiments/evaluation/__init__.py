"""How good a model is on held-out prompts.

Entry points: `heldout.collect` and `heldout.summarize`. May import `rewards`,
`rollouts` and what lies below them, but not `learning`.
"""
