"""How much does the direction of a step gain per unit of KL?

To first order, a step `-α D` lowers the loss by `α ⟨G', D⟩` at a KL of
`α² KL(D)`. With a KL budget, the worth of a direction D is thus
`⟨G', D⟩ / √(2 KL(D))`. D is made from the gradient of one batch, G' is the mean
gradient of the other batches, and the KL is that on responses of the next
batch. The study asks whether a sketch loses anything against the dense
gradient, and how RowAdam, Adam's first step and Muon compare with it.

  python -m experiments.studies.gain_per_kl.run --out=docs/results/gain_per_kl

With `--small` the small model is measured, and with `--redraw` nothing is.

Cost: 40 minutes on two CPU cores, 4 GB of memory, 22 GB of disk in
`.cache/gradients` (shared with `experiments.studies.rank_reconstruction`).
"""
