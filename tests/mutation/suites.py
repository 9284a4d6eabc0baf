"""Which tests cover which file, in groups: the fast ones that know it best come first."""

from __future__ import annotations

SCHEDULE, GENERATORS = "tests/unit/schedule/test_", "tests/unit/schedule/generators/test_"
PROOF, TIMING = "tests/unit/schedule/proof/test_", "tests/unit/schedule/timing/test_"
ENGINE, MODEL = "tests/unit/engine/test_", "tests/unit/model/test_"
GLOO, LAYER_UNITS = "tests/dist/distributed/test_gloo.py", "tests/unit/layers/test_"
OPTIM, DIST = "tests/unit/optim/test_", "tests/dist/test_"
ENGINES, OPTIMIZERS = "tests/dist/engine/test_", "tests/dist/optim/test_"
EXECUTED = (
    *(f"{ENGINE}{name}.py" for name in ("executor", "executor_work_items", "stage")),
    f"{ENGINES}executor.py",
)
LAYERS = (f"{DIST}tensor_parallel.py",)
PARITY = (f"{DIST}parity.py::test_drawn_pairs[1]", f"{DIST}parity.py::test_drawn_pairs[2]")
STREAMS = (
    "tests/unit/schedule/async_schedules/test_async_schedules.py",
    "tests/unit/schedule/async_schedules/test_proof.py",
)
PLANS = tuple(f"tests/unit/context/test_{name}.py" for name in ("plans", "split", "documents"))
RINGS = (f"{DIST}ring_attention.py",)
OVER_POSITIONS = (f"{DIST}context.py",)
EXPERTS = tuple(f"{LAYER_UNITS}{name}.py" for name in ("routing", "experts", "dispatch"))
OVER_EXPERTS = (f"{DIST}moe.py", f"{DIST}dispatch.py")
WINDOWS = (f"{DIST}async_schedules.py",)
FAULTLESS = (f"{DIST}faults.py::test_the_cases_pass_without_a_fault",)
ON_A_DEVICE = (
    "tests/fake_cuda/test_parity_cuda.py::test_some_cases[2]",
    "tests/fake_cuda/test_faults_cuda.py::test_the_cases_have_no_faults",
)

Groups = tuple[tuple[str, ...], ...]
SUITES: dict[str, Groups] = {
    "schedule/proof/validate.py": (
        (f"{PROOF}validate.py",),
        (f"{GENERATORS}generators.py", f"{GENERATORS}sequence.py", f"{GENERATORS}recompute.py"),
        (f"{GENERATORS}classic.py", f"{GENERATORS}zero_bubble.py", f"{GENERATORS}v_family.py"),
        STREAMS,
    ),
    "schedule/proof/rank_lists.py": (
        (f"{PROOF}validate.py",),
        (f"{GENERATORS}generators.py", f"{GENERATORS}sequence.py", f"{GENERATORS}recompute.py"),
        STREAMS,
    ),
    "schedule/wavefront.py": (
        (f"{TIMING}simulate.py", f"{TIMING}ticks.py", f"{PROOF}validate.py"),
    ),
    "schedule/timing/ticks.py": ((f"{TIMING}ticks.py", f"{TIMING}simulate.py"),),
    "schedule/timing/simulate.py": (
        (f"{TIMING}simulate.py", f"{TIMING}ticks.py"),
        (f"{GENERATORS}closed_forms.py", f"{GENERATORS}sequence.py", f"{GENERATORS}recompute.py"),
        (f"{TIMING}zero_stages.py", f"{SCHEDULE}render.py", f"{TIMING}trace.py", *STREAMS),
    ),
    "schedule/lower.py": (
        (f"{SCHEDULE}lower.py",),
        (f"{SCHEDULE}data_parallel.py", f"{SCHEDULE}speculation.py", f"{GENERATORS}recompute.py"),
        EXECUTED,
    ),
    "engine/executor.py": (
        EXECUTED,
        (f"{ENGINE}recorder.py", f"{ENGINE}channels.py", f"{ENGINES}channels.py"),
        FAULTLESS,
        (f"{DIST}post_validation.py",),
    ),
    "engine/stage.py": (
        (f"{ENGINE}stage.py", f"{ENGINE}stage_loss.py", f"{ENGINE}stage_recompute.py"),
        (f"{ENGINE}stage_slices.py", f"{MODEL}activations_kept.py", f"{DIST}plan_run.py"),
        FAULTLESS,
        (f"{DIST}user_models.py",),
        WINDOWS,
    ),
    "engine/channels.py": (
        (f"{ENGINE}channels.py", f"{ENGINES}channels.py"),
        EXECUTED,
        FAULTLESS,
        (f"{DIST}odd_sizes.py",),
        ON_A_DEVICE,
    ),
    "engine/async_runner.py": (
        (f"{ENGINE}async_runner.py", *EXECUTED),
        (f"{ENGINE}stage_slices.py", f"{ENGINE}stage_recompute.py"),
        FAULTLESS,
        WINDOWS,
    ),
    "engine/profiler_names.py": ((f"{ENGINE}profiler_names.py",),),
    "engine/packed.py": ((f"{ENGINE}packed.py",), (f"{DIST}user_model_spec.py",), FAULTLESS),
    "engine/pipeline.py": (
        EXECUTED,
        FAULTLESS,
        (f"{DIST}eager_reductions.py", f"{DIST}step_library.py", f"{DIST}post_validation.py"),
        WINDOWS,
        ON_A_DEVICE,
    ),
    "engine/recv_prefetch.py": ((f"{ENGINE}recv_prefetch.py",), FAULTLESS),
    "engine/recorder.py": (
        (f"{ENGINE}recorder.py", f"{ENGINE}executor_work_items.py"),
        (f"{DIST}async_timeline.py",),
    ),
    "engine/scatter_gather.py": ((f"{ENGINES}scatter_gather.py",), FAULTLESS),
    "engine/tuple_stage.py": (
        ("tests/unit/library/test_pipeline.py",),
        (f"{DIST}user_model_spec.py",),
    ),
    "context/documents.py": (PLANS, RINGS, OVER_POSITIONS),
    "context/score_rects.py": (PLANS, RINGS),
    "context/packs.py": (
        ("tests/unit/context/test_packs.py",),
        (f"{LAYER_UNITS}attention_tiles.py",),
    ),
    "context/plan.py": (PLANS, RINGS),
    "context/plans.py": (PLANS, RINGS),
    "context/positions.py": (PLANS, RINGS, OVER_POSITIONS),
    "context/simulate.py": (("tests/unit/context/test_simulate.py",),),
    "context/split.py": (PLANS, RINGS, OVER_POSITIONS),
    "context/tensors.py": (("tests/unit/plan/test_context_options.py",), RINGS, OVER_POSITIONS),
    "layers/attention_tiles.py": ((f"{LAYER_UNITS}attention_tiles.py",), RINGS, OVER_POSITIONS),
    "layers/context.py": (RINGS, OVER_POSITIONS),
    "layers/ulysses_all_to_all.py": (RINGS, (f"{DIST}ulysses_all_to_all.py",), OVER_POSITIONS),
    "layers/ring_attention.py": (RINGS, OVER_POSITIONS, ON_A_DEVICE),
    "layers/moe/dispatch.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/chunks.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/dispatchers/all_gather.py": (EXPERTS, OVER_EXPERTS, (f"{DIST}padding.py",)),
    "layers/moe/dispatchers/all_to_all.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/dispatchers/fetch.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/routers.py": (EXPERTS, (f"{DIST}extending.py",)),
    "layers/moe/sharding.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/weights.py": (EXPERTS, OVER_EXPERTS, (f"{DIST}placement.py",)),
    "layers/moe/transfer.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/owners.py": (
        (f"{LAYER_UNITS}parameter.py", f"{LAYER_UNITS}expert_replicas.py"),
        (f"{DIST}migration.py",),
    ),
    "layers/moe/padding.py": ((f"{LAYER_UNITS}expert_padding.py",), (f"{DIST}padding.py",)),
    "layers/moe/replicas.py": ((f"{LAYER_UNITS}expert_replicas.py",), (f"{DIST}placement.py",)),
    "layers/moe/permutation.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/tasks.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/experts.py": (EXPERTS, (f"{MODEL}moe.py",), OVER_EXPERTS),
    "layers/moe/routing.py": (EXPERTS, OVER_EXPERTS),
    "layers/moe/routing_noise.py": ((f"{DIST}routing_noise.py",),),
    "layers/moe/row_codec.py": ((f"{LAYER_UNITS}row_codec.py",), (f"{DIST}row_codec.py",)),
    "layers/moe/token_shards.py": (EXPERTS, OVER_EXPERTS),
    "layers/kv_cache.py": (
        (f"{LAYER_UNITS}kv_cache.py",),
        ("tests/unit/generate/test_generator.py",),
    ),
    "layers/lora.py": ((f"{MODEL}lora.py",), (f"{DIST}lora.py",)),
    "layers/parameter.py": (
        (f"{LAYER_UNITS}parameter.py",),
        LAYERS,
        FAULTLESS,
        (f"{DIST}user_models.py",),
    ),
    "layers/dropout.py": ((f"{LAYER_UNITS}rng.py", f"{ENGINE}stage_slices.py"), LAYERS, FAULTLESS),
    "layers/microbatch.py": (
        (f"{ENGINE}stage_slices.py", "tests/unit/train/test_feed.py"),
        (f"{MODEL}gpt_hf.py", f"{DIST}plan_run.py", f"{LAYER_UNITS}formulas.py"),
        FAULTLESS,
        OVER_POSITIONS,
    ),
    "layers/norm.py": ((f"{MODEL}gpt_hf.py", f"{MODEL}activations_kept.py"), LAYERS, FAULTLESS),
    "layers/activation_policy.py": (
        (
            "tests/unit/layout/test_chunks.py",
            "tests/unit/layout/test_activation_plan.py",
            f"{MODEL}parameters.py",
        ),
        (f"{MODEL}activations_kept.py", f"{ENGINE}stage_costs.py"),
    ),
    "layers/rng.py": ((f"{LAYER_UNITS}rng.py",), FAULTLESS),
    "layers/weight_grad.py": ((f"{LAYER_UNITS}weight_grad.py",), EXECUTED, LAYERS),
    "layers/offload.py": (
        (
            f"{LAYER_UNITS}offload.py",
            f"{MODEL}activations_kept.py",
            f"{DIST}plan_run.py",
            f"{ENGINE}stage.py",
        ),
        (f"{DIST}activations.py", f"{DIST}activation_policies.py"),
        ON_A_DEVICE,
        ("tests/fake_cuda/test_pinned_memory.py",),
    ),
    "layers/recompute.py": (
        (f"{MODEL}activations_kept.py", f"{DIST}plan_run.py", f"{ENGINE}stage.py"),
        (f"{DIST}activations.py", f"{DIST}activation_policies.py"),
    ),
    "layers/linear.py": (
        LAYERS,
        (f"{DIST}narrow_types.py", f"{DIST}overlap.py"),
        FAULTLESS,
        (f"{DIST}activation_policies.py",),
        PARITY,
    ),
    "layers/embedding.py": (
        (f"{LAYER_UNITS}embedding.py", *LAYERS),
        (f"{DIST}narrow_types.py", "tests/unit/generate/test_generator.py"),
        (f"{DIST}activations.py",),
        FAULTLESS,
    ),
    "distributed/collectives.py": (
        (GLOO, f"{OPTIMIZERS}reduction.py", *LAYERS),
        (f"{DIST}mesh_groups.py", f"{DIST}rules.py"),
        (f"{DIST}zero.py", "tests/fake_cuda/test_staged.py"),
    ),
    "distributed/gloo.py": ((GLOO, *LAYERS), (f"{DIST}zero.py",)),
    "layers/cross_entropy.py": ((f"{LAYER_UNITS}cross_entropy.py",), LAYERS, FAULTLESS),
    "layers/linear_cross_entropy.py": (
        (f"{LAYER_UNITS}linear_cross_entropy.py", *LAYERS),
        FAULTLESS,
    ),
    "optim/buffers.py": (
        (f"{OPTIM}buffers.py", f"{OPTIM}optimizer.py"),
        (f"{OPTIMIZERS}optimizer.py", f"{DIST}zero_step.py", f"{DIST}rules.py"),
        PARITY,
    ),
    "optim/moe/migration.py": ((f"{OPTIM}migration.py",), (f"{DIST}migration.py",)),
    "optim/optimizer.py": (
        (f"{OPTIM}optimizer.py", f"{OPTIM}finite.py", f"{OPTIMIZERS}optimizer.py"),
        (f"{DIST}zero_step.py", f"{DIST}rules.py"),
        (f"{DIST}post_validation.py", f"{DIST}weight_prediction.py"),
        (f"{DIST}async_faults.py",),
        PARITY,
    ),
    "optim/groups.py": ((f"{OPTIM}groups.py", f"{OPTIM}buffers.py"), (f"{DIST}mesh_groups.py",)),
    "optim/state_store.py": (
        (f"{OPTIM}state_store.py", f"{OPTIM}rules_alone.py"),
        (f"{DIST}rules.py",),
    ),
    "optim/weight_versions.py": (
        (f"{OPTIM}weight_versions.py",),
        (f"{DIST}async_faults.py",),
        WINDOWS,
    ),
    "optim/shard.py": (
        (f"{OPTIM}shard.py", f"{OPTIM}optimizer.py", f"{OPTIM}buffers.py"),
        (f"{OPTIMIZERS}optimizer.py", f"{OPTIMIZERS}reduction.py"),
        (f"{DIST}zero_step.py", f"{DIST}zero.py"),
        PARITY,
    ),
    "optim/bucket_launch.py": ((f"{DIST}reduce_chunks.py",), FAULTLESS),
    "optim/velocity.py": ((f"{OPTIM}velocity.py",), (f"{DIST}async_faults.py",)),
    "optim/checksum.py": ((f"{OPTIM}checksum.py",),),
    "optim/replica_check.py": ((f"{DIST}replica_check.py",),),
    "optim/reduction.py": ((f"{OPTIMIZERS}reduction.py",), (f"{DIST}zero_step.py",), PARITY),
}
"""Groups of tests by file below megapipe/. A mutant goes through them until one of them fails."""
