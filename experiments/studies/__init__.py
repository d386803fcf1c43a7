"""One claim of the method per folder: a sweep, an analysis, a command.

Every study NAME has the same parts:

- its docstring: what is asked, the command, the cost;
- `sweep.FULL` and `sweep.SMALL`: what is measured, as data;
- `analysis.table` and `analysis.figure_of`: Markdown and figure of saved rows,
  and `analysis.draw`, which writes both;
- `python -m experiments.studies.NAME.run`: measures and draws.

`scale` measures nothing of its own, and has a table only. `sweeps` runs studies
that train, `gradient_sweeps` those of gradients. May import everything but the
commands at the top of `experiments`.
"""
