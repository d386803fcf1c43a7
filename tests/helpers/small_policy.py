"""A small transformer policy with scanned, rematerialized layers."""

import math
import re

from flax import linen as nn
import jax
import jax.numpy as jnp

from logra_jax import linen

VOCAB, WIDTH, LAYERS, BATCH, LENGTH = 19, 8, 2, 4, 6


class Block(nn.Module):
  """An attention and a gated MLP layer, with the seven default targets."""

  width: int
  dtype: jax.typing.DTypeLike | None = None

  @nn.compact
  def __call__(self, x, valid):
    dense = lambda n, name: linen.Dense(n, name=name, dtype=self.dtype)
    h = nn.RMSNorm(name="attn_norm")(x)
    q, k, v = (dense(self.width, f"{n}_proj")(h) for n in "qkv")
    n = x.shape[1]
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / self.width**0.5
    seen = jnp.tril(jnp.ones((n, n), bool)) & valid[:, None, :]
    # The floor is finite because a padded query attends to no key.
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    x = x + dense(self.width, "o_proj")(weights @ v)
    h = nn.RMSNorm(name="mlp_norm")(x)
    h = nn.silu(dense(2 * self.width, "gate_proj")(h)) * dense(
        2 * self.width, "up_proj"
    )(h)
    return x + dense(self.width, "down_proj")(h), None


class Policy(nn.Module):
  """A policy whose `hidden` returns `[B, T, width]` and whose `head` logits."""

  width: int = WIDTH
  vocab: int = VOCAB
  dtype: jax.typing.DTypeLike | None = None

  def setup(self):
    self.embed = nn.Embed(self.vocab, self.width)
    layers = nn.scan(
        nn.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=LAYERS,
    )
    self.layers = layers(self.width, self.dtype)
    self.norm = nn.RMSNorm()
    self.lm_head = nn.Dense(self.vocab, use_bias=False)

  def hidden(self, tokens, valid):
    x, _ = self.layers(self.embed(tokens), valid)
    return self.norm(x)

  def head(self, hidden):
    return self.lm_head(hidden)

  def __call__(self, tokens, valid):
    return self.head(self.hidden(tokens, valid))


POLICY = Policy()


def make_batch(seed=0, batch=BATCH, length=LENGTH, vocab=VOCAB):
  """Rows of padding (in every other row), prompt and completion."""
  tokens = jax.random.randint(jax.random.key(seed), (batch, length), 0, vocab)
  position = jnp.arange(length)[None]
  padding = (jnp.arange(batch) % 2)[:, None]
  valid = position >= padding
  mask = (position >= 2) & (position < length - 1)
  return {
      "tokens": tokens,
      "valid": valid,
      "completion_mask": jnp.broadcast_to(mask, tokens.shape),
  }


def make_params(policy=POLICY, seed=0, scale=1.0):
  batch = make_batch()
  params = policy.init(jax.random.key(seed), batch["tokens"], batch["valid"])
  return jax.tree.map(lambda x: scale * x, params["params"])


def logits_fn(params, batch, policy=POLICY):
  return policy.apply({"params": params}, batch["tokens"], batch["valid"])


def hidden_fn(params, batch, policy=POLICY):
  return policy.apply(
      {"params": params}, batch["tokens"], batch["valid"], method="hidden"
  )


def head_fn(params, hidden, policy=POLICY):
  return policy.apply({"params": params}, hidden, method="head")


def loss_fn(params, batch):
  """Cross-entropy of the next token, averaged over the mask."""
  log_probs = jax.nn.log_softmax(logits_fn(params, batch)[:, :-1])
  taken = jnp.take_along_axis(log_probs, batch["tokens"][:, 1:, None], -1)
  mask = batch["completion_mask"][:, :-1]
  return -jnp.sum(taken[..., 0] * mask) / jnp.sum(mask)


def buffers(compiled_text):
  """Returns the number of elements of every array in the text of a program."""
  shapes = re.findall(r"\b(?:f|bf|s|u)\d+\[([\d,]+)\]", compiled_text)
  return [math.prod(map(int, s.split(","))) for s in shapes]
