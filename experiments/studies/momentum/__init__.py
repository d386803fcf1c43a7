"""What do momentum, basis, rank and preconditioner do under one KL budget?

The study asks whether momentum on the sketches of a fixed basis pays, whether
rank 256 is needed, whether the basis must change, and how far LoGRA is from
dense optimizers with the same budget and data.

  python -m experiments.studies.momentum.run --out=docs/results/momentum

With `--small` three cells are trained for six updates, and with `--redraw`
nothing is.

Cost: 275 runs of 30 updates of the small model, half a minute each on two CPU
cores, and less after the first seed of a cell; 8 runs of 10 updates of
SmolLM2-135M, some minutes each.
"""
