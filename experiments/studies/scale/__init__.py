"""Memory and throughput beside the published figures.

Asked: does an update take the memory and the time that the paper reports?
Ours are the compiled programs of `planning.memory_table` and the times of
`benchmarks.update_time`, whose files are committed; nothing is measured again.

  python -m experiments.studies.scale.run --out=docs/results/scale

`--small` measures a small model instead, in two minutes: LoGRA and dense Adam
compiled for two CPU devices, and timed.
"""
