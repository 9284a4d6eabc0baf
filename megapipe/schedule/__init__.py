"""Pipeline schedules as data, without torch: generate, prove, simulate, draw and lower them.

A :class:`~megapipe.schedule.ir.Schedule` is one list of operations per pipeline rank. It comes from
a generator (:mod:`~megapipe.schedule.generators`) or a file. It is proved executable by
:func:`~megapipe.schedule.proof.validate.validate`, timed by
:func:`~megapipe.schedule.timing.simulate.simulate`, drawn by :mod:`~megapipe.schedule.render`, and
turned into programs with explicit messages by :func:`~megapipe.schedule.lower.lower`.
"""
