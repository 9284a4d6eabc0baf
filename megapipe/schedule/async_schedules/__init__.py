"""No-flush schedules, whose operations read stale weights.

An order (:mod:`~megapipe.schedule.async_schedules.orders`) lists what each rank does per update
window. A policy (:mod:`~megapipe.schedule.async_schedules.policies`) says which weight version each
operation reads, and when weights are updated. An order and a policy make a no-flush schedule
(:mod:`~megapipe.schedule.async_schedules.async_schedule`).
"""
