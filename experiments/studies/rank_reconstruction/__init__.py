"""How much of a gradient's direction does a sketch keep, by rank?

The study measures the cosine of a dense gradient G and its reconstruction,
`Aᵀ S` or least squares `Aᵀ (A Aᵀ)⁻¹ S`, by rank, basis and module, for real
GRPO gradients. For an i.i.d. basis, the first is predicted to be
√(r / (r + d_in)) and the second √(r / d_in), whatever the gradient. At r = d_in
the library's basis is the identity, and both are 1.

It also asks whether refreshing the basis matters over a window of updates: T
gradients G_t of different batches at the same weights, with the sum G. With a
fixed basis, the sum of the reconstructions is the reconstruction of the sum,
`Aᵀ A G`; with a refreshed one it is `Σ_t A_tᵀ A_t G_t`. Both are compared with
G.

  python -m experiments.studies.rank_reconstruction.run \\
    --out=docs/results/rank_reconstruction

With `--small` the small model is measured, and with `--redraw` nothing is.

Cost: 10 minutes on two CPU cores after `gain_per_kl`, which makes the same
gradients; 25 minutes without.
"""
