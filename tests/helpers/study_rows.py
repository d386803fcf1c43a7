"""Hand-made rows of sweeps, and lines of the tables that are made of them."""

from experiments.studies import sweeps


def make_row(part="p", cell="c", seed=0, reward=(0.0, 1.0)):
  """A row of a run without a budget, with two evaluations.

  The first update takes 18 seconds and the others 3. Held-out accuracy rises
  from 0.1 to 0.7.
  """
  reward = [float(x) for x in reward]
  return {
      "part": part,
      "cell": cell,
      "seed": seed,
      "overrides": {},
      "curves": {
          "train/reward": reward,
          "time/rollout": [9.0] + [1.0] * (len(reward) - 1),
          "time/update": [9.0] + [2.0] * (len(reward) - 1),
      },
      "evals": {
          "update": [0.0, float(len(reward))],
          "eval/accuracy": [0.1, 0.7],
      },
      "seconds": 1.0,
  }


def make_cell_row(part, cell, seed, reward, accuracy=0.5, realised=1.0):
  """A row of a cell; with a budget, KL is `realised` times its budget."""
  row = make_row(part.name, cell.name, seed, reward)
  row["overrides"] = dict(cell.overrides)
  row["evals"]["eval/accuracy"] = [0.1, accuracy]
  row["evals"]["eval/weight_norm"] = [10.0, 11.0]
  if sweeps.run_config(part, cell, seed).kl.enabled:
    n = len(reward)
    row["curves"] |= {
        "kl/budget": [1e-3] * n,
        "kl/predicted": [1e-3] * n,
        "kl/realised": [realised * 1e-3] * n,
        "kl/skipped": [0.0] * n,
    }
  return row


def line_of(table, start):
  """The entries of the one line of a table whose first entry is `start`."""
  lines = [x[2:-2].split(" | ") for x in table.splitlines() if x[:2] == "| "]
  (line,) = [x for x in lines if x[0] == start]
  return line
