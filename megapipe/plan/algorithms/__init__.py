"""Published planning algorithms over one cost model, compared by one judge.

:mod:`.problem` has what a planner is told, :mod:`.pipeline` what it returns, :mod:`.judge` the one
function that says how long a plan's step takes, and :mod:`.registry` the planners by name. Each
file of :mod:`.planners` is a planner, or a family of planners.
"""
