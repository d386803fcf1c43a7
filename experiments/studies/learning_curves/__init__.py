"""LoGRA at four ranks against dense AdamW, LoRA and GaLore.

Asked: reward against updates and against seconds, held-out accuracy and memory,
with the KL budget and without it, there at the best learning rate of a grid.

Command: python -m experiments.studies.learning_curves.run \
    --out=docs/results/learning_curves
  python -m experiments.studies.learning_curves.memory \
    --out=docs/results/learning_curves
  (`--small`: two methods, six updates; `--redraw`: from the rows that are
  there, and from `memory.json` if it is there)
Cost: 153 runs of 30 updates of the small model, half a minute each on two CPU
  cores, less for all seeds of a cell but the first; memory: 22 compilations of
  ten seconds.
"""
