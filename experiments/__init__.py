"""The training program around `logra_jax`: models, tasks, rollouts, RL."""
