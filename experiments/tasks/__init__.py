"""Tasks by name: prompts by index, and verifiable rewards of responses.

| name | examples | a response is right if |
|---|---|---|
| `addition`, `addition:2` | sums of numbers with up to so many digits | its \
last number is the sum |
| `reasoning_gym:<data set>` | a procedural data set of reasoning-gym | the \
data set's own scorer says so |
| `jsonl:<path>`, `parquet:<path>` | a file of problems with answers | it \
gives the answer (`answers`) |
| `<module>:<function>` | what `function(seed=..., **options)` returns: a list \
of rows as in a file, or a `Task` | it gives the answer, or the task says |
| `0.7*<name> + 0.3*<name>` | several tasks, mixed by weight | its task says |

A name may end in options, whose values are JSON:
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
