"""1,200 updates under a KL budget that falls: does a run collapse.

Asked: whether reward stays where it got, and what KL, the norm of the weights
and held-out accuracy do over a run of the published length.

Command: python -m experiments.studies.long_run.run --out=docs/results/long_run
  (`--small`: 24 updates of a random model; `--redraw`: from the rows that are
  there)
Cost: two runs of 1,200 updates of the small model, some minutes each on two
  CPU cores.
"""
