"""What a training run needs, before a device is rented.

Entry points: `update_plan.plan` and `run_plan.plan_config`, behind the command
`experiments.plan`. May import `runs` and what lies below it.
"""
