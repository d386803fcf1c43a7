"""RL-trains a real 135M language model to add, on two CPU cores.

SmolLM2-135M-Instruct learns single-digit addition by GRPO with LoGRA: full
weights of all seven projections, gradients only as sketches of rank 16.

Command: make quickstart
  (in a notebook: `experiments.models.download.ensure_model(config.model)`, then
  `experiments.train.train(config, workdir)`)
Cost: 4 minutes of training on two CPU cores, 4 GB of memory.
Expected: mean training reward from 0.29 to 0.98 in 15 updates, held-out
  accuracy (greedy) from 0.55 to 1.00 in 20.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The quickstart's settings; the defaults of every other config."""
  c = ml_collections.ConfigDict()
  c.seed = 0
  # A Hugging Face directory, a GGUF file, or 'tiny' (random, for tests).
  c.model = ".cache/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
  c.dtype = "float32"  # Of activations and products.
  c.param_dtype = "float32"  # Of the stored weights.
  c.remat = False  # Recompute each layer in the backward pass.
  c.attention_block = 0  # Queries scored at once; 0 means all.
  c.token_block = 0  # Tokens of a sequence projected at once; 0 means all.
  c.updates = 20

  # Devices along each axis (experiments/parallel/sharding.py); all are used.
  c.mesh = ml_collections.ConfigDict()
  c.mesh.data = 1
  c.mesh.fsdp = 1
  c.mesh.tensor = 1

  c.task = ml_collections.ConfigDict()
  c.task.name = "addition"  # docs/tasks.md has all names.
  c.task.seed = 0
  c.task.reward = "correctness"  # A weighted sum, 'correctness + 0.1*format'.
  # Processes that compute rewards, and how long one may take, in seconds. 0
  # processes: in this one, without a limit.
  c.task.workers = 0
  c.task.timeout = 10.0

  c.rollout = _rollout()
  c.loss = _loss()
  c.optimizer = _optimizer()
  c.kl = _kl()

  c.evaluate = ml_collections.ConfigDict()
  c.evaluate.every = 10  # Updates; also before the first and after the last.
  c.evaluate.prompts = 96  # At most, of the held-out ones.

  c.checkpoint = ml_collections.ConfigDict()
  c.checkpoint.every = 5  # Updates, ...
  c.checkpoint.minutes = 0.0  # ... or minutes, whichever is first; 0: never.
  c.checkpoint.keep = 2  # The newest; the best one is kept besides.

  # Where metrics go besides metrics.jsonl (docs/metrics.md).
  c.log = ml_collections.ConfigDict()
  c.log.tensorboard = True
  c.log.wandb = ""  # Name of a project; '' is off.
  c.log.trackio = ""  # Likewise.

  # Updates in a row that may be skipped for a number that is not finite.
  c.max_skipped = 5
  return c.lock()


def _rollout() -> ml_collections.ConfigDict:
  """What is sampled: an update sees prompts * responses completions."""
  c = ml_collections.ConfigDict()
  c.prompts = 12
  c.responses = 8  # To each prompt; a group shares a baseline.
  c.temperature = 0.7
  c.top_k = 0  # 0 means all tokens.
  c.top_p = 1.0
  c.max_prompt_tokens = 44
  c.min_new_tokens = 0
  c.max_new_tokens = 12
  c.stop = ()  # Strings that end a response.
  c.slots = 0  # Responses decoded at once; 0 means all.
  c.cache_dtype = ""  # Of the KV cache: 'int8', or that of activations.
  # A completion server to sample from (docs/evaluation.md), by address; ''
  # samples in this process.
  c.server = ""
  c.server_model = "policy"  # Its name there.
  # Whether it loads new weights from workdir/served, as experiments.serve does.
  c.server_sync = True
  # Rounds of new prompts for groups whose rewards are all equal, at most.
  c.dynamic_tries = 0
  # Training examples to choose from by observed pass rate; 0: in order.
  c.curriculum = 0
  # What becomes of responses that reach max_new_tokens: 'keep', 'mask' (no
  # loss), 'filter' (neither loss nor baseline) or 'penalty'.
  c.overlong = "keep"
  c.overlong_buffer = 0  # Tokens in which the penalty grows to 1.
  return c


def _loss() -> ml_collections.ConfigDict:
  """What is learned from it, and in what portions."""
  c = ml_collections.ConfigDict()
  # 'grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'rloo' or 'reinforce_pp'.
  c.name = "dapo"
  c.clip_low = 0.2
  c.clip_high = 0.2
  # Prompts and responses are packed into rows of this many tokens; of several
  # lengths, each compiled once, the one that leaves least empty is taken.
  c.row_tokens = (256,)
  c.micro_rows = 3  # Rows computed at once.
  c.chunk = 128  # Tokens whose logits are in memory at once.
  # Steps on a rollout: its prompts in so many parts, all of them so often.
  c.minibatches = 1
  c.epochs = 1
  # Truncated importance sampling against the gap of sampler and trainer:
  # 'none', 'token' or 'sequence'.
  c.correction = "none"
  c.correction_cap = 2.0
  # Penalty on the KL to the policy before training, in nats per token; keeps a
  # second copy of the weights.
  c.reference_kl = 0.0
  c.reference_estimator = "k3"  # Or 'k1', 'k2'.
  return c


def _optimizer() -> ml_collections.ConfigDict:
  """What turns gradients into a step; see learning/optimizers.py."""
  c = ml_collections.ConfigDict()
  # 'logra', 'dense_adam', 'dense_sgd', 'lora', 'galore' or 'muon'. Each trains
  # the seven projections of every layer.
  c.name = "logra"
  # What happens to all other parameters (embeddings, norms, biases, head):
  # 'frozen', or 'adam' with the same learning rate, beta2 and eps, momentum
  # 0.9 and no weight decay.
  c.others = "frozen"
  # The step before the KL budget's say. One of the two, the other is 0:
  c.learning_rate = 1e-5
  c.update_ratio = 0.0  # ‖ΔW‖ / ‖W‖ over all targets; 'logra' only.
  c.momentum = 0.9  # Adam's beta1, of logra's sketches, of Muon.
  c.beta2 = 0.95  # Not read by 'muon'.
  c.eps = 1e-8
  c.weight_decay = 0.0
  c.rank = 16  # Of sketches, adapters, or GaLore's projections.
  c.seed = 42  # Of logra's bases, of lora's first adapters.
  # What only 'lora' reads: adapters are scaled by lora_alpha / rank.
  c.lora_alpha = 32.0
  # What only 'galore' reads: updates between two projections.
  c.galore_gap = 200
  # What only 'logra' reads.
  c.distribution = "rademacher"
  c.refresh = False
  # Of the sketches: 'row_adam' or 'norm_preserving' (both published), 'adam'
  # (fixed basis only) or 'none'.
  c.preconditioner = "row_adam"
  return c


def _kl() -> ml_collections.ConfigDict:
  """How far an update may move the policy."""
  c = ml_collections.ConfigDict()
  # KL(old || new) that one update may cost, in nats per generated token:
  # a cosine from budget to final_budget, constant where they are equal.
  c.enabled = True  # False: steps of the learning rate, as they are.
  c.budget = 2e-3
  c.final_budget = 2e-3
  c.anneal_updates = 300
  c.alpha_max = 3.0
  c.probe_responses = 4
  c.measure = True  # Also the KL of the step taken, after the merge.
  c.mismatch = False  # Take the gap of sampler and trainer off the budget.
  return c
