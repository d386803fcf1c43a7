"""Does a run of 1,200 updates under a falling KL budget collapse?

The study asks whether reward stays where it got, and how KL, the norm of the
weights and held-out accuracy develop over a run of the published length.

  python -m experiments.studies.long_run.run --out=docs/results/long_run

With `--small` a random model is trained for 24 updates, and with `--redraw`
nothing is.

Cost: two runs of 1,200 updates of the small model, some minutes each on two CPU
cores.
"""
