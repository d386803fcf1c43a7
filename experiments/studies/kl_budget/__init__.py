"""Does a KL budget help, and which: none, constant, annealed.

Asked: mean reward at the end of training, held-out accuracy and stability of
runs that differ in the budget only, and whether the KL that a step was
predicted to cost is the KL that it cost.

Command: python -m experiments.studies.kl_budget.run \
    --out=docs/results/kl_budget
  (`--small`: two cells, six updates; `--redraw`: from the rows that are there)
Cost: the small model 35 runs of 60 updates, half a minute each on two CPU
  cores; SmolLM2-135M 10 runs of 10 updates, some minutes each.
"""
