"""Does a KL budget help, and which one: none, constant or annealed?

Runs differ only in their budget. The study compares their mean reward at the
end of training, held-out accuracy and stability, and asks whether the KL that
was predicted for a step is the KL that it had.

  python -m experiments.studies.kl_budget.run --out=docs/results/kl_budget

With `--small` two cells are trained for six updates, and with `--redraw`
nothing is.

Cost: 35 runs of 60 updates of the small model, half a minute each on two CPU
cores; 10 runs of 10 updates of SmolLM2-135M, some minutes each.
"""
