"""RL-trains a real 135M language model to add, on two CPU cores.

SmolLM2-135M-Instruct learns single-digit addition by GRPO with LoGRA: the full
weights of all seven projections are trained, but their gradients exist only as
sketches of rank 16.

Its values are the defaults of every other config. docs/config.md lists them;
`experiments.configs.reference` writes it from the comments here, which stand
above or behind each field.

Command: make quickstart
  (in a notebook: `experiments.models.download.ensure_model(config.model)`, then
  `experiments.runs.loop.train(config, workdir)`)
Cost: 4 minutes of training on two CPU cores, 4 GB of memory.
Expected: the mean training reward rises from 0.29 to 0.98 in 15 updates, and
  the held-out accuracy (greedy decoding) from 0.55 to 1.00 in 20.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Settings of the model and of the run, and the sections of all others."""
  config = ml_collections.ConfigDict()
  # Random seed of the run: what is sampled, and the weights of `model='tiny'`.
  config.seed = 0
  # A Hugging Face directory, a GGUF file, or 'tiny' (a random model for tests).
  config.model = ".cache/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
  # Dtype of activations and products, 'float32' or 'bfloat16'.
  config.dtype = "float32"
  # Dtype of the stored weights, 'float32' or 'bfloat16'.
  config.param_dtype = "float32"
  # Recompute each layer in the backward pass, which saves memory.
  config.remat = False
  # Queries whose attention scores are in memory at once; 0 means all.
  config.attention_block = 0
  # Tokens of a sequence that are projected at once; 0 means all.
  config.token_block = 0
  # Length of the run. Each update samples responses and learns from them.
  config.updates = 20
  config.mesh = _mesh()
  config.task = _task()
  config.rollout = _rollout()
  config.loss = _loss()
  config.optimizer = _optimizer()
  config.kl = _kl()
  config.evaluate = _evaluate()
  config.checkpoint = _checkpoint()
  config.log = _log()
  # Stop the run after this many updates in a row whose loss, gradient or KL was
  # not finite.
  config.max_skipped = 5
  return config.lock()


def _mesh() -> ml_collections.ConfigDict:
  """How devices are laid out; the product of the sizes is their number."""
  mesh = ml_collections.ConfigDict()
  # Replicas of the weights, each with its own responses.
  mesh.data = 1
  # Devices that have their own responses and share one copy of the weights.
  mesh.fsdp = 1
  # Devices that share responses and split attention heads and features.
  mesh.tensor = 1
  return mesh


def _task() -> ml_collections.ConfigDict:
  """What is asked and how answers are rewarded; see docs/tasks.md."""
  task = ml_collections.ConfigDict()
  # Name of the task, with its options, or a weighted sum of tasks.
  task.name = "addition"
  # Random seed of the training examples: their order, and for procedural tasks
  # their content.
  task.seed = 0
  # A weighted sum of reward parts, such as 'correctness + 0.1*format'.
  task.reward = "correctness"
  # Processes that compute rewards; 0 computes them in the training process,
  # without a time limit.
  task.workers = 0
  # Seconds that the reward of one response can take before it counts as 0; not
  # used with 0 workers.
  task.timeout = 10.0
  return task


def _rollout() -> ml_collections.ConfigDict:
  """What is sampled: each update sees `prompts * responses` completions."""
  rollout = ml_collections.ConfigDict()
  rollout.prompts = 12  # Prompts per update.
  # Responses to each prompt; together they are a group with one baseline.
  rollout.responses = 8
  rollout.temperature = 0.7  # Sampling temperature; must be positive.
  # Sample only from this many of the likeliest tokens; 0 means all.
  rollout.top_k = 0
  # Sample only from the likeliest tokens that hold this share of the
  # probability; 1 means all.
  rollout.top_p = 1.0
  rollout.max_prompt_tokens = 44  # Longest prompt, in tokens.
  # A response cannot end before this many tokens.
  rollout.min_new_tokens = 0
  rollout.max_new_tokens = 12  # Longest response, in tokens.
  rollout.stop = ()  # Strings that end a response.
  rollout.slots = 0  # Responses that are decoded at once; 0 means all.
  # Dtype of the KV cache: 'int8', or '' for the dtype of activations.
  rollout.cache_dtype = ""
  # Address of a completion server to sample from, see docs/evaluation.md; ''
  # samples in the training process.
  rollout.server = ""
  rollout.server_model = "policy"  # The name that the server gives the model.
  # Whether the server loads new weights from `workdir/served` after each
  # update, as `experiments.serve` does.
  rollout.server_sync = True
  # Most rounds of further prompts that replace groups whose rewards are all
  # equal.
  rollout.dynamic_tries = 0
  # Size of a pool of training examples from which prompts are drawn by their
  # observed pass rate; 0 takes all examples in order.
  rollout.curriculum = 0
  # How responses cut off at `max_new_tokens` count: 'keep' (like others),
  # 'mask' (not in the loss), 'filter' (neither in the loss nor in the
  # baseline) or 'penalty' (a long response loses reward).
  rollout.overlong = "keep"
  # Tokens before `max_new_tokens` over which the penalty grows from 0 to 1;
  # only for `overlong='penalty'`.
  rollout.overlong_buffer = 0
  return rollout


def _loss() -> ml_collections.ConfigDict:
  """The policy loss, and how much of the batch is computed at once."""
  loss = ml_collections.ConfigDict()
  # The policy loss: 'grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'rloo' or
  # 'reinforce_pp'.
  loss.name = "dapo"
  # Ratios of new to old probability are clipped below `1 - clip_low`.
  loss.clip_low = 0.2
  # Ratios of new to old probability are clipped above `1 + clip_high`.
  loss.clip_high = 0.2
  # Lengths of the rows, in tokens, into which prompts and responses are packed.
  # Each length is compiled once, and each batch uses the one that leaves the
  # least empty.
  loss.row_tokens = (256,)
  # Rows in a micro-batch, over all devices; gradients are summed over
  # micro-batches.
  loss.micro_rows = 3
  loss.chunk = 128  # Tokens whose logits are in memory at once.
  # Parts into which the prompts of a rollout are split; each is an optimizer
  # step.
  loss.minibatches = 1
  # Passes over a rollout; an update has `minibatches * epochs` steps.
  loss.epochs = 1
  # Truncated importance sampling against the difference between sampler and
  # trainer: 'none', or ratios per 'token' or per 'sequence'.
  loss.correction = "none"
  loss.correction_cap = 2.0  # Upper limit of these ratios; at least 1.
  # Weight of a penalty on the KL to the policy before training (nats per
  # token). Above 0, a second copy of the weights is kept.
  loss.reference_kl = 0.0
  loss.reference_estimator = "k3"  # Estimator of that KL: 'k1', 'k2' or 'k3'.
  return loss


def _optimizer() -> ml_collections.ConfigDict:
  """How gradients become a step."""
  optimizer = ml_collections.ConfigDict()
  # The optimizer: 'logra', 'dense_adam', 'dense_sgd', 'lora', 'galore' or
  # 'muon'. Each trains the seven projections of every layer.
  optimizer.name = "logra"
  # What happens to all other parameters (embeddings, norms, biases, head):
  # 'frozen', or 'adam' with the same learning rate, `beta2` and `eps`, momentum
  # 0.9 and no weight decay.
  optimizer.others = "frozen"
  # Learning rate, before the KL budget scales the step. Either this or
  # `update_ratio` is positive, the other is 0.
  optimizer.learning_rate = 1e-5
  # Size of the step, ‖ΔW‖ / ‖W‖ over all trained kernels, instead of a learning
  # rate; 'logra' with frozen others only.
  optimizer.update_ratio = 0.0
  # Adam's beta1, and the momentum of SGD, of Muon and of LoGRA's sketches.
  optimizer.momentum = 0.9
  # Decay of the second moment; not used by 'muon'.
  optimizer.beta2 = 0.95
  optimizer.eps = 1e-8  # Added to denominators, so that none is 0.
  optimizer.weight_decay = 0.0  # Decoupled weight decay.
  # Rank of the sketches, of the adapters, or of GaLore's projections.
  optimizer.rank = 16
  # Random seed of LoGRA's bases and of the first LoRA adapters.
  optimizer.seed = 42
  # 'lora' only: the adapters are scaled by `lora_alpha / rank`.
  optimizer.lora_alpha = 32.0
  # 'galore' only: optimizer steps between two projections.
  optimizer.galore_gap = 200
  # 'logra' only: distribution of the bases, 'rademacher', 'gaussian' or
  # 'orthonormal'.
  optimizer.distribution = "rademacher"
  # 'logra' only: draw a new basis for every optimizer step.
  optimizer.refresh = False
  # 'logra' only: what preconditions the sketches, 'row_adam' or
  # 'norm_preserving' (both published), 'adam' (needs `refresh=False`) or
  # 'none'.
  optimizer.preconditioner = "row_adam"
  return optimizer


def _kl() -> ml_collections.ConfigDict:
  """How far one step may move the policy."""
  kl = ml_collections.ConfigDict()
  # Scale each step to the budget; False takes steps of the learning rate as
  # they are.
  kl.enabled = True
  # KL(old || new) that the first step may cost, in nats per generated token. It
  # follows a cosine to `final_budget`.
  kl.budget = 2e-3
  # The budget at the end of the cosine; equal to `budget`, it is constant.
  kl.final_budget = 2e-3
  kl.anneal_updates = 300  # Length of the cosine, in optimizer steps.
  kl.alpha_max = 3.0  # Largest factor by which the budget enlarges a step.
  # Responses of the batch on which the KL of a step is predicted.
  kl.probe_responses = 4
  # Also measure the KL of the step that was taken, after the weights changed.
  kl.measure = True
  # Subtract the difference between sampler and trainer from the budget.
  kl.mismatch = False
  return kl


def _evaluate() -> ml_collections.ConfigDict:
  """When held-out prompts are answered, greedily."""
  evaluate = ml_collections.ConfigDict()
  # Updates between two evaluations; there is also one before the first update
  # and one after the last.
  evaluate.every = 10
  evaluate.prompts = 96  # Largest number of held-out prompts.
  return evaluate


def _checkpoint() -> ml_collections.ConfigDict:
  """When checkpoints are saved.

  A run is also saved at its end, when it is interrupted, and when its held-out
  accuracy is the best so far.
  """
  checkpoint = ml_collections.ConfigDict()
  # Save a checkpoint every this many updates; 0 saves only by `minutes` and at
  # the end.
  checkpoint.every = 5
  # Also save when this many minutes have passed since the last checkpoint; 0
  # saves only by `every` and at the end.
  checkpoint.minutes = 0.0
  # How many of the newest checkpoints to keep, in addition to the best one.
  checkpoint.keep = 2
  return checkpoint


def _log() -> ml_collections.ConfigDict:
  """Where metrics go in addition to `metrics.jsonl`; see docs/metrics.md."""
  log = ml_collections.ConfigDict()
  log.tensorboard = True  # Write TensorBoard events to the workdir.
  log.wandb = ""  # Project at Weights & Biases; '' means none.
  log.trackio = ""  # Project at Trackio; '' means none.
  return log
