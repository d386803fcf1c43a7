"""A softmax policy with one target kernel and a bias; it compiles quickly."""

import jax
import jax.numpy as jnp
import numpy as np

import logra_jax

BATCH, LENGTH, WIDTH, VOCAB = 3, 4, 6, 7


def make_params(seed=0, vocab=VOCAB):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {"q_proj": {"kernel": normal(WIDTH, vocab), "bias": normal(vocab)}}


def make_batch(seed=1):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(BATCH, LENGTH, WIDTH))
  mask = np.arange(LENGTH)[None] >= np.array([[1], [2], [3]])
  action = rng.integers(VOCAB, size=(BATCH, LENGTH))
  return {
      "x": jnp.asarray(x, jnp.float32),
      "completion_mask": jnp.asarray(mask),
      "action": jnp.asarray(action),
  }


def logits_fn(params, batch):
  layer = params["q_proj"]
  logits = logra_jax.dense(batch["x"], layer["kernel"])
  # As wide as the logits, for tests that forbid rank promotion.
  return logits + jnp.broadcast_to(layer["bias"], logits.shape)


def hidden_fn(params, batch):
  del params
  return batch["x"]


def head_fn(params, hidden):
  return logits_fn(params, {"x": hidden})


def loss_fn(params, batch):
  log_probs = jax.nn.log_softmax(logits_fn(params, batch))
  taken = jnp.take_along_axis(log_probs, batch["action"][..., None], -1)
  return -jnp.mean(taken[..., 0], where=batch["completion_mask"])
