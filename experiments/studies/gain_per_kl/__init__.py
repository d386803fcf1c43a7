"""What a step's direction gains on other batches per unit of KL.

Asked: a step `-α D` lowers the loss by `α ⟨G', D⟩` to first order, at a KL of
`α² KL(D)`. What counts of a direction D for a learner with a KL budget is thus
`⟨G', D⟩ / √(2 KL(D))`. D is made of one batch's gradient, G' is the mean
gradient of the other batches, and the KL that on responses of the next batch.
Does a sketch lose anything against the dense gradient, and how do RowAdam,
Adam's first step and Muon's compare.

Command: python -m experiments.studies.gain_per_kl.run \
    --out=docs/results/gain_per_kl
  (`--small`: the small model; `--redraw`: from the rows that are there)
Cost: 40 minutes on two CPU cores, 4 GB of memory, 22 GB of disk under
  `.cache/gradients` (shared with `experiments.studies.rank_reconstruction`).
"""
