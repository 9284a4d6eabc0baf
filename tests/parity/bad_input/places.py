"""Variables of launchers that make no sense."""

from __future__ import annotations

from tests.parity.bad_input.case import Bad

ALONE: dict[str, str | None] = {
    "RANK": None,
    "WORLD_SIZE": None,
    "MASTER_ADDR": None,
    "MASTER_PORT": None,
}
"""The environment without torchrun's variables."""
SLURM = {
    **ALONE,
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "127.0.0.1",
    "MASTER_PORT": "{port}",
}
MPI = {
    **ALONE,
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_PORT": "{port}",
}


def place(name: str, words: tuple[str, ...], places: dict[str, str | None]) -> Bad:
    """Make a mistake in variables that all ranks have."""
    return Bad(name, "", 4, words, places=places)


PLACES = [
    place("WORLD_SIZE is a word", ("WORLD_SIZE='two': expected a number",), {"WORLD_SIZE": "two"}),
    place("WORLD_SIZE is not set", ("WORLD_SIZE=''", "expected a number"), {"WORLD_SIZE": None}),
    Bad("WORLD_SIZE is too small", "train.steps=100000 optimizer.schedule=constant log.every=9999",
        4, ("rank 2 does not exist in a world of 2",), places={"WORLD_SIZE": "2"}, ranks=3,
        late=True),
    place("LOCAL_RANK is a word", ("LOCAL_RANK='gpu0': expected a number",),
        {"LOCAL_RANK": "gpu0"}),
    place("MASTER_PORT is a word", ("MASTER_PORT='http': expected a port number",),
        {"MASTER_PORT": "http"}),
    place("MASTER_PORT is beyond all", ("MASTER_PORT='70000': expected a port number",),
        {"MASTER_PORT": "70000"}),
    Bad("MASTER_ADDR is of nobody", "parallel.timeout_s=2", 4,
        ("rendezvous at nobody.invalid", "for 2 s", "set MASTER_ADDR to the host of rank 0"),
        places={"MASTER_ADDR": "nobody.invalid", "LOCAL_RANK": "{rank}"},
        late=True),  # a line at once says that the name is looked for
    place("half of SLURM's variables", ("one of 2 SLURM tasks", "SLURM_STEP_NUM_TASKS"),
        {**SLURM, "SLURM_STEP_NUM_TASKS": None}),
    place("SLURM_JOB_ID is a word", ("SLURM_JOB_ID='job': expected a number",),
        {**SLURM, "SLURM_JOB_ID": "job", "MASTER_PORT": None}),
    place("SLURM_LOCALID is not set", ("SLURM_LOCALID=''", "expected a number"),
        {**SLURM, "SLURM_LOCALID": None}),
    place("half of Open MPI's variables", ("OMPI_COMM_WORLD_SIZE=''", "expected a number"),
        {**MPI, "OMPI_COMM_WORLD_SIZE": None}),
    place("Open MPI on several hosts", ("set MASTER_ADDR to",),
        {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
    place("a launcher that is not known", ("FLUX_TASK_RANK", "set RANK, WORLD_SIZE"),
        {**ALONE, "FLUX_TASK_RANK": "{rank}"}),
]  # fmt: skip
