"""Tasks by name: prompts by index, and verifiable rewards of responses.

Entry points: `make_task`, and `Task` for tasks of your own. May import
`parallel` and what lies below it.

| name | examples | a response is right if |
|---|---|---|
| `addition`, `addition:2` | sums of numbers of at most one digit, or two | \
its last number is the sum |
| `reasoning_gym:<data set>` | a procedural data set of reasoning-gym | the \
data set's own scorer says so |
| `jsonl:<path>`, `parquet:<path>` | a file of problems with answers | it \
gives the answer (see `answers`) |
| `<module>:<function>` | what `function(seed=..., **options)` returns: a list \
of rows as in a file, or a `Task` | it gives the answer, or the task says so |
| `0.7*<name> + 0.3*<name>` | several tasks, mixed by weight | its task says \
so |

A name can end in options, whose values are JSON:
`reasoning_gym:gcd?min_numbers=2&max_numbers=2`. `docs/tasks.md` has examples.
"""

from experiments.tasks.addition import Addition
from experiments.tasks.answers import last_number
from experiments.tasks.base import Example, Messages, Task, checked_rewards
from experiments.tasks.gym import ReasoningGym
from experiments.tasks.mixture import Mixture
from experiments.tasks.problems import Jsonl, Parquet, Problems
from experiments.tasks.registry import make_task

__all__ = [
    "Addition",
    "Example",
    "Jsonl",
    "Messages",
    "Mixture",
    "Parquet",
    "Problems",
    "ReasoningGym",
    "Task",
    "checked_rewards",
    "last_number",
    "make_task",
]
