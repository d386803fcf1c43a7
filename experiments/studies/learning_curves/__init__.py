"""How does LoGRA at four ranks compare with dense AdamW, LoRA and GaLore?

The study compares reward by updates and by seconds, held-out accuracy, and
memory. Each optimizer runs with the KL budget, and without it at the learning
rates of a grid, of which the best is taken.

  python -m experiments.studies.learning_curves.run \\
    --out=docs/results/learning_curves
  python -m experiments.studies.learning_curves.memory \\
    --out=docs/results/learning_curves

The table has a column of memory if `memory.json` exists. With `--small` two
optimizers are trained for six updates, and with `--redraw` nothing is.

Cost: 153 runs of 30 updates of the small model, half a minute each on two CPU
cores, and less after the first seed of a cell; for memory, 22 compilations of
ten seconds.
"""
