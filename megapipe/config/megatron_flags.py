"""Flags of Megatron-LM and the keys that stand for them, as docs/from_megatron.md has them."""

_KEYS = {
    "activations.modules": "recompute-modules",
    "activations.offload": "fine-grained-activation-offloading offload-modules "
    "cpu-offloading-num-layers",
    "activations.policy": "recompute-activations recompute-granularity recompute-method "
    "recompute-num-layers",
    "checkpoint.background": "async-save",
    "checkpoint.every": "save-interval",
    "checkpoint.keep_every": "save-retain-interval",
    "checkpoint.load": "load ckpt-step",
    "checkpoint.load_only=weights": "finetune no-load-optim no-load-rng",
    "checkpoint.memory_every": "non-persistent-save-interval replication",
    "data.cache": "data-cache-path",
    "data.document_mask=true": "reset-attention-mask",
    "data.mask_document_ends=true": "eod-mask-loss",
    "data.prefetch": "dataloader-type num-workers",
    "data.reset_positions=true": "reset-position-ids",
    "data.source": "data-path",
    "data.source=stdlib": "mock-data",
    "data.split": "split",
    "data.test": "test-data-path",
    "data.tokenizer": "tokenizer-type tokenizer-model vocab-file merge-file",
    "data.validation": "valid-data-path per-split-data-args-path",
    "experts.dispatch": "moe-token-dispatcher-type",
    "experts.pad": "moe-pad-expert-input-to-capacity",
    "kernels.attention": "attention-backend use-flash-attn",
    "kernels.loss_chunk": "cross-entropy-loss-fusion",
    "kernels.overlap": "tp-comm-overlap",
    "kernels.weight_grad=torch": "no-gradient-accumulation-fusion",
    "log.every": "log-interval",
    "log.memory_history=true": "record-memory-history",
    "log.profile": "profile use-pytorch-profiler profile-step-start profile-step-end",
    "log.stragglers_every": "log-straggler",
    "log.tensorboard=true": "tensorboard-dir",
    "log.timeline": "timing-log-level",
    "log.wandb_project": "wandb-project",
    "model.activation=swiglu": "swiglu",
    "model.bias=false": "disable-bias-linear",
    "model.dropout": "hidden-dropout attention-dropout",
    "model.dtype=bf16": "bf16",
    "model.dtype=fp16": "fp16",
    "model.ffn_hidden": "ffn-hidden-size",
    "model.full_attention_every": "window-attn-skip-freq",
    "model.head_dim": "kv-channels",
    "model.heads": "num-attention-heads",
    "model.hidden": "hidden-size",
    "model.init_std": "init-method-std",
    "model.kv_heads": "group-query-attention num-query-groups",
    "model.layers": "num-layers",
    "model.max_positions": "max-position-embeddings",
    "model.moe.balance": "moe-aux-loss-coeff",
    "model.moe.balance_scope": "moe-router-load-balancing-type",
    "model.moe.bias_rate": "moe-router-enable-expert-bias moe-router-bias-update-rate",
    "model.moe.capacity": "moe-expert-capacity-factor",
    "model.moe.drop": "moe-token-drop-policy",
    "model.moe.every": "moe-layer-freq",
    "model.moe.experts": "num-experts",
    "model.moe.ffn": "moe-ffn-hidden-size",
    "model.moe.group_top_k": "moe-router-group-topk",
    "model.moe.groups": "moe-router-num-groups",
    "model.moe.jitter": "moe-input-jitter-eps",
    "model.moe.normalise": "moe-router-pre-softmax",
    "model.moe.scale": "moe-router-topk-scaling-factor",
    "model.moe.scores": "moe-router-score-function",
    "model.moe.shared": "moe-shared-expert-intermediate-size",
    "model.moe.shared_gate=sigmoid": "moe-shared-expert-gate",
    "model.moe.top_k": "moe-router-topk",
    "model.moe.z": "moe-z-loss-coeff",
    "model.norm": "normalization",
    "model.norm_eps": "norm-epsilon",
    "model.positions": "position-embedding-type",
    "model.qk_norm": "qk-layernorm",
    "model.qkv_bias": "add-qkv-bias",
    "model.rotary_base": "rotary-base",
    "model.rotary_scaling=llama3": "use-rope-scaling",
    "model.rotary_share": "rotary-percent",
    "model.tied_embeddings=false": "untie-embeddings-and-output-weights",
    "model.vocab_size": "vocab-size padded-vocab-size",
    "model.window": "window-size",
    "optimizer.beta1": "adam-beta1",
    "optimizer.beta2": "adam-beta2",
    "optimizer.clip": "clip-grad",
    "optimizer.decay_steps": "lr-decay-iters lr-wsd-decay-iters",
    "optimizer.eps": "adam-eps",
    "optimizer.loss_scale": "loss-scale",
    "optimizer.loss_scale_window": "loss-scale-window",
    "optimizer.lr": "lr",
    "optimizer.master": "main-params-dtype",
    "optimizer.min_lr": "min-lr",
    "optimizer.momentum": "sgd-momentum",
    "optimizer.muon_adjust": "muon-scale-mode muon-extra-scale-factor",
    "optimizer.offload=host": "optimizer-cpu-offload",
    "optimizer.reduce_chunk_mib": "ddp-bucket-size ddp-num-buckets",
    "optimizer.reduce_dtype=bf16": "grad-reduce-in-bf16",
    "optimizer.rule": "optimizer",
    "optimizer.schedule": "lr-decay-style lr-wsd-decay-style",
    "optimizer.shard_size": "num-distributed-optimizer-instances",
    "optimizer.state_dtype": "use-precision-aware-optimizer exp-avg-dtype exp-avg-sq-dtype",
    "optimizer.warmup_steps": "lr-warmup-iters lr-warmup-fraction",
    "optimizer.weight_decay": "weight-decay",
    "optimizer.zero": "use-megatron-fsdp data-parallel-sharding-strategy",
    "optimizer.zero=1": "use-distributed-optimizer",
    "optimizer.zero=3": "use-torch-fsdp2",
    "parallel.backend": "distributed-backend",
    "parallel.cp": "context-parallel-size",
    "parallel.ep": "expert-model-parallel-size",
    "parallel.etp": "expert-tensor-parallel-size",
    "parallel.pp": "pipeline-model-parallel-size",
    "parallel.sequence_parallel=true": "sequence-parallel",
    "parallel.timeout_s": "distributed-timeout-minutes",
    "parallel.tp": "tensor-model-parallel-size",
    "pipeline.chunks": "num-virtual-stages-per-pipeline-rank num-layers-per-virtual-pipeline-stage",
    "pipeline.group": "microbatch-group-size-per-virtual-pipeline-stage",
    "pipeline.layout": "pipeline-model-parallel-layout decoder-first-pipeline-num-layers "
    "decoder-last-pipeline-num-layers",
    "pipeline.scatter_gather=off": "no-scatter-gather-tensors-in-pipeline",
    "pipeline.schedule": "delay-wgrad-compute defer-embedding-wgrad-compute",
    "run.collect_every": "manual-gc manual-gc-interval",
    "run.deterministic=true": "deterministic-mode",
    "run.folder": "save",
    "run.name": "wandb-exp-name",
    "run.seed": "seed",
    "train.batch_ramp": "rampup-batch-size",
    "train.global_batch": "global-batch-size",
    "train.microbatch": "micro-batch-size",
    "train.sequence_length": "seq-length",
    "train.steps": "train-iters",
    "train.stop_after": "exit-interval",
    "train.validate_every": "eval-interval",
    "train.validation_samples": "eval-iters",
    "train.validation_samples=null": "full-validation",
}

_WITHOUT_KEY = """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
    accumulate-allreduce-grads-in-fp32 apply-layernorm-1p attention-softmax-in-fp32
    calculate-per-token-loss ckpt-format ckpt-fully-parallel-load cp-comm-type cuda-graph-impl
    ddp-average-in-collective ddp-reduce-scatter-with-fp32-accumulation decoupled-lr
    decrease-batch-size-if-needed dist-ckpt-optim-fully-reshardable distribute-saved-activations
    end-weight-decay exit-duration-in-mins exit-on-missing-checkpoint exit-signal-handler
    fp32-residual-connection fp4-format fp8-format hysteresis initial-loss-scale log-energy
    log-num-zeros-in-grad log-params-norm log-throughput lr-warmup-init
    make-vocab-size-divisible-by min-loss-scale nccl-communicator-config-path
    no-align-grad-reduce no-align-param-gather no-bias-gelu-fusion no-bias-swiglu-fusion
    no-check-for-nan-in-loss-and-grad no-masked-softmax-fusion no-overlap-p2p-communication
    no-save-optim openai-gelu overlap-grad-reduce overlap-param-gather
    override-opt-param-scheduler quick-geglu rotary-interleaved softmax-type spec squared-relu
    start-weight-decay train-samples transformer-impl use-checkpoint-args
    use-checkpoint-opt-param-scheduler use-mcore-models use-nccl-ub use-sharp
    use-tp-pp-dp-mapping yaml-cfg
"""
"""Flags without a counterpart, and those that need no key."""
FLAGS = {flag: key for key, flags in _KEYS.items() for flag in flags.split()} | dict.fromkeys(
    _WITHOUT_KEY.split(), ""
)
"""The key of each flag without its dashes, with the value where the flag says it; "" for none."""
