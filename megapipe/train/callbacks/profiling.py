"""``log.profile``: a trace of a step per rank, with torch's profiler."""

from __future__ import annotations

from megapipe.observe.profile import StepProfile
from megapipe.train.callbacks.callback import Callback, Run, Step


class Profiling(Callback):
    """Profiles the steps that ``log.profile`` lists."""

    def __init__(self) -> None:
        self._profile: StepProfile | None = None
        """Profile of the current step."""

    def before_step(self, run: Run, step: Step) -> None:
        if step.number not in run.config.log.profile:
            return
        mesh = run.mesh
        place = f"pp {mesh.pp.index} dp {mesh.dp.index} tp {mesh.tp.index}"
        on_gpu = mesh.device.type == "cuda"
        self._profile = StepProfile(
            run.folder, step.number, rank=mesh.rank, place=place, on_gpu=on_gpu
        )
        self._profile.start()
        mesh.barrier()
        step.profile = True

    def after_step(self, run: Run, step: Step) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        problem = None
        try:
            profile.stop()
        except OSError as error:
            problem = f"rank {run.mesh.rank}: {error}"
        problem = run.mesh.agree(problem)
        if problem is not None:
            run.note(f"no complete profile of step {step.number}: {problem}")
        else:
            run.note(
                f"profile of step {step.number}: a trace per rank in {profile.folder}; python "
                f"-m megapipe.observe.profile {profile.folder} merges them"
            )
