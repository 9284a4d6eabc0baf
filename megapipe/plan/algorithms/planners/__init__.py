"""Published planners, one file each; :mod:`megapipe.plan.algorithms.registry` imports all of
them."""
