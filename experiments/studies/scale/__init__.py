"""Does an update take the memory and time that the paper reports?

The study puts memory of compiled programs (`planning.memory_table`) and times
of updates (`benchmarks.update_time`) next to published figures. Their files are
committed, and nothing is measured again.

  python -m experiments.studies.scale.run --out=docs/results/scale

With `--small` a small model is measured instead: LoGRA and dense Adam, compiled
for two CPU devices and timed.

Cost: seconds; two minutes on two CPU cores with `--small`.
"""
