"""Which tests cover which file: in groups, of which the fast ones that know it best come first."""

from __future__ import annotations

SCHEDULE, GENERATORS = "tests/unit/schedule/test_", "tests/unit/schedule/generators/test_"
PROOF, TIMING = "tests/unit/schedule/proof/test_", "tests/unit/schedule/timing/test_"
ENGINE, MODEL = "tests/unit/engine/test_", "tests/unit/model/test_"
GLOO, LAYER_UNITS = "tests/unit/distributed/test_gloo.py", "tests/unit/layers/test_"
OPTIM, DIST = "tests/unit/optim/test_", "tests/dist/test_"
EXECUTED = (f"{ENGINE}executor.py", f"{ENGINE}executor_pieces.py", f"{ENGINE}stage.py")
LAYERS = (f"{DIST}tensor_parallel.py",)
PARITY = (f"{DIST}parity.py::test_pairs[1]", f"{DIST}parity.py::test_pairs[2]")
STREAMS = (
    "tests/unit/schedule/streams/test_streams.py",
    "tests/unit/schedule/streams/test_proof.py",
)
FAULTLESS = (f"{DIST}faults.py::test_the_cases_pass_without_a_fault",)
ON_A_DEVICE = (
    "tests/fake_cuda/test_parity_cuda.py::test_parity[2]",
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
    "schedule/proof/lists.py": (
        (f"{PROOF}validate.py",),
        (f"{GENERATORS}generators.py", f"{GENERATORS}sequence.py", f"{GENERATORS}recompute.py"),
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
        (f"{ENGINE}recorder.py", f"{ENGINE}channels.py"),
        FAULTLESS,
        (f"{DIST}post_validation.py",),
    ),
    "engine/stage.py": (
        (f"{ENGINE}stage.py", f"{ENGINE}stage_loss.py", f"{ENGINE}stage_recompute.py"),
        (f"{ENGINE}stage_slices.py", f"{MODEL}activations_kept.py", f"{MODEL}slices_kept.py"),
        FAULTLESS,
    ),
    "engine/channels.py": (
        (f"{ENGINE}channels.py",),
        EXECUTED,
        FAULTLESS,
        (f"{DIST}odd_sizes.py",),
        ON_A_DEVICE,
    ),
    "layers/weight_grad.py": ((f"{LAYER_UNITS}weight_grad.py",), EXECUTED, LAYERS),
    "layers/offload.py": (
        (
            f"{LAYER_UNITS}offload.py",
            f"{MODEL}activations_kept.py",
            f"{MODEL}slices_kept.py",
            f"{ENGINE}stage.py",
        ),
        (f"{DIST}activations.py", f"{DIST}activation_policies.py"),
        ON_A_DEVICE,
    ),
    "layers/recompute.py": (
        (f"{MODEL}activations_kept.py", f"{MODEL}slices_kept.py", f"{ENGINE}stage.py"),
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
        LAYERS,
        (f"{DIST}narrow_types.py", "tests/unit/generate/test_generator.py"),
        FAULTLESS,
    ),
    "distributed/collectives.py": (
        (GLOO, f"{OPTIM}reduction.py", *LAYERS),
        (f"{DIST}mesh_groups.py", f"{DIST}rules.py"),
        (f"{DIST}zero.py", "tests/fake_cuda/test_staged.py"),
    ),
    "distributed/gloo.py": ((GLOO, *LAYERS), (f"{DIST}zero.py",)),
    "layers/cross_entropy.py": (LAYERS, FAULTLESS),
    "layers/linear_cross_entropy.py": (
        (f"{LAYER_UNITS}linear_cross_entropy.py", *LAYERS),
        FAULTLESS,
    ),
    "optim/shard.py": (
        (f"{OPTIM}optimizer.py", f"{OPTIM}buffers.py", f"{OPTIM}reduction.py"),
        (f"{DIST}zero_step.py", f"{DIST}zero.py"),
        PARITY,
    ),
    "optim/departure.py": ((f"{DIST}reduce_chunks.py",), FAULTLESS),
    "optim/velocity.py": ((f"{OPTIM}velocity.py",), (f"{DIST}stream_faults.py",)),
    "optim/checksum.py": ((f"{OPTIM}checksum.py",),),
    "optim/copies.py": ((f"{DIST}copies.py",),),
    "optim/reduction.py": ((f"{OPTIM}reduction.py",), (f"{DIST}zero_step.py",), PARITY),
}
"""By file below megapipe/. A mutant goes through the groups until one of them fails."""
