"""Measurements of speed, memory and robustness on this machine.

Commands: `update_time`, `rollout_speed`, `gpu_check` and `soak`. May import
everything but `studies` and the commands at the top of `experiments`.
"""
