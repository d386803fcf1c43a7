"""How much of a gradient's direction a sketch keeps, by rank.

Asked: the cosine of a dense gradient G and its reconstruction, `Aᵀ S` or least
squares `Aᵀ (A Aᵀ)⁻¹ S`, by rank, basis and module, on real GRPO gradients; and
whether it matters over a window of updates that the basis is drawn anew. For
an i.i.d. basis the first is predicted to be √(r / (r + d_in)) and the second
√(r / d_in), whatever the gradient.

Window: T gradients G_t of different batches at the same weights, and their sum
G. With a fixed basis the sum of the reconstructions is the reconstruction of
the sum, `Aᵀ A G`; with a refreshed one it is `Σ_t A_tᵀ A_t G_t`. Either is
compared with G.

Command: python -m experiments.studies.rank_reconstruction.run \
    --out=docs/results/rank_reconstruction
  (`--small`: the small model; `--redraw`: from the rows that are there)
Cost: 10 minutes on two CPU cores after `gain_per_kl`, with which it shares
  its gradients; 25 minutes without.
"""
