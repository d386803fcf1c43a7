"""Packs the tokens of responses into rows of one length.

A row holds one or several prompts, each followed by responses to it:
`prompt a | a's response | a's response | prompt b | b's response | padding`.
A token attends to its own prompt and its own response only, at the positions
that it would have in a separate row. Features are therefore those of separate
rows, at a fraction of the cost: a prompt is computed once for all responses in
its row, and a short response costs only its own tokens.

Axis letters: B responses, N prompts, P tokens of the longest prompt, C tokens
of the longest response, G rows, S tokens of a row, K slots for generated tokens
in a row, D features.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.rollouts.rollout import Rollout


@struct.dataclass
class Rows:
  """Packed tokens, `[..., G, S]`, and the generated ones, `[..., G, K]`.

  Attributes:
    tokens: Token ids, `[..., G, S]` int32.
    positions: Position of each token in its own text, `[..., G, S]` int32.
    prompt: Which prompt of the row a token belongs to, `[..., G, S]` int32; -1
      at padding.
    response: Which response of the row a token belongs to, `[..., G, S]` int32;
      -1 in prompts and at padding.
    source: Place in the row of the features that predict each generated token,
      which is the token before it, `[..., G, K]` int32.
    targets: The generated tokens, `[..., G, K]` int32.
    target_mask: False at empty slots, `[..., G, K]` bool.
    target_response: The response of each generated token, `[..., G, K]` int32;
      -1 at empty slots.
    target_step: Number of tokens of its response before each generated token,
      `[..., G, K]` int32.
  """

  tokens: jax.Array
  positions: jax.Array
  prompt: jax.Array
  response: jax.Array
  source: jax.Array
  targets: jax.Array
  target_mask: jax.Array
  target_response: jax.Array
  target_step: jax.Array


@dataclasses.dataclass(frozen=True)
class Packing:
  """Packed responses, and where each of their tokens went.

  Attributes:
    rows: M micro-batches of G rows, NumPy arrays `[M, G, ...]`.
    index: Flat position of each generated token in the `[B, T]` arrays of the
      rollout, `[M, G, K]` int64; 0 at empty slots.
    count: Number of micro-batches that hold tokens; those after it are empty.
    computed: Number of tokens, with padding, in the first `count`
      micro-batches.
    padding: Fraction of these that is padding.
    length: T, the number of columns of the rollout.
  """

  rows: Rows
  index: np.ndarray
  count: int
  computed: int
  padding: float
  length: int

  def gather(self, values: np.ndarray) -> np.ndarray:
    """Packs `[B]` or `[B, T]` values into `[M, G, K]`, 0 at empty slots."""
    flat = np.asarray(values).reshape(-1)
    index = self.index
    if values.ndim == 1:  # One value for the whole response.
      index = index // self.length
    out = flat[index]
    return np.where(self.rows.target_mask, out, np.zeros((), out.dtype))


def max_targets(n_prompt: int, n_new: int, row_tokens: int) -> int:
  """The largest number of generated tokens in a row, K."""
  # A row holds one prompt and one response, or many short ones.
  return n_new if row_tokens == n_prompt + n_new else row_tokens - 1


def _responses_in_a_row(n_prompt: int, n_new: int, row_tokens: int) -> int:
  """Number of longest responses to a longest prompt that fit in a row."""
  return (row_tokens - n_prompt) // n_new


def max_micro_batches(
    prompts: int,
    responses: int,
    n_prompt: int,
    n_new: int,
    row_tokens: int,
    micro_rows: int,
) -> int:
  """The number of micro-batches that can hold any rollout of this size, M."""
  a_row = _responses_in_a_row(n_prompt, n_new, row_tokens)
  return -(-prompts * -(-responses // a_row) // micro_rows)


def pack(
    rollout: Rollout,
    keep: np.ndarray,
    *,
    group_size: int,
    n_new: int,
    row_tokens: int,
    micro_rows: int,
) -> Packing:
  """Packs the kept responses, on the host in NumPy.

  A row holds as many groups as fit. A group that is split over rows has its
  prompt in each of them.

  Args:
    rollout: B responses, `[B, P + C]`. The responses to a prompt are adjacent.
    keep: The responses to compute, `[B]` bool.
    group_size: Number of responses to each prompt; divides B.
    n_new: C, the tokens of the longest response.
    row_tokens: S, the tokens of a row, at least P + C.
    micro_rows: G, the rows of a micro-batch.

  Returns:
    M micro-batches, where M is that of `max_micro_batches` and so depends only
    on shapes.

  Raises:
    ValueError: If a row cannot hold the longest prompt and response.
  """
  batch, length = rollout.tokens.shape
  n_prompt = length - n_new
  if row_tokens < length:
    raise ValueError(
        f"row_tokens={row_tokens} must be at least {length}, the longest prompt"
        " and the longest response together"
    )
  valid = np.asarray(rollout.valid)
  mask = np.asarray(rollout.completion_mask)
  prompt_lengths = valid[::group_size, :n_prompt].sum(axis=1)
  lengths = np.where(keep, mask.sum(axis=1), 0)
  a_row = _responses_in_a_row(n_prompt, n_new, row_tokens)
  n_targets = max_targets(n_prompt, n_new, row_tokens)
  layout = min(
      (
          _layout(
              prompt_lengths, lengths, group_size, row_tokens, n_targets, worth
          )
          for worth in (math.inf, 1, 0)
      ),
      key=len,
  )
  n_rows = batch // group_size * -(-group_size // a_row)
  if len(layout) > n_rows:  # With many long prompts, put one in each row.
    layout = _one_prompt_a_row(lengths, group_size, a_row)
  n_micro = -(-n_rows // micro_rows)
  count = max(-(-len(layout) // micro_rows), 1)
  computed = count * micro_rows * row_tokens
  arrays = _empty(n_micro * micro_rows, row_tokens, n_targets)
  tokens = np.asarray(rollout.tokens)
  for row, segments in enumerate(layout):
    _fill(arrays, row, segments, tokens, valid, mask, group_size, n_prompt)
  used = sum(
      prompt_lengths[p] + lengths[responses].sum()
      for segments in layout
      for p, responses in segments
  )
  index = arrays.pop("index")
  split = lambda x: x.reshape(n_micro, micro_rows, *x.shape[1:])
  return Packing(
      rows=Rows(**{name: split(x) for name, x in arrays.items()}),
      index=split(index),
      count=count,
      computed=computed,
      padding=float(1 - used / computed),
      length=length,
  )


def all_rows(rollout: Rollout, group_size: int, n_new: int) -> Rows:
  """Packs all responses into one micro-batch; see `pack` for the arguments.

  Returns:
    NumPy arrays `[N, ...]`: one row for each prompt, with room for all
    responses to it.
  """
  batch, length = rollout.tokens.shape
  packed = pack(
      rollout,
      np.ones(batch, bool),
      group_size=group_size,
      n_new=n_new,
      row_tokens=length + (group_size - 1) * n_new,
      micro_rows=batch // group_size,
  )
  return jax.tree.map(lambda x: x[0], packed.rows)


# A prompt, and those responses to it that share a row with it.
_Segment = tuple[int, list[int]]


def _layout(
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    group_size: int,
    row_tokens: int,
    row_targets: int,
    worth: float,
) -> list[list[_Segment]]:
  """Decides which responses go to which row, from lengths alone.

  Places large groups first, each in the fullest row that can hold it. A group
  that fits in no row starts a new one, unless it is worth splitting: a part of
  it fills up a row if the tokens of these responses are at least `worth` times
  those of the prompt, which is then computed once more.
  """
  groups = np.arange(len(lengths)).reshape(-1, group_size)
  totals = prompt_lengths + lengths[groups].sum(axis=1)
  rows: list[list[_Segment]] = []
  room: list[list[int]] = []  # Tokens and generated tokens that still fit.

  def place(row: int, prompt: int, responses: list[int]) -> None:
    generated = int(lengths[responses].sum())
    rows[row].append((prompt, sorted(responses)))
    room[row][0] -= int(prompt_lengths[prompt]) + generated
    room[row][1] -= generated

  for prompt in np.argsort(-totals, kind="stable").tolist():
    own = int(prompt_lengths[prompt])
    group = groups[prompt][np.argsort(-lengths[groups[prompt]], kind="stable")]
    pending = [int(i) for i in group if lengths[i]]
    while pending:
      generated = int(lengths[pending].sum())
      fitting = [
          row
          for row, (tokens, targets) in enumerate(room)
          if own + generated <= tokens and generated <= targets
      ]
      if fitting:
        place(min(fitting, key=lambda row: room[row][0]), prompt, pending)
        break
      row = max(range(len(rows)), key=lambda row: room[row][0], default=-1)
      some = _fill_up(lengths, pending, own, room[row]) if rows else []
      if not some or lengths[some].sum() < worth * own:
        row = len(rows)
        rows.append([])
        room.append([row_tokens, row_targets])
        some = _fill_up(lengths, pending, own, room[row])
      place(row, prompt, some)
      pending = [i for i in pending if i not in some]
  return rows


def _fill_up(
    lengths: np.ndarray, pending: list[int], own: int, room: list[int]
) -> list[int]:
  """The responses, longest first, that fit into the room with their prompt."""
  left = min(room[0] - own, room[1])
  some = []
  for response in pending:
    if lengths[response] <= left:
      some.append(response)
      left -= int(lengths[response])
  return some


def _one_prompt_a_row(
    lengths: np.ndarray, group_size: int, a_row: int
) -> list[list[_Segment]]:
  """The layout that fits for all lengths."""
  rows = []
  for first in range(0, len(lengths), group_size):
    group = [i for i in range(first, first + group_size) if lengths[i]]
    for start in range(0, len(group), a_row):
      rows.append([(first // group_size, group[start : start + a_row])])
  return rows


def _empty(
    n_rows: int, row_tokens: int, row_targets: int
) -> dict[str, np.ndarray]:
  """Rows of padding, and the index of `Packing`."""
  wide = (n_rows, row_tokens)
  thin = (n_rows, row_targets)
  return {
      "tokens": np.zeros(wide, np.int32),
      "positions": np.zeros(wide, np.int32),
      "prompt": np.full(wide, -1, np.int32),
      "response": np.full(wide, -1, np.int32),
      "source": np.zeros(thin, np.int32),
      "targets": np.zeros(thin, np.int32),
      "target_mask": np.zeros(thin, bool),
      "target_response": np.full(thin, -1, np.int32),
      "target_step": np.zeros(thin, np.int32),
      "index": np.zeros(thin, np.int64),
  }


def _fill(
    arrays: dict[str, np.ndarray],
    row: int,
    segments: Sequence[_Segment],
    tokens: np.ndarray,
    valid: np.ndarray,
    mask: np.ndarray,
    group_size: int,
    n_prompt: int,
) -> None:
  """Writes the segments of a row into the arrays."""
  at, target, number = 0, 0, 0
  length = tokens.shape[1]
  for which, (prompt, responses) in enumerate(segments):
    first = prompt * group_size
    ids = tokens[first, :n_prompt][valid[first, :n_prompt]]
    end = at + len(ids)
    arrays["tokens"][row, at:end] = ids
    arrays["positions"][row, at:end] = np.arange(len(ids))
    arrays["prompt"][row, at:end] = which
    last = end - 1
    at = end
    for response in responses:
      places = np.flatnonzero(mask[response])
      n = len(places)
      here = slice(at, at + n)
      arrays["tokens"][row, here] = tokens[response, places]
      arrays["positions"][row, here] = len(ids) + np.arange(n)
      arrays["prompt"][row, here] = which
      arrays["response"][row, here] = number
      slots = slice(target, target + n)
      # A token is predicted from the one before it, and the first one from the
      # end of the prompt.
      arrays["source"][row, slots] = [last, *range(at, at + n - 1)]
      arrays["targets"][row, slots] = tokens[response, places]
      arrays["target_mask"][row, slots] = True
      arrays["target_response"][row, slots] = number
      arrays["target_step"][row, slots] = np.arange(n)
      arrays["index"][row, slots] = response * length + places
      at, target, number = at + n, target + n, number + 1


class Model(Protocol):
  """What the learner uses of a policy, usually a `Decoder`."""

  def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the model, such as `hidden_masked` or `head`."""


def features(model: Model, params: optax.Params, rows: Rows) -> jax.Array:
  """Computes the features that predict the generated tokens.

  Args:
    model: The policy.
    params: Its parameters.
    rows: G rows.

  Returns:
    `[G, K, D]`: the head turns entry `[g, k]` into the logits of
    `rows.targets[g, k]`.
  """
  hidden = model.apply(
      {"params": params},
      rows.tokens,
      rows.positions,
      _visible(rows),
      method="hidden_masked",
  )
  return jnp.take_along_axis(hidden, rows.source[..., None], axis=1)


def _visible(rows: Rows) -> jax.Array:
  """Which tokens attend to which, `[G, queries S, keys S]` bool.

  Padding attends to earlier padding, so that no query is without a key.
  """
  index = np.arange(rows.tokens.shape[1])
  causal = jnp.asarray(index[None, :] <= index[:, None])
  same_prompt = rows.prompt[:, :, None] == rows.prompt[:, None, :]
  of_key = rows.response[:, None, :]
  own = (of_key == rows.response[:, :, None]) | (of_key < 0)
  return causal & same_prompt & own
