"""What momentum, basis, rank and preconditioner do under one KL budget.

Asked: does momentum on the sketches of a fixed basis pay, is rank 256 needed,
does the basis have to change, and how far is LoGRA from dense optimizers with
the same budget and data.

Command: python -m experiments.studies.momentum.run --out=docs/results/momentum
  (`--small`: three cells, six updates; `--redraw`: from the rows that are
  there)
Cost: the small model 275 runs of 30 updates, half a minute each on two CPU
  cores, less for all seeds of a cell but the first; SmolLM2-135M 8 runs of 10
  updates, some minutes each.
"""
