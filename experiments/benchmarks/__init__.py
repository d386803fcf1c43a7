"""Measurements of time and endurance on the machine at hand.

Entry points: `update_time`, `rollout_speed`, `gpu_check` and `soak`, each a
command. May import everything but `studies` and the commands at the top.
"""
