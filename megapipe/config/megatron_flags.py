"""Megapipe's key for each flag of Megatron-LM, as in docs/from_megatron.md."""

_KEYS = {
    "activations.modules": "recompute-modules",
    "activations.offload": "fine-grained-activation-offloading offload-modules "
    "cpu-offloading-num-layers",
    "activations.policy": "recompute-activations recompute-granularity recompute-method "
    "recompute-num-layers",
    "checkpoint.async_save": "async-save",
    "checkpoint.every": "save-interval",
    "checkpoint.in_memory_every": "non-persistent-save-interval replication",
    "checkpoint.keep_every": "save-retain-interval",
    "checkpoint.load": "load ckpt-step",
    "checkpoint.load_only=weights": "finetune no-load-optim no-load-rng",
    "data.cache": "data-cache-path",
    "data.document_mask=true": "reset-attention-mask",
    "data.eod_mask_loss=true": "eod-mask-loss",
    "data.prefetch": "dataloader-type num-workers",
    "data.reset_position_ids=true": "reset-position-ids",
    "data.source": "data-path",
    "data.source=stdlib": "mock-data",
    "data.split": "split",
    "data.test": "test-data-path",
    "data.tokenizer": "tokenizer-type tokenizer-model vocab-file merge-file",
    "data.validation": "valid-data-path per-split-data-args-path",
    "experts.dispatch": "moe-token-dispatcher-type",
    "experts.pad_to_capacity": "moe-pad-expert-input-to-capacity",
    "kernels.loss_chunk_tokens": "cross-entropy-loss-fusion",
    "kernels.only.attention": "attention-backend use-flash-attn",
    "kernels.only.weight_grad=torch": "no-gradient-accumulation-fusion",
    "kernels.tp_comm_overlap": "tp-comm-overlap",
    "log.every": "log-interval",
    "log.memory_history=true": "record-memory-history",
    "log.profile": "profile use-pytorch-profiler profile-step-start profile-step-end",
    "log.straggler_window": "log-straggler",
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
    "model.moe.aux_loss_coeff": "moe-aux-loss-coeff",
    "model.moe.aux_loss_scope": "moe-router-load-balancing-type",
    "model.moe.bias_update_rate": "moe-router-enable-expert-bias moe-router-bias-update-rate",
    "model.moe.capacity_factor": "moe-expert-capacity-factor",
    "model.moe.drop_policy": "moe-token-drop-policy",
    "model.moe.expert_ffn_hidden": "moe-ffn-hidden-size",
    "model.moe.jitter": "moe-input-jitter-eps",
    "model.moe.layer_freq": "moe-layer-freq",
    "model.moe.norm_topk_prob": "moe-router-pre-softmax",
    "model.moe.num_experts": "num-experts",
    "model.moe.num_groups": "moe-router-num-groups",
    "model.moe.routed_scaling_factor": "moe-router-topk-scaling-factor",
    "model.moe.score_function": "moe-router-score-function",
    "model.moe.shared_ffn_hidden": "moe-shared-expert-intermediate-size",
    "model.moe.shared_gate=sigmoid": "moe-shared-expert-gate",
    "model.moe.top_k": "moe-router-topk",
    "model.moe.topk_groups": "moe-router-group-topk",
    "model.moe.z_loss_coeff": "moe-z-loss-coeff",
    "model.norm": "normalization",
    "model.norm_eps": "norm-epsilon",
    "model.positions": "position-embedding-type",
    "model.qk_norm": "qk-layernorm",
    "model.qkv_bias": "add-qkv-bias",
    "model.rope.base": "rotary-base",
    "model.rope.factor": "rope-scaling-factor",
    "model.rope.percent": "rotary-percent",
    "model.rope.scaling=llama3": "use-rope-scaling",
    "model.sliding_window": "window-size",
    "model.tied_embeddings=false": "untie-embeddings-and-output-weights",
    "model.vocab_size": "vocab-size padded-vocab-size",
    "optimizer.bucket_mib": "ddp-bucket-size ddp-num-buckets",
    "optimizer.decay_steps": "lr-decay-iters lr-wsd-decay-iters",
    "optimizer.loss_scale": "loss-scale",
    "optimizer.loss_scale_window": "loss-scale-window",
    "optimizer.lr": "lr",
    "optimizer.master_weights": "main-params-dtype",
    "optimizer.max_grad_norm": "clip-grad",
    "optimizer.min_lr": "min-lr",
    "optimizer.offload=host": "optimizer-cpu-offload",
    "optimizer.options.adjust_lr_fn": "muon-scale-mode muon-extra-scale-factor",
    "optimizer.options.betas": "adam-beta1 adam-beta2",
    "optimizer.options.eps": "adam-eps",
    "optimizer.options.momentum": "sgd-momentum",
    "optimizer.reduce_dtype=bf16": "grad-reduce-in-bf16",
    "optimizer.rule": "optimizer",
    "optimizer.schedule": "lr-decay-style lr-wsd-decay-style",
    "optimizer.shard_group_size": "num-distributed-optimizer-instances",
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
    "pipeline.options.microbatch_group_size": "microbatch-group-size-per-virtual-pipeline-stage",
    "pipeline.scatter_gather=off": "no-scatter-gather-tensors-in-pipeline",
    "pipeline.schedule": "delay-wgrad-compute defer-embedding-wgrad-compute",
    "pipeline.stage_layout": "pipeline-model-parallel-layout decoder-first-pipeline-num-layers "
    "decoder-last-pipeline-num-layers",
    "run.deterministic=true": "deterministic-mode",
    "run.folder": "save",
    "run.gc_interval": "manual-gc manual-gc-interval",
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
"""Flags without a corresponding key: megapipe lacks the feature, or needs no setting for it."""
FLAGS = {flag: key for key, flags in _KEYS.items() for flag in flags.split()} | dict.fromkeys(
    _WITHOUT_KEY.split(), ""
)
"""Megapipe's key for each flag (without leading dashes). It is key=value if the flag implies a
value, and "" if no key corresponds to the flag."""
