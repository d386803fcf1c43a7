"""What a training run needs, before a device is rented.

Entry point: `plan.plan`, behind the command `experiments.plan`. May import
`runs` and what lies below it.
"""
