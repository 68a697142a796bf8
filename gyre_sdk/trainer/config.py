"""The settings of `gyre-train CONFIG.toml`: one frozen struct per section.

Relative paths are resolved against the config file's folder. Names of the loss and the optimizer are TRL's and
transformers' (`GRPOConfig`, `TrainingArguments`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from gyre_sdk import settings
from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.cells.settings import CellsConfig
from gyre_sdk.trainer.engines import kv
from gyre_sdk.trainer.loss_options import LossOptions

ENVIRONMENT_PREFIX = "GYRE_TRAIN"

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
LossName = Literal[
    "run", "run_mean", "grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo", "gspo"
]  # fmt: skip
SELECTIONS = ("paper", "all", "longest", "main_only")
"""Selection rules that have a name."""


def _check_reference(reference: str | None, key: str) -> None:
    if reference is None:
        return
    module, colon, function = reference.partition(":")
    if not (module and colon and function.isidentifier()):
        raise ValueError(f"{key} = {reference!r} is not module:function, for example my_agent:run")


class LoraConfig(msgspec.Struct, frozen=True):
    """Train low-rank adapters (peft) in place of the full weights; published alone to vLLM, merged to the embedded engine."""

    r: Positive = 16
    """Rank."""
    alpha: Positive = 32
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Must stay 0: dropout would make the ratio to the sampling policy noisy."""
    target_modules: str | list[str] = "all-linear"
    load_in_4bit: bool = False
    """Hold the frozen weights in 4 bits (QLoRA); needs the package bitsandbytes and a GPU."""

    def __post_init__(self) -> None:
        if self.dropout:
            raise ValueError(
                f"lora.dropout = {self.dropout} would make the ratio to the sampling policy noisy; leave it at 0"
            )


class PolicyConfig(msgspec.Struct, frozen=True):
    """The policy that starts."""

    model: Path
    """Hugging Face model folder, with its tokenizer. Its weights are version 0."""
    lora: LoraConfig | None = None


class TasksConfig(msgspec.Struct, frozen=True):
    """What the policy is trained on. Exactly one of `loader` and `folder`."""

    loader: str | None = None
    """`module:function` returning a sequence of `Task`; called with `options`."""
    folder: Path | None = None
    """Glob of Harbor task folders, for example `tasks/*`."""
    options: dict[str, Any] = {}
    seed: int = 0
    """Seed of the order of tasks."""

    def __post_init__(self) -> None:
        if (self.loader is None) == (self.folder is None):
            raise ValueError("give exactly one of loader and folder")
        _check_reference(self.loader, "loader")


class AgentConfig(msgspec.Struct, frozen=True):
    """The user's agent."""

    function: str
    """`module:function`; called as `function(agent, **options)` inside a session, and may be async; the task is `agent.task`."""
    options: dict[str, Any] = {}
    classifier: str = ""
    """Tells the lanes of an agent with one key for everything: a preset or `module:attribute`; empty: one lane per key."""

    def __post_init__(self) -> None:
        _check_reference(self.function, "function")


class RolloutConfig(msgspec.Struct, frozen=True):
    """How runs are made."""

    groups_per_step: Positive = 8
    """B: groups that one step consumes."""
    runs_per_group: Annotated[int, msgspec.Meta(ge=2)] = 8
    """N: runs of one task whose rewards are compared."""
    concurrency: Positive = 16
    """Runs at a time."""
    staleness: NotNegative = 1
    """phi: steps by which dispatch may run ahead of training beyond a burst; 0 waits for every publication."""
    publish_every: Positive = 1
    """mu: steps of a burst, after which new weights are published."""
    workspace: Literal["docker", "local", "auto"] = "docker"
    recycle: bool = False
    """Clean containers between runs and use them again, where that is safe."""
    timeout_s: Seconds | None = None
    """Wall time of a run; its work so far is scored. None: the task's own limit."""
    turns: Positive | None = None
    """Calls of a run, all lanes together."""
    tokens: Positive | None = None
    """Prompt plus sampled tokens of a run."""
    success_at: float = 1.0
    """Reward from which a run counts as a full success."""


class RoleConfig(msgspec.Struct, frozen=True):
    """What a role of calls counts."""

    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Factor on the loss weight of the role's tokens inside their run, in `loss_type = 'run'`; 0 leaves them as context in
    any loss."""
    j_max: NotNegative | None = None
    """Trajectories of this role selected from a run at most; None: only `train.j_max` bounds them."""


class TrainConfig(msgspec.Struct, frozen=True):
    """How the policy is trained."""

    steps: Positive = 20
    learning_rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-6
    schedule: Literal["linear", "constant", "cosine", "constant_with_warmup"] = "linear"
    warmup_steps: NotNegative = 0
    final_learning_rate: Fraction = 0.0
    """Fraction of `learning_rate` that the linear and cosine schedules end at."""
    betas: tuple[Annotated[float, msgspec.Meta(ge=0, lt=1)], Annotated[float, msgspec.Meta(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    max_grad_norm: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """0 does not clip."""
    epsilon: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    epsilon_high: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """None: as `epsilon`."""
    delta: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Upper bound of the ratio where the advantage is negative (two-sided clipping); None: none."""
    loss_type: LossName = "run"
    """`run`: mean over a run's tokens, then over runs (arXiv:2609.33848), also called `run_mean`; the others as in TRL,
    sequence-level ones over calls."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """What a ratio is of: a token, or all targets of a call (their geometric mean)."""
    max_completion_length: Positive = 1024
    """Constant of `dr_grpo`."""
    importance_sampling: Literal[
        "bypass", "off", "truncate", "mask", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "bypass"
    """`bypass`: clip against the log-probs at sampling. `truncate`: weigh by the ratio to them, cut at the bounds. `mask`: the
    same, and leave out what is outside. `sequence_*`: the ratio of a call. `off`: take the samples as the policy's own."""
    importance_sampling_cap: Annotated[float, msgspec.Meta(gt=0)] | None = 2.0
    """Upper bound of that ratio; None: none."""
    importance_sampling_floor: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Lower bound; None: none."""
    proximal: Literal["current", "interpolated"] = "current"
    """What the clipped ratio is against, unless `bypass`: the policy before this step, or between it and the one that
    sampled, by staleness."""
    off_policy_mask_threshold: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Calls with a negative advantage that have drifted from their sampling by more nats per token leave; None: none."""
    top_entropy_quantile: Fraction = 1.0
    """Share of a unit's targets, those of highest entropy, that the policy's loss takes."""
    sapo_temperature_neg: Annotated[float, msgspec.Meta(gt=0)] = 1.05
    """Of `sapo`, where the advantage is not positive."""
    sapo_temperature_pos: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Of `sapo`, where the advantage is positive."""
    vespo_k_pos: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    """Exponent of `vespo`, positive advantages."""
    vespo_lambda_pos: Annotated[float, msgspec.Meta(ge=0)] = 3.0
    """Decay of `vespo`, positive advantages."""
    vespo_k_neg: Annotated[float, msgspec.Meta(ge=0)] = 3.0
    """Exponent of `vespo`, negative advantages."""
    vespo_lambda_neg: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    """Decay of `vespo`, negative advantages."""
    beta: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Coefficient of the KL to the reference policy; 0 needs none."""
    reference: Path | None = None
    """Model folder of the reference policy. None: the starting policy, which with LoRA is the model with its adapters off."""
    sync_ref_model: bool = False
    """Move the reference towards the policy every `ref_model_sync_steps` steps, by `ref_model_mixup_alpha`."""
    ref_model_mixup_alpha: Fraction = 0.6
    """Share of the policy in a moved reference."""
    ref_model_sync_steps: Positive = 512
    use_bias_correction_kl: bool = True
    """Multiply the KL by the ratio, so that its gradient is the reverse KL's."""
    entropy_coef: float = 0.0
    """Coefficient of the mean entropy of the targets, which is added to the objective."""
    negative_advantage_scale: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Factor on negative advantages."""
    scale_rewards: Literal["group", "population", "none", "leave_one_out"] = "group"
    """Advantage: reward minus the group's mean, divided by its standard deviation (`group`: of the sample; `population`) or
    not (`none`); `leave_one_out`: reward minus the mean of the other runs."""
    credit_hook: str | None = None
    """`module:function` that gives rewards per role or per call; their advantages stand in place of the run's."""
    selection: str = "paper"
    """Rule that selects trajectories: `paper`, `all`, `longest`, `main_only`, or `module:function`."""
    roles: dict[str, RoleConfig] = {}
    """Roles in the order in which trajectories are drawn; those that are not named come last, with weight 1."""
    j_max: NotNegative = 5
    """Trajectories selected from a run at most; 0 for all."""
    max_staleness: NotNegative | None = None
    """Calls sampled by a version more than this many steps old become context; None trains all."""
    mask_truncated_completions: bool = False
    """Calls that were cut by their length limit become context."""
    mismatch_threshold: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Training stops when the trainer's log-probs of tokens sampled by the version in training differ from the engine's by
    more than this many nats in the mean; None only reports."""
    executor: Literal["auto", "flat", "gather", "dfs"] = "auto"
    """How rows are computed: `flat` each by itself; `gather` and `dfs` share prefixes. `auto` looks at the model and the rows."""
    unit_tokens: NotNegative = 0
    """Tokens of a unit of training work at most, shared prefixes counted once; 0 makes one unit of a group."""
    micro_batch_tokens: Positive = 8192
    """Tokens of a forward pass, padding included; a longer row goes alone. On a CPU 1024 to 2048 are fastest."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer over the training processes (FSDP2), in place of a whole copy on each."""
    bf16: bool = False
    """Mixed precision in bfloat16; weights, their sums and the optimizer stay in float32."""
    threads: NotNegative = 1
    """CPU threads of torch in the trainer; 0 leaves torch's choice."""
    seed: int = 0
    save_every: Positive = 1
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 2
    report_to: list[str] = []
    """Trackers that get the metrics of every step, as in transformers: `tensorboard`, `trackio`, `wandb`, ..."""

    def __post_init__(self) -> None:
        _check_reference(self.credit_hook, "credit_hook")
        if self.selection not in SELECTIONS:
            _check_reference(self.selection, f"selection (one of {', '.join(SELECTIONS)}, or your own)")
        if self.sync_ref_model and not self.beta:
            raise ValueError("sync_ref_model = true needs beta above 0: without it there is no reference policy")
        if self.fsdp and self.executor not in ("auto", "flat"):
            raise ValueError(
                f"executor = {self.executor!r} makes as many passes as its rows have segments, and fsdp needs as many on every"
                " rank: use executor = 'flat' with fsdp = true"
            )
        try:
            LossOptions.of(self)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        weighted = sorted(name for name, role in self.roles.items() if role.weight not in (0.0, 1.0))
        if weighted and self.loss_type not in ("run", "run_mean"):
            raise ValueError(
                f"roles.{weighted[0]}.weight = {self.roles[weighted[0]].weight:g} has no effect on loss_type ="
                f" {self.loss_type!r}, where all tokens count alike: set loss_type = 'run', or a weight of 0 or 1"
            )


class EngineConfig(msgspec.Struct, frozen=True):
    """What serves the policy."""

    kind: Literal["embedded", "vllm"] = "embedded"
    url: str | None = None
    """Of a running vLLM server, started as the guide's section on publication says; None: gyre starts the engine."""
    publish: bool = True
    """Publish new weights. False: rollouts and evaluation only, with whatever the server serves."""
    port: Port = 0
    """0 takes a free one."""
    threads: NotNegative = 1
    max_batch: Positive = 64
    request_log: Path | None = None
    """File where the engine logs what it was sent and sampled."""
    options: list[str] = []
    """Further arguments of the engine's command line."""
    transport: Literal["auto", "file", "lora", "nccl"] = "auto"
    """How weights reach the engine: `file` in shared memory, `lora` as adapter files, or `nccl` from GPU to GPU. `auto`:
    `lora` for vLLM and a policy with adapters, else `file`."""
    python: Path | None = None
    """Python of the environment that vLLM and gyre-sdk are installed in; gyre starts the server with it. None: its own."""
    kv: kv.KvConfig | None = None
    """None: what goes on at another replica is computed there again."""

    def __post_init__(self) -> None:
        if self.url is not None and self.kind != "vllm":
            raise ValueError("url belongs to kind = 'vllm', for example url = 'http://127.0.0.1:8000'")
        if self.kind == "embedded" and self.transport not in ("auto", "file"):
            raise ValueError(
                f"transport = {self.transport!r} belongs to kind = 'vllm'; the embedded engine reads files"
            )
        started, publish = self.url is None, self.publish
        wrong = kv.problem(self.kv, vllm=self.kind == "vllm", started=started, publish=publish, options=self.options)
        if wrong is not None:
            raise ValueError(wrong)


class ProxyConfig(msgspec.Struct, frozen=True):
    """The recording proxy."""

    port: Port = 0
    """0 takes a free one."""
    renderer: str = "auto"
    """Renderer between messages and tokens, for example `qwen3`."""
    renderer_options: dict[str, Any] = {}
    sampling: Literal["refuse", "untrained"] = "refuse"
    """Calls of training runs with settings that the trainer cannot reproduce (greedy, top-p, top-k, min-p, penalties,
    grammars): refused with what to change, or served, counted and not trained."""
    options: list[str] = []
    """Further arguments of `gyre serve`."""


class StoreConfig(msgspec.Struct, frozen=True):
    """Where everything is recorded."""

    path: Path


class OutputConfig(msgspec.Struct, frozen=True):
    """Where checkpoints and logs go."""

    dir: Path
    linger_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """Seconds that the processes of a training, here and on a Ray cluster, live on when `gyre-train` was killed: agents are
    served, and the same command takes them over. 0: they end with it."""


class TrainerConfig(msgspec.Struct, frozen=True):
    """All of it."""

    policy: PolicyConfig
    tasks: TasksConfig
    agent: AgentConfig
    store: StoreConfig
    output: OutputConfig
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()
    proxy: ProxyConfig = ProxyConfig()
    cells: CellsConfig | None = None
    """None: one engine serves all the time, while the trainer trains."""

    def __post_init__(self) -> None:
        if self.cells is not None:
            self._check_cells()
        train, lora = self.train, self.policy.lora
        if train.sync_ref_model and (self.cells is not None or (lora is not None and train.reference is None)):
            raise ValueError(
                "train.sync_ref_model = true moves the weights of one copy: with adapters there is none, and every cell has its"
                " own; set it to false"
            )
        if self.engine.transport == "lora" and lora is None:
            raise ValueError("engine.transport = 'lora' publishes adapters: set policy.lora, or transport = 'file'")

    def _check_cells(self) -> None:
        assert self.cells is not None
        if self.engine.url is not None:
            raise ValueError("cells start their own replicas: leave engine.url out, or [cells]")
        if not self.engine.publish:
            raise ValueError("cells train: set engine.publish = true, or leave [cells] out")
        if self.policy.lora is not None and self.policy.lora.load_in_4bit:
            raise ValueError(
                "weights in 4 bits stay on the GPU, where replicas need the room: leave load_in_4bit or [cells] out"
            )
        if self.train.fsdp and self.cells.count > 1 and self.cells.ranks == 1:
            raise ValueError(
                "train.fsdp spreads a cell's weights over its processes, and cells.ranks = 1: set it to the GPUs of a cell, or"
                " leave train.fsdp out"
            )


def load_config(path: Path | str, overrides: list[str] | dict[str, Any] | None = None) -> TrainerConfig:
    """Read a config file, `GYRE_TRAIN__SECTION__KEY` variables and `section.key=value` arguments.

    Raises:
        SettingsError: a key or value is wrong, or the model folder is not one.
    """
    config = settings.load(TrainerConfig, path, overrides or [], prefix=ENVIRONMENT_PREFIX)
    if not (config.policy.model / "config.json").is_file():
        raise SettingsError(
            f"policy.model = {str(config.policy.model)!r} in {path}: no model is there (config.json is missing);"
            " give a Hugging Face model folder"
        )
    return config


def save_config(config: TrainerConfig, path: Path) -> None:
    """Write the settings for another process of this training: paths whole, overrides applied."""
    path.write_bytes(msgspec.json.encode(config, enc_hook=str))


def read_config(path: Path) -> TrainerConfig:
    """Read what `save_config` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=TrainerConfig, dec_hook=lambda kind, value: kind(value))
