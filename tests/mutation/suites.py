"""Which tests cover which file: in groups, of which the fast ones that know it best come first."""

from __future__ import annotations

SCHEDULE, ENGINE = "tests/unit/schedule/test_", "tests/unit/engine/test_"
TP, OPTIM, DIST = "tests/unit/tensor_parallel/test_", "tests/unit/optim/test_", "tests/dist/test_"
EXECUTED = (f"{ENGINE}executor.py", f"{ENGINE}executor_pieces.py", f"{ENGINE}stage.py")
LAYERS = (f"{DIST}tensor_parallel.py",)
PARITY = (f"{DIST}parity.py::test_pairs[1]", f"{DIST}parity.py::test_pairs[2]")
FAULTLESS = (f"{DIST}faults.py::test_the_cases_pass_without_a_fault",)

Groups = tuple[tuple[str, ...], ...]
SUITES: dict[str, Groups] = {
    "schedule/validate.py": (
        (f"{SCHEDULE}schedule_validate.py",),
        (f"{SCHEDULE}generators.py", f"{SCHEDULE}sequence.py", f"{SCHEDULE}recompute.py"),
        (f"{SCHEDULE}classic.py", f"{SCHEDULE}zero_bubble.py", f"{SCHEDULE}v_family.py"),
    ),
    "schedule/lists.py": (
        (f"{SCHEDULE}schedule_validate.py",),
        (f"{SCHEDULE}generators.py", f"{SCHEDULE}sequence.py", f"{SCHEDULE}recompute.py"),
    ),
    "schedule/wavefront.py": ((f"{SCHEDULE}simulate.py", f"{SCHEDULE}schedule_validate.py"),),
    "schedule/simulate.py": (
        (f"{SCHEDULE}simulate.py",),
        (f"{SCHEDULE}closed_forms.py", f"{SCHEDULE}sequence.py", f"{SCHEDULE}recompute.py"),
        (f"{SCHEDULE}zero_stages.py", f"{SCHEDULE}render.py", f"{SCHEDULE}trace.py"),
    ),
    "schedule/lower.py": (
        (f"{SCHEDULE}lower.py",),
        (f"{SCHEDULE}synchronise.py", f"{SCHEDULE}opening.py", f"{SCHEDULE}recompute.py"),
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
        (f"{ENGINE}stage_slices.py", f"{ENGINE}activations_kept.py", f"{ENGINE}slices_kept.py"),
        FAULTLESS,
    ),
    "engine/channels.py": (
        (f"{ENGINE}channels.py",),
        EXECUTED,
        FAULTLESS,
        (f"{DIST}odd_sizes.py",),
    ),
    "engine/weight_grad.py": ((f"{ENGINE}weight_grad.py",), EXECUTED, LAYERS),
    "engine/activations.py": (
        (f"{ENGINE}activations_kept.py", f"{ENGINE}slices_kept.py", f"{ENGINE}stage.py"),
        (f"{DIST}activations.py", f"{DIST}activation_policies.py"),
    ),
    "tensor_parallel/linear.py": (
        LAYERS,
        (f"{DIST}narrow_types.py", f"{DIST}overlap.py"),
        FAULTLESS,
        (f"{DIST}activation_policies.py",),
        PARITY,
    ),
    "tensor_parallel/embedding.py": (
        LAYERS,
        (f"{DIST}narrow_types.py", "tests/unit/generate/test_generator.py"),
        FAULTLESS,
    ),
    "tensor_parallel/collectives.py": (
        (f"{TP}direct.py", f"{OPTIM}reduction.py", *LAYERS),
        (f"{DIST}mesh_groups.py", f"{DIST}rules.py"),
        (f"{DIST}zero.py",),
    ),
    "tensor_parallel/direct.py": ((f"{TP}direct.py", *LAYERS), (f"{DIST}zero.py",)),
    "tensor_parallel/cross_entropy.py": (LAYERS, FAULTLESS),
    "tensor_parallel/linear_cross_entropy.py": (
        (f"{TP}linear_cross_entropy.py", *LAYERS),
        FAULTLESS,
    ),
    "optim/shard.py": (
        (f"{OPTIM}optimizer.py", f"{OPTIM}buffers.py", f"{OPTIM}reduction.py"),
        (f"{DIST}zero_step.py", f"{DIST}zero.py"),
        PARITY,
    ),
    "optim/departure.py": ((f"{DIST}reduce_chunks.py",), FAULTLESS),
    "optim/reduction.py": ((f"{OPTIM}reduction.py",), (f"{DIST}zero_step.py",), PARITY),
}
"""By file below megapipe/. A mutant goes through the groups until one of them fails."""
