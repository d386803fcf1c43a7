"""From rollouts and rewards to new weights: one update.

Entry points: `train_step.make_train_step`, `optimizers.make_optimizer` and
`losses.policy_loss`. May import `rollouts` and what lies below it, but not
`evaluation`.
"""
